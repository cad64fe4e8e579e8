"""The papers' tables of parameters, computation and cache, beside what the shapes give.

    python -m experiments.paper_tables

LRKV (arXiv 2601.11471) eq. 5 to 7 and Tables 1, 2 and 4; its blog's ratios; projection sharing
(arXiv 2606.04032) Tables 1, 5 to 8 and 10; thin keys (arXiv 2603.04427) Table 11. Our figures come
from the configs that are trained. A paper's figure agrees if ours, rounded to its digits, is it;
where it does not, the row says why. Prints Markdown tables and one JSON line.
"""

from absl import app
from absl import flags

from experiments import record
from experiments import tables_lrkv
from experiments import tables_projection_sharing
from experiments import tables_thin_keys
from experiments.paper_figure import Figure

_PAPERS = (tables_lrkv, tables_projection_sharing, tables_thin_keys)


def tables() -> dict[str, list[Figure]]:
    """Every table, by title."""
    return {
        title: rows for paper in _PAPERS for make in paper.TABLES for title, rows in make().items()
    }


def main(*, save: bool = False) -> None:
    result = tables()
    for title, rows in result.items():
        print(f"\n{title}\n\n| figure | unit | paper | ours | verdict |\n|---|---|---:|---:|---|")
        for r in rows:
            print(f"| {r.what} | {r.unit} | {r.paper} | {r.rounded} | {r.verdict} |")
    print("\n| table | rows | agree |\n|---|---:|---:|")
    for title, rows in result.items():
        print(f"| {title} | {len(rows)} | {sum(r.agrees for r in rows)} |")
    as_json = {title: [_as_json(row) for row in rows] for title, rows in result.items()}
    record.record("paper_tables", dict(tables=as_json), save=save)


def _as_json(r: Figure) -> dict:
    figure = dict(what=r.what, unit=r.unit, paper=r.paper, ours=float(r.ours))
    return figure | dict(agrees=r.agrees, verdict=r.verdict)


if __name__ == "__main__":
    save_ = flags.DEFINE_bool("save", False, "Also write experiments/results/paper_tables.json.")
    app.run(lambda argv: main(save=save_.value))
