"""Every row is read by its index, from any storage, with any number of open shards."""

from concurrent import futures
import dataclasses
import gc
import hashlib
import json
import os
import pathlib
import shutil
import threading
import weakref

import grain
import numpy as np
import pytest

from kvjax.data import loader, manifest, packed_rows, shards
from tests import quick
from tests.data.corpora import ROWS, SHARDS, T, rows_of
from tests.data.test_loader import take


def test_rows_are_written_once_a_block_of_them_is_there(tmp_path, monkeypatch):
    """Buffers less than a block of a stream and its mask; `add_row` writes rows of their own."""
    written, T_last = [], 12

    class Writer(packed_rows.ArrayRecordWriter):
        def write(self, record):
            written.append(record)
            super().write(record)

    monkeypatch.setattr(packed_rows, "ArrayRecordWriter", Writer)
    monkeypatch.setattr(packed_rows, "_BLOCK_TOKENS", 10)
    for N in (3, T_last):
        rng, path, num_written = np.random.default_rng(N), tmp_path / str(N), 0
        lengths = rng.integers(0, 9, 20)
        ends = np.cumsum(lengths)
        tokens = rng.integers(1 << 16, size=ends[-1]).astype("<u2")
        mask = rng.integers(2, size=ends[-1]).astype("u1")
        writer = packed_rows.ShardWriter(path, N, tokens.dtype, masked=True)
        written.clear()
        for end, length in zip(ends, lengths, strict=True):
            writer.add(tokens[end - length : end], mask[end - length : end])
            if end - num_written * N > max(N, 10):
                num_written = (end - 1) // N
            assert len(written) == num_written
        assert num_written > 2
        separate = rng.integers(1 << 16, size=N + 1).astype("<u2"), np.ones(N + 1, "u1")
        writer.add_row(*separate)
        shard = writer.close(fill=7)
        stream_rows = -(-(ends[-1] - 1) // N)
        assert shard == (stream_rows + 1, path.stat().st_size) and stream_rows * N + 1 > ends[-1]
        padding = stream_rows * N + 1 - ends[-1]
        tokens, mask = np.append(tokens, np.full(padding, 7)), np.append(mask, np.zeros(padding))
        rows = [(tokens[i : i + N + 1], mask[i : i + N + 1]) for i in range(0, stream_rows * N, N)]
        rows.insert(num_written, separate)
        heads = packed_rows.heads(packed_rows.dtypes(np.dtype("<u2"), True), N + 1)
        assert written == [
            heads["mask"] + m.astype("u1").tobytes() + heads["tokens"] + t.astype("<u2").tobytes()
            for t, m in rows
        ]
    writer = packed_rows.ShardWriter(tmp_path / "none", T_last, tokens.dtype)
    writer.add(tokens[:1])
    assert writer.close(fill=7) == (0, 0) and not (tmp_path / "none").exists()


@pytest.fixture
def opened(monkeypatch):
    """Names of the shards opened so far, and how many were open at once."""
    lock, counts = threading.Lock(), dict(names=[], now=0, most=0)

    class Counted(shards.ArrayRecordReader):
        def __init__(self, path, *args, **kwargs):
            super().__init__(path, *args, **kwargs)
            with lock:
                counts["names"].append(os.path.basename(path))
                counts["now"] += 1
                counts["most"] = max(counts["most"], counts["now"])

        def close(self):
            with lock:
                counts["now"] -= 1
            super().close()

    monkeypatch.setattr(shards, "ArrayRecordReader", Counted)
    return counts


def test_a_row_opens_its_shard_and_no_other(dataset, written, opened):
    _, expected_NT = written
    rows = dataset.rows("train")
    assert len(rows) == len(expected_NT) and not opened["names"]
    assert rows[0]["tokens"].dtype == np.uint16
    np.testing.assert_array_equal(rows[len(rows) - 1]["tokens"], expected_NT[-1])
    assert opened["names"] == [packed_rows.shard_name("train", i, SHARDS) for i in (1, 38)]
    np.testing.assert_array_equal(np.stack([row["tokens"] for row in rows]), expected_NT)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[index]


@pytest.mark.parametrize("limit", quick.only([3], [1, 3, 100]))
def test_rows_in_any_order_from_several_threads_with_few_readers(
    dataset, written, opened, monkeypatch, limit
):
    _, expected_NT = written
    monkeypatch.setattr(shards, "max_readers", lambda: limit)
    rows = dataset.rows("train")

    def read(seed):
        order = np.random.default_rng(seed).integers(len(rows), size=200)
        np.testing.assert_array_equal(rows_of(rows, order), expected_NT[order])
        index = int(order[0])
        np.testing.assert_array_equal(rows[index]["tokens"], expected_NT[index])

    with futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(16)))
    assert opened["most"] == min(limit, SHARDS - 4)
    assert len(set(opened["names"])) == SHARDS - 4
    assert (len(opened["names"]) == SHARDS - 4) == (limit > SHARDS)


