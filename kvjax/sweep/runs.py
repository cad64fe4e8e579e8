"""Trains runs whose workdirs lie in one folder, and estimates the time that they take."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import pathlib
import statistics
import sys

from etils import epath
import ml_collections

from kvjax import config as config_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line, progress
from kvjax.sweep import processes as processes_lib
from kvjax.workdir import checkpoint, metrics, storage, trained

GUESS = 60e9  # FLOP/s that a run on a CPU is assumed to reach, before any run has begun


class Run:
    """A training run, whose workdir is FOLDER/NAME. Subclasses define its attributes.

    Attributes:
      arguments: arguments of kvjax.main, without --workdir.
    """

    name: str
    config: ml_collections.ConfigDict
    arguments: Sequence[str]

    @functools.cached_property
    def experiment(self) -> config_lib.Experiment:
        return config_lib.resolve(self.config)

    @functools.cached_property
    def flops_per_token(self) -> int:
        e = self.experiment
        return formulas.training_flops_per_token(e.model, e.data.sequence_length)

    @property
    def flops(self) -> float:
        """FLOPs of the run's training, without its evaluations."""
        e = self.experiment
        return self.flops_per_token * e.tokens_per_step * e.train.num_steps


def curve(workdir: pathlib.Path) -> dict[int, float]:
    """Returns validation bits per byte by step; {} for a run without evaluations."""
    records = _records(workdir, metrics.METRICS)
    return {r["step"]: r["validation_bpb"] for r in records if "validation_bpb" in r}


def speed(workdir: pathlib.Path) -> float | None:
    """Returns the median tokens/s of a run's records, or None without records."""
    return _median(workdir, "tokens_per_second")


def _median(workdir: pathlib.Path, key: str) -> float | None:
    values = [r[key] for r in _records(workdir, metrics.TIMING) if key in r]
    return statistics.median(values) if values else None


def _wall_time_factor(workdir: pathlib.Path) -> float:
    """Returns a run's time with evaluations, saving and waiting for data, over that of steps alone.

    Returns 1 for a run that has not recorded its goodput.
    """
    records = [r for r in _records(workdir, metrics.TIMING) if r.get("goodput")]
    if not records:
        return 1.0
    lost = sum(records[-1].get(f"lost_{cause}", 0.0) for cause in ("data", "validating", "saving"))
    return 1 + lost / records[-1]["goodput"]


def _records(workdir: pathlib.Path, name: str) -> list[dict]:
    return metrics.read_records(epath.Path(workdir) / name)


def steps_done(run: Run, folder: pathlib.Path) -> int:
    """Returns the step of a run's last checkpoint; 0 without one."""
    return max(storage.steps(epath.Path(folder) / run.name / checkpoint.CHECKPOINTS), default=0)


def is_finished(run: Run, folder: pathlib.Path) -> bool:
    """Returns True if a run has evaluated its last step and saved a checkpoint of it."""
    last, workdir = run.experiment.train.num_steps, epath.Path(folder) / run.name
    if not last and (workdir / "config.json").exists():  # one epoch: its length is in the workdir
        last = trained.experiment_of(workdir).train.num_steps
    return last in curve(workdir) and steps_done(run, folder) == last


def seconds_left(
    runs: Sequence[Run], folder: pathlib.Path, guess: float | None = GUESS
) -> dict[str, float] | None:
    """Returns by name the estimated seconds that each unfinished run still needs; None if unknown.

    The estimate uses the median startup time and the median FLOP/s, evaluations and saving
    included, of the runs that have begun.

    Args:
      guess: FLOP/s to assume if no run has begun.
    """
    rates, starts = [], []
    for run in runs:
        if tokens_per_second := speed(folder / run.name):
            factor = _wall_time_factor(folder / run.name)
            rates.append(tokens_per_second * run.flops_per_token / factor)
            starts.append(_median(folder / run.name, "seconds_to_first_step") or 0.0)
    if not rates and not guess:
        return None
    rate = statistics.median(rates) if rates else guess
    start = statistics.median(starts) if starts else 0.0
    left = {}
    for run in runs:
        if not is_finished(run, folder):
            num_steps = max(run.experiment.train.num_steps, 1)
            left[run.name] = start + run.flops * (1 - steps_done(run, folder) / num_steps) / rate
    return left


def plan(runs: Sequence[Run], left: Mapping[str, float] | None, count: int, processes: int) -> str:
    """Returns a sentence on the number of runs to train and their estimated time.

    Args:
      left: result of `seconds_left`.
      count: number of runs to train.
    """
    parallel = f", {processes} side by side" if processes > 1 else ""
    duration = "the time is known once the first has begun"
    if left is not None:
        seconds = max([sum(left.values()) / processes, *left.values()], default=0)
        duration = f"about {progress.duration(seconds)}"
    return f"{count} runs of {len(runs)} to train{parallel}: {duration}"


def command(run: Run, workdir: pathlib.Path) -> list[str]:
    """Returns the command that trains a run."""
    return [sys.executable, "-m", "kvjax.main", f"--workdir={workdir}", *run.arguments]


def train(
    runs: Sequence[Run],
    folder: pathlib.Path,
    *,
    processes: int,
    guess: float | None = GUESS,
    before: Callable[[Run], str] = lambda run: "",
) -> Iterator[tuple[Run, str]]:
    """Trains unfinished runs, `processes` at a time; see `processes.run` for signals.

    A run's output is appended to FOLDER/NAME.log.

    Args:
      guess: see `seconds_left`.
      before: called before a run starts; returns "", or a reason not to start it.

    Yields:
      First the runs that were finished before, then each run when it has ended, with one line on
      its failure, or "".
    """
    missing = {run.name: run for run in runs if not is_finished(run, folder)}
    yield from ((run, "") for run in runs if run.name not in missing)
    if not missing:
        return
    left = seconds_left(runs, folder, guess)
    command_line.say(plan(runs, left, len(missing), processes))
    refused = []

    def jobs() -> Iterator[processes_lib.Job]:
        for run in missing.values():
            if why := before(run):
                refused.append((run, why))
                continue
            words = command(run, folder / run.name)
            yield processes_lib.Job(run.name, words, folder / f"{run.name}.log")

    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(processes_lib.run(jobs(), processes)) as ended:
        for job, why in ended:
            yield missing[job.name], why
    yield from refused
