"""Checkpoints of a run: atomic, asynchronous, and tied to the config that made them.

One checkpoint holds the training state (parameters, optimizer, step, random key) and the position
in the data. A checkpoint that is damaged is set aside, and the one before it is used; what is no
damage stops the run with its reason. All processes of a job write one checkpoint together, each
what its devices hold, and each reads what its devices will hold: the mesh and the number of
processes may be others.
"""

import contextlib
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from kvjax import distributed
from kvjax.foundation.errors import UserError, warn
from kvjax.foundation.files import Watched, unused
from kvjax.workdir import storage

CHECKPOINTS = "checkpoints"  # the folder in a workdir
SNAPSHOTS = "snapshots"  # another one, of parameters alone, all of which are kept
# Who reads a part of an array reads all chunks that it touches: this bounds what that is too much.
CHUNK_BYTES = 1 << 24


class Checkpoints:
    """The checkpoints of one workdir.

    Args:
      directory: an epath; made if missing.
      keep: how many of the latest to keep; None: all.
    """

    def __init__(self, directory: epath.Path, *, keep: int | None):
        self.directory = directory
        self._keep = keep
        self._pending = None  # (step, response) of a save under way
        self._open()
        self._workdir = Watched(directory.parent)

    def _open(self) -> None:
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
        self._complete = {c.step for c in self._checkpointer.checkpoints}

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return [c.step for c in self._checkpointer.checkpoints if c.step in self._complete]

    def describe(self) -> str:
        """A sentence for a message when nothing can be asked of Orbax or of a disk any more."""
        latest = sorted(self._complete)[-(self._keep or 0) :]
        return f"Checkpoints of steps {latest} are in {self.directory}. "

    def save(self, step: int, state: Any, position: int) -> None:
        """Starts a save; returns once the arrays are copied off the devices.

        Raises:
          UserError: the workdir was moved or removed meanwhile: Orbax would make another one. The
            step is saved where the workdir is now, if that is known, but not by several processes,
            which may not agree on it.
          OSError: the save before this one failed (see `wait`).
        """
        items = dict(state=state, data=dict(position=np.asarray(position, np.int64)))
        workdir = self.directory.parent
        change, new = self._workdir.change()
        if not change:
            self._save(step, items)
            return
        if new:
            self.directory = new / self.directory.name
        if new and distributed.count() == 1:
            with contextlib.suppress(Exception):  # it is said that the step was not saved
                self._remove_unfinished()
                self._save(step, items)
                self.wait()
        there = storage.steps(self.directory) if new else []
        advice = (
            f"--workdir={new} goes on from step {there[-1]}"
            if there
            else "begins anew: it has no checkpoint any more"
        )
        raise UserError(
            f"{workdir} {change} while the run went on: stopped at step {step}, which was "
            f"{'saved there' if step in there else 'not saved'}. The same command "
            f"{'with ' if there else ''}{advice}"
        )

    def _save(self, step: int, items: dict[str, Any]) -> None:
        self.wait()
        if step in self.steps():
            return
        with self._reporting(step):
            response = self._checkpointer.save_checkpointables_async(step, items, force=True)
            self._pending = (step, response)
            response.on_complete(lambda _: self._complete.add(step))

    def is_moved(self) -> bool:
        """Returns whether the workdir was moved or removed since it was opened."""
        return bool(self._workdir.change()[0])

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
        self._complete.add(step)  # the callback's thread may be later

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
            why = storage.reason(error)
            raise OSError(f"checkpoint of step {step} was not written: {why}") from error

    def _remove_unfinished(self) -> None:
        """Opens the folder anew, without what a save that failed left in it."""
        self._pending = None
        with contextlib.suppress(Exception):  # the failed save is reported once, by `wait`
            self._checkpointer.close()
        self._open()  # cleans up temporary directories

    def restore(self, abstract_state: Any) -> tuple[Any, int, int] | None:
        """(state, position, step) of the latest checkpoint that is whole, or None.

        With several processes: that all of them find whole.

        Args:
          abstract_state: a tree of ShapeDtypeStructs with shardings.

        Raises:
          UserError: checkpoints are there and all of them are damaged; or the latest that is not
            cannot be loaded for another reason (I/O, memory, other arrays, another step's name).
        """
        damage = {}  # by step
        for step in reversed(self.steps()):
            items, damaged, other = self._load(step, abstract_state)
            # On all processes alike: the first that has something to say.
            damaged = next(filter(None, distributed.gather("damaged", damaged)), "")
            other = next(filter(None, distributed.gather("restore", other)), "")
            storage.align_operation_ids()
            if other:
                raise UserError(other)
            if not damaged:
                self._set_aside(damage, step)
                return items["state"], int(items["data"]["position"]), step
            del items  # before the next one takes as much memory
            damage[step] = damaged
            if distributed.index() == 0:
                warn(f"checkpoint of step {step} cannot be read: {damaged}")
        if damage:
            why = "; ".join(f"step {step}: {reason}" for step, reason in damage.items())
            raise UserError(
                f"{self.directory}: no checkpoint can be read ({why}). Nothing was "
                "changed; choose another --workdir, or restore the folder from a backup"
            )
        return None

    def _load(self, step: int, abstract_state: Any) -> tuple[dict | None, str, str]:
        """What one checkpoint holds; if that is nothing, its damage or what else is in the way."""
        path = self.directory / str(step)
        abstract = dict(state=abstract_state, data=dict(position=np.zeros((), np.int64)))
        try:
            with storage.single_process_context():
                items = ocp.load_checkpointables(path, abstract)
            check_step_number(path, items["state"])
            return items, "", ""
        except UserError as error:
            return None, "", str(error)
        except Exception as raised:  # corrupted files raise many types
            error = storage.listing_error(path) or raised
            reason, damaged = storage.reason(error), storage.is_damage(error)
            asked = storage.shapes_of(abstract_state)
            with contextlib.suppress(Exception):  # of damage that goes as far
                try:
                    there = storage.shapes(path / "state")
                except FileNotFoundError as missing:  # in plainer words than Orbax's
                    there, reason = asked, str(missing) if damaged else reason
                if damaged and there != asked:
                    return None, "", _other_model(path, there, asked)
            other = (
                f"{path} was not loaded: {reason}. That is no damage of the checkpoint, and "
                "nothing was changed: mend it and run the same command again"
            )
            return (None, reason, "") if damaged else (None, "", other)

    def _set_aside(self, damaged: dict[int, str], good_step: int) -> None:
        """Renames damaged checkpoints, so that saving can go on."""
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
        self._workdir.close()


