"""Greedy generation by transformers, timed token by token, for beside_transformers.py.

Runs in an environment with torch and transformers, and without kvjax.
"""

import json
import os
import sys
import time

import torch
import transformers


class _Clock:
    """A streamer that records the time of each token."""

    def __init__(self):
        self.start, self.seconds = time.perf_counter(), []

    def put(self, value: torch.Tensor) -> None:
        self.seconds.append(time.perf_counter() - self.start)

    def end(self) -> None:
        pass


def generate(model, prompt: list[int], num_tokens: int) -> dict:
    """Generates `num_tokens` tokens of one sequence, without a stop token."""
    ids_BT, clock = torch.tensor([prompt]), _Clock()
    tokens_BT = model.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock,
    )
    _, first, *_, last = clock.seconds  # the prompt comes first
    rate = (num_tokens - 1) / (last - first)
    tokens = tokens_BT[0, len(prompt) :].tolist()
    assert len(tokens) == num_tokens == len(clock.seconds) - 1
    return dict(tokens=tokens, first=first, decode_tokens_per_second=rate)


def main(folder: str) -> None:
    """Prints versions as a line of JSON, then a line for each {"prompt", "num_tokens"} on stdin.

    A line is {"tokens", "first", "decode_tokens_per_second"}, with `first` in seconds.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    print(json.dumps(dict(versions=versions, threads=torch.get_num_threads())), file=answers)
    answers.flush()
    for line in sys.stdin:
        with torch.no_grad():
            answer = generate(model, **json.loads(line))
        print(json.dumps(answer), file=answers, flush=True)
