"""Workdirs of synthetic runs."""

from collections.abc import Sequence
import json
import pathlib

import jax.numpy as jnp

from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.workdir import identity


def write_run(
    workdir: pathlib.Path,
    *,
    config: str = "lrkv_tiny",
    num_steps: int = 100,
    steps: Sequence[int] = (25, 50, 75, 100),
    bpb: Sequence[float] = (4.0, 3.0, 2.5, 2.25),
    data: str = "data",
    tokenizer: str = "tokenizer",
    rate: float = 8192.0,
    length: int = 256,
    **overrides,
) -> pathlib.Path:
    """Writes a run's workdir without checkpoints; returns it.

    Args:
      steps, bpb: of evaluations.
      data, tokenizer: content of dataset.json and tokenizer.json.
      rate: tokens/s.
      length: of rows.
      overrides: keys of config.train.
    """
    asked = load_config(CONFIGS / f"{config}.py")
    asked.train.update(num_steps=num_steps, **overrides)
    asked.data.sequence_length = length
    tree = identity.identity(asked, jnp.dtype("float32"))
    each = asked.train.batch_size * asked.data.sequence_length
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(tree))
    (workdir / "dataset.json").write_text(json.dumps(dict(dataset=data)))
    (workdir / "tokenizer.json").write_text(json.dumps(tokenizer))
    lines = [
        json.dumps(dict(step=step, tokens=step * each, loss=1.0, validation_bpb=value))
        for step, value in zip(steps, bpb, strict=True)
    ]
    (workdir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    timed = [json.dumps(dict(step=step, tokens_per_second=rate)) for step in steps]
    (workdir / "timing.jsonl").write_text("".join(f"{line}\n" for line in timed))
    return workdir
