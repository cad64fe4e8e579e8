"""Writes reports/provenance.md, which lists the results that no commit of this history reproduces.

    python -m experiments.tables.provenance_table            # writes the page
    python -m experiments.tables.provenance_table --check    # status 1 if the page differs

Reads the `made_by` of every result in experiments/results and the history of this checkout. Needs
git and the whole history (no shallow clone).
"""

import collections
from collections.abc import Iterable
import json
import subprocess

from experiments.record import RESULTS
from kvjax.foundation import command_line, provenance, record_lines
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.errors import UserError

PAGE = ROOT / "experiments" / "reports" / "provenance.md"
# Kinds of results by the provenance of their code, with their descriptions on the page.
KINDS = {
    "commit": "made by a commit of this history",
    "same code": "its commit was rewritten before it landed; a commit of this history has its code",
    "changed": "made by a commit of this history with changes that were not committed",
    "gone": "its commit is not in this history: it was rewritten before it landed",
    "several": "names a commit for each row",
}
MARKS = ("<!-- written by `python -m experiments.tables.provenance_table` -->", "<!-- to here -->")


def kind(made_by: dict, commits: frozenset[str], codes: Iterable[dict[str, str]]) -> str:
    """Returns the key in KINDS of a result.

    Args:
      made_by: the result's `made_by`.
      commits: full names of all commits of the history.
      codes: for each commit of the history, the `made_by.code` that it writes.
    """
    name = made_by.get("commit", "")
    short = name.rstrip("+")
    if not short or " " in short:
        return "several"
    if any(commit.startswith(short) for commit in commits):
        return "changed" if name.endswith("+") else "commit"
    code = made_by.get("code")
    return "same code" if code and code in codes else "gone"


def tables(results: dict[str, dict], commits: frozenset[str], codes: list[dict[str, str]]) -> str:
    """Returns the page's tables: a count of each kind, and the results that no commit reproduces.

    Args:
      results: `made_by` by path below experiments/results.
      commits, codes: see `kind`.
    """
    kinds = {name: kind(made_by, commits, codes) for name, made_by in results.items()}
    counts = collections.Counter(kinds.values())
    lines = ["| results | what is known |", "|---:|---|"]
    lines += [f"| {counts[key]} | {text} |" for key, text in KINDS.items() if counts[key]]
    lines += [
        "",
        "Results that no commit of this history makes again, by the commit they name:",
        "",
    ]
    lines += ["| commit | results |", "|---|---|"]
    by_commit = collections.defaultdict(list)
    for name, key in sorted(kinds.items()):
        if key in ("changed", "gone"):
            commit = f"{results[name]['commit']}{', gone' if key == 'gone' else ''}"
            by_commit[commit].append(name.removesuffix(".json"))
    lines += [f"| {commit} | {_listed(names)} |" for commit, names in sorted(by_commit.items())]
    return "\n".join(lines)


def _listed(names: list[str]) -> str:
    """Joins file names, grouped by folder."""
    folders = collections.defaultdict(list)
    for name in names:
        folder, _, file = name.rpartition("/")
        folders[folder].append(file)
    return "; ".join(
        f"{folder}/: {', '.join(files)}" if folder else ", ".join(files)
        for folder, files in folders.items()
    )


def _results() -> dict[str, dict]:
    results = {}
    for path in sorted(RESULTS.rglob("*.json")):
        results[path.relative_to(RESULTS).as_posix()] = json.loads(path.read_text())
    for path in sorted(RESULTS.rglob("*.jsonl")):
        folder = path.relative_to(RESULTS).with_suffix("").as_posix()
        records = record_lines.read(path).items()
        results |= {f"{folder}/{name}": record for name, record in records}
    return {name: result.get("made_by", {}) for name, result in results.items()}


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        raise UserError(f"git {' '.join(arguments)} failed: {run.stderr.strip()}")
    return run.stdout


def _codes(commits: frozenset[str]) -> list[dict[str, str]]:
    """Returns `made_by.code` of each commit."""
    digests: dict[str, str] = {}

    def digest(tree: str, folder: str) -> str:
        if tree not in digests:
            entries = (line.split("\t") for line in _git("ls-tree", "-r", tree).splitlines())
            digests[tree] = provenance.code_digest(
                {f"{folder}/{n}": e.split()[2] for e, n in entries if n.endswith(".py")}
            )
        return digests[tree]

    codes = []
    for commit in commits:
        entries = (line.split() for line in _git("ls-tree", commit, *provenance.CODE).splitlines())
        codes.append({entry[3]: digest(entry[2], entry[3]) for entry in entries})
    return codes


def _page() -> str:
    if _git("rev-parse", "--is-shallow-repository").strip() == "true":
        raise UserError("this clone is shallow; run `git fetch --unshallow` first")
    commits = frozenset(_git("rev-list", "HEAD").split())
    results = _results()
    wanted = [made_by for made_by in results.values() if made_by.get("code")]
    unknown = [m for m in wanted if kind(m, commits, ()) == "gone"]
    begin, end = MARKS
    before, after = PAGE.read_text().split(begin)
    written = tables(results, commits, _codes(commits) if unknown else [])
    return f"{before}{begin}\n\n{written}\n\n{end}{after.split(end)[1]}"


def main(arguments: list[str]) -> int:
    """Returns the exit status; see the module's docstring."""
    parser = command_line.Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page differs")
    options = parser.parse(arguments)
    text = _page()
    if options.check:
        same = PAGE.exists() and PAGE.read_text() == text
        print("nothing differs" if same else f"{PAGE.relative_to(ROOT)} differs")
        return 0 if same else 1
    PAGE.write_text(text)
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
