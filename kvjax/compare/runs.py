"""Reads training runs from their workdirs: config, and bits per byte by step."""

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

from kvjax import config as config_lib
from kvjax.costs import formulas
from kvjax.data import manifest
from kvjax.data.config import is_prepared
from kvjax.foundation import json_text, runtime
from kvjax.foundation.errors import UserError, warn
from kvjax.foundation.files import forget_listings
from kvjax.workdir import checkpoint, metrics, storage, trained

CONFIG = "config.json"
_THREADS = 16  # read workdirs in parallel, since a bucket has a high latency
_MAX_DEPTH = 3  # levels of subfolders that are searched for workdirs
_MAX_STEPS, _MAX_SPEED = 2**53, 1e18  # steps, tokens/s; records with larger values are damaged
# Config keys that name a run and change no computation (`workdir.identity` drops others).
_COSMETIC = ("name", "train.seed")
SEED, STEPS, _SOURCE = "train.seed", "train.num_steps", "data.source"
_TOKENIZER, _DATA_SET, _UNKNOWN = "tokenizer", "data set", "missing"
_FILES = {_TOKENIZER: manifest.TOKENIZER, _DATA_SET: manifest.MANIFEST}


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """A run that has begun.

    Attributes:
      keys: flattened config, as "model.mlp_dim".
      data: properties by name; bits per byte of two runs are comparable if all are equal.
      steps, bpb: [evaluations] of the validation split, steps ascending.
      seconds: [evaluations] training time so far, without compilation and evaluation; nan if
        timing.jsonl lacks it.
      finished: True if the last step was evaluated.
    """

    name: str
    workdir: epath.Path
    experiment: config_lib.Experiment
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
    def computation(self) -> dict[str, object]:
        """Config keys that determine the computation, except for the seed.

        Keys with default values are left out: a run that was made before a key existed then equals
        a run with that key's default.
        """
        defaults = {
            key: list(value) if isinstance(value, tuple) else value  # as in JSON
            for key, value in config_lib.defaults(str(self.keys["attention.kind"])).items()
        }
        keys = {
            key: value
            for key, value in self.keys.items()
            if key not in _COSMETIC and (key not in defaults or value != defaults[key])
        }
        if is_prepared(str(keys.get(_SOURCE, ""))):  # a path; `data` identifies the content
            del keys[_SOURCE]
        return keys


@dataclasses.dataclass(frozen=True)
class SkippedRun:
    """A workdir that cannot be compared, with the reason.

    Attributes:
      may_come: True if it may become comparable as training goes on.
    """

    name: str
    why: str
    may_come: bool = False


def is_there(name: str) -> bool:
    """Returns True if a folder exists, without using cached listings of a bucket."""
    path = runtime.path("a workdir", name)
    forget_listings(path)
    return path.exists()


def workdirs(names: Sequence[str]) -> list[tuple[str, epath.Path]]:
    """Returns (name, path) of the workdirs that are named or lie in a named folder.

    A named folder without workdirs is included, too; `read` then reports it as skipped.

    Raises:
      UserError: a name that does not exist, or is a file.
    """
    by_name: dict[str, epath.Path] = {}
    for name in names:
        path = runtime.path("a workdir", name)
        if not is_there(name):
            raise UserError(f"{name}: no such folder; give workdirs of runs, or a folder of them")
        if not path.is_dir():
            raise UserError(f"{name}: is a file; give workdirs of runs, or a folder of them")
        name = os.fsencode(name.rstrip("/")).decode(errors="backslashreplace")
        # A folder without workdirs may be that of a run that is about to write its config.
        by_name |= _workdirs_in(name, path, _MAX_DEPTH) or {name: path}
    return list(by_name.items())


def _workdirs_in(name: str, path: epath.Path, depth: int) -> dict[str, epath.Path]:
    """Returns the workdirs in a folder or, if it has none, in its subfolders.

    If the folder has workdirs of its own, subfolders that contain further workdirs are returned
    beside them, so that `_read` reports them as skipped.
    """
    if (path / CONFIG).exists():
        return {name: path}
    own: dict[str, epath.Path] = {}
    subfolders: dict[str, epath.Path] = {}
    in_subfolders: dict[str, epath.Path] = {}
    for child in sorted(path.iterdir()) if depth else ():
        if not child.is_dir():
            continue
        child_name = f"{name}/{os.fsencode(child.name).decode(errors='backslashreplace')}"
        if (child / CONFIG).exists():
            own[child_name] = child
        elif workdirs := _workdirs_in(child_name, child, depth - 1):
            subfolders[child_name] = child
            in_subfolders |= workdirs
    return own | subfolders if own else in_subfolders


def read(
    named: Iterable[tuple[str, epath.Path]], *, running: bool
) -> tuple[list[ComparedRun], list[SkippedRun]]:
    """Reads runs in the given order; returns compared and skipped runs.

    Args:
      named: (name, workdir) of each run.
      running: include unfinished runs.
    """
    with futures.ThreadPoolExecutor(_THREADS) as pool:
        runs = list(pool.map(lambda run: _read(*run, running=running), named))
    compared = [run for run in runs if isinstance(run, ComparedRun)]
    return compared, [run for run in runs if isinstance(run, SkippedRun)]