def test_the_shard_unused_for_longest_is_closed(dataset, opened, monkeypatch):
    monkeypatch.setattr(shards, "max_readers", lambda: 2)
    rows = dataset.rows("train")
    first = np.cumsum(rows._rows) - rows._rows  # row of each shard
    for shard in (1, 2, 1, 3, 1, 2):
        rows[int(first[shard])]
    names = [packed_rows.shard_name("train", i, SHARDS) for i in (1, 2, 3, 2)]
    assert opened["names"] == names


def test_rows_that_take_long_are_read_at_once(dataset, written, monkeypatch):
    """A folder's rows are read concurrently only if the previous reads were slow."""
    barrier, threads = threading.Barrier(8), set()

    class Reader(shards.ArrayRecordReader):
        def read(self, *args):
            threads.add(threading.current_thread())
            if wait and not barrier.broken:
                barrier.wait(20)
            return super().read(*args)

    monkeypatch.setattr(shards, "ArrayRecordReader", Reader)
    rows, indices, wait = dataset.rows("train"), range(0, 80, 2), False

    def read(count_as_slow):
        threads.clear()
        monkeypatch.setattr(shards, "_SLOW_SECONDS", 0 if count_as_slow else 1e9)
        np.testing.assert_array_equal(rows_of(rows, indices), written[1][indices])
        return len(threads)

    assert [read(False), read(True)] == [1, 1]
    wait = True
    assert read(False) >= 8
    wait = False
    assert read(False) == 1


def test_rows_that_nobody_has_leave_nothing_open(dataset):
    """Closes files by reference counts: the garbage collector would leave hundreds open."""
    opened = []
    for _ in range(2):
        rows = dataclasses.replace(dataset).rows("train")
        rows_of(rows, range(len(rows)))
        opened.append(weakref.ref(rows._readers))
        gc.disable()
        del rows
        assert [ref() for ref in opened] == [None] * len(opened)
        gc.enable()


