"""Trains the runs of a grid in parallel processes, each on cores of its own, and resumes them.

A run's workdir is FOLDER/NAME_seedS_stepsN. Finished runs are not trained again; interrupted runs
resume.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import os
import pathlib
import queue
import statistics
import subprocess
import sys

from etils import epath

from experiments import record
from experiments.studies import code as code_lib, grid
from experiments.studies.grid import Cell, Kept, Run
from experiments.studies.kept import claim
from kvjax.foundation import command_line, progress, runtime
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.files import matching_entries
from kvjax.foundation.output import Output
from kvjax.workdir import checkpoint, metrics, storage


def curve(workdir: pathlib.Path) -> dict[int, float]:
    """Returns bits per byte by step; {} for a run without evaluations."""
    file = epath.Path(workdir) / metrics.METRICS
    records = metrics.read_records(file) if file.exists() else []
    return {r["step"]: r["validation_bpb"] for r in records if "validation_bpb" in r}


def speed(workdir: pathlib.Path) -> float | None:
    """Returns the median tokens/s of a run's records, or None without records."""
    file = epath.Path(workdir) / "timing.jsonl"
    records = metrics.read_records(file) if file.exists() else []
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    return statistics.median(speeds) if speeds else None


def figures(run: Run, folder: pathlib.Path) -> dict:
    """Returns a run's bits per byte by step and at the end, tokens/s, and seconds of its steps."""
    found, rate = curve(folder / run.name), speed(folder / run.name)
    tokens = run.steps * run.experiment.tokens_per_step
    return dict(
        bpb=found[run.steps],
        curve=found,
        tokens_per_second=rate,
        seconds=tokens / rate if rate else None,
    )


def study(
    name: str,
    cells: Sequence[Cell],
    options: argparse.Namespace,
    figures_of: Callable[[Kept], dict],
    tables: Iterable[tuple[str, Sequence[str], Callable[[Mapping], Sequence]]],
    *,
    places: Sequence[str] = (),
    more: Callable[[pathlib.Path], dict] = lambda workdir: {},
    note: str = "",
) -> int:
    """Trains the missing runs, all cells with the first seed, then with the next.

    Prints the tables and records the result, with --save after each run.

    Args:
      options: those of `options.Parser` with `runs`, and `steps`.
      figures_of: computes figures from the runs, with lists of rows.
      tables: for each the key of its rows, the header, and a function from a row to its cells.
      places: further files that determine the figures.
      more: computes further figures of a run from its folder.
      note: printed below the tables.

    Returns:
      1 if a run failed.
    """
    file = record.RESULTS / f"{name}.json"
    if options.save:
        claim(file)
    how = dict(mix=options.mix, fresh=options.fresh, places=map(pathlib.Path, places))
    kept = Kept(file, options.steps, **how)
    runs = [Run(one, seed, options.steps) for seed in range(options.seeds) for one in cells]
    if options.save:
        kept.check((run.cell.name, run.seed, run.identity) for run in runs)

    def result(failed: Mapping[str, str]) -> dict:
        seconds = sum(run["seconds"] or 0 for of in kept.runs.values() for run in of.values())
        return figures_of(kept) | dict(seconds=seconds, failed=dict(failed)) | kept.as_json()

    def save(failed: Mapping[str, str]) -> None:
        if options.save:
            record.keep(name, result(failed))

    runtime.start()
    found, out = result(train_missing(runs, kept, options, save, more)), Output(options)
    for key, header, show in tables:
        out.table(header, map(show, found[key]))
    if note:
        out.say(f"\n{note}")
    return record.end(name, found, out, save=options.save)


def train_missing(
    runs: Sequence[Run],
    kept: Kept,
    options: argparse.Namespace,
    after: Callable[[Mapping[str, str]], None],
    more: Callable[[pathlib.Path], dict],
) -> dict[str, str]:
    """Trains the missing runs and records them; returns the reason of each failure by run.

    Args:
      after: called with the failures so far, after each recorded run.
      more: computes further figures of a run from its folder.
    """
    failed: dict[str, str] = {}
    missing = [run for run in runs if not kept.of(run)]
    how = dict(processes=options.processes, mix=options.mix)
    with contextlib.closing(train(missing, options.runs, **how)) as ended:
        for run, why in ended:
            workdir = options.runs / run.name
            if not why:
                try:
                    kept.keep(run, workdir, **figures(run, options.runs), **more(workdir))
                except UserError as error:
                    why = first_line(error)
            if why:
                failed[run.name] = why
                command_line.say(f"{run.name}: {why}")
            else:
                after(failed)
    return failed


