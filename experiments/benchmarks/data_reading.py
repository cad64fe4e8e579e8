"""Measures reading of prepared data: the embedded corpus, many shards, a store with latency.

    python -m experiments.benchmarks.data_reading [--save] [--rows=50000000] [--shards=10000]

The embedded corpus is prepared into a temporary folder (cold), prepared again (warm), and read in
batches of 32 rows of 256 tokens.

The data set of many shards has tiny rows, and all its shards are links to one file. The file is in
the page cache, so the times are for finding, opening and decoding rows, and exclude the disk. A new
process opens the data set, takes a batch from the start and one from the middle, then reads for
--seconds. Its memory is reported without its imports.

Rows of 2048 tokens are read from two stores that answer with a latency: a folder, and a stand-in
for a bucket on this machine (without encryption or a limit of bandwidth). Settings differ in the
number of rows requested at once, of batches made at once, and of shards: with few shards all
readers stay open, with many most rows open a reader. Prints three tables. Needs Linux.
"""

from collections.abc import Iterator
import dataclasses
import itertools
import os
import pathlib
import shutil
import statistics
import tempfile
import threading
import time
from typing import NamedTuple
from unittest import mock

from etils import epath
import grain
import numpy as np
import psutil

from experiments.benchmarks import contender, object_store, runner
from experiments.benchmarks.runner import Option
from kvjax.data import (
    config as config_lib,
    loader,
    manifest,
    packed_rows,
    prepare,
    shards,
    tokenizer as tokenizer_lib,
)
from kvjax.foundation import command_line, progress
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

BATCH = 64  # rows
LATENCIES = (0.0, 0.005, 0.02)  # seconds before a store answers


class Setting(NamedTuple):
    """A store and the threads that read from it."""

    store: str
    rows_at_once: int
    batches_at_once: int = 1
    batches_ahead: int = 4


SETTINGS = (
    *(Setting(store, rows) for store in ("folder", "bucket") for rows in (1, shards.THREADS)),
    *(Setting("bucket", rows, 8, 16) for rows in (8, shards.THREADS, 2 * shards.THREADS)),
)
FEW, MANY = 64, 4096  # shards of rows of 2048 tokens
LENGTH, SHARD_ROWS, STORE_BATCH = 2048, 5000, 32
_READER = shards.ArrayRecordReader
_BUCKET = "gs://bucket"
_CHILD = dict(function="open_and_read", environment=dict(JAX_PLATFORMS="cpu"))


def embedded(seconds: float) -> dict:
    """Returns seconds to prepare and open the embedded corpus, and tokens per second of reading."""
    with tempfile.TemporaryDirectory() as folder, progress.waiting("reading the corpus"):
        config = config_lib.DataConfig(directory=folder, sequence_length=256)
        times = [time.perf_counter()]
        for _ in range(2):  # cold, warm
            prepared = prepare.prepare(config)
            times.append(time.perf_counter())
        dataset = loader.open_dataset(prepared)
        times.append(time.perf_counter())
        keys = {"sequence_length": 256, "batch_size": 32, "seed": 0, "position": 0}
        rate = 256 * _rows_per_second(loader.train_batches(dataset, **keys), seconds, warmup=20)
    cold, warm, opening = (round(end - start, 3) for start, end in itertools.pairwise(times))
    figures = {"prepare_cold_seconds": cold, "prepare_warm_seconds": warm, "open_seconds": opening}
    return figures | {"tokens_per_second": round(rate), "cores": os.cpu_count()}


