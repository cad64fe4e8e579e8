"""Checkpoints of a run: atomic, asynchronous, and tied to the config that made them.

One checkpoint holds the training state (parameters, optimizer, step, random key) and the position
in the data. A checkpoint that cannot be read is set aside, and the one before it is used. All
processes of a job write one checkpoint together, each what its devices hold, and each reads what
its devices will hold: the mesh and the number of processes may be others.
"""

from collections.abc import Callable
import contextlib
import json
import logging
import os
from typing import Any

from absl import logging as absl_logging
from etils import epath
import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from kvjax import distributed
from kvjax.errors import UserError
from kvjax.errors import first_line

log = logging.getLogger("kvjax")
CHECKPOINTS = "checkpoints"  # the folder in a workdir
# Who reads a part of an array reads all chunks that it touches: this bounds what that is too much.
CHUNK_BYTES = 1 << 24


class Checkpoints:
    """The checkpoints of one workdir.

    Args:
      directory: an epath; made if missing.
      keep: how many of the latest to keep.
    """

    def __init__(self, directory: epath.Path, *, keep: int):
        self.directory = directory
        self._keep = keep
        self._pending = None  # (step, response) of a save under way
        self._open()

    def _open(self) -> None:
        absl_logging.set_verbosity(absl_logging.ERROR)
        policies = ocp.training
        context = ocp.Context()
        context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
        self._checkpointer = ocp.training.Checkpointer(
            self.directory,
            # The loop alone decides when to save.
            save_decision_policy=policies.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.preservation_policies.LatestN(self._keep),
            cleanup_tmp_directories=True,
            context=context,
        )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return [c.step for c in self._checkpointer.checkpoints]

    def say_what_is_there(self) -> str:
        """A sentence for a message when nothing can be asked of Orbax any more."""
        names = os.listdir(self.directory) if os.path.isdir(self.directory) else []
        steps = sorted(int(name) for name in names if name.isdigit())
        return f"Checkpoints of steps {steps} are in {self.directory}. "

    def save(self, step: int, state: Any, position: int) -> None:
        """Starts a save; returns once the arrays are copied off the devices.

        Raises OSError if the save before this one failed (see `wait`).
        """
        self.wait()
        if step in self.steps():
            return
        items = dict(state=state, data=dict(position=np.asarray(position, np.int64)))
        save = self._checkpointer.save_checkpointables_async
        with self._reporting(step):
            self._pending = (step, save(step, items, force=True))

    def wait(self) -> None:
        """Waits for the save under way.

        Raises:
          OSError: if it failed (a full disk, say). The checkpoints before it are intact; what it
            left half-written is removed, and saving goes on to work once there is room.
        """
        if self._pending is None:
            return
        (step, response), self._pending = self._pending, None
        with self._reporting(step):
            response.result()

    @contextlib.contextmanager
    def _reporting(self, step: int):
        """Any failure of a save as an OSError, after what it left is removed.

        With several processes the next start removes it: here the others may still be writing.
        """
        try:
            yield
        except Exception as error:  # Orbax wraps what the file system said in several types
            if distributed.count() == 1:
                self._remove_unfinished()
            raise OSError(f"checkpoint of step {step} was not written: {_reason(error)}") from error

    def _remove_unfinished(self) -> None:
        try:
            self._checkpointer.close()
        except Exception as error:  # the failed save is reported once, by `wait`
            log.debug("closing after a failed save: %s", error)
        self._open()  # cleans up temporary directories

    def restore(self, abstract_state: Any) -> tuple[Any, int, int] | None:
        """(state, position, step) of the latest checkpoint that can be read, or None.

        With several processes: that all of them can read.

        Args:
          abstract_state: a tree of ShapeDtypeStructs with shardings.

        Raises:
          UserError: if checkpoints are there and none of them can be read.
        """
        abstract = dict(state=abstract_state, data=dict(position=np.zeros((), np.int64)))
        failures = []
        for step in reversed(self.steps()):
            items, reason = None, ""
            try:
                with _alone():
                    items = ocp.load_checkpointables(self.directory / str(step), abstract)
            except Exception as error:  # corrupted files raise many types
                reason = _reason(error)
            reasons = distributed.gather("restore", reason)
            _count_operations_alike()
            if any(reasons):
                del items  # before the next one takes as much memory
                reason = next(filter(None, reasons))
                failures.append(f"step {step}: {reason}")
                log.warning("checkpoint of step %d cannot be read: %s", step, reason)
                continue
            self._set_aside(step)
            return items["state"], int(items["data"]["position"]), step
        if failures:
            raise UserError(
                f"{self.directory}: no checkpoint can be read ({'; '.join(failures)}). Nothing was "
                "changed; choose another --workdir, or restore the folder from a backup"
            )
        return None

    def _set_aside(self, good_step: int) -> None:
        """Renames unreadable checkpoints later than the good one, so that saving can go on."""
        later = [step for step in self.steps() if step > good_step]
        if not later:
            return
        self._checkpointer.close()
        for step in later if distributed.index() == 0 else ():
            target = self.directory.parent / f"unreadable-checkpoint-{step}"
            if target.exists():
                target.rmtree()
            (self.directory / str(step)).rename(target)
            log.warning("going on from step %d; step %d was moved to %s", good_step, step, target)
        distributed.gather("set aside", "")
        self._open()

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()


