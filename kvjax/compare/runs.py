"""Training runs as their workdirs tell them: what was asked, and bits per byte by step."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
import dataclasses
import functools
import hashlib
import os

from etils import epath
from flax import traverse_util
import jax.numpy as jnp
import numpy as np

from kvjax import experiment as experiment_lib
from kvjax.costs import formulas
from kvjax.data import manifest
from kvjax.data.config import is_prepared
from kvjax.foundation import json_text, runtime
from kvjax.foundation.errors import UserError, warn
from kvjax.foundation.files import forget_listings
from kvjax.workdir import checkpoint, metrics, storage, trained

CONFIG = "config.json"
# What is read by many at once: a bucket answers late, and each workdir has four small files.
_AT_ONCE = 16
_DEEPEST = 3  # folders below one that is named: a data set's have no end
_MOST_STEPS, _FASTEST = 2**53, 1e18  # tokens/s: beyond that no record is one
# Keys of a config that name a run, and change nothing that is computed. A workdir has none of those
# that say when a run is looked at (`workdir.identity`).
_COSMETIC = ("name", "train.seed")
SEED, STEPS, _SOURCE = "train.seed", "train.num_steps", "data.source"
_TOKENIZER, _DATA_SET, _UNKNOWN = "tokenizer", "data set", "missing"
_FILES = {_TOKENIZER: manifest.TOKENIZER, _DATA_SET: manifest.MANIFEST}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was begun.

    Attributes:
      keys: of its config, as "model.mlp_dim".
      data: digests by name of what must be the same for bits per byte to compare.
      steps, bpb: [evaluations] of the validation split, steps ascending.
      seconds: [evaluations] that training took until then, without compilation and evaluations;
        nan where timing.jsonl does not tell.
      finished: whether the last step was evaluated.
    """

    name: str
    workdir: epath.Path
    experiment: experiment_lib.Experiment
    keys: Mapping[str, object]
    data: Mapping[str, str]
    steps: np.ndarray
    bpb: np.ndarray
    seconds: np.ndarray
    finished: bool

    @property
    def seed(self) -> int:
        return self.experiment.train.seed

    @property
    def tokens(self) -> np.ndarray:
        """[evaluations]"""
        return self.steps * self.experiment.tokens_per_step

    @property
    def final(self) -> float:
        """Bits per byte of the last evaluation."""
        return float(self.bpb[-1])

    @functools.cached_property
    def what(self) -> dict[str, object]:
        """Keys that decide what is computed, but for the seed; defaults, maybe newer, left out."""
        usual = experiment_lib.defaults(str(self.keys["attention.kind"]))
        same = lambda key, value: key in usual and value == _stored(usual[key])
        found = {
            key: value
            for key, value in self.keys.items()
            if key not in _COSMETIC and not same(key, value)
        }
        if is_prepared(str(found.get(_SOURCE, ""))):  # it may have moved; `data` says what it is
            del found[_SOURCE]
        return found


def _stored(value):
    """A value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A workdir that has nothing to compare, and why; `may_come`: the run may mend it yet."""

    name: str
    why: str
    may_come: bool = False


def is_there(name: str) -> bool:
    """Whether a folder that is named is there now."""
    path = runtime.path("a workdir", name)
    forget_listings(path)
    return path.exists()


def workdirs(names: Sequence[str]) -> list[tuple[str, epath.Path]]:
    """The workdirs that are named, or that lie in a folder that is.

    With them stand folders that have none, or have theirs further down: `read` says so.

    Raises:
      UserError: there is nothing of that name, or a file.
    """
    found: dict[str, epath.Path] = {}
    for name in names:
        path = runtime.path("a workdir", name)
        if not is_there(name):
            raise UserError(f"{name}: no such folder; give workdirs of runs, or a folder of them")
        if not path.is_dir():
            raise UserError(f"{name}: is a file; give workdirs of runs, or a folder of them")
        name = os.fsencode(name.rstrip("/")).decode(errors="backslashreplace")
        # A workdir that was only begun has no config yet; the caller says that nothing is there.
        found |= _in(name, path, _DEEPEST) or {name: path}
    return list(found.items())


