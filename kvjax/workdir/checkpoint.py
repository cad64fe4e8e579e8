"""Checkpoints of a run: atomic, asynchronous, and independent of the mesh.

A checkpoint holds the training state (parameters, optimizer, step, random key) and the position in
the data. All processes of a job write and read one checkpoint together, each the shards of its
devices.

A run that finds its latest checkpoint damaged sets it aside and restores the one before. Any other
failure to load (I/O, memory) ends the run: it must not fall back to older state and overwrite a
checkpoint that is good.
"""

from collections.abc import Callable
import contextlib
from typing import Any

from etils import epath
import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from kvjax import distributed
from kvjax.foundation.errors import UserError, warn
from kvjax.foundation.files import unused
from kvjax.workdir import storage

CHECKPOINTS = "checkpoints"  # the folder in a workdir
SNAPSHOTS = "snapshots"  # the folder of parameters kept for analysis (`snapshot_every`)
# Chunks are read whole: the smaller they are, the fewer bytes are read beside those of a shard.
CHUNK_BYTES = 1 << 24


class Checkpoints:
    """The checkpoints of one workdir.

    Args:
      directory: created if missing.
      keep: number of latest checkpoints to keep; None: all.
    """

    def __init__(self, directory: epath.Path, *, keep: int | None):
        self.directory = directory
        self._keep = keep
        self._pending = None  # (step, response) of an asynchronous save
        self._open()

    def _open(self) -> None:
        policies = ocp.training
        context = ocp.Context()
        context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
        self._checkpointer = ocp.training.Checkpointer(
            self.directory,
            # Saves whenever `save` is called.
            save_decision_policy=policies.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.preservation_policies.LatestN(self._keep),
            cleanup_tmp_directories=True,
            context=context,
        )
        self._complete = {c.step for c in self._checkpointer.checkpoints}

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, ascending."""
        return [c.step for c in self._checkpointer.checkpoints if c.step in self._complete]

    def save(self, step: int, state: Any, position: int) -> None:
        """Starts an asynchronous save; returns once the arrays are copied off the devices.

        Raises:
          OSError: the previous save failed (see `wait`).
        """
        self.wait()
        if step in self.steps():
            return
        items = {"state": state, "data": {"position": np.asarray(position, np.int64)}}
        with self._reporting(step):
            response = self._checkpointer.save_checkpointables_async(step, items, force=True)
            self._pending = (step, response)
            response.on_complete(lambda _: self._complete.add(step))

    def wait(self) -> None:
        """Waits for the pending save.

        Raises:
          OSError: the save failed, for example on a full disk. Earlier checkpoints are intact, the
            partial files of the failed one are removed, and later saves work once there is room.
        """
        if self._pending is None:
            return
        (step, response), self._pending = self._pending, None
        with self._reporting(step):
            response.result()
        self._complete.add(step)  # the callback may not have run yet

    @contextlib.contextmanager
    def _reporting(self, step: int):
        """Raises any failure of a save as an OSError, after removing the partial files.

        With several processes, which may still be writing, the next start removes them instead.
        """
        try:
            yield
        except Exception as error:  # Orbax wraps errors of the file system in several types
            if distributed.count() == 1:
                self._remove_unfinished()
            why = storage.reason(error)
            raise OSError(f"checkpoint of step {step} was not written: {why}") from error

    def _remove_unfinished(self) -> None:
        """Reopens the folder, which removes partial files of a failed save."""
        self._pending = None
        with contextlib.suppress(Exception):  # the failed save, which `_reporting` reports
            self._checkpointer.close()
        self._open()  # cleanup_tmp_directories

    def restore(self, abstract_state: Any) -> tuple[Any, int, int] | None:
        """Restores the latest checkpoint that no process finds damaged.

        Args:
          abstract_state: a tree of ShapeDtypeStructs with shardings.

        Returns:
          (state, position, step), or None without checkpoints.

        Raises:
          UserError: all checkpoints are damaged; or one cannot be loaded for another reason (I/O,
            memory, other arrays).
        """
        damaged = {}  # step -> damage
        for step in reversed(self.steps()):
            items, damage, failure = self._load(step, abstract_state)
            # All processes act on the first report, so that they restore the same step.
            damage = next(filter(None, distributed.gather("damaged", damage)), "")
            failure = next(filter(None, distributed.gather("restore", failure)), "")
            storage.align_operation_ids()
            if failure:
                raise UserError(failure)
            if not damage:
                self._set_aside(damaged, step)
                return items["state"], int(items["data"]["position"]), step
            del items  # frees its memory before the next load
            damaged[step] = damage
            if distributed.index() == 0:
                warn(f"checkpoint of step {step} cannot be read: {damage}")
        if damaged:
            why = "; ".join(f"step {step}: {damage}" for step, damage in damaged.items())
            raise UserError(
                f"{self.directory}: no checkpoint can be read ({why}). Nothing was "
                "changed; choose another --workdir, or restore the folder from a backup"
            )
        return None

    def _load(self, step: int, abstract_state: Any) -> tuple[dict | None, str, str]:
        """Loads one checkpoint; returns (items, "", ""), (None, damage, "") or (None, "", failure).

        `damage` is the reason why a damaged checkpoint cannot be read. `failure` is a whole message
        for anything else that prevents loading.
        """
        path = self.directory / str(step)
        abstract = {"state": abstract_state, "data": {"position": np.zeros((), np.int64)}}
        try:
            with storage.single_process_context():
                items = ocp.load_checkpointables(path, abstract)
            return items, "", ""
        except Exception as raised:  # corrupted files raise many types
            error = storage.listing_error(path) or raised
            reason = storage.reason(error)
            if not storage.is_damage(error):
                failure = (
                    f"{path} was not loaded: {reason}. It is not damaged, and nothing was changed: "
                    "fix the cause and run the same command again"
                )
                return None, "", failure
            # Orbax raises the same types for arrays of other shapes as for damage.
            expected = storage.shapes_of(abstract_state)
            with contextlib.suppress(Exception):  # the index may be damaged too
                try:
                    stored = storage.shapes(path / "state")
                except FileNotFoundError as missing:
                    return None, str(missing), ""  # plainer than Orbax's message
                if stored != expected:
                    return None, "", _mismatch(path, stored, expected)
            return None, reason, ""

    def _set_aside(self, damaged: dict[int, str], good_step: int) -> None:
        """Renames damaged checkpoints, so that their steps can be saved again."""
        if not damaged:
            return
        self._checkpointer.close()
        for step in damaged if distributed.index() == 0 else ():
            target = unused(self.directory.parent / f"unreadable-checkpoint-{step}")
            (self.directory / str(step)).rename(target)
            warn(f"going on from step {good_step}; step {step} was moved to {target}")
        distributed.gather("set aside", "")
        self._open()

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()


def read_parameters(directory: epath.Path, step: int, abstract_params: Any) -> Any:
    """Reads the parameters of one checkpoint, without optimizer state.

    Args:
      step: one of `storage.steps`.
      abstract_params: a tree of ShapeDtypeStructs with the shardings and dtypes of the result,
        which may differ from those in training.

    Raises:
      UserError: the checkpoint holds other names or shapes, or cannot be read.
    """
    path = directory / str(step)
    with _reading(path):
        _check_parameters(path, abstract_params)
        context = storage.single_process_context()
        context.pytree.loading.partial_load = True
        with context:
            tree = {"params": abstract_params}
            return ocp.load(path, tree, checkpointable_name="state")["params"]


def start_reading(directory: epath.Path, step: int, abstract_params: Any) -> Callable:
    """Starts to read the parameters of one checkpoint onto one device, in threads.

    Takes the arguments of `read_parameters`, raises the same errors and reads the same numbers, but
    faster than Orbax.

    Returns:
      A function that waits and returns the tree of parameters.
    """
    path = directory / str(step)
    leaves, tree = jax.tree.flatten(abstract_params)
    with _reading(path):
        _check_parameters(path, abstract_params)
        names = [f"params.{name}" for name in storage.shapes_of(abstract_params)]
        finish = storage.start_reading(path / "state", dict(zip(names, leaves, strict=True)))

    def params() -> Any:
        with _reading(path):
            arrays = finish()
        placed = [
            jax.device_put(arrays[name], x.sharding, may_alias=True)
            for name, x in zip(names, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, placed)

    return params


def fingerprint(directory: epath.Path, step: int) -> str:
    """Returns `storage.fingerprint` of a checkpoint's state.

    Raises:
      UserError: the checkpoint is incomplete.
    """
    path = directory / str(step)
    with _reading(path):
        return storage.fingerprint(path / "state")


def check_parameters(directory: epath.Path, step: int, abstract_params: Any) -> None:
    """Raises the UserErrors of `read_parameters` that can be found without reading arrays."""
    path = directory / str(step)
    with _reading(path):
        _check_parameters(path, abstract_params)


def _check_parameters(path: epath.Path, abstract_params: Any) -> None:
    """Raises a UserError if the stored parameters have other names or shapes."""
    state = storage.shapes(path / "state")
    prefix = "params."
    stored = {k.removeprefix(prefix): shape for k, shape in state.items() if k.startswith(prefix)}
    expected = storage.shapes_of(abstract_params)
    if stored != expected:
        raise UserError(_mismatch(path, stored, expected))


@contextlib.contextmanager
def _reading(path: epath.Path):
    """Raises any failure to read a checkpoint as a UserError that names the other checkpoints."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # corrupted files raise many types
        others = [s for s in storage.steps(path.parent) if str(s) != path.name]
        raise UserError(
            f"{path} cannot be read ({storage.reason(error)}); "
            + (f"other checkpoints there: steps {others}" if others else "there is no other")
        ) from error


def _mismatch(path: epath.Path, stored: dict, expected: dict) -> str:
    """Returns the message for a checkpoint whose arrays have other names or shapes."""
    names = sorted(stored.keys() | expected.keys())
    differing = [name for name in names if stored.get(name) != expected.get(name)]
    rows = [
        f"  {name}: checkpoint {stored.get(name, 'none')}, config {expected.get(name, 'none')}"
        for name in differing[:8]
    ]
    rows += [f"  and {len(differing) - 8} more"] if len(differing) > 8 else []
    return (
        f"{path} holds another model than the config describes:\n"
        + "\n".join(rows)
        + "\nGive the workdir that it was trained in, with an unchanged config.json"
    )
