"""Tokens per second of the input pipeline alone, and seconds to prepare the embedded corpus.

    python -m experiments.input_benchmark [--batch_size=32 --sequence_length=256 --seconds=5]

Prepares into a new temporary folder (cold), asks for the same again (warm), then reads batches and
throws them away.
Prints a table, and as last line the same as one line of JSON.
"""

import itertools
import json
import os
import tempfile
import time

from absl import app
from absl import flags

from kvjax.data import config as config_lib
from kvjax.data import loader
from kvjax.data import prepare

_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "rows in a batch", lower_bound=1)
_SEQUENCE_LENGTH = flags.DEFINE_integer(
    "sequence_length", 256, "T, targets in a row", lower_bound=1
)
_SECONDS = flags.DEFINE_float("seconds", 5.0, "how long to read", lower_bound=0.1)
_WARMUP_BATCHES = 20


def _prepare_seconds(config: config_lib.DataConfig) -> float:
    start = time.perf_counter()
    prepare.prepare(config)
    return time.perf_counter() - start


def _tokens_per_second(dataset: loader.PackedDataset) -> float:
    """Targets a second of `train_batches`, after a warm-up, over at least `--seconds`."""
    batches = loader.train_batches(
        dataset,
        sequence_length=_SEQUENCE_LENGTH.value,
        batch_size=_BATCH_SIZE.value,
        seed=0,
        position=0,
    )
    for _ in itertools.islice(batches, _WARMUP_BATCHES):
        pass
    start, tokens = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < _SECONDS.value:
        tokens += next(batches)[:, 1:].size
    return tokens / seconds


def main(argv: list[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"flags only, not {argv[1:]}.")
    with tempfile.TemporaryDirectory() as folder:
        config = config_lib.DataConfig(directory=folder, sequence_length=_SEQUENCE_LENGTH.value)
        figures = {
            "prepare_cold_seconds": round(_prepare_seconds(config), 2),
            "prepare_warm_seconds": round(_prepare_seconds(config), 3),
        }
        start = time.perf_counter()
        dataset = loader.open_dataset(prepare.prepare(config))
        figures["open_seconds"] = round(time.perf_counter() - start, 3)
        figures["tokens_per_second"] = round(_tokens_per_second(dataset))
    figures |= {
        "batch_size": _BATCH_SIZE.value,
        "sequence_length": _SEQUENCE_LENGTH.value,
        "cores": os.cpu_count(),
    }
    for name, figure in figures.items():
        print(f"{name:24}{figure:>14,}")
    print(json.dumps(figures))


if __name__ == "__main__":
    app.run(main)
