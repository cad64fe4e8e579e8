"""Makes the runs of a grid: every combination of values, with every seed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re

import jax.numpy as jnp
import ml_collections

from kvjax.foundation import command_line
from kvjax.foundation.errors import UserError
from kvjax.foundation.overrides import PREFIX
from kvjax.foundation.text import check_text
from kvjax.sweep.runs import Run
from kvjax.workdir import identity

_MOST_RUNS = 1000
_LONGEST_NAME = 200  # a file's name has at most 255 bytes
_LONGEST_VALUE = 40
_SEED = "train.seed"
_RESERVED = {  # keys that the grid sets
    _SEED: "give --seeds=N for the seeds 0 to N - 1",
    "name": "runs are named after the values that vary; give --out to name their folder",
}


@dataclasses.dataclass(frozen=True, eq=False)
class GridRun(Run):
    """A run of a grid, named after the values of the keys that vary and its seed."""

    name: str
    config: ml_collections.ConfigDict
    arguments: Sequence[str]


def axes(texts: Sequence[str]) -> dict[str, list[str]]:
    """Returns the values of each key, given texts such as "attention.rank=16,32".

    Raises:
      UserError: a text without key or value, a key that is given twice, or one of `_RESERVED`.
    """
    values_by_key: dict[str, list[str]] = {}
    for text in texts:
        check_text("--set", text)
        key, equals, values = text.partition("=")
        key = key.removeprefix("config.")
        if not (key and equals):
            raise UserError(f"--set {text}: give KEY=VALUE,..., such as --set attention.rank=16,32")
        if key in values_by_key:
            raise UserError(f"--set {key} is given twice: give all values at once, as {key}=1,2")
        if key in _RESERVED:
            raise UserError(f"--set {text}: {_RESERVED[key]}")
        values_by_key[key] = list(dict.fromkeys(_split(values)))
    return values_by_key


def _split(text: str) -> Iterator[str]:
    """Yields the values of a list such as (8,16),(4,4); commas in brackets do not separate."""
    depth, begin = 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[begin:i]
            begin = i + 1
    yield text[begin:]


def runs(
    files: Sequence[pathlib.Path],
    axes: Mapping[str, Sequence[str]],
    fixed: Sequence[str],
    seeds: int,
) -> list[GridRun]:
    """Returns the runs: all combinations with seed 0, then with seed 1, ...

    Args:
      files: config files.
      axes: values by key, see `axes`.
      fixed: overrides of all runs, such as "--config.train.num_steps=100".
      seeds: number of seeds.

    Raises:
      UserError: a config, key or value is invalid, there are too many runs, or two runs are equal.
    """
    for override in fixed:
        key = re.split("[ =]", override)[0].removeprefix(f"{PREFIX}.")
        if key in _RESERVED:
            raise UserError(f"{override}: {_RESERVED[key]}")
    cells = list(itertools.product(files, *axes.values()))
    if len(cells) * seeds > _MOST_RUNS:
        raise UserError(
            f"--set and --seeds make {len(cells) * seeds:,} runs: must be at most {_MOST_RUNS:,}"
        )
    labels = _short(list(axes))
    grid = []
    for file, *values in cells:
        varied = [f"{PREFIX}.{key}={value}" for key, value in zip(axes, values, strict=True)]
        with _naming_options(file, axes):
            config = command_line.load_config(file, [*fixed, *varied])
        words = [command_line.config_label(file)] if len(files) > 1 else []
        words += [f"{label}={_clean(value)}" for label, value in zip(labels, values, strict=True)]
        for seed in range(seeds):
            seeded = config.copy_and_resolve_references()
            seeded.train.seed = seed
            arguments = [f"{PREFIX}={file}", *fixed, *varied, f"{PREFIX}.{_SEED}={seed}"]
            run = GridRun("_".join([*words, f"seed={seed}"]), seeded, arguments)
            with _naming_options(file, axes):
                _ = run.experiment  # raises for values that do not fit
            grid.append(run)
    grid.sort(key=lambda run: run.experiment.train.seed)  # stable
    _check_different(grid)
    return grid


@contextlib.contextmanager
def _naming_options(file: pathlib.Path, keys: Iterable[str]) -> Iterator[None]:
    """Replaces --config and --config.KEY in errors by this command's FILE and --set KEY."""
    try:
        yield
    except UserError as error:
        text = str(error).replace(f"{PREFIX}={file}", str(file))
        text = text.replace(f"{PREFIX}=", "")  # in suggestions
        for key in keys:
            text = text.replace(f"{PREFIX}.{key}", f"--set {key}")
        raise UserError(text) from error


def _short(keys: Sequence[str]) -> list[str]:
    """Returns the last word of each key, or the whole key if keys share their last word."""
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(word) > 1 else word for key, word in zip(keys, last, strict=True)]


def _clean(value: str) -> str:
    """Returns a value as part of a folder's name; a digest stands for characters that cannot be."""
    clean = re.sub(r"[^\w.+-]+", "-", value, flags=re.ASCII).strip("-")[:_LONGEST_VALUE]
    if clean == value:
        return value
    return "-".join(filter(None, (clean, hashlib.sha256(value.encode()).hexdigest()[:6])))


def _check_different(runs: Sequence[GridRun]) -> None:
    """Raises a UserError if two runs compute the same, or if a run's name is too long or taken."""
    names: dict[str, str] = {}  # config -> name of the first run with it
    taken: set[str] = set()
    for run in runs:
        if len(run.name) > _LONGEST_NAME:
            raise UserError(f"--set: {run.name} is too long a name for a folder; vary fewer keys")
        tree = identity.identity(run.config, jnp.dtype("float32")) | dict(name="")
        first = names.setdefault(json.dumps(tree, sort_keys=True, default=str), run.name)
        if first != run.name:
            raise UserError(
                f"{first} and {run.name} are the same computation: leave out one of the configs or "
                "values of --set"
            )
        if run.name in taken:
            raise UserError(f"two configs have the name {run.name}: rename a file, or sweep twice")
        taken.add(run.name)
