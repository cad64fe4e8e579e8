"""Seconds that `kvjax.compare` takes for many long runs, as a command and by itself.

    python -m experiments.benchmarks.compare_speed [--runs=20] [--records=10000] [--save]

Writes made-up runs of one config with five seeds each: records of training, every fourth with an
evaluation. Prints a table.
"""

import argparse
from collections.abc import Sequence
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import jax.numpy as jnp
import numpy as np

from experiments import record
from kvjax.foundation import command_line
from kvjax.foundation.checkout import CONFIGS, ROOT
from kvjax.foundation.command_line import load_config
from kvjax.foundation.configuration import at_least
from kvjax.foundation.output import Output
from kvjax.workdir import identity

SEEDS = 5
_MECHANISMS = ("mha", "lrkv", "gqa", "mla", "mqa", "mla_paper", "lrkv_gqa", "thin_keys")


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
    """A workdir as a run leaves it, without checkpoints.

    Args:
      steps, bpb: of evaluations.
      data, tokenizer: what dataset.json and tokenizer.json say.
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


def write_many(folder: pathlib.Path, runs: int, records: int) -> list[pathlib.Path]:
    """Workdirs of so many runs with so many records each."""
    made, rng = [], np.random.default_rng(0)
    steps = list(range(4, records + 1, 4))
    for i in range(runs):
        mechanism, seed = _MECHANISMS[i // SEEDS % len(_MECHANISMS)], i % SEEDS
        bpb = (2 + 3 / np.sqrt(1 + np.array(steps)) + rng.normal(0, 1e-3, len(steps))).tolist()
        how = dict(config=f"{mechanism}_tiny", num_steps=steps[-1], steps=steps, bpb=bpb)
        workdir = write_run(folder / f"{mechanism}_{i}", seed=seed, **how)
        with (workdir / "metrics.jsonl").open("a") as file:
            for step in range(1, records + 1):
                if step % 4:
                    file.write(json.dumps(dict(step=step, tokens=8192 * step, loss=2.5)) + "\n")
        made.append(workdir)
    return made


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=20, help="workdirs (20)")
    add("--records", type=int, default=10_000, help="of each (10000)")
    add("--repeats", type=int, default=3, help="times the command runs (3)")
    add("--save", action="store_true", help="write experiments/results/compare_speed.json")
    parser.add_output()
    options = parser.parse(arguments)
    for key in ("runs", "repeats"):
        at_least(f"--{key}", getattr(options, key), 1)
    at_least("--records", options.records, 4)
    record.check(options.save)
    return options


def measure(runs: int, records: int, repeats: int) -> dict:
    """Seconds of the whole command, each time, and what it read and wrote."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        made = write_many(pathlib.Path(folder) / "runs", runs, records)
        size = sum((workdir / "metrics.jsonl").stat().st_size for workdir in made)
        target = pathlib.Path(folder) / "out"
        program = [sys.executable, "-m", "kvjax.compare", *map(str, made), f"--out={target}"]
        for _ in range(repeats):
            begun = time.monotonic()
            subprocess.run(program, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.monotonic() - begun)
        page = (target / "compare.html").stat().st_size
    return dict(megabytes=size / 1e6, seconds=seconds, page_megabytes=page / 1e6)


def main(arguments: Sequence[str]) -> None:
    """Measures, and prints."""
    options = _options(arguments)
    out = Output(options)
    asked = dict(runs=options.runs, records=options.records)
    found = measure(**asked, repeats=options.repeats)
    header = ("runs", "records each", "MB read", "s, each time", "page, MB")
    told = ", ".join(f"{value:.1f}" for value in found["seconds"])
    sizes = (f"{found['megabytes']:.1f}", told, f"{found['page_megabytes']:.2f}")
    out.table(header, [(options.runs, f"{options.records:,}", *sizes)])
    record.record("compare_speed", asked | found, out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
