"""The folder of a preparation under way: who works there is left alone, who is gone is not."""

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


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_parts_of_the_same_text_are_taken_over(tmp_path, bucket, where):
    """Whole ones, wherever they stood; the folder that had them is gone."""
    top = epath.Path("gs://out" if where == "bucket" else tmp_path / "out")
    old = partial_dataset.PartialDataset(top / "old", ["x", "a", "b", "c", "d", "e", "f"])
    old.open(PLAN | dict(parts=7))
    new = partial_dataset.PartialDataset(top / "new", ["f", "e", "d", "c", "b", "a", "g"])
    name = lambda split, part: packed_rows.shard_name(split, part, 7)
    made = {}
    for left_out in (False, True):
        new.open(PLAN)
        old.open(PLAN | dict(parts=7))
        _publish(old, 0, train=b"other text")
        made["a"] = _publish(old, 1, train=b"aa", validation=b"a")
        made["b"] = _publish(old, 2, Skipped(1, ("a line",), 5), train=b"bbb")
        _publish(old, 3, train=b"cccc")  # half of it, and whole where it goes to
        made["d"] = _publish(old, 4, train=b"ddddd")
        _publish(old, 5, train=b"eeeeee")
        _publish(old, 6, train=b"ff")
        (old.rows / name("train", 3)).write_bytes(b"cc")
        (old.rows / name("train", 4)).rename(new.rows / name("train", 2))  # by a first attempt
        (new.rows / name("validation", 4)).write_bytes(b"of another text")
        (old.folder / partial_dataset.DONE / "00005.json").write_text("{}")
        made["f"] = _publish(new, 0, train=b"f", validation=b"f0")
        assert new.adopt(old.folder, left_out=left_out, shown=False) == (3 if left_out else 2)
        assert not old.folder.exists() and new.missing() == (
            [1, 3, 6] if left_out else [1, 3, 4, 6]
        )
        expected = [
            made["f"],
            None,
            made["d"],
            None,
            made["b"] if left_out else None,
            made["a"],
            None,
        ]
        assert new.all_made() == expected
        rows = {path.name: path.read_bytes() for path in new.rows.iterdir()}
        own = {("train", 0): b"f", ("validation", 0): b"f0", ("train", 2): b"ddddd"}
        own |= {("train", 5): b"aa", ("validation", 5): b"a"}
        own |= {("train", 4): b"bbb"} if left_out else {("validation", 4): b"of another text"}
        assert rows == {name(*which): content for which, content in own.items()}
        new.remove()
    assert new.adopt(old.folder, left_out=True, shown=False) == 0


def test_what_is_published_is_read_back(making):
    made = _publish(making, 1, Skipped(7, ("a line",), 2))
    assert making.all_made() == [None, made, None] and making.missing() == [0, 2]
    again = partial_dataset.PartialDataset(making.target, "abc")
    again.open(PLAN)
    assert again.missing() == [0, 2]
    mark = making.folder / partial_dataset.DONE / "00001.json"  # as before null texts were counted
    mark.write_text(mark.read_text().replace('[7, ["a line"], 2]', '[7, ["a line"]]'))
    assert making.all_made()[1] == made._replace(left_out=Skipped(7, ("a line",)))


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
    making.open({"code": "b"})
    assert partial_dataset.read_plan(making.folder) == {"code": "b"}
    _publish(making, 0)
    with pytest.raises(DataError) as told:
        making.open({"code": "c" * 58, "parts": 3, "config": "as it is asked for"})
    assert str(told.value) == (
        f"{making.folder} was begun by other code or with another plan (code: 'b', now '{'c' * 56}"
        "...; parts: nothing, now 3). Go on with what it was begun with, or remove that folder to "
        "begin anew"
    )
    making.open({"code": "b", "config": "as it is asked for"})
    assert partial_dataset.read_plan(making.folder) == {"code": "b", "config": "as it is asked for"}
    assert making.missing() == [1, 2]


def test_failures_are_those_of_parts_that_are_not_done(making):
    making.fail(2, "the third")
    making.fail(0, "the first")
    making.open(PLAN)
    assert making.failures() == ["the first", "the third"]
    _publish(making, 0)
    assert making.failures() == ["the third"]


def test_what_could_not_be_read_is_known_by_its_name(making):
    """By the whole of it, from whoever said so; what may be read the next time is not broken."""
    assert partial_dataset.were_broken(making.folder, [])
    making.fail(1, "'/in/a.jsonl, line 3 is no JSON", broken=True)
    making.fail(2, "/in/b.jsonl could not be read: no answer")
    _publish(making, 0, Skipped(1, ("in part: /in/c.jsonl: has no key 'text'",)))
    making.open(PLAN | dict(left_out=["/in/d.parquet is no whole Parquet file"]))
    known = ("/in/a.jsonl", "/in/c.jsonl", "/in/d.parquet")
    for names in (*zip(known, strict=True), known):
        assert partial_dataset.were_broken(making.folder, names), names
    for other in ("/in/b.jsonl", "/in/a", "n/a.jsonl", "/in/aXjsonl", "/in/e.jsonl"):
        assert not partial_dataset.were_broken(making.folder, [*known, other]), other


def test_of_what_is_left_out_the_first_messages_are_kept(monkeypatch):
    """Each once, however often a file is opened; all are counted, and null texts apart."""
    for module in (tokenized_part, preparation):
        monkeypatch.setattr(module, "MAX_MESSAGES", 2)
    left_out = tokenized_part.ErrorCollector(True)
    for message in ("a\nmore", "b", "a", "c"):
        left_out(readers.SourceError(message))
    left_out(readers.NullTextError("d"))
    found = left_out.said()
    assert found == Skipped(3, ("a", "b"), 1)
    both = [Skipped(1, ("z",)), found]
    assert preparation._said(both) == {"left_out": dict(count=4, first=["z", "a"])}
    with pytest.raises(readers.SourceError, match="^a$"):
        tokenized_part.ErrorCollector(False)(readers.SourceError("a"))


def test_half_an_upload_is_thrown_away(making, bucket, tmp_path, monkeypatch):
    """Closed, it would take the place of what another process may have uploaded whole."""
    done = []

    class Sink:
        write = close = lambda self, *_: done.append("kept")
        discard = lambda self: done.append("discarded")

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
