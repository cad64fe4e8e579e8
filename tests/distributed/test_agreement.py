"""Agreement of three processes, and of one alone."""

import types

from etils import epath
import jax
import pytest

from kvjax import distributed
from kvjax.distributed import agreement
from kvjax.foundation.errors import UserError
from tests.distributed.store import Store, together


def _message(check, *arguments) -> str | None:
    """Returns the message of a failed check."""
    try:
        check(*arguments)
    except UserError as error:
        return str(error)
    return None


def test_three_processes_get_the_same_messages(tmp_path, monkeypatch):
    """The second process has other rows and another workdir."""
    store = Store()
    folders = [epath.Path(tmp_path / name / "x") for name in ("shared", "apart", "shared")]

    def process(i):
        results = [distributed.gather("x", f"{word}{i}") for word in "ab"]
        flags = {"seed": 7, "path": epath.Path("/x"), "b": min(i, 1), "a": i}
        for settings in (
            dict(seed=7, path=epath.Path("/x")),
            flags | ({"only": True} if i == 1 else {}),
            {f"k{k:02}": i for k in range(12)},
            {f"k{k:02}": i for k in range(13)},
        ):
            results.append(_message(distributed.check_same, settings))
        rows = (epath.Path("/rows"), f"digest {i % 2}", "one folder")
        results.append(_message(distributed.check_same_rows, *rows))
        results.append(distributed.folder_leaders("y", folders[i]))
        return [*results, _message(distributed.check_shared, epath.Path(folders[i]))]

    results = together(monkeypatch, store, 3, process)
    shared = results[0].pop()
    for result in results[1:]:
        assert result.pop().replace(str(folders[1]), str(folders[0])) == shared
    assert shared == (
        f"--workdir={folders[0]}: process 1 of 3 cannot see what process 0 writes there, but all "
        "processes write to one checkpoint. Give a folder that all hosts mount at the same path "
        "(NFS, Filestore, Lustre), or a bucket (gs://)"
    )
    assert results[1:] == results[:1] * 2
    differences = "the processes of this job were started differently:\n{}\n"
    differences += "Give all of them the same command and the same code"
    line = "  k{:02}: 0 (process 0), 1 (process 1), 2 (process 2)"
    twelve = [line.format(k) for k in range(12)]
    assert results[0] == [
        ["a0", "a1", "a2"],
        ["b0", "b1", "b2"],
        None,
        differences.format(
            "  a: 0 (process 0), 1 (process 1), 2 (process 2)\n"
            "  b: 0 (process 0), 1 (processes 1, 2)\n"
            "  only: None (processes 0, 2), True (process 1)"
        ),
        differences.format("\n".join(twelve)),
        differences.format("\n".join([*twelve, "  and 1 more"])),
        "/rows: process 1 of 3 have other rows than process 0; give all hosts one folder",
        [0, 1, 0],
    ]
    texts = {key: text for key, text in store.values.items() if key.startswith("kvjax/x/")}
    assert texts == {
        f"kvjax/x/{n}/{i}": f"{t}{i}" for n, t in ((1, "a"), (2, "b")) for i in range(3)
    }
    names = {key.split("/", 1)[1].rsplit("/", 2)[0] for key in store.values}
    stages = ("token", "written", "found")
    folder_keys = {f"{exchange}/{stage}" for exchange in ("y", "workdir") for stage in stages}
    assert names == {"x", "given", "dataset"} | folder_keys
    assert [list(folder.iterdir()) for folder in folders] == [[], [], []]

    def fails(*arguments):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    store.blocking_key_value_get = fails
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        agreement.gather("z", "")


def test_processes_that_share_a_folder_are_a_team(tmp_path, monkeypatch):
    """The first process leads; a process with its own folder neither announces nor waits."""
    store = Store()

    def process(i):
        team = distributed.Team("data", epath.Path(tmp_path / f"{i % 2}"))
        if i:
            team.announce("done")
        if i != 2:
            team.wait_for("done")
            team.announce("read")
        team.wait_for("read", leader=True)
        return team.index, team.size

    assert together(monkeypatch, store, 3, process) == [(0, 2), (0, 1), (1, 2)]
    shared_keys = {"kvjax/data/done/2", "kvjax/data/read/0"}
    assert {key for key in store.values if "done" in key or "read" in key} == shared_keys
    assert {key for key in store.awaited if "done" in key or "read" in key} == shared_keys


def test_one_process_agrees_with_itself(tmp_path, monkeypatch):
    state = types.SimpleNamespace(client=None, num_processes=3, process_id=2)
    monkeypatch.setattr(agreement, "_state", lambda: state)
    assert (distributed.count(), distributed.index()) == (1, 0)
    assert distributed.gather("x", "y") == ["y"]
    distributed.check_same({"a": 1})
    assert distributed.folder_leaders("x", tmp_path / "none") == [0]
    assert not (tmp_path / "none").exists()
    team = distributed.Team("x", tmp_path)
    assert (team.index, team.size) == (0, 1)
    team.announce("done")
    team.wait_for("done")
    with pytest.raises(UserError, match="mine"), distributed.end_together():
        raise UserError("mine")
