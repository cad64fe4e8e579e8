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
def partial(tmp_path):
    dataset = partial_dataset.PartialDataset(epath.Path(tmp_path) / "key", "abc")
    dataset.open(PLAN)
    return dataset


def _publish(partial, part, left_out=Skipped(), **shards):
    """Publishes a part with these bytes as a split's shard."""
    counts = {"train": Counts(rows=1, documents=2), "validation": Counts()}
    with partial.work() as work:
        for split, content in shards.items():
            (work / packed_rows.shard_name(split, part, partial.num_parts)).write_bytes(content)
            counts[split] = dataclasses.replace(counts[split], file_bytes=len(content))
        result = PartResult(counts, left_out)
        partial.publish(part, work, result)
        return result


def test_what_is_published_is_read_back(partial):
    published = _publish(partial, 1, Skipped(7, ("a line",), 2))
    assert partial.results() == [None, published, None] and partial.missing() == [0, 2]
    reopened = partial_dataset.PartialDataset(partial.target, "abc")
    reopened.open(PLAN)
    assert reopened.missing() == [0, 2]


def test_what_a_killed_process_was_writing_is_removed_and_a_living_one_s_is_not(partial):
    machine = f"work-{partial_dataset._machine()}-"
    works = {
        f"{machine}{os.getpid()}-living": True,
        f"{machine}999999999-killed": False,
        "work-another-host-12-new": True,
        "work-another-host-12-old": False,
    }
    for name in works:
        folder = pathlib.Path(partial.folder) / name
        folder.mkdir()
        (folder / "file").write_text("")
        if name.endswith("old"):
            long_ago = time.time() - folders.ABANDONED_SECONDS - 60
            for path in (folder / "file", folder):
                os.utime(path, (long_ago, long_ago))
    partial.open(PLAN)
    assert {name: (partial.folder / name).exists() for name in works} == works


def test_another_plan_begins_anew_unless_a_part_is_done(partial):
    (partial.rows / "of the first plan").touch()
    partial.open({"code": "b"})
    assert not list(partial.rows.iterdir())
    assert partial_dataset.read_plan(partial.folder) == {"code": "b"}
    _publish(partial, 0)
    with pytest.raises(DataError) as raised:
        partial.open({"code": "c", "parts": 3})
    assert str(raised.value) == (
        f"{partial.folder} was begun with another code, parts. Resume it with the code and options "
        "that began it, or remove that folder"
    )
    assert partial_dataset.read_plan(partial.folder) == {"code": "b"}
    assert partial.missing() == [1, 2]


def test_parts_without_a_readable_plan_are_made_again(partial, capsys):
    _publish(partial, 0)
    (partial.folder / partial_dataset.PLAN).write_text("")
    partial.open(PLAN)
    assert partial.missing() == [0, 1, 2] and partial_dataset.read_plan(partial.folder) == PLAN
    assert "has no readable plan.json: starting over" in capsys.readouterr().err


def test_failures_are_those_of_parts_that_are_not_done(partial):
    partial.fail(2, "the third")
    partial.fail(0, "the first")
    partial.open(PLAN)
    assert partial.failures() == ["the first", "the third"]
    _publish(partial, 0)
    assert partial.failures() == ["the third"]


def test_of_what_is_left_out_the_first_messages_are_kept(monkeypatch):
    """Counts each message once, however often a file is opened, and null texts separately."""
    for module in (tokenized_part, preparation):
        monkeypatch.setattr(module, "MAX_MESSAGES", 2)
    errors = tokenized_part.ErrorCollector(True)
    for message in ("a\nmore", "b", "a", "c"):
        errors(readers.SourceError(message))
    errors(readers.NullTextError("d"))
    skipped = errors.skipped()
    assert skipped == Skipped(3, ("a", "b"), 1)
    of_parts = [Skipped(1, ("z",)), skipped]
    assert preparation._skipped_info(of_parts) == {"left_out": dict(count=4, first=["z", "a"])}
    with pytest.raises(readers.SourceError, match="^a$"):
        tokenized_part.ErrorCollector(False)(readers.SourceError("a"))


def test_half_an_upload_is_thrown_away(partial, bucket, tmp_path, monkeypatch):
    """Closing it would replace a complete object that another process may have uploaded."""
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


def test_a_part_of_other_text_is_not_done(partial):
    _publish(partial, 1)
    assert partial_dataset.PartialDataset(partial.target, "abc").missing() == [0, 2]
    assert partial_dataset.PartialDataset(partial.target, "aBc").missing() == [0, 1, 2]
