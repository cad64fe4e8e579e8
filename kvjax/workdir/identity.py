"""Restricts a workdir to one config and one data set, and to one process at a time.

A resumed run must compute the same numbers, so only the mesh and the keys of `_FREE_KEYS` may
change. `train.num_steps` may not, because learning rates depend on it; to end a run early, set
`train.stop_after`.
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
from kvjax.workdir import lineage, origin, storage, trackers
from kvjax.workdir.checkpoint import CHECKPOINTS, SNAPSHOTS

_EARLIER = "earlier-run"
# Files of a run beside its checkpoints. `_RECORDS` exist only if the run took a step. They are
# moved last, so that after a killed move the next start still finds them and moves the rest.
_RECORDS = ("sample.txt", "timing.jsonl", "metrics.jsonl")
_IDENTITY_FILES = ("config.json", "config.txt", "dataset.json", "tokenizer.json")
_TRACKED = ("events", "profile", trackers.STATE, "wandb")
_FILES = (
    *_IDENTITY_FILES,
    *origin.FILES,
    lineage.PARENT,
    SNAPSHOTS,
    "curves.png",
    *_TRACKED,
    *_RECORDS,
)
# Keys of `train` that do not affect what a run computes: logging, saving, stopping, the sample.
NEUTRAL_KEYS = (
    "log_every",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "snapshot_every",
    "stop_after",
    "max_bad_steps",
    "sample_prompt",
    "sample_tokens",
)
# Keys that may differ when a run is resumed.
_FREE_KEYS = {
    "train": (*NEUTRAL_KEYS, "grad_accumulation"),  # fewer chips need more microbatches
    "compute": ("remat", "unroll", "query_chunk", "loss_chunks", "attention"),
    "data": ("directory",),
}


@contextlib.contextmanager
def exclusive(workdir: epath.Path):
    """Creates and locks the workdir; raises a UserError if another process holds the lock.

    The operating system releases the lock when the process ends, even if it is killed. Workdirs in
    buckets are not locked.
    """
    workdir.mkdir(parents=True, exist_ok=True)
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
    """If a run's checkpoints are gone, moves its other files into a new folder, with a warning.

    The new run in this workdir would overwrite them. Does nothing if the earlier run took no step.
    """
    if storage.steps(workdir / CHECKPOINTS):
        return
    records = [workdir / name for name in _RECORDS if (workdir / name).exists()]
    if not any(path.stat().length for path in records):
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
    """Returns the part of a config that may not change when a run is resumed.

    Args:
      dtype: resolved dtype of the computation, since "auto" depends on the platform.
    """
    tree = {k: dict(v) if hasattr(v, "items") else v for k, v in config.items() if k != "mesh"}
    tree["compute"]["dtype"] = str(dtype)
    for section, keys in _FREE_KEYS.items():
        tree[section] = {k: v for k, v in tree[section].items() if k not in keys}
    return tree


def check_config(workdir: epath.Path, config: ml_collections.ConfigDict, dtype: jnp.dtype) -> None:
    """Raises a UserError if a workdir has checkpoints of another config or dtype.

    A key that one of the two configs lacks counts as its default. The folder of prepared data may
    differ, since `check_data` compares the contents.
    """
    defaults = config_lib.defaults(config.attention.kind)

    def same(key: str, stored, new) -> bool:
        if key == "compute.dtype" and stored == "auto":  # older workdirs store it unresolved
            warn(
                f"{workdir} does not say in which dtype it was trained: the run goes on in {new} "
                "(set another with --config.compute.dtype)"
            )
            return True
        if key == "data.source" and is_prepared(stored) and is_prepared(new):
            return True
        default = defaults.get(key)
        if isinstance(default, tuple):  # as JSON
            default = list(default)
        return (default if stored is None else stored) == (default if new is None else new)

    check_identity(
        workdir / "config.json",
        identity(config, dtype),
        same=same,
        advice="Give the same values to resume it (and a dtype, since --config.compute.dtype=auto "
        "depends on the platform)",
    )


def check_data(workdir: epath.Path, dataset: loader.PackedDataset) -> None:
    """Raises a UserError if a workdir has checkpoints trained on other rows or tokens."""
    check_identity(
        workdir / "dataset.json",
        _data_identity(dataset),
        # Older workdirs store the folder's name instead of the digest.
        same=lambda key, stored, new: stored in (new, dataset.path.name),
        advice=f"The run was trained on other rows or another tokenizer than in {dataset.path}: "
        "give the same data to resume it",
    )
    path = workdir / manifest.TOKENIZER
    if not (path.exists() and storage.steps(workdir / CHECKPOINTS)):
        return
    if tokenizer.load(path).vocabulary() != dataset.tokenizer.vocabulary():
        raise UserError(
            f"{path} is not the tokenizer of {dataset.path}: give the data that the run was "
            "trained on to resume it, or another --workdir for a new run. If the file is wrong, "
            "move it away"
        )


def write_run_identity(
    workdir: epath.Path,
    config: ml_collections.ConfigDict,
    dtype: jnp.dtype,
    dataset: loader.PackedDataset,
) -> None:
    """Writes the run's identity; call after `check_config` and `check_data`."""
    write_identity(workdir / "config.json", identity(config, dtype))
    write_atomically(workdir / "config.txt", to_text(config))
    write_identity(workdir / "dataset.json", _data_identity(dataset))
    path = workdir / manifest.TOKENIZER
    if not (path.exists() and storage.steps(workdir / CHECKPOINTS)):
        write_atomically(path, dataset.tokenizer.to_json())


def write_model_identity(workdir: epath.Path, config: ml_collections.ConfigDict) -> None:
    """Writes the identity of a converted model, whose dtype stays as in the config ("auto")."""
    write_identity(workdir / "config.json", identity(config, config.compute.dtype))


def _data_identity(dataset: loader.PackedDataset) -> dict:
    return {"dataset": dataset.digest}


def check_identity(
    path: epath.Path,
    identity: dict,
    *,
    same: Callable[[str, Any, Any], bool] = lambda key, stored, new: stored == new,
    advice: str = "Give the same values to resume it",
) -> None:
    """Raises a UserError that names the differing keys if a workdir has checkpoints of another run.

    Args:
      path: a file of `write_identity` in the workdir.
      identity: nested JSON values.
      same: (dotted key, stored value, new value) -> True if the values are equivalent; a missing
        value is None.
      advice: how to resume the stored run.
    """
    if not storage.steps(path.parent / CHECKPOINTS):
        return
    if not path.exists():
        raise UserError(
            f"{path.parent} has checkpoints, but no {path.name} that describes their run: choose "
            "another --workdir"
        )
    stored = dict(_leaves(json_text.read_object(path, "restore it, or choose another --workdir")))
    new = dict(_leaves(json.loads(json.dumps(identity))))
    keys = sorted(stored.keys() | new.keys())
    differing = [k for k in keys if not same(k, stored.get(k), new.get(k))]
    if differing:
        rows = [f"  {k}: there {stored.get(k)!r}, now {new.get(k)!r}" for k in differing[:12]]
        rows += [f"  and {len(differing) - 12} more"] if len(differing) > 12 else []
        raise UserError(
            f"{path.parent} holds another run:\n"
            + "\n".join(rows)
            + f"\n{advice}, or another --workdir for a new run"
        )


def write_identity(path: epath.Path, identity: dict) -> None:
    """Writes the file that `check_identity` compares."""
    write_atomically(path, json.dumps(identity, indent=1, sort_keys=True) + "\n")


def _leaves(tree: Any, prefix: str = ""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
