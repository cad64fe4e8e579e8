"""Studies whose runs are small enough to be trained one after another in one process.

An interrupted study resumes, because its result has the figures of finished runs (`FinishedRuns`).
"""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import json
import pathlib
import statistics
import time

import jax

from experiments import record
from experiments.record import EXPERIMENTS
from experiments.studies import code as code_lib, finished_runs
from experiments.studies.finished_runs import FinishedRuns
from kvjax.foundation import command_line, progress, provenance, runtime
from kvjax.foundation.checkout import PACKAGE
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.output import Output

# Code that determines the numbers of small models, beside the study.
_DECIDES = (
    *(PACKAGE / name for name in ("attention", "layers", "model", "kernels/softmax_attention")),
    EXPERIMENTS / "models",
    EXPERIMENTS / "tasks",
)

# Runs that raise these are left out: for a loss that is not finite, lack of memory, a bad size.
_FAILURES = (FloatingPointError, OverflowError, MemoryError, UserError, jax.errors.JaxRuntimeError)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model and task, trained with several seeds.

    Attributes:
      settings: JSON-able values that determine a run's numbers.
      train: function from a seed to JSON-able figures.
    """

    name: str
    settings: Mapping[str, object]
    train: Callable[[int], dict]

    @property
    def identity(self) -> str:
        return code_lib.digest(json.dumps(self.settings, sort_keys=True))


def load[T](load: Callable[[pathlib.Path], T], option: str, text: str) -> T:
    """Loads a local file or folder.

    Raises:
      UserError: it cannot be read; the message names the option.
    """
    try:
        return load(pathlib.Path(text).expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # DataError is a ValueError
        raise UserError(f"{option}={text}: {first_line(error)}") from error


def study(
    name: str,
    cells: Sequence[Cell],
    options: argparse.Namespace,
    figures_of: Callable[[FinishedRuns], dict],
    header: Sequence[str],
    show: Callable[[Mapping], Sequence],
    *,
    code_files: Sequence[str],
    printed: str = "rows",
    only: Mapping[str, Collection] | None = None,
    note: str = "",
) -> int:
    """Trains the missing runs, prints a table and records the result; returns 1 if a run failed.

    Args:
      figures_of: computes figures, among them a list of rows, from the runs.
      show: function from a row to the table's cells.
      code_files: source files that determine numbers: the study, and others that it imports.
      printed: key of the rows of the table.
      only: allowed values by key of a row; other rows are not printed.
      note: printed below the table.
    """

    def result(finished: FinishedRuns, failed: Mapping[str, str]) -> dict:
        seconds = sum(run["seconds"] for runs in finished.runs.values() for run in runs.values())
        return (
            figures_of(finished) | dict(seconds=seconds, failed=dict(failed)) | finished.as_json()
        )

    runtime.start()
    figures, out = (
        result(*train(name, cells, options, result, code_files=code_files)),
        Output(options),
    )
    rows = [r for r in figures[printed] if all(r[key] in x for key, x in (only or {}).items())]
    out.table(header, map(show, rows))
    if note:
        out.say(f"\n{note}")
    return record.end(name, figures, out, save=options.save)


def runs_of(cell: Cell, finished: FinishedRuns) -> dict[int, dict]:
    """Returns a cell's runs by seed, without runs of other settings under its name."""
    runs = finished.runs.get(cell.name, {})
    return {seed: run for seed, run in runs.items() if run["identity"] == cell.identity}


def figure(cell: Cell, finished: FinishedRuns, name: str) -> dict[int, float]:
    """Returns a figure of a cell's runs by seed."""
    return {seed: run[name] for seed, run in runs_of(cell, finished).items()}


def means(cells: Sequence[Cell], finished: FinishedRuns, name: str, **settings) -> dict[int, float]:
    """Returns the mean of a figure over cells, by seed, for seeds that all cells have.

    Args:
      settings: settings that select the cells, such as variant="qkv".
    """
    selected = [c for c in cells if all(c.settings[key] == x for key, x in settings.items())]
    runs = [figure(cell, finished, name) for cell in selected]
    seeds = sorted(set.intersection(*map(set, runs))) if runs else []
    return {seed: statistics.mean(run[seed] for run in runs) for seed in seeds}


def train(
    name: str,
    cells: Sequence[Cell],
    options: argparse.Namespace,
    result_of: Callable[[FinishedRuns, Mapping[str, str]], dict],
    *,
    code_files: Sequence[str] = (),
) -> tuple[FinishedRuns, dict[str, str]]:
    """Trains the missing runs, all cells with the first seed, then with the next.

    Args:
      name: name of the result.
      result_of: function from finished runs and failures to the result; written after each run.
      code_files: further source files that determine numbers.

    Returns:
      Finished runs, and the reason of each failure by run.
    """
    code = code_lib.code_of((*_DECIDES, *map(pathlib.Path, code_files)))
    file = record.RESULTS / f"{name}.json"
    if options.save:
        finished_runs.claim(file)
    finished = FinishedRuns(file, {}, code, mix=options.mix, fresh=options.fresh)
    runs = [(cell, seed) for seed in range(options.seeds) for cell in cells]
    if options.save:
        finished.check((c.name, seed, c.identity) for c, seed in runs)
    missing = [(c, seed) for c, seed in runs if not finished.found(c.name, seed, c.identity)]
    made_by = {key: x for key, x in provenance.provenance().items() if key != "command"}
    failed: dict[str, str] = {}
    times = [run["seconds"] for cell in cells for run in runs_of(cell, finished).values()]

    def left(count: int) -> str:
        return f", about {progress.duration(count * statistics.mean(times))}" if times else ""

    if missing:
        count = len(missing)
        command_line.say(f"{count} runs of {len(runs)} to train{left(count)}")
    with progress.waiting("training") as doing:
        for i, (cell, seed) in enumerate(missing):
            where = f"{i + 1} of {len(missing)}{left(len(missing) - i)}"
            doing.at(f"{cell.name}, seed {seed}, {where}")
            begun = time.perf_counter()
            try:
                figures = cell.train(seed)
            except _FAILURES as error:
                failed[f"{cell.name} seed {seed}"] = first_line(error)
                continue
            seconds = time.perf_counter() - begun
            times.append(seconds)
            key = (cell.name, seed, cell.identity)
            finished.put(*key, code, dict(made_by=made_by), seconds=seconds, **figures)
            if options.save:
                record.keep(name, result_of(finished, failed), quiet=True)
    return finished, failed
