"""The ledger: every claim of four papers and a blog, with the verdict of this project's results.

    python -m experiments.claims            # prints verdicts and reasons
    python -m experiments.claims --write    # writes experiments/CLAIMS.md

A verdict follows from a rule and a result (experiments/ledger/); none is written by hand.
"""

import collections
from collections.abc import Sequence
import textwrap

from experiments.ledger import (
    judge,
    rules_logit_spectra,  # noqa: F401 registers its rules, as the others
    rules_lrkv,  # noqa: F401
    rules_projection_sharing,  # noqa: F401
    rules_thin_keys,  # noqa: F401
)
from experiments.record import EXPERIMENTS
from experiments.studies.language_models import corrected
from kvjax.foundation import command_line, progress
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

FILE = "CLAIMS.md"
PAPERS = {
    "lrkv": "LRKV (arXiv 2601.11471)",
    "lrkv_blog": "LRKV's blog",
    "projection_sharing": "Projection sharing (arXiv 2606.04032)",
    "thin_keys": "Thin keys (arXiv 2603.04427)",
    "logit_spectra": "Logit spectra (arXiv 2604.04384)",
}
_COLUMNS = ("place", "claim", "published", "verdict", "here", "command")
_HEAD = """# Claims

Claims of four papers and a blog, with verdicts from this project's results. `python -m
experiments.claims --write` makes this page from `experiments/results/` and from shapes; a test
compares them. Each verdict follows from a rule in [ledger/](ledger/) and a result, never from
judgement. A verdict on a difference between models needs three seeds. ± are 95 % intervals over
seeds.

{correction}

"At demo size" is a model that two CPU cores train in minutes, on the books that come with kvjax: 4
layers of width 128 unless the row names another size. d12 and d36 are the paper's scales of 128M
and 2.5B parameters. v5p is a TPU. "There" is the paper, "here" is this project.
"""


def ledger() -> dict[str, list[dict]]:
    """Returns the judged rows by paper."""
    rows_by_paper = {}
    with progress.waiting("judging"):
        for paper, title in PAPERS.items():
            rows_by_paper[title] = [_row(claim) for claim in judge.claims(paper)]
    return rows_by_paper


def _row(claim: dict) -> dict:
    judgement = judge.judge(claim)
    row = {key: claim[key] for key in ("place", "says", "published")}
    return row | {"verdict": judgement.verdict, "ours": judgement.ours, "command": claim["command"]}


def _correction(count: int) -> str:
    """Returns a sentence: verdicts are not corrected for their number; p-values of the headline."""
    p_values = corrected(judge.read("studies/mechanisms")["rows"])
    shown = ", ".join(f"{cell} {p:.2f}" for cell, p in p_values.items())
    text = (
        f"The {count} verdicts are not corrected for their number: if models do not differ, one 95 "
        "% interval in twenty still excludes 0. For the headline, five mechanisms minus MHA at "
        "demo size (reports/lrkv.md), the p-values after Holm's correction for five are: "
        f"{shown}."
    )
    return textwrap.fill(text, 100)


def written(rows_by_paper: dict[str, list[dict]]) -> str:
    """Returns the text of CLAIMS.md."""
    count = sum(map(len, rows_by_paper.values()))
    verdicts = [(f"**{name}**", means) for name, means in judge.VERDICTS.items()]
    counts = []
    for title, rows in rows_by_paper.items():
        by_verdict = collections.Counter(row["verdict"] for row in rows)
        counts.append((title, *(str(by_verdict[name]) for name in judge.VERDICTS)))
    parts = [
        _HEAD.replace("{correction}", _correction(count)),
        _table(("verdict", "means"), verdicts),
        _table(("paper", *judge.VERDICTS), counts, numbers=True),
    ]
    for title, rows in rows_by_paper.items():
        cells = [
            (
                *(row["place"], row["says"], row["published"], f"**{row['verdict']}**"),
                *(row["ours"], f"`{row['command']}`" if row["command"] else ""),
            )
            for row in rows
        ]
        parts += [f"## {title}", _table(_COLUMNS, cells)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    rule = "|---|" + ("---:|" if numbers else "---|") * (len(header) - 1)
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def main(arguments: Sequence[str]) -> None:
    """Prints the ledger; writes CLAIMS.md with --write."""
    parser = command_line.Parser(__doc__)
    parser.add_argument("--write", action="store_true", help=f"write experiments/{FILE}")
    parser.add_output()
    options = parser.parse(arguments)
    out, rows_by_paper = Output(options), ledger()
    for title, rows in rows_by_paper.items():
        out.say(f"\n{title}")
        cells = [(r["place"], r["says"], r["published"], r["verdict"], r["ours"]) for r in rows]
        out.table(_COLUMNS[:-1], cells)
    if options.write:
        try:
            (EXPERIMENTS / FILE).write_text(written(rows_by_paper), "utf-8")
        except OSError as error:
            raise UserError(f"--write: {EXPERIMENTS / FILE}: {error.strerror}") from error
    out.result({"name": "claims", "claims": rows_by_paper})


if __name__ == "__main__":
    command_line.run(main)
