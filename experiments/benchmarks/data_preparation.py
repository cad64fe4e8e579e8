"""What preparing text takes: rates, memory of a worker, room for what is under way; and from that
the hours of a corpus of the papers' size.

    python -m experiments.benchmarks.data_preparation [--megabytes=100,1000] [--workers=2] [--save]

The text is the embedded corpus, document by document, again and again with other numbers in it, as
JSON lines in a temporary folder. Memory is the proportional set size of the largest worker at its
highest. Room is what parts under way take at most, beside the rows that are done: the largest
part's shards for each worker. Prints two tables. Needs Linux.
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

from experiments import record
from experiments.benchmarks import contender
from kvjax.data import (
    config as config_lib,
    manifest,
    parts,
    preparation,
    preparation_estimate,
    sources,
)
from kvjax.foundation import command_line, lists, progress
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.configuration import at_least, between
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

# FineWeb-Edu's sample-100BT: so many tokens of GPT-2's vocabulary. Ours makes about as many.
FINEWEB_TOKENS = 100e9
MACHINES = {"2 cores": 2, "32 cores": 32, "224 cores": 224, "50 Beam workers of 4 cores": 200}
_PREPARE = "import sys; from kvjax.data import prepare; prepare.main(sys.argv[1:])"


def write_corpus(path: pathlib.Path, size: int) -> int:
    """Writes about so many bytes of documents as JSON lines; their text's bytes."""
    config, written = config_lib.DataConfig(), 0
    texts = [piece.text for split in sources.SPLITS for piece in sources.pieces(config, split)]
    with open(path, "w") as file:
        for number, text in enumerate(itertools.cycle(texts)):
            if written >= size:
                return written
            copy = 1000 + number // len(texts)  # as many tokens in each, whatever the size
            text = text.replace(" the ", f" the {copy} ")
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written += len(text.encode())


class _Watch(threading.Thread):
    """The most memory of any worker while a process runs."""

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
    """Prepares a corpus of about so many bytes in processes of their own; figures by name."""
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
    said, _ = process.communicate()
    if process.returncode:
        raise UserError(
            f"--megabytes: preparing {size / 1e6:.0f} MB ended with an error, see above"
        )
    seconds = time.perf_counter() - begun
    prepared = pathlib.Path(said.splitlines()[-1])
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
    """Bytes of its shards, of both splits."""
    sizes = collections.Counter()
    for shard in prepared.rglob("*.array_record-*"):
        sizes[shard.name.partition("array_record")[2]] += shard.stat().st_size
    return max(sizes.values())


def hours(found: preparation_estimate.Estimate) -> dict[str, float]:
    """Hours for FineWeb-Edu's sample, by machine, as --plan would say at this text's rates."""
    text_bytes = FINEWEB_TOKENS * found.text_bytes / found.tokens
    count = int(text_bytes // parts.PART_BYTES)
    large = dataclasses.replace(found, text_bytes=text_bytes, parts=count)
    return {name: large.seconds(workers) / 3600 for name, workers in MACHINES.items()}


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--megabytes", default="100,1000", help="sizes of the text, comma-separated (100,1000)")
    add("--workers", type=int, default=2, help="processes that tokenize (2)")
    add("--vocab_size", type=int, default=32_768, help="learned from the corpus (32768)")
    add("--sequence_length", type=int, default=2048, help="T, targets in a row (2048)")
    add("--save", action="store_true", help="write experiments/results/data_preparation.json")
    parser.add_output()
    options = parser.parse(arguments)
    sizes = lists.integers("--megabytes", options.megabytes)
    for size in sizes:
        between("--megabytes", size, 10, 100_000)
    at_least("--workers", options.workers, 1)
    at_least("--sequence_length", options.sequence_length, 1)
    between("--vocab_size", options.vocab_size, 257, 200_000)
    record.check(options.save)
    out, rows, results = Output(options), [], []
    with tempfile.TemporaryDirectory() as temporary, progress.waiting("preparing") as doing:
        folder = pathlib.Path(temporary)
        tokenizer = _tokenizer(folder, options.vocab_size)
        for size in sizes:
            doing.now(f"preparing {size} MB")
            found = measure(
                folder, tokenizer, size * 10**6, options.workers, options.sequence_length
            )
            results.append(found)
            rows.append(
                (
                    f"{found['text_bytes'] / 1e6:,.0f} MB",
                    found["parts"],
                    f"{found['seconds']:.0f}",
                    f"{found['planned_seconds']:.0f}",
                    f"{found['bytes_per_second'] / 1e6:.1f}",
                    f"{found['tokens_per_second'] / 1e6:.2f}M",
                    f"{found['worker_bytes'] / 1e6:,.0f} MB",
                    f"{found['room_bytes'] / 1e6:,.1f} MB",
                )
            )
    header = (
        "text",
        "parts",
        "s",
        "s planned",
        "MB/s",
        "tokens/s",
        "a worker",
        "under way",
    )
    out.say(f"{options.workers} processes, T = {options.sequence_length}:")
    out.table(header, rows)
    planned = preparation_estimate.Estimate(**results[-1]["estimate"])
    step = planned.reading + planned.encoding + planned.writing
    shares = {name: getattr(planned, name) / step for name in ("reading", "encoding", "writing")}
    said = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
    out.say(f"\nA core: {planned.rate / 1e6:.1f} MB/s, of its time {said}.")
    table = hours(planned)
    out.table(("100B tokens on", "h"), [(name, f"{h:,.2g}") for name, h in table.items()])
    result = dict(workers=options.workers, sizes=results, shares=shares, hours=table)
    record.record("data_preparation", result, out, save=options.save)


def _tokenizer(folder: pathlib.Path, vocab_size: int) -> str:
    """The path of a tokenizer that learned from the embedded corpus."""
    from kvjax.data import tokenizer

    config = config_lib.DataConfig()
    texts = [piece.text for piece in sources.pieces(config, "train")]
    path = folder / "tokenizer.json"
    tokenizer.train(texts, vocab_size).save(path)
    return str(path)


if __name__ == "__main__":
    command_line.run(main)