def is_whole(run: Run, folder: pathlib.Path) -> bool:
    """Returns True if a run has its last evaluation and the checkpoint of that step."""
    workdir = folder / run.name
    if run.steps not in curve(workdir):
        return False
    return run.steps in storage.steps(epath.Path(workdir) / checkpoint.CHECKPOINTS)


def refused(run: Run, folder: epath.PathLike, *, mix: bool) -> str:
    """Returns the reason why a run's folder cannot be used or resumed; "" if it can, or is
    empty."""
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
    """Trains unfinished runs, `processes` at a time, each on cores of its own.

    Ctrl-C reaches its runs too, which save their state; no other run is started.

    Yields:
      Each run when it has ended, finished ones first, and the reason of its failure in one line, or
      "". A run's output is in FOLDER/NAME.log.

    Raises:
      UserError: folders of other configs or of other code, before any training.
    """
    grid.code()  # records the code at the start, which `_train` compares
    unfit = [f"{run.name} {why}" for run in runs if (why := refused(run, folder, mix=mix))]
    if unfit:
        raise UserError(
            f"{os.path.relpath(folder)}: {unfit[0]}"
            + (f", and {len(unfit) - 1} more are like it" if len(unfit) > 1 else "")
            + ". Give another --runs, or --mix if the change of code affects no number"
        )
    there = {run.name: is_whole(run, folder) for run in runs}
    missing = [run for run in runs if not there[run.name]]
    yield from ((run, "") for run in runs if there[run.name])
    if not missing:
        return
    done = [(run, rate) for run in runs if there[run.name] and (rate := speed(folder / run.name))]
    rates = [rate * run.flops / (run.experiment.tokens_per_step * run.steps) for run, rate in done]
    rate = statistics.median(rates) if rates else grid.GUESS
    seconds = sum(run.flops for run in missing) / rate / processes
    command_line.say(
        f"{len(missing)} runs of {len(runs)} to train, {processes} side by side: about "
        f"{progress.duration(seconds)}"
        + ("" if rates else f", at a guess ({grid.GUESS / 1e9:.0f} GFLOP/s each)")
    )
    pool, cores = futures.ThreadPoolExecutor(processes), queue.SimpleQueue()
    for share in shares(processes):
        cores.put(share)
    try:
        asked = {pool.submit(_train, run, folder, cores): run for run in missing}
        for future in futures.as_completed(asked):
            yield asked[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _train(run: Run, folder: pathlib.Path, free: queue.SimpleQueue) -> str:
    """Trains a run on free cores; returns the reason of its failure in one line, or ""."""
    if files := code_lib.changed(grid.code(), grid.code_now()):
        return f"the code changed after the study began ({code_lib.in_short(files)})"
    workdir, log_file = folder / run.name, folder / f"{run.name}.log"
    grid.begin(run, epath.Path(workdir))
    cores = free.get()
    try:
        if cores:
            os.sched_setaffinity(0, cores)  # of this thread, inherited by its child process
        command_line.say(run.name)
        with log_file.open("a") as log:
            ended = subprocess.run(
                command(run, workdir), cwd=ROOT, stdout=log, stderr=log, check=False
            )
    finally:
        free.put(cores)
    if files := code_lib.changed(grid.code(), grid.code_now()):
        return f"the code changed while it was trained ({code_lib.in_short(files)})"
    return f"status {ended.returncode}: {_last_line(log_file)}" if ended.returncode else ""


def shares(processes: int) -> list[set[int]]:
    """Divides this process's cores; empty sets where the system does not report them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cores[i::processes]) or set(cores) for i in range(processes)]


def command(run: Run, workdir: pathlib.Path) -> list[str]:
    """Returns the command that trains a run."""
    asked = [f"--config.{key}={value}" for key, value in run.overrides.items()]
    program = [sys.executable, "-m", "kvjax.main"]
    return [*program, f"--config={run.cell.config}", f"--workdir={workdir}", *asked]


def _last_line(file: pathlib.Path) -> str:
    text = file.read_text(errors="replace").replace("\r", "\n")  # progress bars end in \r
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
