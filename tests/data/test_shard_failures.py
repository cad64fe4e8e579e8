"""Damaged shards are named and others are read; rows of a bucket are requested concurrently."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil

import numpy as np
import pytest

from experiments.benchmarks import data_reading, object_store
from kvjax.data import loader, manifest, packed_rows, shards
from kvjax.foundation.errors import DataError
from tests.data.corpora import ROWS, SHARDS, T, damage, rows_of
from tests.data.test_loader import take


@pytest.fixture
def copy(written, tmp_path):
    """A copy of the data set without digests, as early versions wrote it."""
    path = tmp_path / "copy"
    shutil.copytree(written[0], path)
    info = json.loads((path / manifest.MANIFEST).read_text())
    for key in manifest.INTEGRITY_KEYS:
        del info[key]
    (path / manifest.MANIFEST).write_text(json.dumps(info))
    return path


@pytest.mark.parametrize("how", ["flipped", "missing", "half", "another"])
def test_a_damaged_shard_is_told_and_the_others_are_read(written, copy, how):
    _, expected_NT = written

    def name(i):
        return copy / ROWS / packed_rows.shard_name("train", i, SHARDS)

    rows = loader.open_dataset(copy).rows("train")
    damaged = next(i for i in range(2, 7) if rows._rows[i] != rows._rows[1])
    first, end = rows._ends[damaged] - rows._rows[damaged], rows._ends[damaged]
    content = name(damaged).read_bytes()
    if how == "another":
        name(damaged).write_bytes(name(1).read_bytes())
    else:
        damage(name(damaged), how)
    for _ in range(2):  # it is not remembered as opened
        with pytest.raises(manifest.DamagedDataError, match=f"^{copy} is damaged: .*prepare it"):
            rows.__getitems__(range(first, end))
    undamaged = [i for i in range(len(rows)) if not first <= i < end]
    np.testing.assert_array_equal(rows_of(rows, undamaged), expected_NT[undamaged])
    if how != "flipped":  # that one is open
        name(damaged).write_bytes(content)
        np.testing.assert_array_equal(rows_of(rows, [first]), expected_NT[[first]])


def test_a_record_that_is_no_row_is_told(copy):
    file = copy / ROWS / packed_rows.shard_name("train", 1, SHARDS)
    count = loader.open_dataset(copy).rows("train")._rows[1]
    writer = packed_rows.ArrayRecordWriter(os.fspath(file), "group_size:1")
    (head,) = packed_rows.heads({packed_rows.FEATURE: np.dtype("u2")}, T).values()
    for _ in range(count):
        writer.write(head + bytes(2 * T + 2))
    writer.close()
    rows = loader.open_dataset(copy).rows("train")
    with pytest.raises(manifest.DamagedDataError, match="row 0 of .*-00001-of-00040 is not a row"):
        rows[0]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("features.json", '"tokens"', '"words"'),
        ("features.json", '"bytes"', '"none"'),
        ("features.json", '"uint16"', '"bananas"'),
        ("features.json", "{", "["),
        ("dataset_info.json", "array_record", "tfrecord"),
        ("dataset_info.json", "{SHARD_X_OF_Y}", "{SHARD_INDEX}"),
        ("dataset_info.json", '"train"', '"test"'),
        ("dataset_info.json", '"0"', '"1"'),
        ("dataset_info.json", '"0"', '"none"'),
    ],
)
def test_a_description_of_something_else_is_told(copy, file, old, new):
    path = copy / ROWS / file
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))
    with pytest.raises(manifest.DamagedDataError, match=f"^{copy} is damaged: "):
        loader.open_dataset(copy).rows("train")


class Gate:
    """Delays answers until `count` requests wait at once; later requests pass at once."""

    def __init__(self, count):
        self.count, self.waiting, self.open, self.reached = count, 0, asyncio.Event(), False

    async def __call__(self, path, first):
        self.waiting += 1
        if self.waiting >= self.count:
            self.reached = True
            self.open.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.open.wait(), 20)
        self.open.set()
        self.waiting -= 1


@pytest.fixture
def in_bucket(written, bucket):
    """The data set as gs://data/many, and its local folder."""
    shutil.copytree(written[0], bucket / "data" / "many")
    return "gs://data/many", bucket / "data" / "many"


def test_rows_of_a_bucket_are_asked_for_at_once(in_bucket, written, bucket):
    gate = Gate(8)
    with object_store.threaded(bucket, gate) as store:
        rows = loader.open_dataset(in_bucket[0]).rows("train")
        order = np.random.default_rng(0).permutation(len(rows))
        np.testing.assert_array_equal(rows_of(rows, order), written[1][order])
    assert gate.reached
    opened = [path for path, _, size in store.requests if size > 1 << 15]  # ends of shards
    assert len(opened) >= SHARDS - 4
    assert len(store.requests) >= len(rows) + SHARDS - 4
    assert all(re.match("data/many/packed_rows/1.0.0/.*-of-00040$", path) for path in opened)


def test_small_batches_of_a_bucket_are_asked_for_at_once(in_bucket, written, bucket):
    keys = dict(sequence_length=T, batch_size=2, seed=5, position=20)
    expected = take(loader.train_batches(loader.open_dataset(written[0]), **keys), 10)
    gate = Gate(8)
    with object_store.threaded(bucket, gate):
        dataset = loader.open_dataset(in_bucket[0])
        batches = loader.train_batches(dataset, **keys)
        np.testing.assert_array_equal(take(batches, 10), expected)
        data_reading.close(batches)
        batches = loader.validation_batches(dataset, sequence_length=T, batch_size=16)
        rows = np.concatenate(list(batches))
    assert gate.reached
    np.testing.assert_array_equal(rows[: len(written[1])], written[1])


@pytest.mark.parametrize("how", ["flipped", "missing", "refused"])
def test_a_bucket_that_refuses_is_not_damaged_data(in_bucket, bucket, how):
    path, folder = in_bucket
    name = packed_rows.shard_name("train", 1, SHARDS)

    async def answer(path, first):
        if how == "refused":
            raise PermissionError

    if how != "refused":
        damage(folder / ROWS / name, how)
    with object_store.threaded(bucket, answer):
        rows = loader.open_dataset(path).rows("train")
        with pytest.raises(
            DataError, match="reading gs://" if how == "refused" else path
        ) as raised:
            rows.__getitems__(range(rows._rows[1]))
        rows._threads.shutdown()  # what the others still read ends before the store does
    assert isinstance(raised.value, manifest.DamagedDataError) == (how != "refused")
    assert ("could not be read" in str(raised.value)) == (how == "refused")


def test_too_many_files_are_not_damaged_data(dataset, monkeypatch):
    def none_left(*args, **kwargs):
        raise RuntimeError("open() failed: Too many open files; opening x")

    monkeypatch.setattr(shards, "ArrayRecordReader", none_left)
    with pytest.raises(
        DataError, match="-00001-of-00040 could not be read: .*Too many open"
    ) as raised:
        dataset.rows("train")[0]
    assert not isinstance(raised.value, manifest.DamagedDataError)


def test_rows_in_buckets_of_another_kind_are_refused(dataset):
    elsewhere = dataclasses.replace(dataset, path=loader.epath.Path("s3://data/many"))
    with pytest.raises(DataError, match="s3://data/many: rows are read from .*prepared:FOLDER"):
        elsewhere.rows("train")