def check_step_number(path: epath.Path, state: dict) -> None:
    """Raises a UserError if a checkpoint's folder is named after another step than it holds."""
    if "step" not in state:
        return
    step = int(state["step"].addressable_data(0))
    if str(step) != path.name:
        raise UserError(
            f"{path} holds step {step}: folders were renamed. Nothing was changed; give this one "
            f"the name {step} again, or move it out of {path.parent}"
        )


def read_parameters(directory: epath.Path, step: int, abstract_params: Any) -> Any:
    """The parameters of one checkpoint; optimizer state is not read.

    Args:
      step: one of `storage.steps`.
      abstract_params: a tree of ShapeDtypeStructs with shardings, which need not be those of
        training; arrays come in its dtypes.

    Raises:
      UserError: the checkpoint holds parameters of other names or shapes (says which), or another
        step, or cannot be read.
    """
    path = directory / str(step)
    with _reading(path):
        stored = _check_parameters(path, abstract_params)
        tree = dict(params=abstract_params)
        if "step" in stored:
            sharding = _whole(jax.tree.leaves(abstract_params)[0].sharding)
            tree["step"] = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
        context = storage.single_process_context()
        context.pytree.loading.partial_load = True
        with context:
            state = ocp.load(path, tree, checkpointable_name="state")
        check_step_number(path, state)
        return state["params"]


def _whole(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The sharding of a scalar on the devices of another array."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())


def fingerprint(directory: epath.Path, step: int) -> str:
    """Returns the `storage.fingerprint` of a checkpoint's state; a UserError if it is not whole."""
    path = directory / str(step)
    with _reading(path):
        return storage.fingerprint(path / "state")


def check_parameters(directory: epath.Path, step: int, abstract_params: Any) -> None:
    """Raises the UserErrors of `read_parameters` that are known without reading any array."""
    path = directory / str(step)
    with _reading(path):
        _check_parameters(path, abstract_params)


def _check_parameters(path: epath.Path, abstract_params: Any) -> dict:
    """The shapes that a checkpoint holds, by dotted name; a UserError for another model's."""
    stored = storage.shapes(path / "state")
    start = "params."
    there = {k.removeprefix(start): shape for k, shape in stored.items() if k.startswith(start)}
    asked = storage.shapes_of(abstract_params)
    if there != asked:
        raise UserError(_other_model(path, there, asked))
    return stored


@contextlib.contextmanager
def _reading(path: epath.Path):
    """What goes wrong when a checkpoint is read as a UserError that names the others there."""
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


def _other_model(path: epath.Path, there: dict, asked: dict) -> str:
    """What to say of a checkpoint whose arrays have other names or shapes."""
    differing = sorted(k for k in there.keys() | asked.keys() if there.get(k) != asked.get(k))
    rows = [
        f"  {k}: checkpoint {there.get(k, 'none')}, config {asked.get(k, 'none')}"
        for k in differing[:8]
    ]
    rows += [f"  and {len(differing) - 8} more"] if len(differing) > 8 else []
    return (
        f"{path} holds another model than the config describes:\n"
        + "\n".join(rows)
        + "\nGive the workdir that it was trained in, with its config.json as it was"
    )
