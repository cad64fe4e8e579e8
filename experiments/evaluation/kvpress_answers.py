"""Answers token_eviction.py's questions with kvpress, in an environment without kvjax."""

import json
import sys

import kvpress
import torch
import transformers

PRESSES = {
    "expected_attention": kvpress.ExpectedAttentionPress,
    "knorm": kvpress.KnormPress,
    "snapkv": kvpress.SnapKVPress,
    "streaming_llm": kvpress.StreamingLLMPress,
}


def main(folder: str, questions_file: str) -> None:
    """Reads questions from a JSON file; prints a JSON line for each press and task.

    A press evicts tokens once, after the whole prompt; all tokens of the answer are kept.
    """
    transformers.logging.disable_progress_bar()
    with open(questions_file) as file:
        questions = json.load(file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ends = set(questions["ends"])
    for name in questions["presses"]:
        for task in questions["tasks"]:
            texts, kept = [], 0
            for ids in task["prompts"]:
                answer, tokens = _answer(
                    model, ids, _press(name, questions["cache"]), task["num_tokens"], ends
                )
                texts.append(tokenizer.decode(answer, skip_special_tokens=True))
                kept += tokens / len(ids) / len(task["prompts"])
            print(json.dumps(dict(press=name, task=task["name"], texts=texts, kept=kept)))
            sys.stdout.flush()


def _press(name: str, cache: float):
    return None if name == "none" else PRESSES[name](compression_ratio=1 - cache)


@torch.no_grad()
def _answer(model, ids: list[int], press, num_tokens: int, ends: set[int]) -> tuple[list, int]:
    """Returns a greedy answer, and the number of the prompt's tokens that the cache kept."""
    cache = transformers.DynamicCache()

    def forward(ids: list[int], start: int) -> int:
        positions = torch.arange(start, start + len(ids))
        result = model(
            torch.tensor([ids]),
            position_ids=positions[None],
            cache_position=positions,
            past_key_values=cache,
            logits_to_keep=1,
        )
        return int(result.logits[0, -1].argmax())

    if press is None:
        token = forward(ids, 0)
    else:
        with press(model):
            token = forward(ids, 0)
    kept, answer = cache.get_seq_length(), []
    while token not in ends and len(answer) < num_tokens:
        answer.append(token)
        if len(answer) < num_tokens:
            token = forward([token], len(ids) + len(answer) - 1)
    return answer, kept
