"""Trains a grid of runs: every combination of values of config keys, with several seeds.

    python -m kvjax.sweep configs/lrkv_tiny.py --set attention.rank=16,32,64 --seeds=3
    python -m kvjax.sweep configs/lrkv_tiny.py configs/mha_tiny.py --seeds=3 --out=runs/sweep/two
    python -m kvjax.sweep configs/lrkv_tiny.py --set attention.rank=16,32 --plan  # trains nothing

Each run has a workdir in --out, such as rank=16_seed=0, and writes its output to rank=16_seed=0.log
beside it. An option such as --config.train.num_steps=100 applies to all runs. On CPUs, runs are
trained side by side, each on its own cores; on an accelerator, one after the other. Ctrl-C, SIGTERM
and SIGHUP stop all runs after they have saved. The same command continues them, and trains failed
runs again. At the end it prints the table of kvjax.compare: means and 95 % intervals over seeds.
"""

import argparse
from collections.abc import Mapping, Sequence
import contextlib
import os
import pathlib
import subprocess
import sys

from etils import epath

from kvjax.compare import groups as groups_lib, report, runs as compare_lib
from kvjax.foundation import command_line, overrides as overrides_lib, progress, runtime, target
from kvjax.foundation.configuration import between
from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.files import in_bucket
from kvjax.foundation.output import Output
from kvjax.sweep import grid, runs as runs_lib
from kvjax.sweep.runs import Run
from kvjax.workdir import identity

_MOST_SEEDS = 1000
_PRINT_PLATFORM = "import jax; print(jax.default_backend())"
_SHARED_GPU = "XLA_PYTHON_CLIENT_PREALLOCATE"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    arguments, overrides = overrides_lib.split(arguments)
    parser = command_line.Parser(__doc__)
    parser.add_output()
    add = parser.add_argument
    add("configs", nargs="*", metavar="CONFIG", help="config files, or FILE.py:VARIANT")
    text = "a config key and its values; may be repeated, once per key"
    add("--set", action="append", default=[], metavar="KEY=VALUE,...", help=text)
    add("--seeds", type=int, default=1, help="runs per combination, with seeds from 0 (1)")
    add("--out", default="", help="folder of the workdirs (runs/sweep/CONFIG)")
    text = "runs at a time (on CPUs as many as there are cores, else 1)"
    add("--processes", type=int, default=None, help=text)
    add("--plan", action="store_true", help="list the runs and their estimated time; train nothing")
    options = parser.parse(arguments)
    options.overrides, options.axes = overrides, grid.axes(options.set)
    between("--seeds", options.seeds, 1, _MOST_SEEDS)
    if options.processes is not None:
        between("--processes", options.processes, 1, 1000)
    if not options.configs:
        raise UserError("no config is given: give one, such as configs/lrkv_tiny.py")
    options.configs = [pathlib.Path(os.path.expanduser(name)) for name in options.configs]
    if not options.out and len(options.configs) > 1:
        raise UserError(
            "--out is missing: several configs need a folder for their runs, such as runs/sweep/two"
        )
    return options


def main(arguments: list[str]) -> int:
    """Trains the grid; see the module's docstring. Returns 1 if a run failed."""
    options = _options(arguments)
    runs = grid.runs(options.configs, options.axes, options.overrides, options.seeds)
    folder = _folder(options.out or f"runs/sweep/{command_line.config_label(options.configs[0])}")
    platform = _platform()
    processes = _processes(options.processes, platform, len(runs))
    _check_folder(runs, folder, platform)
    out, guess = Output(options), runs_lib.GUESS if platform == "cpu" else None
    if options.plan:
        out.result(_plan(runs, folder, processes, guess, out))
        return 0
    failed = _train(runs, folder, processes, guess)
    rows = _table([run for run in runs if run.name not in failed], folder, out)
    for name, why in failed.items():
        out.say(f"- failed: {name}, {why}; its output is in {_shown(folder)}/{name}.log")
    if rows:
        compare = command_line.program().replace("sweep", "compare")
        page = f"--out=runs/compare/{folder.name}"
        out.say(f"\nThe page: {compare} {_shown(folder)} {page}", wrap=False)
    out.result(dict(out=str(folder), rows=rows, failed=failed))
    return 1 if failed else 0


def _folder(out: str) -> pathlib.Path:
    """Returns the folder of the workdirs; raises a UserError if it cannot hold them."""
    if in_bucket(out):
        raise UserError(f"--out = {out!r}: must be a local folder")
    folder = target.check(out, ())
    runtime.check_checkpoints("--out", folder)
    if (folder / compare_lib.CONFIG).exists():
        raise UserError(f"--out = {out!r}: is the workdir of a run: give a folder of its own")
    return pathlib.Path(folder)


