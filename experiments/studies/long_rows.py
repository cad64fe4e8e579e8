"""LRKV and others on longer rows: bits per byte by position (LRKV's blog, without figures).

    python -m experiments.studies.long_rows [--seeds=3] [--save]

Trains tiny configs on rows of 256 and of 1,024 tokens, with equal tokens in total, and evaluates
them on held-out rows of 1,024: the gain from distant context, by mechanism. Models of 256 show the
loss beyond their training length. A seed draws initial weights and data order, so differences from
MHA of the same row length are taken seed by seed. Runs of 256 are shared with `language_models`, if
both have one --runs. Prints bits per byte by position with 95 % intervals (Student's t over seeds).
"""

import argparse
from collections.abc import Mapping, Sequence
import itertools
import pathlib

from experiments import record
from experiments.studies import demo_size, side_by_side
from experiments.studies.demo_size import TOKENS_PER_STEP
from experiments.studies.grid import Cell, Kept, Run
from experiments.studies.kept import claim
from experiments.tasks import positions, text
from experiments.tasks.positions import EDGES, by_position
from kvjax.foundation import command_line, lists, runtime
from kvjax.foundation.configuration import at_least
from kvjax.foundation.intervals import Estimate, difference, estimate
from kvjax.foundation.output import Output

NAME = "long_rows"
MECHANISMS = ("mha", "lrkv", "gqa", "mqa", "mla")
FIRST = "mha"
LENGTHS = (256, 1024)  # tokens per training row


def cell(mechanism: str, length: int) -> Cell:
    """Returns a mechanism's cell with rows of a length; for 256 tokens the tiny config
    unchanged."""
    config, against = demo_size.tiny(mechanism), "" if mechanism == FIRST else FIRST
    if length == 256:
        return Cell(mechanism, config, {}, against)
    rows = {"data.sequence_length": length, "train.batch_size": TOKENS_PER_STEP // length}
    return Cell(_name(mechanism, length), config, rows, against and _name(FIRST, length))


def _name(mechanism: str, length: int) -> str:
    return mechanism if length == 256 else f"{mechanism}_t{length}"


def rows(seeds: Mapping[str, Mapping[int, dict]]) -> list[dict]:
    """Returns a row per model: bits per byte between `EDGES`, and differences from MHA.

    Args:
      seeds: figures by cell and seed.
    """

    def at(name, i):
        return {seed: run["by_position"][i] for seed, run in seeds.get(name, {}).items()}

    found = []
    for length in LENGTHS:
        for mechanism in MECHANISMS:
            name = _name(mechanism, length)
            if not seeds.get(name):
                continue
            places = []
            for i in range(len(EDGES) - 1):
                now = estimate(list(at(name, i).values()))
                off = None
                if mechanism != FIRST:
                    off = difference(at(name, i), at(_name(FIRST, length), i))
                places.append(
                    dict(
                        positions=[EDGES[i], EDGES[i + 1]],
                        bpb=now.mean,
                        bpb_half_interval=now.half,
                        difference=off and off.mean,
                        difference_half_interval=off and off.half,
                    )
                )
            of = dict(mechanism=mechanism, length=length, seeds=sorted(seeds[name]))
            found.append(of | dict(places=places))
    return found


_HEADER = (
    "mechanism",
    "trained on rows of",
    *(f"{a}-{b - 1}" for a, b in itertools.pairwise(EDGES)),
)


def _cells(row: Mapping) -> tuple:
    def shown(place: Mapping) -> str:
        if place["difference"] is None:
            return Estimate(place["bpb"], place["bpb_half_interval"]).shown(".4f")
        return Estimate(place["difference"], place["difference_half_interval"]).shown("+.4f")

    return row["mechanism"], f"{row['length']:,}", *map(shown, row["places"])


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="runs of each model (3)")
    add("--steps", type=int, default=128, help="training steps of 8,192 tokens (128: 1.0M)")
    add("--mechanisms", default=",".join(MECHANISMS), help=f"({','.join(MECHANISMS)})")
    side_by_side.add_options(parser, "runs/studies")
    add("--save", action="store_true", help=f"write experiments/results/{NAME}.json")
    parser.add_output()
    options = parser.parse(arguments)
    options.mechanisms = lists.names("--mechanisms", options.mechanisms, MECHANISMS)
    for key in ("seeds", "steps", "processes"):
        at_least(f"--{key}", getattr(options, key), 1)
    options.runs = side_by_side.check_runs(options.runs)
    record.check(options.save)
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    options = _options(arguments)
    runtime.start()
    file = record.RESULTS / f"{NAME}.json"
    places = map(pathlib.Path, (positions.__file__, text.__file__))
    if options.save:
        claim(file)
    kept = Kept(file, options.steps, mix=options.mix, fresh=options.fresh, places=places)
    cells = [cell(name, length) for length in LENGTHS for name in options.mechanisms]
    runs = [Run(one, seed, options.steps) for seed in range(options.seeds) for one in cells]

    def result(failed: Mapping[str, str]) -> dict:
        every = {one.name: one for m in MECHANISMS for n in LENGTHS for one in [cell(m, n)]}
        there: dict[str, dict[int, dict]] = {}
        for name in kept.runs.keys() & every.keys():
            for seed in sorted(kept.runs[name]):
                if found := kept.of(Run(every[name], seed, options.steps)):
                    there.setdefault(name, {})[seed] = found
        seconds = sum(run["seconds"] or 0 for of in kept.runs.values() for run in of.values())
        figures = dict(tokens=options.steps * TOKENS_PER_STEP, edges=EDGES, rows=rows(there))
        return figures | dict(seconds=seconds, failed=dict(failed)) | kept.as_json()

    def save(failed: Mapping[str, str]) -> None:
        if options.save:
            record.keep(NAME, result(failed))

    failed = side_by_side.train_missing(runs, kept, options, save, by_position)
    found, out = result(failed), Output(options)
    out.table(_HEADER, map(_cells, found["rows"]))
    out.say("\nBits per byte by position in rows of 1,024; of others the difference from MHA.")
    for run, why in failed.items():
        out.say(f"- left out: {run}, {why}")
    record.record(NAME, found, out, save=options.save)
    return 1 if failed else 0


if __name__ == "__main__":
    command_line.run(main)
