"""Agreement between processes through the coordination service's key-value store.

Nothing here uses a device or a collective.
"""

import collections
import json
from typing import Any
import uuid

from etils import epath

from kvjax.foundation.errors import UserError


def client():
    """Returns JAX's client of the coordination service; None in a job of one process."""
    return _state().client


def _state():
    from jax._src import distributed  # not public; Orbax uses it too

    return distributed.global_state


def count() -> int:
    """Returns the number of processes, without initialising a device."""
    state = _state()
    return state.num_processes if state.client is not None else 1


def index() -> int:
    """Returns the index of this process; process 0 writes the files that a job has once."""
    return _state().process_id if count() > 1 else 0


def gather(name: str, text: str) -> list[str]:
    """Returns the texts of all processes, by index; a barrier without a time limit.

    All processes must make the same calls in the same order.

    Args:
      name: name of this exchange, for its keys in the store; may be reused.
    """
    if count() == 1:
        return [text]
    _exchanges[name] += 1
    key = f"kvjax/{name}/{_exchanges[name]}"
    client().key_value_set(f"{key}/{index()}", text)
    return [_wait_for(f"{key}/{i}") for i in range(count())]


_exchanges = collections.Counter()  # exchanges by name, since a key in the store is written once


def _wait_for(key: str) -> str:
    """Waits for a key for as long as the job lives."""
    from jax.errors import JaxRuntimeError

    while True:
        try:
            return client().blocking_key_value_get(key, 5_000)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def check_same(settings: dict[str, Any]) -> None:
    """Raises a UserError on every process unless all pass the same values.

    Args:
      settings: this process's settings, by name.
    """
    if rows := _differing("given", settings):
        raise UserError(
            "the processes of this job were started differently:\n"
            + "\n".join(rows)
            + "\nGive all of them the same command and the same code"
        )


def check_same_rows(path: epath.Path, digest: str, advice: str) -> None:
    """Raises a UserError on every process if their data sets at `path` differ.

    Args:
      advice: end of the message: what to give all hosts.
    """
    digests = gather("dataset", digest)
    if differing := [i for i, other in enumerate(digests) if other != digests[0]]:
        raise UserError(
            f"{path}: {processes(differing)} of {len(digests)} have other rows than process 0; "
            f"give all hosts {advice}"
        )


def _differing(name: str, own: dict[str, Any]) -> list[str]:
    """Returns a line for each key whose values differ; it names the processes of each value."""
    all_settings = [json.loads(text) for text in gather(name, json.dumps(own, default=str))]
    rows = []
    for key in sorted(set().union(*all_settings)):
        holders: dict[str, list[int]] = {}
        for process, settings in enumerate(all_settings):
            holders.setdefault(str(settings.get(key)), []).append(process)
        if len(holders) > 1:
            shown = [f"{value} ({processes(indices)})" for value, indices in holders.items()]
            rows.append(f"  {key}: {', '.join(shown)}")
    return rows if len(rows) <= 12 else [*rows[:12], f"  and {len(rows) - 12} more"]


def processes(indices: list[int]) -> str:
    """Formats indices: "process 3", "processes 0, 1, 2"."""
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def folder_leaders(name: str, folder: epath.Path) -> list[int]:
    """Returns, for each process, the lowest index of the processes that share its folder.

    Each process writes a file to its folder and looks for the files of the others.

    Args:
      name: name of this exchange, for its keys in the store.
      folder: path on this process; created if missing.
    """
    if count() == 1:
        return [0]
    token = gather(f"{name}/token", uuid.uuid4().hex)[0]

    def file(process: int) -> epath.Path:
        return folder / f".kvjax-{token}-{process}"

    folder.mkdir(parents=True, exist_ok=True)
    file(index()).write_text("")
    try:
        gather(f"{name}/written", "")
        first = next(i for i in range(count()) if i == index() or file(i).exists())
        return [int(text) for text in gather(f"{name}/found", str(first))]
    finally:
        file(index()).unlink(missing_ok=True)


def check_shared(workdir: epath.Path) -> None:
    """Raises a UserError on every process unless all see process 0's workdir."""
    blind = [i for i, leader in enumerate(folder_leaders("workdir", workdir)) if leader]
    if blind:
        raise UserError(
            f"--workdir={workdir}: {processes(blind)} of {count()} cannot see what process 0 "
            "writes there, but all processes write to one checkpoint. Give a folder that all hosts "
            "mount at the same path (NFS, Filestore, Lustre), or a bucket (gs://)"
        )


class Team:
    """The processes that share a folder; the first of them leads.

    Args:
      name: see `folder_leaders`; may be used once per job.

    Attributes:
      index: index of this process in the team; 0 leads.
      size: number of processes.
    """

    def __init__(self, name: str, folder: epath.Path):
        leaders = folder_leaders(name, folder)
        self._members = [i for i, leader in enumerate(leaders) if leader == leaders[index()]]
        self._key = f"kvjax/{name}"
        self.index, self.size = self._members.index(index()), len(self._members)

    def announce(self, stage: str) -> None:
        """Tells the others that this process has finished a stage."""
        if self.size > 1:
            client().key_value_set(f"{self._key}/{stage}/{index()}", "")

    def wait_for(self, stage: str, *, leader: bool = False) -> None:
        """Waits until all others, or the leader alone, have announced a stage; no time limit."""
        for member in self._members[:1] if leader else self._members:
            if member != index():
                _wait_for(f"{self._key}/{stage}/{member}")
