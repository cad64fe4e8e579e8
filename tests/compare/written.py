"""Workdirs of synthetic runs, and what is read of them."""

from collections.abc import Sequence
import json
import pathlib

import jax.numpy as jnp

from kvjax.compare import groups as groups_lib, runs as runs_lib
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
    config_dict = load_config(CONFIGS / f"{config}.py")
    config_dict.train.update(num_steps=num_steps, **overrides)
    config_dict.data.sequence_length = length
    tree = identity.identity(config_dict, jnp.dtype("float32"))
    each = config_dict.train.batch_size * config_dict.data.sequence_length
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


def read(*folders: pathlib.Path, running: bool = False):
    """Returns the runs in folders, and the skipped ones."""
    places = runs_lib.workdirs([str(folder) for folder in folders])
    return runs_lib.read(places, running=running)


def grouped(*folders: pathlib.Path, way: str = "seed", running: bool = False):
    """Returns the groups of the runs in folders, none of which may be skipped."""
    runs, skipped = read(*folders, running=running)
    assert not skipped
    return groups_lib.groups(runs, way)