def at_scale(rows: int, num_shards: int, repeats: int, seconds: float) -> dict:
    """Returns the medians of `open_and_read` over several processes, for a large data set."""
    with tempfile.TemporaryDirectory() as folder, progress.waiting("making many shards") as doing:
        path = pathlib.Path(folder) / "large"
        make(path, rows // num_shards, num_shards, sequence_length=1)
        results = []
        for i in range(repeats):
            doing.now(f"opening {num_shards:,} shards: {i + 1} of {repeats}")
            arguments = dict(path=os.fspath(path), rows=rows, seconds=seconds)
            results.append(contender.run(__spec__.name, arguments, **_CHILD))
            if "error" in results[-1]:
                raise UserError(f"opening {path}: {results[-1]['error']}")
    figures = {name: statistics.median(result[name] for result in results) for name in results[0]}
    return dict(rows=rows, shards=num_shards) | figures


def make(path: pathlib.Path, rows: int, num_shards: int, sequence_length: int) -> None:
    """Writes a data set of `num_shards` shards of `rows` rows each, all links to one file.

    Only every hundredth validation shard has rows, as if documents were long and few held out.
    """
    folder = path / manifest.ROWS / manifest.ROWS_VERSION
    folder.mkdir(parents=True)
    tokenizer = tokenizer_lib.byte_tokenizer()
    random = np.random.default_rng(0)
    tokens = random.integers(tokenizer.vocab_size, size=rows * sequence_length + 1)
    first_file = folder / packed_rows.shard_name("train", 0, num_shards)
    writer = packed_rows.ShardWriter(first_file, sequence_length, np.dtype("<u2"))
    writer.add(tokens.astype("<u2"))
    written = writer.close(fill=None)
    shards_by_split = dict(train=[written] * num_shards, validation=[])
    for i in range(num_shards):
        held_out = i % 100 == 0
        shards_by_split["validation"].append(written if held_out else packed_rows.Shard(0, 0))
        for split in ("train", "validation") if held_out else ("train",):
            file = folder / packed_rows.shard_name(split, i, num_shards)
            if not file.exists():
                _link(first_file, file)
    packed_rows.describe(folder, shards_by_split, sequence_length + 1, np.dtype("<u2"))
    tokenizer.save(epath.Path(path) / manifest.TOKENIZER)
    config = config_lib.DataConfig(
        tokenizer="byte", vocab_size=tokenizer.vocab_size, sequence_length=sequence_length
    )
    sizes = {
        split: sum(shard.rows for shard in of_split) for split, of_split in shards_by_split.items()
    }
    info = {
        "format_version": manifest.FORMAT_VERSION,
        "config": dataclasses.asdict(config),
        "tokenizer": {"sha256": ""},
        "xz_bits_per_byte": 8.0,
        "splits": {split: {"rows": size} for split, size in sizes.items()},
    }
    manifest.write(path, info, manifest.digests(path))


def _link(file: pathlib.Path, name: pathlib.Path) -> None:
    try:
        os.link(file, name)
    except OSError:  # the file system has no links, or limits their number
        shutil.copyfile(file, name)


def open_and_read(path: str, rows: int, seconds: float) -> dict:
    """Measures opening and reading: seconds, bytes of memory beyond imports, rows per second."""
    process = psutil.Process()

    def resident() -> int:
        return process.memory_info().rss

    before, start = resident(), time.perf_counter()
    dataset = loader.open_dataset(path)
    keys = dict(sequence_length=1, batch_size=BATCH, seed=0)
    batches = loader.train_batches(dataset, position=0, **keys)
    opened = time.perf_counter()
    next(batches)
    first = time.perf_counter()
    memory = resident() - before
    middle = loader.train_batches(dataset, position=rows // 2 // BATCH * BATCH, **keys)
    next(middle)
    jumped = time.perf_counter()
    rate = _rows_per_second(batches, seconds)
    return dict(
        open_seconds=round(opened - start, 3),
        first_batch_seconds=round(first - opened, 3),
        batch_in_the_middle_seconds=round(jumped - first, 3),
        resident_bytes_after_first_batch=memory,
        resident_bytes_after_reading=resident() - before,
        readers_at_most=shards.max_readers(),
        rows_per_second=round(rate),
    )


def _rows_per_second(batches: Iterator, seconds: float, warmup: int = 4) -> float:
    """Returns rows per second, over at least `seconds`, after `warmup` batches."""
    for _ in itertools.islice(batches, warmup):
        pass
    start, rows = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        rows += len(next(batches))
    return rows / elapsed


class _InBucket(loader.PackedDataset):
    """A data set whose rows are read from the stand-in for a bucket."""

    def rows(self, split: str) -> shards.PackedRows:
        folder = pathlib.PurePath(manifest.ROWS, manifest.ROWS_VERSION)
        description = shards.read_description(self.path / folder)
        return shards.PackedRows(f"{_BUCKET}/{self.path.name}/{folder}", split, description)


class _SlowReader(shards.ArrayRecordReader):
    """A reader of a local shard that waits before it opens and before each read."""

    seconds = 0.0

    def __init__(self, *args, **kwargs):
        time.sleep(self.seconds)
        super().__init__(*args, **kwargs)

    def read(self, *args):
        time.sleep(self.seconds)
        return super().read(*args)


def from_a_store(seconds: float) -> list[dict]:
    """Returns tokens/s of reading rows of 2048 tokens, by number of shards, setting and latency."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, progress.waiting("reading") as doing:
        buckets = pathlib.Path(folder)
        for num_shards in (FEW, MANY):
            path = buckets / _BUCKET.removeprefix("gs://") / str(num_shards)
            make(path, SHARD_ROWS, num_shards, sequence_length=LENGTH)
            rates = {setting: [] for setting in SETTINGS}
            for latency in LATENCIES:
                with object_store.process(buckets, latency):
                    for setting in SETTINGS:
                        where = f"{setting.store}, {setting.rows_at_once} rows at once"
                        doing.at(f"{num_shards} shards, {1000 * latency:.0f} ms, {where}")
                        rates[setting].append(round(_rate(path, setting, latency, seconds)))
            rows += [
                dict(store=setting.store, shards=num_shards)
                | setting._asdict()
                | dict(tokens_per_second=rates[setting])
                for setting in SETTINGS
            ]
    return rows


def _rate(path: pathlib.Path, setting: Setting, latency: float, seconds: float) -> float:
    dataset = loader.open_dataset(path)
    options = grain.ReadOptions(
        num_threads=setting.batches_at_once, prefetch_buffer_size=setting.batches_ahead
    )
    reader, name_of_options = _SlowReader, "_READ_OPTIONS"
    if setting.store == "bucket":  # its server waits, not the reader
        dataset = _InBucket(dataset.path, dataset.tokenizer, dataset.token_bytes, dataset.info)
        reader, name_of_options = _READER, "_BUCKET_READ_OPTIONS"
    keys = dict(sequence_length=LENGTH, batch_size=STORE_BATCH, seed=0, position=0)
    with (
        mock.patch.object(shards, "THREADS", setting.rows_at_once),
        mock.patch.object(shards, "ArrayRecordReader", reader),
        mock.patch.object(_SlowReader, "seconds", latency),
        mock.patch.object(loader, name_of_options, options),
    ):
        batches = loader.train_batches(dataset, **keys)
        rate = _rows_per_second(batches, seconds)
        close(batches)
    return LENGTH * rate


def close(batches: Iterator) -> None:
    """Ends prefetch threads; if the store ended first, Google's client would retry for long."""
    batches.close()
    for thread in threading.enumerate():
        if thread.name.startswith("grain-prefetch"):
            thread.join()


_KEYS = ("store", "shards", "rows_at_once", "batches_at_once")


def _show(result: dict, out: Output) -> None:
    for figures in (result["embedded"], result["opened"]):
        out.table(("figure", "value"), [(name, f"{value:,}") for name, value in figures.items()])
    header = [key.replace("_", " ") for key in _KEYS]
    header += [f"tokens/s at {1000 * latency:.0f} ms" for latency in LATENCIES]
    cells = [
        (*(row[key] for key in _KEYS), *(f"{rate:,}" for rate in row["tokens_per_second"]))
        for row in result["from_a_store"]
    ]
    out.table(header, cells)


def _check(options: runner.Options) -> None:
    most = 1 << 32  # limit of Grain's permutations
    if options.rows % options.shards or not 2 * BATCH <= options.rows < most:
        raise UserError(
            f"--rows = {options.rows}: must be a multiple of --shards = {options.shards}, from "
            f"{2 * BATCH} to {most - 1}"
        )


def _measure(options: runner.Options) -> dict:
    return dict(
        embedded=embedded(options.seconds),
        opened=at_scale(options.rows, options.shards, options.repeats, options.seconds),
        latencies_s=LATENCIES,
        from_a_store=from_a_store(options.seconds),
    )


main = runner.benchmark(
    "data_reading",
    __doc__,
    dict(
        rows=Option(50_000_000, "rows of the large data set"),
        shards=Option(10_000, "shards of the large data set", least=1),
        repeats=Option(3, "processes that open it, for medians", least=1),
        seconds=Option(1.0, "seconds of reading at each setting", least=0.1, most=3600),
    ),
    _measure,
    _show,
    check=_check,
    start=lambda: None,
)

if __name__ == "__main__":
    command_line.run(main)
