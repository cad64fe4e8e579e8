"""Measures data preparation: rates, memory of a worker, disk; estimates the hours of 100B tokens.

    python -m experiments.benchmarks.data_preparation [--megabytes=100,1000] [--workers=2] [--save]

The text is the embedded corpus, repeated with a different number inserted into each copy, as JSON
lines in a temporary folder. Memory is the largest proportional set size of any worker. "Unfinished"
is the disk space that unfinished parts need in addition to finished rows: one times the largest
part's shards per worker. Prints two tables. Needs Linux.
"""

import collections
import dataclasses
import itertools
import json
import pathlib
import subprocess
import tempfile
import threading
import time

from etils import epath
import psutil

from experiments.benchmarks import contender, runner
from experiments.benchmarks.runner import Option
from kvjax.data import (
    config as config_lib,
    manifest,
    parts,
    preparation,
    preparation_estimate,
    sources,
    tokenizer as tokenizer_lib,
)
from kvjax.foundation import command_line, lists, progress
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

# FineWeb-Edu's sample-100BT in GPT-2's vocabulary; the one trained here gives about as many.
FINEWEB_TOKENS = 100e9
MACHINES = {"2 cores": 2, "32 cores": 32, "224 cores": 224, "50 Beam workers of 4 cores": 200}
_PREPARE = "import sys; from kvjax.data import prepare; prepare.main(sys.argv[1:])"


def write_corpus(path: pathlib.Path, size: int) -> int:
    """Writes about `size` bytes of documents as JSON lines; returns the bytes of their text."""
    config, written = config_lib.DataConfig(), 0
    texts = [piece.text for split in sources.SPLITS for piece in sources.pieces(config, split)]
    with open(path, "w") as file:
        for number, text in enumerate(itertools.cycle(texts)):
            if written >= size:
                return written
            copy = 1000 + number // len(texts)  # four digits, so that copies have equal lengths
            text = text.replace(" the ", f" the {copy} ")
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written += len(text.encode())


class _Watch(threading.Thread):
    """Records the largest memory of any worker while a process runs."""

    def __init__(self, process: psutil.Process):
        super().__init__(daemon=True)
        self._process, self.memory = process, 0

    def run(self) -> None:
        while self._process.is_running():
            try:
                workers = self._process.children(recursive=True) or [self._process]
                self.memory = max(self.memory, *(w.memory_full_info().pss for w in workers))
            except (psutil.Error, FileNotFoundError):
                pass
            time.sleep(0.05)


def measure(folder: pathlib.Path, tokenizer: str, size: int, workers: int, length: int) -> dict:
    """Prepares a corpus of about `size` bytes with worker processes; returns the figures."""
    corpus, output = folder / f"{size}.jsonl", folder / f"prepared-{size}"
    written = write_corpus(corpus, size)
    keys = dict(source=str(corpus), directory=str(output), tokenizer=tokenizer)
    config = config_lib.DataConfig(**keys, sequence_length=length)
    planned = preparation_estimate.estimate(
        preparation.inspect_sources(config, shown=False), workers
    )
    arguments = [*config.command().split()[3:], f"--workers={workers}"]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*contender.python(_PREPARE), *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    watch = _Watch(psutil.Process(process.pid))
    watch.start()
    printed, _ = process.communicate()
    if process.returncode:
        raise UserError(
            f"--megabytes: preparing {size / 1e6:.0f} MB ended with an error, see above"
        )
    seconds = time.perf_counter() - begun
    prepared = pathlib.Path(printed.splitlines()[-1])
    info = manifest.read(epath.Path(prepared))
    tokens = sum(split["tokens"] for split in info["splits"].values())
    corpus.unlink()
    return dict(
        text_bytes=written,
        parts=planned.parts,
        seconds=seconds,
        planned_seconds=planned.seconds(workers),
        bytes_per_second=written / seconds,
        tokens_per_second=tokens / seconds,
        worker_bytes=watch.memory,
        room_bytes=workers * _largest_part(prepared),
        estimate=dataclasses.asdict(planned),
    )