def test_a_data_set_is_told_by_its_vocabulary_and_some_rows_of_each_split(dataset, written):
    """The digest is stored in workdirs, so it must not change."""
    tokens = sorted(dataset.tokenizer.vocabulary().items(), key=lambda item: item[1])
    digest = hashlib.sha256(json.dumps(dict(tokens)).encode())
    count = len(written[1])
    rows = written[1][[i * (count - 1) // 31 for i in range(32)]]
    for split in ("train", "validation"):
        digest.update(f"{split} {count} (32, 6)".encode() + rows.astype("<i4").tobytes())
    assert dataset.digest == digest.hexdigest()[:20]


def test_evaluations_share_what_is_open(dataset, opened):
    for _ in range(3):
        for _ in loader.validation_batches(dataset, sequence_length=T, batch_size=16):
            pass
    assert len(opened["names"]) == SHARDS - 4


def test_readers_leave_files_to_others(monkeypatch):
    def limit(files):
        monkeypatch.setattr(shards.resource, "getrlimit", lambda _: (files, -1))

    for files, expected in ((1024, 256), (256, 64), (2, 1), (1 << 20, 256)):
        limit(files)
        assert shards.max_readers() == expected
    limit(shards.resource.RLIM_INFINITY)
    assert shards.max_readers() == 256


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_rows_that_tfds_wrote_are_read(tmp_path, dtype):
    import tensorflow_datasets as tfds

    expected_NT = np.random.default_rng(0).integers(1 << 16, size=(20, T + 1)).astype(dtype)
    tokens = tfds.features.Tensor(shape=(T + 1,), dtype=dtype, encoding="bytes")

    class PackedRows(tfds.core.ShardBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(manifest.ROWS_VERSION)

        def _info(self):
            features = tfds.features.FeaturesDict({"tokens": tokens})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _shard_iterators_per_split(self, dl_manager):
            del dl_manager

            def shard(rows):
                return lambda: ((i, {"tokens": expected_NT[i]}) for i in rows)

            return {"train": [shard(range(9)), shard(range(9, 20))]}

    PackedRows(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    rows = shards.PackedRows(tmp_path / ROWS, "train", shards.read_description(tmp_path / ROWS))
    assert rows[3]["tokens"].dtype == dtype
    np.testing.assert_array_equal(rows_of(rows, range(20)), expected_NT)


class Virtual:
    """A data set whose row i holds token i."""

    sequence_length, path, in_bucket = 1, pathlib.PurePath("nowhere"), False

    def __init__(self, count):
        self.num_rows = lambda split: count

    def rows(self, split):
        return self

    def __getitems__(self, indices):
        return [{"tokens": np.array([i, 0])} for i in indices]


def test_the_order_is_that_of_grains_own_source():
    """Runs resume on the order of early versions, which shuffled rows instead of indices."""
    count = 1009
    keys = dict(sequence_length=1, batch_size=16, seed=11)
    order = take(loader.train_batches(Virtual(count), position=0, **keys), 130)[..., 0]
    source = grain.MapDataset.source(list(range(count))).seed(11).shuffle().repeat()
    assert order.ravel().tolist() == [source[i] for i in range(130 * 16)]


def test_rows_with_a_mask_come_back_and_tfds_reads_them(tmp_path, small_dataset):
    """The loader inverts the bits of masked tokens; these tokens have four bytes."""
    import tensorflow_datasets as tfds

    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(300, size=4 * T + 3).astype("<u4"), rng.integers(2, size=4 * T + 3)
    folder = tmp_path / ROWS
    folder.mkdir(parents=True)
    written = {}
    for split, fill in dict(train=None, validation=7).items():
        path = folder / packed_rows.shard_name(split, 0, 1)
        writer = packed_rows.ShardWriter(path, T, tokens.dtype, masked=True)
        for part in (slice(0, 9), slice(9, None)):
            writer.add(tokens[part], mask[part].astype("u1"))
        written[split] = [writer.close(fill)]
    assert [written[split][0].rows for split in written] == [4, 5]
    packed_rows.describe(folder, written, T + 1, tokens.dtype, masked=True)
    shutil.copy(small_dataset.path / manifest.TOKENIZER, tmp_path)
    config = small_dataset.info["config"] | dict(sequence_length=T)
    splits = {split: {"rows": shard.rows} for split, (shard,) in written.items()}
    info = small_dataset.info | dict(config=config, splits=splits, masked=True)
    manifest.write(tmp_path, info, manifest.digests(tmp_path))
    dataset = loader.open_dataset(tmp_path)
    expected = [(tokens[i * T : i * T + T + 1], mask[i * T : i * T + T + 1]) for i in range(4)]
    tfds_rows = tfds.builder_from_directory(folder).as_data_source("train")
    for i, (row, row_mask) in enumerate(expected):
        for read in (tfds_rows[i], dataset.rows("train")[i]):
            np.testing.assert_array_equal(read["tokens"], row)
            np.testing.assert_array_equal(read["mask"], row_mask)
    keys = dict(sequence_length=T, batch_size=5)
    (batch,) = loader.validation_batches(dataset, **keys)
    rows = np.where(batch < 0, ~batch, batch)
    last = [*tokens[4 * T :], *[7] * (T - 2)], [*mask[4 * T :], *[0] * (T - 2)]
    np.testing.assert_array_equal(rows, [row for row, _ in (*expected, last)])
    np.testing.assert_array_equal(batch >= 0, [row_mask for _, row_mask in (*expected, last)])
    assert 0 < (batch < 0).sum() < batch.size
