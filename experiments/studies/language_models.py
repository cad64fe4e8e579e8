"""Studies of small language models: what LRKV, thin keys and projection sharing claim, asked here.

    python -m experiments.studies.language_models --list
    python -m experiments.studies.language_models --study=lrkv_ranks [--seeds=3] [--save]

Models of width 128 or so on the embedded corpus; which, says experiments/studies/demo_size.py. A
seed draws initial weights and data order, the same for all models, so differences are taken seed
by seed. All are trained with the first seed, then with the next, side by side; studies share runs
that they have in common, and go on where they were stopped. Prints bits per byte with 95 %
intervals (Student's t over seeds).
"""

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
import statistics

import jax.numpy as jnp

from experiments import record
from experiments.studies import grid
from experiments.studies import side_by_side
from experiments.studies.demo_size import STUDIES
from experiments.studies.grid import Cell
from experiments.studies.grid import Kept
from experiments.studies.grid import Run
from kvjax.costs import formulas
from kvjax.foundation import command_line
from kvjax.foundation import lists
from kvjax.foundation import runtime
from kvjax.foundation.configuration import at_least
from kvjax.foundation.estimate import Estimate
from kvjax.foundation.estimate import difference
from kvjax.foundation.estimate import estimate
from kvjax.foundation.output import Output

TOKENS_PER_STEP = 32 * 256  # of the tiny configs
FOLDER = "studies"  # of results


def rows(cells: Sequence[Cell], steps: int, kept: Kept) -> list[dict]:
    """A row of each cell that has runs: costs, bits per byte, the difference from another cell."""
    found, runs = [], {}
    for cell in cells:
        asked = {seed: Run(cell, seed, steps) for seed in sorted(kept.runs.get(cell.name, {}))}
        there = {seed: kept.of(run) for seed, run in asked.items()}
        runs[cell.name] = {seed: run for seed, run in there.items() if run}
    bpb = lambda name: {seed: run["bpb"] for seed, run in runs.get(name, {}).items()}
    for cell in cells:
        mine = bpb(cell.name)
        if not mine:
            continue
        model = Run(cell, 0, steps).experiment.model
        now = estimate(list(mine.values()))
        against = difference(mine, bpb(cell.against)) if cell.against else None
        speeds = [x for run in runs[cell.name].values() if (x := run["tokens_per_second"])]
        found.append(
            dict(
                cell=cell.name,
                parameters=formulas.parameters(model)["total"],
                cache_bytes=formulas.cache_bytes_per_token(model, jnp.dtype(jnp.bfloat16)),
                seeds=sorted(mine),
                tokens_per_second=statistics.median(speeds) if speeds else None,
                bpb=now.mean,
                bpb_half_interval=now.half,
                against=cell.against,
                difference=against and against.mean,
                difference_half_interval=against and against.half,
            )
        )
    return found


_HEADER = ("model", "parameters", "cache bytes per token (bfloat16)", "seeds", "bits per byte")
_HEADER += ("difference", "from")


def _cells(r: Mapping) -> tuple:
    moved = "-"
    if r["difference"] is not None:
        moved = Estimate(r["difference"], r["difference_half_interval"]).shown("+.4f")
    bpb = Estimate(r["bpb"], r["bpb_half_interval"]).shown(".4f")
    sizes = (f"{r['parameters']:,}", f"{r['cache_bytes']:,}", len(r["seeds"]))
    return r["cell"], *sizes, bpb, moved, r["against"]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="print what studies there are, and what they take")
    add("--study", default="", help=f"one of {', '.join(STUDIES)}")
    add("--seeds", type=int, default=3, help="runs of each model (3)")
    add("--steps", type=int, default=0, help="of 8,192 tokens (the study's)")
    side_by_side.add_options(parser, f"runs/{FOLDER}")
    add("--save", action="store_true", help=f"write experiments/results/{FOLDER}/STUDY.json")
    parser.add_output()
    options = parser.parse(arguments)
    at_least("--seeds", options.seeds, 1)
    at_least("--steps", options.steps, 0)
    at_least("--processes", options.processes, 1)
    if options.list:
        return options
    command_line.require(options, study=f"one of {', '.join(STUDIES)}, or --list")
    lists.one("--study", options.study, STUDIES)
    options.steps = options.steps or STUDIES[options.study].steps
    options.runs = side_by_side.check_runs(options.runs)
    record.check(options.save)
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains what is not trained yet, and prints; the exit status: 1 if a run failed."""
    options = _options(arguments)
    runtime.start()
    out = Output(options)
    if options.list:
        _list(out, options.seeds)
        return 0
    study, name = STUDIES[options.study], f"{FOLDER}/{options.study}"
    cells = study.cells()
    kept = Kept(
        record.RESULTS / f"{name}.json", options.steps, mix=options.mix, fresh=options.fresh
    )
    runs = [Run(cell, seed, options.steps) for seed in range(options.seeds) for cell in cells]

    def result(failed: Mapping[str, str]) -> dict:
        seconds = sum(run["seconds"] or 0 for seeds in kept.runs.values() for run in seeds.values())
        told = dict(asks=study.asks, claim=study.claim, rows=rows(cells, options.steps, kept))
        told |= dict(tokens=options.steps * TOKENS_PER_STEP, seconds=seconds, failed=dict(failed))
        return told | kept.as_json()

    def save(failed: Mapping[str, str]) -> None:
        if options.save:
            record.keep(name, result(failed))

    failed = side_by_side.train_missing(runs, kept, options, save)
    found = result(failed)
    out.say(f"{study.asks} ({study.claim}.)")
    out.table(_HEADER, map(_cells, found["rows"]))
    for run, why in failed.items():
        out.say(f"- left out: {run}, {why}")
    record.record(name, found, out, save=options.save)
    return 1 if failed else 0


def _list(out: Output, seeds: int) -> None:
    made = []
    for name, study in STUDIES.items():
        cells = study.cells()
        flops = sum(Run(cell, 0, study.steps).flops for cell in cells) * seeds
        made.append((name, study.asks, len(cells) * seeds, f"{flops / grid.GUESS / 3600:.1f}"))
    out.table(("study", "asks", "runs", "core hours, about"), made)


if __name__ == "__main__":
    command_line.run(main)
