"""The ledger: every claim of four papers and a blog, and what results here say of it.

    python -m experiments.claims            # prints verdicts and why
    python -m experiments.claims --write    # writes experiments/CLAIMS.md

A verdict follows from a rule and a result file (experiments/ledger/); none is written by hand.
"""

import collections
from collections.abc import Sequence
import textwrap

from experiments.ledger import logit_spectra, lrkv, lrkv_blog, projection_sharing, thin_keys
from experiments.ledger.results import read
from experiments.ledger.verdicts import VERDICTS, Claim
from experiments.studies.language_models import corrected
from kvjax.foundation import command_line, progress
from kvjax.foundation.checkout import EXPERIMENTS
from kvjax.foundation.errors import UserError
from kvjax.foundation.output import Output

FILE = "CLAIMS.md"
PAPERS: dict[str, tuple[Claim, ...]] = {
    lrkv.TITLE: lrkv.CLAIMS,
    lrkv_blog.TITLE: lrkv_blog.CLAIMS,
    projection_sharing.TITLE: projection_sharing.CLAIMS,
    thin_keys.TITLE: thin_keys.CLAIMS,
    logit_spectra.TITLE: logit_spectra.CLAIMS,
}
_HEAD = """# Claims

What four papers and a blog say, and what results here say of it. It is made from
`experiments/results/` and from shapes by `python -m experiments.claims --write`; a test compares
them. Each verdict follows from a rule in [ledger/](ledger/) and a result, never from judgement.
A claim between models needs three seeds here. ± are 95 % intervals over seeds.

{correction}

Demo size is what two CPU cores train in minutes: 4 layers of width 128 unless another is given, on
the books that come with kvjax. d12 and d36 are the paper's scales of 128M and 2.5B parameters. v5p
is a TPU.

| verdict | means |
|---|---|
"""


def ledger() -> dict[str, list[dict]]:
    """By paper the rows."""
    found = {}
    with progress.waiting("judging"):
        for title, claims in PAPERS.items():
            found[title] = [_row(claim) for claim in claims]
    return found


def _row(claim: Claim) -> dict:
    verdict, ours = claim.judge()
    row = dict(place=claim.place, says=claim.says, published=claim.published)
    return row | dict(verdict=verdict, ours=ours, command=claim.command)


def _correction(found: dict[str, list[dict]]) -> str:
    """Says that verdicts are not corrected for their number, and what correction does to five."""
    count = sum(len(rows) for rows in found.values())
    p_values = corrected(read("studies/mechanisms")["rows"])
    told = ", ".join(f"{cell} {p:.2f}" for cell, p in p_values.items())
    text = (
        f"None of the {count} verdicts is corrected for their number: where models do not differ, "
        "one 95 % interval in twenty leaves 0 out all the same. Of the headline comparisons, five "
        "mechanisms less MHA at demo size (reports/lrkv.md), p-values by Holm's correction for "
        f"five are: {told}."
    )
    return textwrap.fill(text, 100)


def written(found: dict[str, list[dict]]) -> str:
    """The text of CLAIMS.md."""
    head = _HEAD.replace("{correction}", _correction(found))
    parts = [head + "".join(f"| **{name}** | {means} |\n" for name, means in VERDICTS.items())]
    parts.append("| paper | " + " | ".join(VERDICTS) + " |\n|---|" + "---:|" * len(VERDICTS))
    for title, rows in found.items():
        counts = collections.Counter(row["verdict"] for row in rows)
        parts[-1] += f"\n| {title} | " + " | ".join(str(counts[name]) for name in VERDICTS) + " |"
    for title, rows in found.items():
        lines = [f"## {title}\n", "| place | claim | published | verdict | here | command |"]
        lines.append("|---|---|---|---|---|---|")
        for row in rows:
            command = f"`{row['command']}`" if row["command"] else ""
            cells = (row["place"], row["says"], row["published"], f"**{row['verdict']}**")
            lines.append("| " + " | ".join((*cells, row["ours"], command)) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Judges, prints, writes."""
    parser = command_line.Parser(__doc__)
    parser.add_argument("--write", action="store_true", help=f"write experiments/{FILE}")
    parser.add_output()
    options = parser.parse(arguments)
    out, found = Output(options), ledger()
    for title, rows in found.items():
        out.say(f"\n{title}")
        told = [(r["place"], r["says"], r["published"], r["verdict"], r["ours"]) for r in rows]
        out.table(("place", "claim", "published", "verdict", "here"), told)
    if options.write:
        try:
            (EXPERIMENTS / FILE).write_text(written(found), "utf-8")
        except OSError as error:
            raise UserError(f"--write: {EXPERIMENTS / FILE}: {error.strerror}") from error
    out.result(dict(name="claims", claims=found))


if __name__ == "__main__":
    command_line.run(main)
