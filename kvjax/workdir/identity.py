"""What a workdir belongs to: one process at a time, one config, one data set.

A run is continued only as itself. What it computes may not change between its parts; when it looks,
where it runs and when it stops may.
"""

from collections.abc import Callable
import contextlib
import fcntl
import json
from typing import Any

from etils import epath
import jax.numpy as jnp
import ml_collections

from kvjax import config as config_lib, distributed
from kvjax.data import loader, manifest, tokenizer
from kvjax.data.config import is_prepared
from kvjax.foundation import json_text
from kvjax.foundation.configuration import to_text
from kvjax.foundation.errors import UserError, warn
from kvjax.foundation.files import in_bucket, move, unused, write_atomically
from kvjax.workdir import lineage, origin, storage
from kvjax.workdir.checkpoint import CHECKPOINTS, SNAPSHOTS

_EARLIER = "earlier-run"
# What a run writes beside its checkpoints. The last three say that it took a step, and are moved
# last: who is killed in between moves the rest the next time.
_RECORDS = ("sample.txt", "timing.jsonl", "metrics.jsonl")
_CLAIMS = ("config.json", "config.txt", "dataset.json", "tokenizer.json")
_FILES = (*_CLAIMS, *origin.FILES, lineage.PARENT, SNAPSHOTS, "curves.png", "events", *_RECORDS)
# Keys of `train`: when to look and when to stop.
SCHEDULE_KEYS = (
    *("log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "snapshot_every"),
    *("stop_after", "max_bad_steps", "sample_prompt", "sample_tokens"),
)
# What may differ between a run and its continuation: not what is computed.
_FREE_KEYS = {
    "train": (*SCHEDULE_KEYS, "grad_accumulation"),  # fewer chips take a batch in more parts
    "compute": ("remat", "unroll", "query_chunk", "loss_chunks", "attention"),
    "data": ("directory",),
}


@contextlib.contextmanager
def exclusive(workdir: epath.Path):
    """Holds the workdir for this process; a UserError if another one has it.

    The lock is the operating system's, so it ends with its process, however that ends. Workdirs
    that are not local (gs://) have none.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--workdir = {str(workdir)!r}: cannot be made: {reason}") from error
    if in_bucket(workdir) or distributed.index():
        yield
        return
    with open(workdir / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{workdir} is in use by another run: wait for it, or give another --workdir"
            ) from error
        yield


def set_aside_earlier_run(workdir: epath.Path) -> None:
    """Moves what a run left into a folder of its own if its checkpoints are gone, and says so.

    A run that starts from its first step would write over it. Where no step was taken, nothing
    is there that the next run would not write again, of another config perhaps.
    """
    if storage.steps(workdir / CHECKPOINTS):
        return
    has_bytes = lambda path: path.exists() and path.stat().length > 0
    if not any(has_bytes(workdir / name) for name in _RECORDS):
        if (workdir / SNAPSHOTS).exists():
            (workdir / SNAPSHOTS).rmtree()
        return
    target = unused(workdir / _EARLIER)
    target.mkdir()
    for name in _FILES:
        move(workdir / name, target / name)
    warn(
        f"{workdir} has records of a run and no checkpoint to continue it from: they were moved to "
        f"{target}, and this run starts from its first step"
    )


def identity(config: ml_collections.ConfigDict, dtype: jnp.dtype) -> dict:
    """The part of a config that a workdir belongs to.

    Args:
      dtype: that the run computes in: "auto" is another one on another platform.
    """
    tree = {k: dict(v) if hasattr(v, "items") else v for k, v in config.items() if k != "mesh"}
    tree["compute"]["dtype"] = str(dtype)
    for section, keys in _FREE_KEYS.items():
        tree[section] = {k: v for k, v in tree[section].items() if k not in keys}
    return tree


def check_config(workdir: epath.Path, config: ml_collections.ConfigDict, dtype: jnp.dtype) -> None:
    """Raises a UserError if a workdir has checkpoints of another config, or another dtype.

    Folders of prepared data may have moved: `check_data` compares what is in them. A key that is
    newer than the workdir is there with its default.
    """
    defaults = config_lib.defaults(config.attention.kind)
    as_stored = lambda value: list(value) if isinstance(value, tuple) else value

    def same(key: str, there, now) -> bool:
        if key == "compute.dtype" and there == "auto":  # as it was written once, unresolved
            warn(
                f"{workdir} does not say in which dtype it was trained: it goes on in {now} "
                "(--config.compute.dtype gives another)"
            )
            return True
        if key == "data.source" and is_prepared(there) and is_prepared(now):
            return True
        if there is None and key in defaults:
            return now == as_stored(defaults[key])
        return there == now

    check_identity(
        workdir / "config.json",
        identity(config, dtype),
        same=same,
        advice="Give the same values to resume it (--config.compute.dtype=float32 is the same on "
        "any platform)",
    )


def check_data(workdir: epath.Path, dataset: loader.PackedDataset) -> None:
    """Raises a UserError if a workdir has checkpoints trained on other rows, or tokens."""
    advice = (
        f"The rows or the tokenizer in {dataset.path} are not those it was trained on: give these "
        "to resume it"
    )
    same = lambda key, there, now: there in (now, dataset.path.name)  # the name, as it was once
    check_identity(workdir / "dataset.json", _contents(dataset), same=same, advice=advice)
    path = workdir / manifest.TOKENIZER
    if not (path.exists() and storage.steps(workdir / CHECKPOINTS)):
        return
    if tokenizer.load(path).vocabulary() != dataset.tokenizer.vocabulary():
        raise UserError(
            f"{path} is not the tokenizer of {dataset.path}, and was left as it is: give the data "
            "that the run was trained on to resume it, or another --workdir for a new run. If the "
            "file is wrong, move it away"
        )


def record(
    workdir: epath.Path,
    config: ml_collections.ConfigDict,
    dtype: jnp.dtype,
    dataset: loader.PackedDataset,
) -> None:
    """Writes down what a workdir belongs to, once it is known to be this run's."""
    write_identity(workdir / "config.json", identity(config, dtype))
    write_atomically(workdir / "config.txt", to_text(config))
    write_identity(workdir / "dataset.json", _contents(dataset))
    path = workdir / manifest.TOKENIZER
    if not (path.exists() and storage.steps(workdir / CHECKPOINTS)):
        write_atomically(path, dataset.tokenizer.to_json())


def write_model(workdir: epath.Path, config: ml_collections.ConfigDict) -> None:
    """Writes down a model that no run trained; in which dtype it computes goes by the platform."""
    write_identity(workdir / "config.json", identity(config, config.compute.dtype))


def _contents(dataset: loader.PackedDataset) -> dict:
    return {"dataset": dataset.digest}


def check_identity(
    path: epath.Path,
    identity: dict,
    *,
    same: Callable[[str, Any, Any], bool] = lambda key, there, now: there == now,
    advice: str = "Give the same values to resume it",
) -> None:
    """Raises a UserError if a workdir has checkpoints of something else; names what differs.

    Args:
      path: a .json file in the workdir, as `write_identity` writes it.
      identity: what may not change between a run and its continuation, JSON-able, nested.
      same: whether two values of a dotted key mean the same, None where there is none.
      advice: how to resume what is there.
    """
    if not storage.steps(path.parent / CHECKPOINTS):
        return
    if not path.exists():
        raise UserError(
            f"{path.parent} has checkpoints and no {path.name} that says what they belong to: "
            "choose another --workdir"
        )
    before = json_text.read_object(path, "restore it, or choose another --workdir")
    old, new = dict(_flat(before)), dict(_flat(json.loads(json.dumps(identity))))
    keys = sorted(old.keys() | new.keys())
    differing = [k for k in keys if not same(k, old.get(k), new.get(k))]
    if differing:
        rows = [f"  {k}: there {old.get(k)!r}, now {new.get(k)!r}" for k in differing[:12]]
        rows += [f"  and {len(differing) - 12} more"] if len(differing) > 12 else []
        raise UserError(
            f"{path.parent} holds another run, and was left as it is:\n"
            + "\n".join(rows)
            + f"\n{advice}, or another --workdir for a new run"
        )


def write_identity(path: epath.Path, identity: dict) -> None:
    """Writes what `check_identity` compares; old workdirs say less, or the same otherwise."""
    write_atomically(path, json.dumps(identity, indent=1, sort_keys=True) + "\n")


def _flat(tree: Any, prefix: str = ""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
