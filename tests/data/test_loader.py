"""Batches depend on position and seed only, whatever the number of processes and threads."""

import collections
import dataclasses
import itertools
import json
import shutil
import tracemalloc

import grain
from hypothesis import given, settings, strategies as st
import jax
import numpy as np
import pytest

from kvjax.data import loader, prepare
from kvjax.foundation.errors import DataError, UserError
from tests.data.corpora import damage

T = 16


def take(iterator, count):
    """int32 [count, rows, T + 1]."""
    return np.stack(list(itertools.islice(iterator, count)))


def train(dataset, **keys):
    """Training batches; by default of 12 rows, from the start."""
    keys = dict(sequence_length=T, batch_size=12, seed=3, position=0) | keys
    return loader.train_batches(dataset, **keys)


@pytest.fixture(scope="module")
def stream_NT(small_dataset):
    """int32 [rows, T + 1]: three epochs and more, one row after another, in one process."""
    rows = 3 * small_dataset.num_rows("train") + 48
    return take(train(small_dataset, batch_size=1), rows)[:, 0]


def test_an_epoch_has_every_row_once_and_the_next_another_order(small_dataset, stream_NT):
    N = small_dataset.num_rows("train")
    source = small_dataset.rows("train")
    expected = sorted(tuple(source[i]["tokens"]) for i in range(N))
    epochs = [[tuple(row) for row in stream_NT[e * N : (e + 1) * N]] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == expected
        assert epoch != expected
    assert epochs[0] != epochs[1] != epochs[2]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_batches_depend_on_position_only(small_dataset, stream_NT, data):
    batch_size = data.draw(st.sampled_from([4, 6, 12]), "batch_size")
    process_count = data.draw(
        st.sampled_from([n for n in (1, 2, 3, 4, 6) if batch_size % n == 0]), "process_count"
    )
    first = data.draw(st.integers(0, (len(stream_NT) - 36) // batch_size), "first batch")
    threads = data.draw(st.sampled_from([0, 1, 8]), "threads")
    with pytest.MonkeyPatch.context() as patch:
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads * 2)
        patch.setattr(loader, "_READ_OPTIONS", options)
        for p in range(process_count):
            batches = train(
                small_dataset,
                batch_size=batch_size,
                position=first * batch_size,
                process_index=p,
                process_count=process_count,
            )
            for b, batch in enumerate(take(batches, 3), start=first):
                assert batch.dtype == np.int32
                expected = stream_NT[b * batch_size : (b + 1) * batch_size][p::process_count]
                np.testing.assert_array_equal(batch, expected)


def test_far_positions_are_immediate_and_seeds_differ(small_dataset):
    far = take(train(small_dataset, position=12 * 10**9), 2)
    np.testing.assert_array_equal(far, take(train(small_dataset, position=12 * 10**9), 2))
    assert not np.array_equal(take(train(small_dataset), 2), take(train(small_dataset, seed=4), 2))


@pytest.mark.parametrize(("batch_size", "process_count"), [(4, 1), (7, 1), (6, 2), (64, 4)])
@pytest.mark.parametrize("limit", [0, 5, 10**6])
def test_validation_is_every_row_in_order_then_bos(small_dataset, batch_size, process_count, limit):
    batches = [
        list(
            loader.validation_batches(
                small_dataset,
                sequence_length=T,
                batch_size=batch_size,
                process_index=p,
                process_count=process_count,
                limit=limit,
            )
        )
        for p in range(process_count)
    ]
    source = small_dataset.rows("validation")
    source = [source[i] for i in range(min(len(source), limit or len(source)))]
    count = -(-len(source) // batch_size)
    assert [len(b) for b in batches] == [count] * process_count
    rows_NT = np.zeros((count, batch_size, T + 1), np.int32)
    for p in range(process_count):
        rows_NT[:, p::process_count] = batches[p]
    rows_NT = rows_NT.reshape(-1, T + 1)
    np.testing.assert_array_equal(
        rows_NT[: len(source)], [source[i]["tokens"] for i in range(len(source))]
    )
    assert (rows_NT[len(source) :] == small_dataset.tokenizer.bos_id).all()
    assert batches[0][0].dtype == np.int32
    counted = small_dataset.token_bytes[rows_NT[:, 1:]].sum()
    all_bytes = small_dataset.info["splits"]["validation"]["bytes"]
    assert 0 < counted < all_bytes if limit == 5 else counted == all_bytes


def test_shorter_sequences_are_the_start_of_each_row_with_one_warning(
    small_dataset, stream_NT, capsys
):
    batches = take(train(small_dataset, sequence_length=5), 3)
    np.testing.assert_array_equal(batches.reshape(-1, 6), stream_NT[:36, :6])
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("WARNING: sequence_length=5 is less than the 16 of the rows")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            dict(sequence_length=17),
            r"sequence_length=17 .* at most the 16 .*kvjax\.data\.prepare .*--sequence_length=17",
        ),
        (dict(sequence_length=0), "sequence_length=0 must be at least 1"),
        (dict(position=6), "position=6 must be a non-negative multiple of batch_size=12"),
        (dict(position=-12), "position=-12 must be a non-negative multiple"),
        (dict(process_count=5), "batch_size=12 must be a positive multiple of process_count=5"),
        (dict(batch_size=0), "batch_size=0 must be a positive multiple"),
        (dict(batch_size=10**6), r"train split has \d+ rows, fewer than batch_size=1000000"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(small_dataset, keys, message):
    with pytest.raises(ValueError, match=message):
        train(small_dataset, **keys)
    keys = {k: v for k, v in keys.items() if k not in ("position", "seed")}
    if keys and "rows, fewer than batch_size" not in message:
        with pytest.raises(ValueError, match=message):
            loader.validation_batches(
                small_dataset, **(dict(sequence_length=T, batch_size=12) | keys)
            )


def test_folder_without_data_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no dataset\.json.*python -m kvjax\.data\.prepare"
    ):
        loader.open_dataset(tmp_path)


def test_other_format_is_named(small_config, tmp_path):
    config = dataclasses.replace(small_config, directory=str(tmp_path))
    path = prepare.prepare(config)
    info = json.loads((path / "dataset.json").read_text()) | {"format_version": 0}
    del info["blake2b"]
    (path / "dataset.json").write_text(json.dumps(info))
    with pytest.raises(
        ValueError, match=r"has format 0, this code reads 1: .*--sequence_length=16"
    ):
        loader.open_dataset(path)


Device = collections.namedtuple("Device", "process_index id")


class Sharding:
    """A sharding with given ranges of rows for each device of each process."""

    def __init__(self, rows_by_process):
        self.rows_by_process = rows_by_process

    def devices_indices_map(self, shape):
        assert shape[1] == 1
        return {
            Device(process, i): (slice(*rows), slice(None))
            for process, devices in self.rows_by_process.items()
            for i, rows in enumerate(devices)
        }


@pytest.mark.parametrize(
    ("rows_by_process", "expected"),
    [
        ({0: [(0, 4), (4, 8)]}, [(0, 1)]),
        ({0: [(0, 2), (2, 4)], 1: [(4, 6), (6, 8)]}, [(0, 2), (1, 2)]),
        # Devices along the other axis first: the processes' ranges interleave.
        ({0: [(0, 2), (4, 6)], 1: [(2, 4), (6, 8)]}, [(0, 2), (1, 2)]),
        # A row is sharded within a process, or between two.
        ({0: [(0, 4), (0, 4)], 1: [(4, 8), (4, 8)]}, [(0, 2), (1, 2)]),
        ({0: [(0, 4)], 1: [(0, 4)], 2: [(4, 8)], 3: [(4, 8)]}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ({0: [(4, 8)], 1: [(0, 4)]}, [(1, 2), (0, 2)]),
        ({0: [(None, None)], 1: [(None, None)]}, [(0, 1), (0, 1)]),
    ],
)
def test_which_part_a_process_reads(monkeypatch, rows_by_process, expected):
    shares = []
    for process in rows_by_process:
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        shares.append(loader.share(Sharding(rows_by_process), 8))
    assert shares == expected


@pytest.mark.parametrize(
    "rows_by_process",
    [
        {0: [(0, 2), (2, 4)], 1: [(2, 4), (4, 6)], 2: [(6, 8), (4, 6)]},  # half of another's
        {0: [(0, 4)], 1: [(4, 6)], 2: [(6, 8)]},  # unequal
    ],
)
def test_parts_that_are_no_parts(rows_by_process):
    with pytest.raises(DataError, match="config.mesh: the devices of the processes hold"):
        loader.share(Sharding(rows_by_process), 8)


def test_the_part_of_a_process_that_is_alone():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "rest"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    assert loader.share(sharding, 8) == (0, 1)


def test_the_parts_of_a_huge_batch_cost_nothing():
    """Shares are computed before anything checks that a batch fits in memory."""
    rows = 10**9
    by_process = {0: [(0, rows // 2), (rows // 2, rows)]}
    tracemalloc.start()
    try:
        assert loader.share(Sharding(by_process), rows) == (0, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_rows_damaged_while_they_are_read_ahead_are_told(small_dataset, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(small_dataset.path, path)
    damage(*(path / "packed_rows/1.0.0").glob("*-train.*"), "flipped")
    with pytest.raises(UserError, match=f"^{path} is damaged: .*Move that folder away"):
        take(train(loader.open_dataset(path)), 1000)