def _shown(path: pathlib.Path) -> str:
    return os.path.relpath(path)


def _platform() -> str:
    """Returns JAX's platform. Another process finds it, so that this one holds no accelerator."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu"
    with progress.waiting("looking for accelerators"):
        result = subprocess.run(
            [sys.executable, "-c", _PRINT_PLATFORM], capture_output=True, text=True, check=False
        )
    if result.returncode:
        *_, last = result.stderr.strip().splitlines() or [""]
        raise UserError(f"JAX finds no device: {first_line(last)}")
    return result.stdout.split()[-1]


def _processes(requested: int | None, platform: str, runs: int) -> int:
    """Returns how many runs are trained at a time."""
    if platform == "cpu":
        return min(requested or runtime.cores(), runs)
    shared = platform == "gpu" and os.environ.get(_SHARED_GPU, "").lower() in ("false", "0")
    if requested and requested > 1 and not shared:
        remedy = f" (or set {_SHARED_GPU}=false)" if platform == "gpu" else ""
        raise UserError(
            f"--processes = {requested}: must be 1 on a {platform}, since a run takes all of its "
            f"memory{remedy}"
        )
    return min(requested or 1, runs)


def _check_folder(runs: Sequence[Run], folder: pathlib.Path, platform: str) -> None:
    """Raises a UserError if a run's workdir has checkpoints of another config."""
    for run in runs:
        experiment = run.experiment
        if not experiment.train.num_steps:  # one epoch of unknown length: training checks it later
            continue
        dtype = experiment.compute.resolve(platform, experiment.model.block.num_layers).dtype
        try:
            identity.check_config(epath.Path(folder / run.name), run.config, dtype)
        except UserError as error:
            raise UserError(str(error).replace("another --workdir", "another --out")) from error


def _plan(
    runs: Sequence[Run],
    folder: pathlib.Path,
    processes: int,
    guess: float | None,
    out: Output,
) -> dict:
    """Prints and returns each run's state and the time that it still needs."""
    left, rows = runs_lib.seconds_left(runs, folder, guess), []
    for run in runs:
        done, total = runs_lib.steps_done(run, folder), run.experiment.train.num_steps
        state = f"step {done:,} of {total:,}" if done else "to train"
        state = "finished" if runs_lib.is_finished(run, folder) else state
        rows.append(dict(run=run.name, state=state, seconds=(left or {}).get(run.name)))
    durations = ["-" if r["seconds"] is None else progress.duration(r["seconds"]) for r in rows]
    cells = [(r["run"], r["state"], d) for r, d in zip(rows, durations, strict=True)]
    out.table(("run", "state", "takes about"), cells)
    count = sum(row["state"] != "finished" for row in rows)
    text = runs_lib.plan(runs, left, count, processes) if count else "all runs are finished"
    out.say(f"\n{text}, in {_shown(folder)}")
    return dict(out=str(folder), runs=rows, processes=processes)


def _train(
    runs: Sequence[Run], folder: pathlib.Path, processes: int, guess: float | None
) -> dict[str, str]:
    """Trains unfinished runs and prints the result of each; returns reasons of failures by name."""
    failed, ended = {}, 0
    options = dict(processes=processes, guess=guess)
    with contextlib.closing(runs_lib.train(runs, folder, **options)) as trained:
        for run, why in trained:
            ended += 1
            bpb = runs_lib.curve(folder / run.name)
            result = f"{bpb[max(bpb)]:.4f} bits per byte" if bpb else "not evaluated"
            if why:
                failed[run.name] = why
            command_line.say(f"{run.name}: {why or result} ({ended} of {len(runs)})")
    return failed


def _table(runs: Sequence[Run], folder: pathlib.Path, out: Output) -> list[Mapping]:
    """Prints kvjax.compare's table of the finished runs; returns its rows."""
    workdirs = [(run.name, epath.Path(folder / run.name)) for run in runs]
    finished, skipped = compare_lib.read(workdirs, running=False)
    reasons = {run.name: run.why for run in skipped} | compare_lib.incomparable(finished)
    finished = [run for run in finished if run.name not in reasons]
    rows = []
    if finished:
        groups = groups_lib.groups(finished, "seed")
        rows = report.rows(groups, groups[0])
        out.show(report.terminal(rows, groups[0]))
    for name, why in reasons.items():
        out.say(f"- skipped: {name} {why}")
    return rows


if __name__ == "__main__":
    command_line.run(main)