def _in(name: str, path: epath.Path, deep: int) -> dict[str, epath.Path]:
    """Workdirs in a folder; where it has none itself, in its folders: a run may be sweeps/a.

    Beside a folder's own workdirs stand those of its folders that have some.
    """
    if (path / CONFIG).exists():
        return {name: path}
    own: dict[str, epath.Path] = {}
    further: dict[str, dict[str, epath.Path]] = {}
    for one in sorted(path.iterdir()) if deep else ():
        if one.is_dir():
            called = f"{name}/{os.fsencode(one.name).decode(errors='backslashreplace')}"
            if (one / CONFIG).exists():
                own[called] = one
            elif found := _in(called, one, deep - 1):
                further[called] = found
    if own:
        return own | {called: path / called.rpartition("/")[2] for called in further}
    return {called: place for found in further.values() for called, place in found.items()}


def read(
    places: Iterable[tuple[str, epath.Path]], *, running: bool
) -> tuple[list[Run], list[LeftOut]]:
    """Runs in the given order, and what is left out.

    Args:
      running: whether runs that have not ended are taken as far as they are.
    """
    with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(lambda place: _read(*place, running=running), places))
    runs = [one for one in found if isinstance(one, Run)]
    return runs, [one for one in found if isinstance(one, LeftOut)]


def _read(name: str, workdir: epath.Path, *, running: bool) -> Run | LeftOut:
    if not (workdir / CONFIG).exists():
        if _in(name, workdir, _DEEPEST):
            return LeftOut(name, "holds runs of its own: name it to compare them")
        return LeftOut(name, f"has no {CONFIG}: no run was begun there", may_come=True)
    try:
        tree = json_text.read_object(workdir / CONFIG, "restore it, or train again")
        experiment = trained.experiment_of(workdir)
    except UserError as error:
        return LeftOut(name, f"cannot be read: {error}")
    records = _records(name, workdir, metrics.METRICS)
    evaluated = {r["step"]: r["validation_bpb"] for r in records if "validation_bpb" in r}
    if not evaluated:
        # Training evaluates before it saves the last step, and has records from its first on; what
        # was converted has weights alone.
        saved = storage.steps(workdir / checkpoint.CHECKPOINTS)
        converted = bool(saved) and not (workdir / metrics.METRICS).exists()
        ended = converted or experiment.train.num_steps in saved
        return LeftOut(name, "was never evaluated", may_come=not ended)
    if odd := [step for step in evaluated if not 0 <= step <= _MOST_STEPS]:
        return LeftOut(name, f"has a record of step {odd[0]}, which is none")
    steps = np.array(sorted(evaluated), np.int64)
    try:
        bpb = np.array([float(evaluated[step]) for step in steps.tolist()])
    except OverflowError:
        return LeftOut(name, "has bits per byte that no float holds")
    if not np.isfinite(bpb).all():
        bad = int(steps[~np.isfinite(bpb)][0])
        return LeftOut(name, f"has bits per byte that are no number, at step {bad}")
    finished = _is_finished(workdir, experiment, int(steps[-1]))
    if not finished and not running:
        planned = experiment.train.num_steps
        of = f" of {planned:,}" if planned else ""
        why = f"is unfinished, evaluated up to step {steps[-1]:,}{of}"
        return LeftOut(name, why, may_come=True)
    return Run(
        name=name,
        workdir=workdir,
        experiment=experiment,
        keys=traverse_util.flatten_dict(tree, sep="."),
        data=_data(workdir, experiment),
        steps=steps,
        bpb=bpb,
        seconds=_seconds(name, workdir, steps * experiment.tokens_per_step, steps),
        finished=finished,
    )


def _records(name: str, workdir: epath.Path, file: str) -> list[dict]:
    records, broken = metrics.read_checked(workdir / file)
    if broken:
        warn(f"{name}/{file}: {broken}; such lines are left out")
    return records


