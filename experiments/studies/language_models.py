"""Studies of small language models: claims of LRKV, thin keys and projection sharing, tested.

    python -m experiments.studies.language_models --list
    python -m experiments.studies.language_models --study=lrkv_ranks [--seeds=3] [--save]
    python -m experiments.studies.language_models --study=lrkv_starts --cells=lrkv_per_head

Models of width 128 or so on the embedded corpus (experiments/studies/demo_size.py). Initial weights
and data order depend on the seed alone, so differences are taken between runs of the same seed.
Runs are trained in parallel, all models with the first seed, then with the next; they resume, and
studies with equal runs share their folders. Prints bits per byte with 95 % intervals (Student's t
over seeds), and p-values of the differences with Holm's correction for their number.
"""

import argparse
from collections.abc import Mapping, Sequence

from experiments.studies import grid, side_by_side
from experiments.studies.demo_size import STUDIES, TOKENS_PER_STEP
from experiments.studies.grid import Cell, FinishedRuns, Run
from experiments.studies.options import Parser, estimated, local_folder, shown
from kvjax.foundation import command_line, lists
from kvjax.foundation.errors import UserError
from kvjax.foundation.intervals import Estimate, difference, holm, p_value
from kvjax.foundation.output import Output

FOLDER = "studies"  # folder in experiments/results


def rows(cells: Sequence[Cell], finished: FinishedRuns) -> list[dict]:
    """Returns a row per cell with runs: costs, bits per byte, difference from the reference."""
    runs_by_cell, reference_of = (
        finished.by_cell(cells),
        {cell.name: cell.against for cell in cells},
    )

    def gap(name: str) -> dict[int, float]:
        bpb, reference = grid.bits(runs_by_cell, name), grid.bits(runs_by_cell, reference_of[name])
        return {seed: bpb[seed] - reference[seed] for seed in bpb.keys() & reference.keys()}

    table = []
    for cell in cells:
        if cell.name in runs_by_cell:
            change = difference(gap(cell.name), gap(cell.before)) if cell.before else None
            row = dict(cell=cell.name, against=cell.against, before=cell.before)
            table.append(row | grid.row(cell, finished, runs_by_cell) | estimated("moved", change))
    return table


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
    sizes = (f"{r['parameters']:,}", f"{r['cache_bytes']:,}", len(r["seeds"]))
    p = f"{corrected[r['cell']]:.2g}" if r["cell"] in corrected else ""
    bpb, gap, moved = (
        shown(r, name, form)
        for name, form in (("bpb", ".4f"), ("difference", "+.4f"), ("moved", "+.4f"))
    )
    return r["cell"], *sizes, bpb, gap, r["against"], p, moved


def chosen(cells: Sequence[Cell], names: str) -> list[Cell]:
    """Returns the cells of a comma-separated list and their reference cells; all cells for "".

    Raises:
      UserError: an unknown name.
    """
    if not names:
        return list(cells)
    by_name = {cell.name: cell for cell in cells}
    queue, wanted = list(lists.names("--cells", names, tuple(by_name))), set()
    while queue:
        if (name := queue.pop()) and name not in wanted:
            wanted.add(name)
            queue += [by_name[name].against, by_name[name].before]
    return [cell for cell in cells if cell.name in wanted]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, f"{FOLDER}/STUDY")
    add = parser.add_argument
    add("--list", action="store_true", help="print the studies and their core hours")
    add("--study", default="", help=f"one of {', '.join(STUDIES)}")
    text = "some of its models; their reference models are added (all)"
    add("--cells", default="", help=text)
    parser.count("steps", 0, "training steps of 8,192 tokens (the study's)", least=0)
    parser.runs(f"runs/{FOLDER}")
    options = parser.parse(arguments)
    if options.list:
        return options
    command_line.require(options, study=f"one of {', '.join(STUDIES)}, or --list")
    lists.one("--study", options.study, STUDIES)
    if options.cells and options.save:
        raise UserError(f"--cells={options.cells} --save: a result has all models of its study")
    options.chosen = chosen(STUDIES[options.study].cells(), options.cells)
    options.steps = options.steps or STUDIES[options.study].steps
    options.runs = local_folder(options.runs)
    return options


def main(arguments: Sequence[str]) -> int:
    """Trains the missing runs and prints the table; returns 1 if a run failed."""
    options = _options(arguments)
    out = Output(options)
    if options.list:
        _list(out, options.seeds)
        return 0
    study, cells = STUDIES[options.study], options.chosen
    p_values: dict[str, float] = {}

    def figures_of(finished: FinishedRuns) -> dict:
        figures = dict(asks=study.asks, claim=study.claim, tokens=options.steps * TOKENS_PER_STEP)
        figures |= dict(rows=rows(cells, finished))
        p_values.update(corrected(figures["rows"]))
        return figures

    def cells_of(row: Mapping) -> tuple:
        return _cells(row, p_values)

    out.say(f"{study.asks} ({study.claim}.)")
    table, name = ("rows", _HEADER, cells_of), f"{FOLDER}/{options.study}"
    return side_by_side.study(name, cells, options, figures_of, [table])


def _list(out: Output, seeds: int) -> None:
    table = []
    for name, study in STUDIES.items():
        cells = study.cells()
        flops = sum(Run(cell, 0, study.steps).flops for cell in cells) * seeds
        table.append((name, study.asks, len(cells) * seeds, f"{flops / grid.GUESS / 3600:.1f}"))
    out.table(("study", "asks", "runs", "core hours, about"), table)


if __name__ == "__main__":
    command_line.run(main)
