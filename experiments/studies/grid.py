"""Grids of training runs, as data: cells and seeds, a process for each run, resumed, never mixed.

A cell is a config file and overrides. A run lies in FOLDER/NAME_seedS_stepsN; one that is finished
is not trained again, and one that was stopped goes on. What a study keeps of its runs stands in its
result (`Kept`), so that a study goes on where the runs' folders are gone.

Runs of other code are not mixed: a run belongs to the code that trained it (`code`) and to a
config, both of which its folder names.
"""

import ast
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import queue
import signal
import statistics
import subprocess
import sys
import threading

from etils import epath
import jax.numpy as jnp
import ml_collections

from kvjax import experiment as experiment_lib
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation import json_text
from kvjax.foundation import progress
from kvjax.foundation import provenance
from kvjax.foundation.checkout import PACKAGE
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.command_line import load_config
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import write_atomically
from kvjax.workdir import identity
from kvjax.workdir import metrics

# What decides a run's numbers, in kvjax/.
_DECIDES = (
    *("attention", "data", "layers", "model", "recipes", "kernels/softmax_attention"),
    *("experiment.py", "optim.py", "training/program.py", "training/loop.py"),
)
_ABOUT = "study.json"  # in a run's folder: config, code and machine that trained it
_ENDS = (signal.SIGTERM, signal.SIGHUP)
_GUESS = 60e9  # FLOP/s of a core, until a run has told