def _is_finished(workdir: epath.Path, experiment: experiment_lib.Experiment, last: int) -> bool:
    if experiment.train.num_steps:
        return last >= experiment.train.num_steps
    # Once over a mixture's rows, which only that run has counted.
    return last in storage.steps(workdir / checkpoint.CHECKPOINTS)


def _data(workdir: epath.Path, experiment: experiment_lib.Experiment) -> dict[str, str]:
    digest = lambda path: (
        hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else _UNKNOWN
    )
    return {
        _TOKENIZER: digest(workdir / manifest.TOKENIZER),
        _DATA_SET: digest(workdir / manifest.MANIFEST),
        "config.train.eval_rows": str(experiment.train.eval_rows or "all"),
        # A run reads as much of longer prepared rows as its own hold, in validation too.
        "config.data.sequence_length": str(experiment.data.sequence_length),
    }


def _seconds(name: str, workdir: epath.Path, tokens: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Until each step: a process after another, each from its first step on.

    A record tells the rate since its process's first step, which is counted at that rate; steps
    that a later process took again count once.
    """
    per_step = tokens[-1] / steps[-1]
    at, ends = [0], [0.0]
    first, before, rate = 1, 0.0, None
    for record in _records(name, workdir, metrics.TIMING):
        step = max(record["step"], 1)
        if step > _MOST_STEPS:
            continue
        if "seconds_to_first_step" in record:
            kept = [i for i, there in enumerate(at) if there < step]
            at, ends = [at[i] for i in kept], [ends[i] for i in kept]
            more = (step - 1 - at[-1]) * per_step / rate if rate else 0.0
            first, before = step, ends[-1] + more
        elif 0 < record.get("tokens_per_second", 0) < _FASTEST and step > at[-1]:
            rate = record["tokens_per_second"]
            at.append(step)
            ends.append(before + (step - first + 1) * per_step / rate)
    if rate is None:
        return np.full(len(steps), np.nan)
    beyond = np.maximum(steps - at[-1], 0) * per_step / rate
    return np.interp(steps, at, ends) + beyond


def incomparable(runs: Sequence[Run]) -> dict[str, str]:
    """By name the runs whose bits per byte are, or may be, of other things than the first's.

    Why is said of the run, as "cannot be compared ...".
    """
    if len(runs) == 1:
        return {}
    found: dict[str, str] = {}
    first = None
    for run in runs:
        missing = next((what for what in _FILES if run.data[what] == _UNKNOWN), None)
        if missing:
            found[run.name] = (
                f"cannot be compared: {_FILES[missing]} is missing, so nothing tells whether its "
                f"{missing} is that of others; restore it, or leave the run out"
            )
        elif first is None:
            first = run
        elif name := next((x for x, digest in run.data.items() if digest != first.data[x]), None):
            both = f"{run.data[name]}, not {first.data[name]}"
            other = both if name.startswith("config") else "another"
            found[run.name] = f"cannot be compared with {first.name}: its {name} is {other}"
    return found


def check_comparable(runs: Sequence[Run]) -> None:
    """Raises a UserError for runs whose bits per byte are, or may be, of different things."""
    for name, why in incomparable(runs).items():
        raise UserError(f"{name} {why}. Compare runs on one data set, read alike")


# -- what a model costs ----------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def costs(model, sequence_length: int) -> dict[str, int]:
    """Parameters, and for one token the cache's bytes (bfloat16), FLOPs as counted here, and 6N.

    N is the weights that multiply a token: neither input embedding nor attention's products are
    in it, as in LRKV's figure 4, whose 733 exaFLOPs are 6 x 2.444B x 50B tokens.
    """
    return dict(
        parameters=formulas.parameters(model)["total"],
        cache_bytes=formulas.cache_bytes_per_token(model, jnp.dtype(jnp.bfloat16)),
        flops=formulas.training_flops_per_token(model, sequence_length),
        six_n=6 * sum(formulas.matrix_weights(model).values()),
    )
