"""The folder of a preparation: live processes are left alone, files of dead ones are removed."""

import dataclasses
import os
import pathlib
import time

from etils import epath
import pytest

from kvjax.data import folders, packed_rows, partial_dataset, preparation, readers, tokenized_part
from kvjax.data.tokenized_part import Counts, PartResult, Skipped
from kvjax.foundation.errors import DataError

PLAN = {"code": "a"}


@pytest.fixture
def making(tmp_path):
    found = partial_dataset.PartialDataset(epath.Path(tmp_path) / "key", "abc")
    found.open(PLAN)
    return found


def _publish(making, part, left_out=Skipped(), **shards):
    """Publishes a part with these bytes as a split's shard."""
    counts = {"train": Counts(rows=1, documents=2), "validation": Counts()}
    with making.work() as work:
        for split, content in shards.items():
            (work / packed_rows.shard_name(split, part, making.num_parts)).write_bytes(content)
            counts[split] = dataclasses.replace(counts[split], file_bytes=len(content))
        found = PartResult(counts, left_out)
        making.publish(part, work, found)
        return found


def test_what_is_published_is_read_back(making):
    made = _publish(making, 1, Skipped(7, ("a line",), 2))
    assert making.results() == [None, made, None] and making.missing() == [0, 2]
    again = partial_dataset.PartialDataset(making.target, "abc")
    again.open(PLAN)
    assert again.missing() == [0, 2]


def test_what_a_killed_process_was_writing_is_removed_and_a_living_one_s_is_not(making):
    here = f"work-{partial_dataset._here()}-"
    works = {
        f"{here}{os.getpid()}-living": True,
        f"{here}999999999-killed": False,
        "work-another-host-12-new": True,
        "work-another-host-12-old": False,
    }
    for name in works:
        folder = pathlib.Path(making.folder) / name
        folder.mkdir()
        (folder / "file").write_text("")
        if name.endswith("old"):
            long_ago = time.time() - folders.ABANDONED_SECONDS - 60
            for path in (folder / "file", folder):
                os.utime(path, (long_ago, long_ago))
    making.open(PLAN)
    assert {name: (making.folder / name).exists() for name in works} == works


def test_another_plan_begins_anew_unless_a_part_is_done(making):
    (making.rows / "of the first plan").touch()
    making.open({"code": "b"})
    assert not list(making.rows.iterdir())
    assert partial_dataset.read_plan(making.folder) == {"code": "b"}
    _publish(making, 0)
    with pytest.raises(DataError) as told:
        making.open({"code": "c", "parts": 3})
    assert str(told.value) == (
        f"{making.folder} was begun with another code, parts. Resume it with the code and options "
        "that began it, or remove that folder"
    )
    assert partial_dataset.read_plan(making.folder) == {"code": "b"} and making.missing() == [1, 2]


def test_parts_without_a_readable_plan_are_made_again(making, capsys):
    _publish(making, 0)
    (making.folder / partial_dataset.PLAN).write_text("")
    making.open(PLAN)
    assert making.missing() == [0, 1, 2] and partial_dataset.read_plan(making.folder) == PLAN
    assert "has no readable plan.json: starting over" in capsys.readouterr().err


def test_failures_are_those_of_parts_that_are_not_done(making):
    making.fail(2, "the third")
    making.fail(0, "the first")
    making.open(PLAN)
    assert making.failures() == ["the first", "the third"]
    _publish(making, 0)
    assert making.failures() == ["the third"]


def test_of_what_is_left_out_the_first_messages_are_kept(monkeypatch):
    """Counts each message once, however often a file is opened, and null texts separately."""
    for module in (tokenized_part, preparation):
        monkeypatch.setattr(module, "MAX_MESSAGES", 2)
    left_out = tokenized_part.ErrorCollector(True)
    for message in ("a\nmore", "b", "a", "c"):
        left_out(readers.SourceError(message))
    left_out(readers.NullTextError("d"))
    found = left_out.skipped()
    assert found == Skipped(3, ("a", "b"), 1)
    both = [Skipped(1, ("z",)), found]
    assert preparation._skipped_info(both) == {"left_out": dict(count=4, first=["z", "a"])}
    with pytest.raises(readers.SourceError, match="^a$"):
        tokenized_part.ErrorCollector(False)(readers.SourceError("a"))


def test_half_an_upload_is_thrown_away(making, bucket, tmp_path, monkeypatch):
    """Closed, it would take the place of what another process may have uploaded whole."""
    done = []

    class Sink:
        write = close = lambda self, *_: done.append("kept")

        def discard(self):
            done.append("discarded")

    def fails(*args):
        raise KeyboardInterrupt

    remote = partial_dataset.PartialDataset(epath.Path("gs://out/key"), "abc")
    (tmp_path / "file").write_text("x")
    target = type("Target", (), dict(open=lambda self, mode: Sink()))()
    monkeypatch.setattr(partial_dataset.shutil, "copyfileobj", fails)
    with pytest.raises(KeyboardInterrupt):
        remote._put(tmp_path / "file", target)
    assert done == ["discarded"] and (tmp_path / "file").exists()


def test_a_part_of_other_text_is_not_done(making):
    _publish(making, 1)
    assert partial_dataset.PartialDataset(making.target, "abc").missing() == [0, 2]
    assert partial_dataset.PartialDataset(making.target, "aBc").missing() == [0, 1, 2]