def _alone() -> ocp.Context:
    """Orbax without its barriers, at which this process would wait for others."""
    context = ocp.Context()
    if distributed.count() > 1:
        me = distributed.index()
        context.multiprocessing.primary_host = me
        context.multiprocessing.active_processes = {me}
        context.multiprocessing.barrier_sync_key_prefix = f"alone{me}"
    return context


def _count_operations_alike() -> None:
    """Orbax numbers a process's operations, and its barriers by these: a load that failed in some
    processes only leaves them waiting for each other at the next save.
    """
    from orbax.checkpoint._src.futures import synchronization  # nothing public counts

    counter = synchronization.OperationIdGenerator
    most = max(map(int, distributed.gather("operations", counter.get_current_operation_id())))
    while int(counter.get_current_operation_id()) < most:
        counter.next_operation_id()


def saved_steps(directory: epath.Path) -> list[int]:
    """Steps of the complete checkpoints, ascending, of a run that may still be going on.

    `Checkpoints` is for the run itself: opening one removes what is being written.
    """
    if not directory.exists():  # Orbax would make it
        return []
    absl_logging.set_verbosity(absl_logging.ERROR)
    with contextlib.closing(ocp.training.Checkpointer(directory)) as checkpointer:
        return [c.step for c in checkpointer.checkpoints]


def read_parameters(directory: epath.Path, step: int, abstract_params: Any) -> Any:
    """The parameters of one checkpoint; optimizer state is not read.

    Args:
      step: one of `saved_steps`.
      abstract_params: a tree of ShapeDtypeStructs with shardings, which need not be those of
        training; arrays come in its dtypes.

    Raises:
      UserError: the checkpoint holds parameters of other names or shapes (says which), or cannot
        be read.
    """
    path = directory / str(step)
    try:
        with _alone():
            there = _shapes(ocp.metadata(path, checkpointable_name="state").metadata["params"])
        asked = _shapes(abstract_params)
        if there == asked:
            context = _alone()
            context.pytree.loading.partial_load = True
            with context:
                tree = dict(params=abstract_params)
                return ocp.load(path, tree, checkpointable_name="state")["params"]
    except Exception as error:  # corrupted files raise many types
        others = [s for s in saved_steps(directory) if s != step]
        raise UserError(
            f"{path} cannot be read ({_reason(error)}); "
            + (f"other checkpoints there: steps {others}" if others else "there is no other")
        ) from error
    differing = sorted(k for k in there.keys() | asked.keys() if there.get(k) != asked.get(k))
    rows = [
        f"  {k}: checkpoint {there.get(k, 'none')}, config {asked.get(k, 'none')}"
        for k in differing[:8]
    ]
    rows += [f"  and {len(differing) - 8} more"] if len(differing) > 8 else []
    raise UserError(
        f"{path} holds another model than the config describes:\n"
        + "\n".join(rows)
        + "\nGive the workdir that it was trained in, with its config.json as it was"
    )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by dotted name; the metadata of a checkpoint has integer keys as strings."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in leaves}


def _reason(error: BaseException) -> str:
    """The first line of the deepest cause: where Orbax leaves the useful text."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def claim(
    path: epath.Path,
    identity: dict,
    *,
    same: Callable[[str, Any, Any], bool] = lambda key, there, now: there == now,
    advice: str = "Give the same values to resume it",
) -> None:
    """Writes what a workdir belongs to; where it has checkpoints, checks what is written there.

    Args:
      path: a .json file in the workdir.
      identity: what may not change between a run and its continuation, JSON-able, nested.
      same: whether two values of a dotted key mean the same, None where there is none.
      advice: how to resume what is there.

    Raises:
      UserError: if checkpoints belong to something else; names what differs.
    """
    checkpoints = path.parent / CHECKPOINTS
    bound = checkpoints.exists() and any(checkpoints.iterdir())
    if bound and not path.exists():
        raise UserError(
            f"{path.parent} has checkpoints and no {path.name} that says what they belong to: "
            "choose another --workdir"
        )
    if not bound:
        write_identity(path, identity)
        return
    try:
        before = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}): choose another --workdir") from error
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
    """What `claim` compares, as it is now: of old workdirs it says less, or the same otherwise."""
    write_atomically(path, json.dumps(identity, indent=1, sort_keys=True) + "\n")


def write_atomically(path: epath.Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = path.parent / f".{path.name}.tmp"
    temporary.write_text(text)
    temporary.replace(path)


def _flat(tree: Any, prefix: str = ""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
