"""What processes tell each other through the coordination service: a store of keys.

Nothing here touches a device or runs a collective.
"""

import collections
import hashlib
import json
from typing import Any
import uuid

from etils import epath

from kvjax.foundation.errors import UserError


def client():
    """JAX's client of the coordination service; None in a process that is alone."""
    return _state().client


def _state():
    from jax._src import distributed  # where Orbax looks too

    return distributed.global_state


def count() -> int:
    """Processes in the job, without touching a device."""
    state = _state()
    return state.num_processes if state.client is not None else 1


def index() -> int:
    """Which of them this is; 0 writes what one process writes."""
    return _state().process_id if count() > 1 else 0


def gather(name: str, text: str) -> list[str]:
    """What every process gave, by process, once all have; the same list everywhere.

    Waits as long as all of them live. All call it in the same order.

    Args:
      name: of this exchange, for the store.
    """
    if count() == 1:
        return [text]
    _exchanges[name] += 1
    key = f"kvjax/{name}/{_exchanges[name]}"
    client().key_value_set(f"{key}/{index()}", text)
    return [_wait_for(f"{key}/{i}") for i in range(count())]


_exchanges = collections.Counter()


def _wait_for(key: str) -> str:
    from jax.errors import JaxRuntimeError

    while True:
        try:
            return client().blocking_key_value_get(key, 5_000)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def check_same(given: dict[str, Any]) -> None:
    """Raises a UserError on every process unless all gave the same; names what differs.

    Args:
      given: what a process was started with, flat.
    """
    if rows := _differing("given", given):
        raise UserError(
            "the processes of this job were started differently:\n"
            + "\n".join(rows)
            + "\nGive all of them the same command and the same code"
        )


def check_same_programs(texts: dict[str, str]) -> None:
    """Raises a UserError on every process unless all are about to compile the same programs.

    Processes whose collectives are not the same wait for each other until a network gives up.

    Args:
      texts: of the lowered programs, by name.
    """
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items()}
    if rows := _differing("programs", digests):
        raise UserError(
            "the processes of this job would compile different programs, and wait for each other "
            "for ever (digests of their text):\n"
            + "\n".join(rows)
            + "\nGive all of them the same JAX and the same environment (JAX_*, XLA_FLAGS)"
        )


def check_same_rows(path: epath.Path, digest: str, advice: str) -> None:
    """Raises a UserError on every process if they have different data sets at a path.

    Args:
      advice: what to give all hosts.
    """
    theirs = gather("dataset", digest)
    if odd := [i for i, other in enumerate(theirs) if other != theirs[0]]:
        raise UserError(
            f"{path}: {processes(odd)} of {len(theirs)} have other rows there than process 0; give "
            f"all hosts {advice}"
        )


def _differing(name: str, given: dict[str, Any]) -> list[str]:
    """A line for each key whose value is not the same everywhere, with who gave which."""
    everyone = [json.loads(text) for text in gather(name, json.dumps(given, default=str))]
    rows = []
    for key in sorted(set().union(*everyone)):
        holders: dict[str, list[int]] = {}
        for process, theirs in enumerate(everyone):
            holders.setdefault(str(theirs.get(key)), []).append(process)
        if len(holders) > 1:
            shown = [f"{value} ({processes(who)})" for value, who in holders.items()]
            rows.append(f"  {key}: {', '.join(shown)}")
    return rows if len(rows) <= 12 else [*rows[:12], f"  and {len(rows) - 12} more"]


def processes(who: list[int]) -> str:
    """ "process 3", or "processes 0, 1, 2"."""
    return f"process{'es' if len(who) > 1 else ''} {', '.join(map(str, who))}"


def folder_leaders(name: str, folder: epath.Path) -> list[int]:
    """By process, the first one that shares this folder with it: found out by files in it.

    Args:
      name: of this exchange, for the store.
      folder: made if missing; each process gives its own path to it.
    """
    if count() == 1:
        return [0]
    token = gather(f"{name}/token", uuid.uuid4().hex)[0]
    file = lambda process: folder / f".kvjax-{token}-{process}"
    folder.mkdir(parents=True, exist_ok=True)
    file(index()).write_text("")
    try:
        gather(f"{name}/written", "")
        found = next(i for i in range(count()) if i == index() or file(i).exists())
        return [int(text) for text in gather(f"{name}/found", str(found))]
    finally:
        file(index()).unlink(missing_ok=True)


def check_shared(workdir: epath.Path) -> None:
    """Raises a UserError on every process if one of them does not see the first one's workdir."""
    apart = [i for i, leader in enumerate(folder_leaders("workdir", workdir)) if leader]
    if apart:
        raise UserError(
            f"--workdir={workdir}: {processes(apart)} of {count()} cannot see what process 0 "
            "writes there, and all processes write one checkpoint together. Give a folder that "
            "all hosts mount at the same place (NFS, Filestore, Lustre), or a bucket (gs://)"
        )


class Team:
    """The processes of this job that share a folder; the first of them leads.

    Args:
      name: as in `leaders`, used once in the life of the job.

    Attributes:
      index: of this process among them; 0 leads.
      size: how many they are.
    """

    def __init__(self, name: str, folder: epath.Path):
        found = folder_leaders(name, folder)
        self._members = [i for i, leader in enumerate(found) if leader == found[index()]]
        self._key = f"kvjax/{name}"
        self.index, self.size = self._members.index(index()), len(self._members)

    def announce(self, what: str) -> None:
        """Tells the others that this process has come so far."""
        if self.size > 1:
            client().key_value_set(f"{self._key}/{what}/{index()}", "")

    def wait_for(self, what: str, *, leader: bool = False) -> None:
        """Waits for as long as it takes until all others, or the leader, said so."""
        for member in self._members[:1] if leader else self._members:
            if member != index():
                _wait_for(f"{self._key}/{what}/{member}")
