"""Answers of lm-evaluation-harness's own `hf` model for a Llama with random weights.

    .venv-live/bin/python tests/lm_eval/answers_of_transformers.py FOLDER

Writes FOLDER/model, FOLDER/tasks and FOLDER/answers.json. Needs torch and transformers
(constraints-live.txt), not kvjax. No weight is zero, and the tokenizer puts BOS before a text.
"""

import json
import pathlib
import sys

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
import local_tasks
import tokenizers
import torch
import transformers

BOS, ROWS = "<|bos|>", 340
SPECIALS = (BOS, "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LONGER = """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["none has this"], max_gen_toks: 30}
metric_list: [{metric: exact_match}]
"""
# By name: (tasks, True to put BOS before contexts, True to apply the chat template). Texts that are
# scored as a whole get their BOS from the library.
RUNS = {
    "continuations": (["local_choices", "local_endings"], True, False),
    "texts": (["local_texts"], False, False),
    "prompts": (["local_prompts", "local_longer"], True, False),
    "chat": (["local_choices", "local_prompts"], False, True),
}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns a byte-level BPE with merges over blanks, so that " A" is one token."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(SPECIALS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [json.dumps(rows, ensure_ascii=False) for rows, _ in local_tasks.TASKS.values()]
    backend.train_from_iterator([*texts, " A B C D A B C D"], trainer)
    opened = f"{BOS} $A"
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=opened, pair=f"{opened} {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=BOS, chat_template=CHAT_TEMPLATE
    )


def model() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=ROWS,
        hidden_size=48,
        intermediate_size=92,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=local_tasks.MAX_LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        rope_parameters=dict(rope_type="default", rope_theta=500.0),
    )
    llama = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in llama.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(0, 2 * weight.shape[1] ** -0.5, generator=generator)
    return llama.float()


def main(folder: pathlib.Path) -> None:
    transformers.logging.set_verbosity_error()
    model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    tasks = local_tasks.write(folder / "tasks", until="e")
    local_tasks.add(tasks, "local_longer", local_tasks.PROMPTS, LONGER)
    found = {}
    for name, (names, opened, chat) in RUNS.items():
        for batch in (1, 8):
            model_of_library = HFLM(
                pretrained=str(folder / "model"),
                dtype="float32",
                device="cpu",
                batch_size=batch,
                add_bos_token=opened,
            )
            assert model_of_library.max_length == local_tasks.MAX_LENGTH
            manager = TaskManager(include_path=str(tasks), include_defaults=False)
            found[f"{name} {batch}"] = lm_eval.simple_evaluate(
                model=model_of_library,
                tasks=names,
                task_manager=manager,
                apply_chat_template=chat,
                bootstrap_iters=0,
            )
    kept = {
        name: dict(
            results=result["results"],
            answers={
                task: [[sample["arguments"], sample["resps"]] for sample in samples]
                for task, samples in result["samples"].items()
            },
        )
        for name, result in found.items()
    }
    (folder / "answers.json").write_text(json.dumps(dict(runs=RUNS, found=kept)))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
