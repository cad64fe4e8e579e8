"""Measures the share of small random changes to the code (mutants) that the tests detect.

python -m tests.mutants experiments/results/mutants.json                       # the table
python -m tests.mutants experiments/results/mutants.json --run --workers=2     # draws and tries
python -m tests.mutants experiments/results/mutants.json --run --slow          # slow tests too

Outcomes are written at once, so an interrupted run resumes. A reader marks a mutant that does the
same as the code as `equivalent`, with the reason; such mutants do not count.
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
    add("file", type=pathlib.Path, help="the sample and its outcomes")
    add("--run", action="store_true", help="draw a sample if the file is missing; try open mutants")
    add("--slow", action="store_true", help="also try slow tests, if quick ones detect nothing")
    add("--tree", type=pathlib.Path, default=ROOT, help="a checkout (this one)")
    add("--seed", default=kvjax.__version__, help="seed of the sample (the version)")
    add("--count", type=int, default=300, help="approximate number of mutants (%(default)s)")
    add("--least", type=int, default=8, help="minimum per folder (%(default)s)")
    add("--workers", type=int, default=1, help="processes (%(default)s)")
    options = parser.parse_args()
    if options.run:
        if not options.file.exists():
            _write(options.file, _draw_sample(options))
        _try(options)
    print(table.table(_read(options.file)))


def _draw_sample(options) -> dict:
    root = options.tree
    places = sample.points(root)
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    )
    settings = dict(seed=options.seed, count=options.count, least=options.least)
    return dict(
        commit=git.stdout.strip(),
        code=_digest(root),
        **settings,
        places={name: len(points_of_folder) for name, points_of_folder in places.items()},
        mutants=sample.draw(places, root, **settings),
        made_by=software("pytest"),
    )


def _try(options) -> None:
    """Tries all mutants with quick tests, then undetected ones with slow tests."""
    lines = pathlib.Path(cache_directory() / "mutants" / _digest(options.tree, tests=False))
    lines.mkdir(parents=True, exist_ok=True)
    with workers.Pool(options.workers, options.tree, lines) as pool:
        for message in pool.each(workers.record, coverage.test_files(options.tree)):
            if message:
                print(message, flush=True)
        for stages in (("folder", "quick"), ("slow",) if options.slow else ()):
            mutants = _read(options.file)["mutants"]
            open_ = [(i, m, stages) for i, m in enumerate(mutants) if workers.left(m, stages)]
            for index, outcome in pool.each(workers.attempt, open_):
                content = _read(options.file)  # a reader may have marked equivalent mutants
                content["mutants"][index] |= outcome
                _write(options.file, content)
                message = outcome.get("noticed_by", "nobody")
                print(f"{index} {mutants[index]['file']}: {message}", flush=True)


def _digest(root: pathlib.Path, *, tests: bool = True) -> str:
    """Returns a digest of the package and of tests/, with or without the test files."""
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
