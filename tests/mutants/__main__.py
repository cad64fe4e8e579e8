"""Measures what the tests notice: a random sample of small changes to the code, each tried.

python -m tests.mutants experiments/results/mutants.json                       # the table
python -m tests.mutants experiments/results/mutants.json --run --workers=2     # draws and tries
python -m tests.mutants experiments/results/mutants.json --run --slow          # slow tests too

What is found is written at once: a run that was ended goes on where it was. A mutant that does the
same as the code gets its reason as `equivalent` by hand, and leaves the shares.
"""

import argparse
import hashlib
import json
import pathlib
import subprocess

from etils import epath

import kvjax
from kvjax.foundation.checkout import ROOT
from kvjax.foundation.files import write_atomically
from kvjax.foundation.provenance import software
from kvjax.foundation.runtime import cache_directory
from tests.mutants import coverage, sample, table, workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("file", type=pathlib.Path, help="the sample and what was found")
    add("--run", action="store_true", help="draw if the file is not there, and try what is open")
    add("--slow", action="store_true", help="ask slow tests of what quick ones do not notice")
    add("--tree", type=pathlib.Path, default=ROOT, help="a checkout (this one)")
    add("--seed", default=kvjax.__version__, help="another sample (the version)")
    add("--count", type=int, default=300, help="mutants, about (%(default)s)")
    add("--least", type=int, default=8, help="of each folder (%(default)s)")
    add("--workers", type=int, default=1, help="processes (%(default)s)")
    options = parser.parse_args()
    if options.run:
        if not options.file.exists():
            _write(options.file, _drawn(options))
        _try(options)
    print(table.table(_read(options.file)))


def _drawn(options) -> dict:
    root = options.tree
    places = sample.points(root)
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    )
    asked = dict(seed=options.seed, count=options.count, least=options.least)
    return dict(
        commit=git.stdout.strip(),
        code=_digest(root),
        **asked,
        places={name: len(all_of_one) for name, all_of_one in places.items()},
        mutants=sample.draw(places, root, **asked),
        made_by=software("pytest"),
    )


def _try(options) -> None:
    """Tries all mutants with quick tests, then with slow ones those that are left."""
    lines = pathlib.Path(cache_directory() / "mutants" / _digest(options.tree, tests=False))
    lines.mkdir(parents=True, exist_ok=True)
    with workers.Pool(options.workers, options.tree, lines) as pool:
        for said in pool.each(workers.record, coverage.test_files(options.tree)):
            if said:
                print(said, flush=True)
        for stages in (("folder", "quick"), ("slow",) if options.slow else ()):
            mutants = _read(options.file)["mutants"]
            open_ = [(i, m, stages) for i, m in enumerate(mutants) if workers.left(m, stages)]
            for index, found in pool.each(workers.attempt, open_):
                content = _read(options.file)  # a reader may have judged others meanwhile
                content["mutants"][index] |= found
                _write(options.file, content)
                said = found.get("noticed_by", "nobody")
                print(f"{index} {mutants[index]['file']}: {said}", flush=True)


def _digest(root: pathlib.Path, *, tests: bool = True) -> str:
    """Returns a digest of the code and what its tests import, and of the tests if asked."""
    digest = hashlib.sha256()
    for folder in ("kvjax", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            if not tests and folder == "tests" and path.name.startswith("test_"):
                continue
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _read(file: pathlib.Path) -> dict:
    return json.loads(file.read_text("utf-8"))


def _write(file: pathlib.Path, content: dict) -> None:
    write_atomically(epath.Path(file), json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
