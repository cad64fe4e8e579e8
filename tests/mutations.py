"""Whether the tests notice: each of a list of bugs is planted in a copy of the tree, and tests run.

python -m tests.mutations experiments/results/mutations.json          # prints the table
python -m tests.mutations experiments/results/mutations.json --run    # plants them first

The file lists mutations: `file`, the text `old` that occurs in it once, the text `new` in its
place, the `bug` in words. A run adds who noticed, `caught_by`: "make test", "make test-all" or
null, and `test`, the first that failed. That test runs first where an earlier run has it, then
tests of the same room, then all; what is only in `make test-all` runs for those that `make test`
missed. What was found before is kept: delete `caught_by` to try again.
"""

import argparse
import collections
from collections.abc import Iterator
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from kvjax.foundation.checkout import ROOT
from kvjax.foundation.provenance import provenance

PHASES = {
    "make test": "not slow and not aot and not beam and not lm_eval",
    "make test-all": "slow and not aot and not beam and not lm_eval",
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--run", action="store_true", help="plant those not tried yet")
    options = parser.parse_args(arguments)
    content = json.loads(options.file.read_text("utf-8"))
    if options.run:
        with tempfile.TemporaryDirectory() as folder:
            tree = _copy(pathlib.Path(folder))
            for who in PHASES:
                for mutation in content["mutations"]:
                    if _is_open(mutation, who):
                        mutation |= _try(tree, mutation, who)
                        print(f"{mutation['caught_by']}: {mutation['bug']}", flush=True)
                        content["made_by"] = provenance()
                        options.file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(table(content["mutations"]))


def table(mutations: list[dict]) -> str:
    """Markdown."""
    asked = lambda m: "caught_by" in m and (m["caught_by"] or len(m["missed_by"]) == len(PHASES))
    tried = [(m, m["caught_by"] or "**nobody**") for m in mutations if asked(m)]
    rows = [f"| {m['file'].removeprefix('kvjax/')} | {m['bug']} | {who} |" for m, who in tried]
    count = collections.Counter(who for _, who in tried)
    total = ", ".join(f"{who}: {n}" for who, n in count.most_common())
    return "\n".join(["| where | bug | noticed by |", "|---|---|---|", *rows, "", total])


def _copy(folder: pathlib.Path) -> pathlib.Path:
    """The tree as it is, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _is_open(mutation: dict, who: str) -> bool:
    """Whether nobody has noticed it yet, and these tests were not asked."""
    return not mutation.get("caught_by") and who not in mutation.get("missed_by", ())


def _try(tree: pathlib.Path, mutation: dict, who: str, workers: int = 2) -> dict:
    """Whether `make test`, or the rest of `make test-all`, notices, and by which test."""
    path = tree / mutation["file"]
    text = path.read_text("utf-8")
    if text.count(mutation["old"]) != 1:
        raise SystemExit(f"{mutation['file']}: {mutation['old']!r} does not occur once: update it")
    path.write_text(text.replace(mutation["old"], mutation["new"]), "utf-8")
    try:
        rooms = itertools.chain(_known(tree, mutation), _rooms(tree, mutation["file"]))
        failures = (_first_failure(tree, PHASES[who], tests, workers) for tests in rooms)
        test = next(filter(None, failures), None)
    finally:
        path.write_text(text, "utf-8")
    if test is None:
        return dict(caught_by=None, missed_by=[*mutation.get("missed_by", ()), who])
    if _first_failure(tree, "", [test], 0):
        raise SystemExit(f"{test} fails without the bug too")
    return dict(caught_by=who, test=test)


def _known(tree: pathlib.Path, mutation: dict) -> Iterator[list[str]]:
    """The test that noticed before, if its file is there still."""
    test = mutation.get("test", "")
    if test and (tree / test.partition("::")[0]).exists():
        yield [test]


def _rooms(tree: pathlib.Path, file: str) -> Iterator[list[str]]:
    """Where to look first, and then: the file's own tests, its folder's, all.

    A folder of files that are tested together has one file of tests, or that of the folder above.
    """
    path = pathlib.PurePath(file)
    folder = pathlib.PurePath("tests", *path.parts[1:-1])
    near = [folder / f"test_{path.stem.strip('_')}.py"]
    if len(path.parts) > 2:  # at the root `tests/` itself is all
        near += [folder, folder.with_name(f"test_{folder.name}.py")]
    if len(path.parts) > 3:
        near.append(folder.parent)
    yield from ([str(p)] for p in near if (tree / p).exists())
    yield ["tests"]


def _first_failure(tree: pathlib.Path, marks: str, tests: list[str], workers: int) -> str | None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"-n{workers}", "--dist=worksteal"]
    run = subprocess.run(
        [*command, "-m", marks, *tests],
        cwd=tree,
        env=os.environ | dict(PYTHONPATH=str(tree)),
        capture_output=True,
        text=True,
        check=False,
    )
    # Passed, nothing to run, or no test of that name any more.
    if run.returncode in (0, 5) or (run.returncode == 4 and "::" in tests[0]):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if failed is None:
        raise SystemExit(f"pytest ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return failed[1]


if __name__ == "__main__":
    main(sys.argv[1:])