def _read(name: str, workdir: epath.Path, *, running: bool) -> ComparedRun | SkippedRun:
    if not (workdir / CONFIG).exists():
        if _workdirs_in(name, workdir, _MAX_DEPTH):
            return SkippedRun(name, "contains runs: name it to compare them")
        return SkippedRun(name, f"has no {CONFIG}: no run has started there", may_come=True)
    try:
        tree = json_text.read_object(workdir / CONFIG, "restore it, or train again")
        experiment = trained.experiment_of(workdir)
    except UserError as error:
        return SkippedRun(name, f"cannot be read: {error}")
    records = _records(name, workdir, metrics.METRICS)
    evaluated = {r["step"]: r["validation_bpb"] for r in records if "validation_bpb" in r}
    if not evaluated:
        # No evaluation will follow if the last step is saved, since training evaluates before it
        # saves, or if the model was converted (it then has checkpoints but no metrics).
        saved = storage.steps(workdir / checkpoint.CHECKPOINTS)
        converted = bool(saved) and not (workdir / metrics.METRICS).exists()
        ended = converted or experiment.train.num_steps in saved
        return SkippedRun(name, "was never evaluated", may_come=not ended)
    if invalid := [step for step in evaluated if not 0 <= step <= _MAX_STEPS]:
        return SkippedRun(name, f"has a record of step {invalid[0]}, which is out of range")
    steps = np.array(sorted(evaluated), np.int64)
    bpb = np.array([float(evaluated[step]) for step in steps.tolist()])
    if not np.isfinite(bpb).all():
        bad = int(steps[~np.isfinite(bpb)][0])
        return SkippedRun(name, f"has bits per byte that are not finite, at step {bad}")
    finished = _is_finished(workdir, experiment, int(steps[-1]))
    if not finished and not running:
        num_steps = experiment.train.num_steps
        of_total = f" of {num_steps:,}" if num_steps else ""
        why = f"is unfinished, evaluated up to step {steps[-1]:,}{of_total}"
        return SkippedRun(name, why, may_come=True)
    return ComparedRun(
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
        warn(f"{name}/{file}: {broken}; such lines are skipped")
    return records


def _is_finished(workdir: epath.Path, experiment: config_lib.Experiment, last: int) -> bool:
    if experiment.train.num_steps:
        return last >= experiment.train.num_steps
    # The run is one epoch of a mixture, and the config does not have its number of steps.
    return last in storage.steps(workdir / checkpoint.CHECKPOINTS)


def _data(workdir: epath.Path, experiment: config_lib.Experiment) -> dict[str, str]:
    return {
        _TOKENIZER: _digest(workdir / manifest.TOKENIZER),
        _DATA_SET: _digest(workdir / manifest.MANIFEST),
        "config.train.eval_rows": str(experiment.train.eval_rows or "all"),
        # Validation uses the first sequence_length + 1 tokens of longer prepared rows.
        "config.data.sequence_length": str(experiment.data.sequence_length),
    }


def _digest(path: epath.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else _UNKNOWN


def _seconds(name: str, workdir: epath.Path, tokens: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Returns the training seconds up to each step, summed over a run's successive processes.

    Each record has the mean tokens/s since its process started. Steps that a later process repeats,
    after an interruption, are counted once.
    """
    per_step = tokens[-1] / steps[-1]
    recorded_steps, recorded_seconds = [0], [0.0]
    first, before = 1, 0.0  # first step of the current process, and the seconds before that step
    rate = None  # tokens/s of the last record
    for record in _records(name, workdir, metrics.TIMING):
        step = max(record["step"], 1)
        if step > _MAX_STEPS:
            continue
        if "seconds_to_first_step" in record:  # a new process: drop steps that it repeats
            while recorded_steps[-1] >= step:
                recorded_steps.pop()
                recorded_seconds.pop()
            unrecorded = (step - 1 - recorded_steps[-1]) * per_step / rate if rate else 0.0
            first, before = step, recorded_seconds[-1] + unrecorded
        elif 0 < record.get("tokens_per_second", 0) < _MAX_SPEED and step > recorded_steps[-1]:
            rate = record["tokens_per_second"]
            recorded_steps.append(step)
            recorded_seconds.append(before + (step - first + 1) * per_step / rate)
    if rate is None:
        return np.full(len(steps), np.nan)
    after_last = np.maximum(steps - recorded_steps[-1], 0) * per_step / rate
    return np.interp(steps, recorded_steps, recorded_seconds) + after_last


def incomparable(runs: Sequence[ComparedRun]) -> dict[str, str]:
    """Returns by name the reasons why runs cannot be compared.

    Their validation data differ from the first run's, or are unknown.
    """
    if len(runs) == 1:
        return {}
    reasons: dict[str, str] = {}
    first = None
    for run in runs:
        missing = next((name for name in _FILES if run.data[name] == _UNKNOWN), None)
        if missing:
            reasons[run.name] = (
                f"cannot be compared: {_FILES[missing]} is missing, so its {missing} is unknown; "
                "restore it, or remove the run from the list"
            )
        elif first is None:
            first = run
        elif name := next((key for key in run.data if run.data[key] != first.data[key]), None):
            value = "another"
            if name.startswith("config"):
                value = f"{run.data[name]}, not {first.data[name]}"
            reasons[run.name] = f"cannot be compared with {first.name}: its {name} is {value}"
    return reasons


def check_comparable(runs: Sequence[ComparedRun]) -> None:
    """Raises a UserError if a run cannot be compared; see `incomparable`."""
    for name, why in incomparable(runs).items():
        raise UserError(f"{name} {why}. Compare runs on the same validation data")


# -- costs of a model ------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def costs(model, sequence_length: int) -> dict[str, int]:
    """Returns the parameters and, per token, cache bytes (bfloat16), training FLOPs and 6N FLOPs.

    N counts the weights of matrix products, without the input embedding, as in LRKV's figure 4,
    whose 733 exaFLOPs are 6 x 2.444B weights x 50B tokens.
    """
    return dict(
        parameters=formulas.parameters(model)["total"],
        cache_bytes=formulas.cache_bytes_per_token(model, jnp.dtype(jnp.bfloat16)),
        flops=formulas.training_flops_per_token(model, sequence_length),
        six_n=6 * sum(formulas.matrix_weights(model).values()),
    )