def _largest_part(prepared: pathlib.Path) -> int:
    """Returns the bytes of the largest part's shards, of both splits."""
    sizes = collections.Counter()
    for shard in prepared.rglob("*.array_record-*"):
        sizes[shard.name.partition("array_record")[2]] += shard.stat().st_size
    return max(sizes.values())


def hours(measured: preparation_estimate.Estimate) -> dict[str, float]:
    """Returns hours for FineWeb-Edu's sample by machine, as --plan estimates at these rates."""
    text_bytes = FINEWEB_TOKENS * measured.text_bytes / measured.tokens
    count = int(text_bytes // parts.PART_BYTES)
    large = dataclasses.replace(measured, text_bytes=text_bytes, parts=count)
    return {name: large.seconds(workers) / 3600 for name, workers in MACHINES.items()}


def _tokenizer(folder: pathlib.Path, vocab_size: int) -> str:
    """Trains a tokenizer on the embedded corpus; returns its path."""
    config = config_lib.DataConfig()
    texts = [piece.text for piece in sources.pieces(config, "train")]
    path = folder / "tokenizer.json"
    tokenizer_lib.train(texts, vocab_size).save(path)
    return str(path)


def _measure(options: runner.Options) -> dict:
    sizes, keys = [], (options.workers, options.sequence_length)
    with tempfile.TemporaryDirectory() as temporary, progress.waiting("preparing") as doing:
        folder = pathlib.Path(temporary)
        tokenizer = _tokenizer(folder, options.vocab_size)
        for size in options.megabytes:
            doing.now(f"preparing {size} MB")
            sizes.append(measure(folder, tokenizer, size * 10**6, *keys))
    planned = preparation_estimate.Estimate(**sizes[-1]["estimate"])
    step = planned.reading + planned.encoding + planned.writing
    shares = {name: getattr(planned, name) / step for name in ("reading", "encoding", "writing")}
    return dict(workers=options.workers, sizes=sizes, shares=shares, hours=hours(planned))


_COLUMNS = {
    "text": lambda row: f"{row['text_bytes'] / 1e6:,.0f} MB",
    "parts": "{parts}",
    "s": "{seconds:.0f}",
    "s planned": "{planned_seconds:.0f}",
    "MB/s": lambda row: f"{row['bytes_per_second'] / 1e6:.1f}",
    "tokens/s": lambda row: f"{row['tokens_per_second'] / 1e6:.2f}M",
    "a worker": lambda row: f"{row['worker_bytes'] / 1e6:,.0f} MB",
    "unfinished": lambda row: f"{row['room_bytes'] / 1e6:,.1f} MB",
}


def _show(result: dict, out: Output) -> None:
    out.say(f"{result['workers']} processes:")
    out.table(*runner.table(_COLUMNS, result["sizes"]))
    rate = preparation_estimate.Estimate(**result["sizes"][-1]["estimate"]).rate
    shares = ", ".join(f"{name} {share:.0%}" for name, share in result["shares"].items())
    out.say(f"\nA core: {rate / 1e6:.1f} MB/s, of its time {shares}.")
    out.table(("100B tokens on", "h"), [(name, f"{h:,.2g}") for name, h in result["hours"].items()])


main = runner.benchmark(
    "data_preparation",
    __doc__,
    dict(
        megabytes=Option(
            "100,1000", "sizes of the text", parse=lists.integers, least=10, most=100_000
        ),
        workers=Option(2, "processes that tokenize", least=1),
        vocab_size=Option(32_768, "learned from the corpus", least=257, most=200_000),
        sequence_length=Option(2048, "T, targets in a row", least=1),
    ),
    _measure,
    _show,
    start=lambda: None,
)

if __name__ == "__main__":
    command_line.run(main)
