"""Prints the papers' tables of parameters, computation and cache beside figures from our shapes.

    python -m experiments.tables.paper_tables [--save]

LRKV (arXiv 2601.11471) eq. 5 to 7 and Tables 1, 2 and 4; its blog's ratios; projection sharing
(arXiv 2606.04032) Tables 1, 5 to 8 and 10; thin keys (arXiv 2603.04427) Table 11. Our figures come
from the shapes of configs. Figures agree if ours, rounded to the paper's digits, equals the
paper's; otherwise the row gives the reason. --markdown prints Markdown.
"""

from experiments import record
from experiments.tables import tables_lrkv, tables_projection_sharing, tables_thin_keys
from experiments.tables.paper_figure import Figure
from kvjax.foundation import command_line, progress
from kvjax.foundation.output import Output, Table

_PAPERS = (tables_lrkv, tables_projection_sharing, tables_thin_keys)


def tables() -> dict[str, list[Figure]]:
    """Returns every table, by title."""
    by_title = {}
    with progress.waiting("working out the papers' tables") as doing:
        for paper in _PAPERS:
            for make in paper.TABLES:
                doing.at(f"{len(by_title)} done")
                by_title |= make()
    return by_title


def show(by_title: dict[str, list[Figure]], out: Output) -> dict:
    """Prints the tables and the number of figures that agree; returns the result as JSON."""
    header = ("figure", "unit", "paper", "ours", "verdict")
    for title, rows in by_title.items():
        cells = [(r.what, r.unit, r.paper, r.rounded, r.verdict) for r in rows]
        out.show(Table(f"\n{title}", header, cells))
    agree = [(title, len(rows), sum(r.agrees for r in rows)) for title, rows in by_title.items()]
    out.table(("table", "rows", "agree"), agree)
    return dict(tables={title: [_as_json(row) for row in rows] for title, rows in by_title.items()})


def _as_json(r: Figure) -> dict:
    figure = dict(what=r.what, unit=r.unit, paper=r.paper, ours=float(r.ours))
    return figure | dict(agrees=r.agrees, verdict=r.verdict)


def main(arguments: list[str]) -> None:
    """Prints the tables."""
    parser = command_line.Parser(__doc__)
    text = "also write experiments/results/paper_tables.json"
    parser.add_argument("--save", action="store_true", help=text)
    parser.add_output()
    options = parser.parse(arguments)
    record.check(options.save)
    out = Output(options)
    record.record("paper_tables", show(tables(), out), out, save=options.save)


if __name__ == "__main__":
    command_line.run(main)
