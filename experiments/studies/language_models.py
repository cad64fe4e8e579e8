"""Studies of small language models: claims of LRKV, thin keys and projection sharing, tested.

    python -m experiments.studies.language_models --list
    python -m experiments.studies.language_models --study=lrkv_ranks [--seeds=3] [--save]
    python -m experiments.studies.language_models --study=lrkv_starts --cells=lrkv_per_head

Models of width 128 or so on the embedded corpus (experiments/studies/demo_size.py). A seed draws
initial weights and data order, equal for all models, so differences are taken seed by seed. Runs
are trained in parallel, all models with the first seed, then with the next; studies share equal
runs, from their folders or results, and resume. Prints bits per byte with 95 % intervals (Student's
t over seeds), and p-values of the differences with Holm's correction for their number.
"""

import argparse
from collections.abc import Mapping, Sequence
import statistics

import jax.numpy as jnp

from experiments import record
from experiments.studies import grid, side_by_side
from experiments.studies.code import in_short
from experiments.studies.demo_size import STUDIES, TOKENS_PER_STEP
from experiments.studies.grid import Cell, Kept, Run
from experiments.studies.kept import claim
from kvjax.costs import formulas
from kvjax.foundation import command_line, lists, runtime
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import Estimate, difference, estimate, holm, p_value
from kvjax.foundation.output import Output

FOLDER = "studies"  # of results


def rows(cells: Sequence[Cell], steps: int, kept: Kept) -> list[dict]:
    """Returns a row per cell with runs: costs, bits per byte, and the difference from its
    reference."""
    found, runs = [], {}
    for cell in cells:
        asked = {seed: Run(cell, seed, steps) for seed in sorted(kept.runs.get(cell.name, {}))}
        there = {seed: kept.of(run) for seed, run in asked.items()}
        runs[cell.name] = {seed: run for seed, run in there.items() if run}

    def bpb(name: str) -> dict[int, float]:
        return {seed: run["bpb"] for seed, run in runs.get(name, {}).items()}

    other = {cell.name: cell.against for cell in cells}

    def apart(name: str) -> dict[int, float]:
        mine, theirs = bpb(name), bpb(other[name])
        return {seed: mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()}

    for cell in cells:
        mine = bpb(cell.name)
        if not mine:
            continue
        model = Run(cell, 0, steps).experiment.model
        now = estimate(list(mine.values()))
        against = difference(mine, bpb(cell.against)) if cell.against else None
        moved = difference(apart(cell.name), apart(cell.before)) if cell.before else None
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
                before=cell.before,
                moved=moved and moved.mean,
                moved_half_interval=moved and moved.half,
            )
        )
    return found


_HEADER = ("model", "parameters", "cache bytes per token (bfloat16)", "seeds", "bits per byte")
_HEADER += ("difference", "from", "p by Holm", "moved by the change")


def corrected(rows: Sequence[Mapping]) -> dict[str, float]:
    """Returns the p-value of each cell's difference, after Holm's correction for all rows."""
    seeds = {row["cell"]: set(row["seeds"]) for row in rows}
    estimated = [row for row in rows if row["difference_half_interval"] is not None]
    p_values = [
        p_value(
            Estimate(row["difference"], row["difference_half_interval"]),
            len(seeds[row["cell"]] & seeds[row["against"]]),
        )
        for row in estimated
    ]
    return {row["cell"]: p for row, p in zip(estimated, holm(p_values), strict=True)}


def _cells(r: Mapping, corrected: Mapping[str, float]) -> tuple:
    def shown(x, half):
        return "-" if x is None else Estimate(x, half).shown("+.4f")

    apart = shown(r["difference"], r["difference_half_interval"])
    moved = shown(r["moved"], r["moved_half_interval"])
    bpb = Estimate(r["bpb"], r["bpb_half_interval"]).shown(".4f")
    sizes = (f"{r['parameters']:,}", f"{r['cache_bytes']:,}", len(r["seeds"]))
    p = f"{corrected[r['cell']]:.2g}" if r["cell"] in corrected else ""
    return r["cell"], *sizes, bpb, apart, r["against"], p, moved


def chosen(cells: Sequence[Cell], names: str) -> list[Cell]:
    """Returns the cells of a comma-separated list and their reference cells; all cells for "".

    Raises:
      UserError: an unknown name.
    """
    if not names:
        return list(cells)
    of = {cell.name: cell for cell in cells}
    left, wanted = list(lists.names("--cells", names, tuple(of))), set()
    while left:
        if (name := left.pop()) and name not in wanted:
            wanted.add(name)
            left += [of[name].against, of[name].before]
    return [cell for cell in cells if cell.name in wanted]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="print the studies and their core hours")
    add("--study", default="", help=f"one of {', '.join(STUDIES)}")
    text = "some of its models; their reference models are added (all)"
    add("--cells", default="", help=text)
    add("--seeds", type=int, default=3, help="runs of each model (3)")
    add("--steps", type=int, default=0, help="training steps of 8,192 tokens (the study's)")
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
    if options.cells and options.save:
        raise UserError(f"--cells={options.cells} --save: a result has all models of its study")
    options.chosen = chosen(STUDIES[options.study].cells(), options.cells)
    options.steps = options.steps or STUDIES[options.study].steps
    options.runs = side_by_side.check_runs(options.runs)
    record.check(options.save)
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    options = _options(arguments)
    runtime.start()
    out = Output(options)
    if options.list:
        _list(out, options.seeds)
        return 0
    study, name = STUDIES[options.study], f"{FOLDER}/{options.study}"
    cells = options.chosen
    file = record.RESULTS / f"{name}.json"
    if options.save:
        claim(file)
    kept = Kept(file, options.steps, mix=options.mix, fresh=options.fresh)
    runs = [Run(cell, seed, options.steps) for seed in range(options.seeds) for cell in cells]

    if options.save:
        kept.check((run.cell.name, run.seed, run.identity) for run in runs)
    others = [record.RESULTS / FOLDER / f"{one}.json" for one in STUDIES if one != options.study]
    if taken := kept.borrow(runs, others):
        command_line.say(f"{len(taken)} runs from results of other studies: {in_short(taken)}")

    def result(failed: Mapping[str, str]) -> dict:
        seconds = sum(run["seconds"] or 0 for seeds in kept.runs.values() for run in seeds.values())
        figures = dict(asks=study.asks, claim=study.claim, rows=rows(cells, options.steps, kept))
        figures |= dict(tokens=options.steps * TOKENS_PER_STEP, seconds=seconds)
        return figures | dict(failed=dict(failed)) | kept.as_json()

    def save(failed: Mapping[str, str]) -> None:
        if options.save:
            record.keep(name, result(failed))

    failed = side_by_side.train_missing(runs, kept, options, save)
    found = result(failed)
    out.say(f"{study.asks} ({study.claim}.)")
    p_values = corrected(found["rows"])
    out.table(_HEADER, [_cells(row, p_values) for row in found["rows"]])
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