@dataclasses.dataclass(frozen=True)
class Cell:
    """What differs from run to run but for the seed.

    Attributes:
      overrides: keys of the config, as "model.mlp_dim".
    """

    name: str
    config: pathlib.Path
    overrides: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Run:
    """A cell with a seed, for so many steps.

    Attributes:
      evaluate: evaluations, evenly spaced; the last at the last step.
      snapshots: of parameters alone, evenly spaced, beside the first weights; 0: none.
    """

    cell: Cell
    seed: int
    steps: int
    evaluate: int = 4
    snapshots: int = 4

    @property
    def name(self) -> str:
        return f"{self.cell.name}_seed{self.seed}_steps{self.steps}"

    @functools.cached_property
    def overrides(self) -> dict[str, object]:
        every = lambda count: max(1, self.steps // count)
        train = dict(num_steps=self.steps, checkpoint_every=self.steps, sample_tokens=0)
        train |= dict(eval_every=every(self.evaluate), seed=self.seed)
        if self.snapshots:
            train |= dict(snapshot_every=every(self.snapshots))
        fixed = {"compute.dtype": "float32"} | {f"train.{key}": x for key, x in train.items()}
        return dict(self.cell.overrides) | fixed

    @functools.cached_property
    def config(self) -> ml_collections.ConfigDict:
        config = load_config(self.cell.config)
        with config.unlocked():
            config.update_from_flattened_dict(self.overrides)
        return config

    @functools.cached_property
    def experiment(self) -> experiment_lib.Experiment:
        return experiment_lib.resolve(self.config)

    @property
    def flops(self) -> float:
        """Of its training, evaluations apart."""
        one = self.experiment
        each = formulas.training_flops_per_token(one.model, one.data.sequence_length)
        return each * one.tokens_per_step * self.steps

    @property
    def identity(self) -> str:
        """Of its config: what a run must have been trained with. Keys with defaults, which may be
        newer than the run, do not count."""
        tree = identity.identity(self.config, jnp.dtype(self.config.compute.dtype))
        usual = experiment_lib.defaults(self.config.attention.kind)
        own = {k: v for k, v in _flat(tree) if k not in usual or v != usual[k]}
        return _digest(json.dumps(own | dict(steps=self.steps), sort_keys=True, default=str))


def _flat(tree: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and values."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def code() -> dict[str, str]:
    """By file what it says, as it is when a study begins; see `_code_now`."""
    return _code_now()


def _code_now() -> dict[str, str]:
    """By file what it says, without its comments and docstrings: what decides a run's numbers."""
    places = [PACKAGE / name for name in _DECIDES]
    files = [f for p in places for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    return {str(file.relative_to(PACKAGE)): _digest(_bare(file.read_text())) for file in files}


def _bare(source: str) -> str:
    """A file without docstrings and comments, in one form."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def changed(before: Mapping[str, str], now: Mapping[str, str] | None = None) -> list[str]:
    """Files that differ from those of another time."""
    now = code() if now is None else now
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


# -- what is kept ----------------------------------------------------------------------------------


class Kept:
    """What a study keeps of its finished runs, in its result, by cell and seed.

    Attributes:
      runs: {cell: {seed: what is kept, with the config's identity, the code and who made it}}.
      codes: {digest: files}, of all runs.

    Raises:
      UserError: the result is damaged or of other steps; or its runs were trained by other code,
        and it is not said that they may be mixed.
    """

    def __init__(self, file: pathlib.Path, steps: int, *, mix: bool, fresh: bool):
        self.runs: dict[str, dict[int, dict]] = {}
        self.codes: dict[str, dict[str, str]] = {}
        if fresh or not file.exists():
            return
        advice = "move it away, or give --fresh to begin a new result"
        found = json_text.read_object(epath.Path(file), advice)
        missing = [key for key in ("steps", "runs", "codes") if key not in found]
        shown = os.path.relpath(file)
        if missing:
            raise UserError(f"{shown} lacks {missing[0]!r}: {advice}")
        if found["steps"] != steps:
            raise UserError(
                f"--steps = {steps}: {shown} has runs of {found['steps']} steps; give that, or "
                "--fresh to begin a new result"
            )
        self.codes = found["codes"]
        files = sorted({name for one in self.codes.values() for name in changed(one)})
        if files and not mix:
            raise UserError(
                f"{shown} has runs of other code ({_some(files)}), and runs of both are not mixed. "
                "--fresh with another --runs trains all anew, and --mix takes them as they are, "
                "where the change decides no number"
            )
        for name, seeds in found["runs"].items():
            self.runs[name] = {int(seed): kept for seed, kept in seeds.items()}

    def of(self, run: Run) -> dict | None:
        """What is kept of a run; None of one that is not there, or was of another config."""
        kept = self.runs.get(run.cell.name, {}).get(run.seed)
        return kept if kept and kept["identity"] == run.identity else None

    def keep(self, run: Run, workdir: pathlib.Path, **found) -> dict:
        """Keeps what a run came to, and what its folder says of code, data and machine."""
        about = _about(workdir)
        digest = _digest(json.dumps(about["code"], sort_keys=True))
        self.codes[digest] = about.pop("code")
        kept = about | dict(identity=run.identity, code=digest) | found
        self.runs.setdefault(run.cell.name, {})[run.seed] = kept
        return kept

    def as_json(self) -> dict:
        return dict(codes=self.codes, runs=self.runs)


def _about(workdir: pathlib.Path) -> dict:
    """What a run's folder says of its code, its data and the machine that trained it."""
    file, data = workdir / _ABOUT, workdir / "dataset.json"
    found = json_text.read_object(epath.Path(file), "train the run anew")
    return found | dict(data=_digest(data.read_text()) if data.exists() else "")


def _some(names: Sequence[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


# -- training --------------------------------------------------------------------------------------


def curve(workdir: pathlib.Path) -> dict[int, float]:
    """By step bits per byte; of a run that was not begun none."""
    file = epath.Path(workdir) / metrics.METRICS
    records = metrics.read_records(file) if file.exists() else []
    return {r["step"]: r["validation_bpb"] for r in records if "validation_bpb" in r}


def speed(workdir: pathlib.Path) -> float | None:
    """Tokens/s, the median over a run's records; None where there is none."""
    file = epath.Path(workdir) / "timing.jsonl"
    records = metrics.read_records(file) if file.exists() else []
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    return statistics.median(speeds) if speeds else None


def _finished(run: Run, folder: pathlib.Path, *, mix: bool) -> tuple[bool, str]:
    """Whether a run lies there whole, and why it may be neither taken nor gone on with."""
    workdir = folder / run.name
    if not (workdir / _ABOUT).exists():
        begun = any(workdir.glob("*.jsonl")) if workdir.exists() else False
        return False, "does not say what code trained it" if begun else ""
    about = _about(workdir)
    if about["identity"] != run.identity:
        return False, "is of another config"
    if (files := changed(about["code"])) and not mix:
        return False, f"was trained by other code ({_some(files)})"
    return run.steps in curve(workdir), ""


def train(
    runs: Sequence[Run], folder: pathlib.Path, *, processes: int, mix: bool
) -> Iterator[tuple[Run, str]]:
    """Trains what is not finished, `processes` side by side, each on cores of its own.

    Interrupted, or ended by SIGTERM or SIGHUP, it interrupts its runs, which save what they have.

    Yields:
      Each run when it has ended, those first that were finished, and why it failed, in one line; ""
      if it did not. What a run says is in FOLDER/NAME.log.

    Raises:
      UserError: folders of other configs or of other code; before anything is trained.
    """
    found = {run.name: _finished(run, folder, mix=mix) for run in runs}
    refused = [f"{name} {why}" for name, (_, why) in found.items() if why]
    if refused:
        raise UserError(
            f"{os.path.relpath(folder)}: {refused[0]}"
            + (f", and {len(refused) - 1} more are like it" if len(refused) > 1 else "")
            + ". Give another --runs, or --mix if a change of code decides no number"
        )
    there = {name: whole for name, (whole, _) in found.items()}
    missing = [run for run in runs if not there[run.name]]
    yield from ((run, "") for run in runs if there[run.name])
    if not missing:
        return
    done = [(run, rate) for run in runs if there[run.name] and (rate := speed(folder / run.name))]
    rates = [rate * run.flops / (run.experiment.tokens_per_step * run.steps) for run, rate in done]
    rate = statistics.median(rates) if rates else _GUESS
    seconds = sum(run.flops for run in missing) / rate / processes
    command_line.say(
        f"{len(missing)} runs of {len(runs)} to train, {processes} side by side: about "
        f"{progress.duration(seconds)}"
        + ("" if rates else f", at a guess ({_GUESS / 1e9:.0f} GFLOP/s each)")
    )
    with _ends_as_interrupted(), _Processes(folder, processes) as begun:
        yield from begun.all(missing)


@contextlib.contextmanager
def _ends_as_interrupted():
    """SIGTERM and SIGHUP are as Ctrl-C here, so that no run is left behind."""

    def interrupt(*_):
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Processes:
    """Processes of runs, so many at a time, each on its share of this process's cores."""

    def __init__(self, folder: pathlib.Path, count: int):
        self._folder, self._stopped, self._lock = folder, False, threading.Lock()
        self._running: list[subprocess.Popen] = []
        self._pool, self._cores = futures.ThreadPoolExecutor(count), queue.SimpleQueue()
        for some in shares(count):
            self._cores.put(some)

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, kind, *_) -> None:
        with self._lock:
            self._stopped = True
            if kind is not None:
                for process in self._running:
                    process.send_signal(signal.SIGTERM)
        self._pool.shutdown()

    def all(self, runs: Sequence[Run]) -> Iterator[tuple[Run, str]]:
        """Runs as they end; see `train`."""
        asked = {self._pool.submit(self._train, run): run for run in runs}
        for future in futures.as_completed(asked):
            yield asked[future], future.result()

    def _train(self, run: Run) -> str:
        cores = self._cores.get()
        try:
            return self._on(cores, run)
        finally:
            self._cores.put(cores)

    def _on(self, cores: set[int], run: Run) -> str:
        """Why a run failed, in one line; "" if it did not."""
        if files := changed(_code_now()):
            return f"the code changed after the study began ({_some(files)})"
        workdir = self._folder / run.name
        workdir.mkdir(parents=True, exist_ok=True)
        if not (workdir / _ABOUT).exists():
            made = {key: x for key, x in provenance.provenance().items() if key != "command"}
            about = dict(identity=run.identity, code=code(), made_by=made)
            write_atomically(epath.Path(workdir / _ABOUT), json.dumps(about) + "\n")
        if cores:
            os.sched_setaffinity(0, cores)  # of this thread, and of the process that it begins
        log_file = self._folder / f"{run.name}.log"
        with log_file.open("a") as log:
            with self._lock:
                if self._stopped:
                    return "not begun"
                command_line.say(run.name)
                how = dict(cwd=ROOT, stdout=log, stderr=log)
                process = subprocess.Popen(command(run, workdir), **how)
                self._running.append(process)
            status = process.wait()
        with self._lock:
            self._running.remove(process)
        if files := changed(_code_now()):
            return f"the code changed while it was trained ({_some(files)})"
        return f"status {status}: {_last_line(log_file)}" if status else ""


def shares(processes: int) -> list[set[int]]:
    """This process's cores, shared out; empty sets where the system does not tell them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cores[i::processes]) or set(cores) for i in range(processes)]


def command(run: Run, workdir: pathlib.Path) -> list[str]:
    """What trains a run."""
    asked = [f"--config.{key}={value}" for key, value in run.overrides.items()]
    program = [sys.executable, "-m", "kvjax.main"]
    return [*program, f"--config={run.cell.config}", f"--workdir={workdir}", *asked]


def _last_line(file: pathlib.Path) -> str:
    text = file.read_text(errors="replace").replace("\r", "\n")  # a progress bar's lines
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def matched(config: pathlib.Path, parameters: int) -> dict[str, int]:
    """The override of the MLP's width that brings a config nearest to so many parameters."""
    count = lambda c: formulas.parameters(experiment_lib.resolve(c).model)["total"]
    plain, wider = load_config(config), load_config(config)
    wider.model.mlp_dim += 1
    each = count(wider) - count(plain)
    return {"model.mlp_dim": plain.model.mlp_dim + round((parameters - count(plain)) / each)}
