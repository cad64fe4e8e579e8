"""Trains the runs of a grid in parallel processes, each on cores of its own, and resumes them.

A run's workdir is FOLDER/NAME_seedS_stepsN. Finished runs are not trained again; interrupted runs
resume.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import os
import pathlib

from etils import epath

from experiments import record
from experiments.studies import code as code_lib, grid
from experiments.studies.finished_runs import claim
from experiments.studies.grid import Cell, FinishedRuns, Run
from kvjax.foundation import command_line, runtime
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.files import matching_entries
from kvjax.foundation.output import Output
from kvjax.sweep import runs as runs_lib


def figures(run: Run, folder: pathlib.Path) -> dict:
    """Returns a run's bits per byte by step and at the end, tokens/s, and seconds of its steps."""
    curve, speed = runs_lib.curve(folder / run.name), runs_lib.speed(folder / run.name)
    tokens = run.steps * run.experiment.tokens_per_step
    return dict(
        bpb=curve[run.steps],
        curve=curve,
        tokens_per_second=speed,
        seconds=tokens / speed if speed else None,
    )


def study(
    name: str,
    cells: Sequence[Cell],
    options: argparse.Namespace,
    figures_of: Callable[[FinishedRuns], dict],
    tables: Iterable[tuple[str, Sequence[str], Callable[[Mapping], Sequence]]],
    *,
    code_files: Sequence[str] = (),
    further_figures: Callable[[pathlib.Path], dict] = lambda workdir: {},
    note: str = "",
) -> int:
    """Trains the missing runs, all cells with the first seed, then with the next.

    Prints the tables and records the result, with --save after each run.

    Args:
      options: from `options.Parser` with --runs and --steps.
      figures_of: computes figures, among them lists of rows, from the runs.
      tables: per table the key of its rows, the header, and a function from a row to its cells.
      code_files: further source files that determine the figures.
      further_figures: computes further figures of a run from its folder.
      note: printed below the tables.

    Returns:
      1 if a run failed.
    """
    file = record.RESULTS / f"{name}.json"
    if options.save:
        claim(file)
    how = dict(mix=options.mix, fresh=options.fresh, code_files=map(pathlib.Path, code_files))
    finished = FinishedRuns(file, options.steps, **how)
    runs = [Run(one, seed, options.steps) for seed in range(options.seeds) for one in cells]
    if options.save:
        finished.check((run.cell.name, run.seed, run.identity) for run in runs)

    def result(failed: Mapping[str, str]) -> dict:
        seconds = sum(
            run["seconds"] or 0 for seeds in finished.runs.values() for run in seeds.values()
        )
        return (
            figures_of(finished) | dict(seconds=seconds, failed=dict(failed)) | finished.as_json()
        )

    def save(failed: Mapping[str, str]) -> None:
        if options.save:
            record.keep(name, result(failed))

    runtime.start()
    figures, out = (
        result(train_missing(runs, finished, options, save, further_figures)),
        Output(options),
    )
    for key, header, show in tables:
        out.table(header, map(show, figures[key]))
    if note:
        out.say(f"\n{note}")
    return record.end(name, figures, out, save=options.save)


def train_missing(
    runs: Sequence[Run],
    finished: FinishedRuns,
    options: argparse.Namespace,
    after: Callable[[Mapping[str, str]], None],
    further_figures: Callable[[pathlib.Path], dict],
) -> dict[str, str]:
    """Trains the missing runs and records them; returns the reason of each failure by run.

    Args:
      after: called with the failures so far, after each recorded run.
      further_figures: computes further figures of a run from its folder.
    """
    failed: dict[str, str] = {}
    missing = [run for run in runs if not finished.of(run)]
    how = dict(processes=options.processes, mix=options.mix)
    with contextlib.closing(train(missing, options.runs, **how)) as ended:
        for run, why in ended:
            workdir = options.runs / run.name
            if not why:
                try:
                    finished.keep(
                        run, workdir, **figures(run, options.runs), **further_figures(workdir)
                    )
                except UserError as error:
                    why = first_line(error)
            if why:
                failed[run.name] = why
                command_line.say(f"{run.name}: {why}")
            else:
                after(failed)
    return failed


def refused(run: Run, folder: epath.PathLike, *, mix: bool) -> str:
    """Returns the reason why a run can neither resume from its folder nor start; "" if it can."""
    workdir = epath.Path(folder) / run.name
    if not (workdir / grid.ABOUT).exists():
        begun = matching_entries(workdir, "*.jsonl")
        return "does not name the code that trained it" if begun else ""
    about = grid.about(workdir)
    if about["identity"] != run.identity:
        return "is of another config"
    if (files := code_lib.changed(about["code"], grid.code())) and not mix:
        return f"was trained by other code ({code_lib.in_short(files)})"
    return ""


def train(
    runs: Sequence[Run], folder: pathlib.Path, *, processes: int, mix: bool
) -> Iterator[tuple[Run, str]]:
    """Trains unfinished runs like `kvjax.sweep.runs.train`, while the code does not change.

    Raises:
      UserError: before any training, if a folder has a run of another config or of other code.
    """
    grid.code()  # caches the code's digests, so that `changed` compares with the start
    unfit = [f"{run.name} {why}" for run in runs if (why := refused(run, folder, mix=mix))]
    if unfit:
        raise UserError(
            f"{os.path.relpath(folder)}: {unfit[0]}"
            + (f", and {len(unfit) - 1} more are like it" if len(unfit) > 1 else "")
            + ". Give another --runs, or --mix if the change of code affects no number"
        )
    begun: set[str] = set()

    def changed(when: str) -> str:
        files = code_lib.changed(grid.code(), grid.code_now())
        return files and f"the code changed {when} ({code_lib.in_short(files)})"

    def before(run: Run) -> str:
        if why := changed("after the study began"):
            return why
        grid.begin(run, epath.Path(folder / run.name))
        begun.add(run.name)
        return ""

    how = dict(processes=processes, before=before)
    with contextlib.closing(runs_lib.train(runs, folder, **how)) as ended:
        for run, why in ended:
            yield run, (run.name in begun and changed("while it was trained")) or why
