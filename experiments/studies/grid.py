"""Grids of training runs, as data: cells and seeds, a process for each run, resumed, never mixed.

A cell is a config file and overrides. A run lies in FOLDER/NAME_seedS_stepsN; one that is finished
is not trained again, and one that was stopped goes on. What a study keeps of its runs stands in its
result (`Kept`), so that a study goes on where the runs' folders are gone.

Runs of other code are not mixed: a run belongs to the code that trained it (`code`), and its folder
to a config (`kvjax.workdir.identity`).
"""

import ast
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import queue
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
_CODE = "code.json"  # in a run's folder: the code that trained it
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
        return dict(self.cell.overrides) | {f"train.{key}": x for key, x in train.items()}

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
        tree = identity.identity(self.config, jnp.dtype(jnp.float32))
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
    """By file what it says, without its comments and docstrings: what decides a run's numbers."""
    places = [PACKAGE / name for name in _DECIDES]
    files = [f for p in places for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    return {str(file.relative_to(PACKAGE)): _digest(_bare(file.read_text())) for file in files}


def _bare(source: str) -> str:
    """The syntax tree without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = body[1:]
    return ast.dump(tree)


def changed(before: Mapping[str, str]) -> list[str]:
    """Files that differ from those of another time."""
    now = code()
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


# -- what is kept ----------------------------------------------------------------------------------


class Kept:
    """What a study keeps of its finished runs, in its result, by cell and seed.

    Attributes:
      runs: {cell: {seed: what is kept}}.

    Raises:
      UserError: they were trained by other code, and it is not said that they may be mixed.
    """

    def __init__(self, file: pathlib.Path, steps: int, *, mix: bool, fresh: bool):
        self.runs: dict[str, dict[int, dict]] = {}
        found = json_text.parse(file.read_text()) if file.exists() and not fresh else {}
        if not found or found.get("steps") != steps:
            return
        if (files := changed(found["code"])) and not mix:
            raise UserError(
                f"{os.path.relpath(file)} was made by other code ({_some(files)}): runs of both "
                "are not mixed. --fresh trains all anew, and --mix takes them as they are, where "
                "the change decides no number"
            )
        for name, seeds in found["runs"].items():
            self.runs[name] = {int(seed): kept for seed, kept in seeds.items()}

    def of(self, run: Run) -> dict | None:
        """What is kept of a run; None of one that is not there, or was of another config."""
        kept = self.runs.get(run.cell.name, {}).get(run.seed)
        return kept if kept and kept["identity"] == run.identity else None

    def keep(self, run: Run, **found) -> dict:
        kept = dict(identity=run.identity) | found
        self.runs.setdefault(run.cell.name, {})[run.seed] = kept
        return kept

    def as_json(self) -> dict:
        return dict(code=code(), runs=self.runs)


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


def is_finished(run: Run, folder: pathlib.Path, *, mix: bool) -> bool:
    """Whether a run lies there whole.

    Raises:
      UserError: its folder is of another config, or of other code.
    """
    workdir = folder / run.name
    if not curve(workdir):
        return False
    identity.check_config(epath.Path(workdir), run.config, jnp.dtype(jnp.float32))
    file = workdir / _CODE
    before = json_text.parse(file.read_text()) if file.exists() else {}
    if (files := changed(before)) and not mix:
        raise UserError(
            f"{os.path.relpath(workdir)} was trained by other code ({_some(files)}): move it away, "
            "or give --mix if the change decides no number"
        )
    return run.steps in curve(workdir)


def train(
    runs: Sequence[Run], folder: pathlib.Path, *, processes: int, mix: bool
) -> Iterator[tuple[Run, str]]:
    """Trains what is not finished, `processes` side by side, each on cores of its own.

    Yields:
      Each run when it has ended, those first that were finished, and why it failed, in one line; ""
      if it did not. What a run says is in FOLDER/NAME.log.

    Raises:
      UserError: see `is_finished`; before anything is trained.
    """
    there = {run.name: is_finished(run, folder, mix=mix) for run in runs}
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
    cores = queue.SimpleQueue()
    for some in _shares(processes):
        cores.put(some)
    stopped = threading.Event()
    with futures.ThreadPoolExecutor(processes) as pool:
        asked = {pool.submit(_train, run, folder, cores, stopped): run for run in missing}
        try:
            for future in futures.as_completed(asked):
                yield asked[future], future.result()
        except BaseException:  # an interruption: the runs had it too, and have saved
            stopped.set()
            raise


def _shares(processes: int) -> list[set[int]]:
    """This process's cores, shared out."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cores[i::processes]) or set(cores) for i in range(processes)]


def _train(
    run: Run, folder: pathlib.Path, cores: queue.SimpleQueue, stopped: threading.Event
) -> str:
    """Why it failed, in one line; "" if it did not."""
    if stopped.is_set():
        return "not begun"
    mine = cores.get()
    try:
        workdir = folder / run.name
        workdir.mkdir(parents=True, exist_ok=True)
        write_atomically(epath.Path(workdir / _CODE), json.dumps(code()) + "\n")
        if mine:
            os.sched_setaffinity(0, mine)  # of this thread, and of the process that it begins
        command_line.say(run.name)
        with (folder / f"{run.name}.log").open("a") as log:
            status = subprocess.run(
                command(run, workdir), cwd=ROOT, stdout=log, stderr=log, check=False
            ).returncode
        return f"status {status}: {_last_line(pathlib.Path(log.name))}" if status else ""
    finally:
        cores.put(mine)


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
    load: Callable[[], ml_collections.ConfigDict] = lambda: load_config(config)
    count = lambda c: formulas.parameters(experiment_lib.resolve(c).model)["total"]
    plain, wider = load(), load()
    wider.model.mlp_dim += 1
    each = count(wider) - count(plain)
    return {"model.mlp_dim": plain.model.mlp_dim + round((parameters - count(plain)) / each)}
