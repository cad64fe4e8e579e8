"""Tokens per second of the input pipeline alone, and seconds to prepare the embedded corpus.

    python -m experiments.benchmarks.input_benchmark [--batch_size=32] [--seconds=5]

Prepares into a new temporary folder (cold), asks for the same again (warm), then reads batches
and throws them away. Prints a table.
"""

import itertools
import lzma
import os
import tempfile
import time

from experiments import record
from kvjax.data import config as config_lib, loader, prepare, source_kinds
from kvjax.foundation import command_line, progress
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

_WARMUP_BATCHES = 20


def _prepare_seconds(config: config_lib.DataConfig) -> float:
    start = time.perf_counter()
    prepare.prepare(config)
    return time.perf_counter() - start


def _tokens_per_second(dataset: loader.PackedDataset, batch_size: int, seconds: float) -> float:
    """Targets a second of `train_batches`, after a warm-up, over at least so many seconds."""
    length = dataset.sequence_length
    options = dict(sequence_length=length, batch_size=batch_size, seed=0, position=0)
    batches = loader.train_batches(dataset, **options)
    for _ in itertools.islice(batches, _WARMUP_BATCHES):
        pass
    start, tokens = time.perf_counter(), 0
    while (taken := time.perf_counter() - start) < seconds:
        tokens += next(batches)[:, 1:].size
    return tokens / taken


def measure(config: config_lib.DataConfig, batch_size: int, seconds: float) -> dict:
    """Figures by name, of a config whose folder is empty."""
    figures = {
        "prepare_cold_seconds": round(_prepare_seconds(config), 2),
        "prepare_warm_seconds": round(_prepare_seconds(config), 3),
    }
    start = time.perf_counter()
    dataset = loader.open_dataset(prepare.prepare(config))
    figures["open_seconds"] = round(time.perf_counter() - start, 3)
    figures["tokens_per_second"] = round(_tokens_per_second(dataset, batch_size, seconds))
    shape = dict(batch_size=batch_size, sequence_length=config.sequence_length)
    return figures | shape | dict(cores=os.cpu_count())


def _check_batch(rows: int, length: int) -> None:
    """Raises a UserError for a batch with more tokens than the corpus has bytes."""
    text = sum(len(lzma.decompress(file.read_bytes())) for file in source_kinds.CORPUS.glob("*.xz"))
    if rows * length > text:
        raise UserError(
            f"--batch_size={rows} --sequence_length={length}: the embedded corpus has {text:,} "
            "bytes, which are not enough for one batch"
        )


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--batch_size", type=int, default=32, help="rows in a batch (32)")
    add("--sequence_length", type=int, default=256, help="T, targets in a row (256)")
    add("--seconds", type=float, default=5.0, help="how long to read (5)")
    parser.add_output()
    options = parser.parse(arguments)
    at_least("--batch_size", options.batch_size, 1)
    at_least("--sequence_length", options.sequence_length, 1)
    if not 0.1 <= options.seconds <= 3600:
        raise UserError(f"--seconds = {options.seconds}: must be from 0.1 to 3600")
    _check_batch(options.batch_size, options.sequence_length)
    out = Output(options)
    with tempfile.TemporaryDirectory() as folder:
        config = config_lib.DataConfig(directory=folder, sequence_length=options.sequence_length)
        with progress.waiting("preparing the corpus, and reading it"):
            figures = measure(config, options.batch_size, options.seconds)
    out.table(("figure", "value"), [(name, f"{figure:,}") for name, figure in figures.items()])
    record.record("input_benchmark", figures, out, save=False)


if __name__ == "__main__":
    command_line.run(main)
