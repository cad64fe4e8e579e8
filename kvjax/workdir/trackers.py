"""Trackers, which get the records of a run: TensorBoard, Weights & Biases, or a user's own.

A tracker has `write(step, record)` and `close()`. Only the first process of a job has trackers.
"""

import ast
from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import time
from typing import Any, Protocol, runtime_checkable
import uuid

from etils import epath

from kvjax.foundation import extras, json_text
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError, first_line, warn

NONE = "none"
DEFAULT = ("tensorboard",)
STATE = "trackers.json"
_MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_OPTION = "--trackers"


@runtime_checkable
class Tracker(Protocol):
    """Receives every record of a run once, in the order of steps.

    If a tracker raises an exception, it gets no more records; the run goes on with a warning.
    """

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Takes one record; a step may have several, with different names."""

    def close(self) -> None:
        """Called once, after the last record."""


def parse(text: str) -> tuple[str, ...]:
    """Returns the names in "tensorboard,wandb"; () for "none".

    Raises:
      UserError: an unknown name, or a name whose package is not installed.
    """
    if text == NONE:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        one_of(_OPTION, name, (*_MODULES, NONE))
        if name == NONE:
            raise UserError(f"{_OPTION} = {text!r}: none excludes other trackers")
        if name not in DEFAULT:
            extras.require(f"{_OPTION}={name}", _MODULES[name])
    return tuple(dict.fromkeys(names))


def check(trackers: Sequence[str | Tracker]) -> None:
    """Raises a UserError for an invalid tracker, or if Weights & Biases is not logged in."""
    if isinstance(trackers, str):
        raise UserError(f"trackers = {trackers!r}: must be a list, as [{trackers!r}]")
    for tracker in trackers:
        if isinstance(tracker, str):
            one_of("trackers", tracker, tuple(_MODULES))
            extras.require(f"the tracker {tracker}", _MODULES[tracker])
        elif isinstance(tracker, type) or not isinstance(tracker, Tracker):
            raise UserError(
                f"trackers: {tracker!r} must be one of {', '.join(map(repr, _MODULES))}, or an "
                "object with write(step, record) and close()"
            )
    if "wandb" in trackers:
        _check_account()


def _check_account() -> None:
    import wandb

    if _mode(wandb) != "online" or wandb.run is not None:
        return
    try:
        known = wandb.login(prompt=False)
    except Exception:  # no network: `Trackers` warns when the run begins
        return
    if not known:
        raise UserError(
            f"{_OPTION}=wandb: Weights & Biases has no account here: run `wandb login` or set "
            "WANDB_API_KEY, or set WANDB_MODE=offline to write files for `wandb sync`"
        )


def _mode(wandb) -> str:
    return wandb.setup().settings.mode


class Trackers:
    """Several trackers as one; those that fail are dropped with a warning.

    A resumed run repeats the records since its checkpoint. TensorBoard gets them again, and is told
    to drop the earlier ones. Other trackers do not get them again; `trackers.json` stores the last
    step that each has received.

    Args:
      folder: local folder of the workdir's files.
      workdir: provides the run's name and config.
      resume_step: step of the checkpoint that the run resumes from.
    """

    def __init__(
        self,
        trackers: Sequence[str | Tracker],
        folder: pathlib.Path,
        workdir: epath.Path,
        *,
        resume_step: int,
    ):
        self._trackers: dict[str, Tracker] = {}
        state = _State(folder / STATE, workdir / STATE)
        for tracker in trackers:
            name = tracker if isinstance(tracker, str) else type(tracker).__name__
            while name in self._trackers:
                name += "+"
            try:
                if tracker == "tensorboard":
                    tracker = TensorBoard(folder / "events", resume_step=resume_step)
                elif tracker == "wandb":
                    tracker = WeightsAndBiases(folder, workdir, state)
                    tracker = _Once(name, tracker, state, by_step=True)
                else:
                    tracker = _Once(name, tracker, state)
            except Exception as error:
                _failed(name, "at its start", error)
            else:
                self._trackers[name] = tracker

    def write(self, step: int, record: Mapping[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.write(step, record)
            except Exception as error:
                del self._trackers[name]
                _failed(name, f"at step {step:,}", error)

    def close(self) -> None:
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                tracker.close()
            except Exception as error:
                _failed(name, "at its end", error)


def _failed(name: str, when: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {first_line(error)}"
    warn(f"the tracker {name} failed {when} and gets no more records; the run goes on ({reason})")


class _State:
    """The last step that each tracker has received, stored as a JSON object.

    Args:
      path: the file, which is replaced atomically.
      before: the file that an earlier process left.
    """

    def __init__(self, path: pathlib.Path, before: epath.Path):
        self._path, self.values = path, {}
        if before.exists():
            try:
                values = json_text.parse(before.read_bytes())
                self.values = values if isinstance(values, dict) else {}
            except ValueError as error:
                warn(f"{before}: {first_line(error)}; trackers may get records twice")

    def save(self) -> None:
        temporary = self._path.with_name(f".{STATE}.tmp")
        temporary.write_text(json.dumps(self.values))
        temporary.replace(self._path)


class _Once:
    """Passes records to a tracker, except those that an earlier process of the run has passed on.

    Args:
      by_step: the tracker keeps a step's records until the next step begins.
    """

    def __init__(self, name: str, tracker: Tracker, state: _State, *, by_step: bool = False):
        self._tracker, self._state, self._name, self._by_step = tracker, state, name, by_step
        received = state.values.get(name)
        received = received if isinstance(received, dict) else {}
        step, names = received.get("step"), received.get("names")
        self._before = step if isinstance(step, int) else -1, set(names or ())
        self._now: tuple[int, set[str]] = self._before

    def write(self, step: int, record: Mapping[str, float]) -> None:
        last, names = self._before
        new = {k: v for k, v in record.items() if step > last or (step == last and k not in names)}
        if not new:
            return
        earlier, self._now = self._now, (step, set(new))
        if step == earlier[0]:
            self._now[1].update(earlier[1])
        # Saves first: a kill in between then loses a record rather than repeating one.
        if not self._by_step:
            self._save(*self._now)
        elif step > earlier[0]:
            self._save(*earlier)
        self._tracker.write(step, new)

    def close(self) -> None:
        self._tracker.close()
        if self._by_step:
            self._save(*self._now)

    def _save(self, step: int, names: set[str]) -> None:
        self._state.values[self._name] = {"step": step, "names": sorted(names)}
        self._state.save()


class TensorBoard:
    """Writes an event file.

    Does not use tensorboardX's SummaryWriter, whose own thread writes; if that fails, its caller
    blocks.
    """

    def __init__(self, directory: pathlib.Path, *, resume_step: int):
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self._proto, self._scalar = event_pb2, summary.scalar
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = event_file_writer.EventsWriter(str(directory / "events"))
        # Tells TensorBoard to drop events beyond this step, which a killed process has written.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._event(step=resume_step + 1, session_log=start)

    def write(self, step: int, record: Mapping[str, float]) -> None:
        for name, value in record.items():
            self._event(step=step, summary=self._scalar(name, value))
        self._writer.flush()

    def _event(self, **fields) -> None:
        self._writer.write_event(self._proto.Event(wall_time=time.time(), **fields))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to the project WANDB_PROJECT ("kvjax"), or with WANDB_MODE=offline to WORKDIR/wandb.

    A resumed run keeps its id. Config keys are named as in `--config.KEY`.
    """

    def __init__(self, folder: pathlib.Path, workdir: epath.Path, state: _State):
        import wandb

        identifier = os.environ.get("WANDB_RUN_ID") or state.values.get("wandb_id")
        state.values["wandb_id"] = identifier = identifier or uuid.uuid4().hex[:12]
        state.save()
        options: dict[str, Any] = {"resume": "allow"} if _mode(wandb) == "online" else {}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "kvjax",
            name=os.environ.get("WANDB_NAME") or workdir.name,
            id=identifier,
            dir=str(folder),
            config=_config(workdir),
            reinit="create_new",  # a notebook may have a run of its own
            settings=wandb.Settings(console="off"),
            **options,
        )

    def write(self, step: int, record: Mapping[str, float]) -> None:
        self._run.log(dict(record), step=step)

    def close(self) -> None:
        self._run.finish()


def _config(workdir: epath.Path) -> dict[str, object]:
    """Returns the keys and values of config.txt."""
    path = workdir / "config.txt"
    if not path.exists():
        return {}
    pairs = (line.partition(" = ") for line in path.read_text().splitlines())
    return {key: ast.literal_eval(value) for key, _, value in pairs}
