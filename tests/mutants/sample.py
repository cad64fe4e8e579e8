"""A random sample of a package's mutants, stratified by folder."""

import math
import pathlib
import random

from tests.mutants import operators

_Points = dict[str, list[tuple[str, operators.Mutant]]]
ROOT = "."  # stands for files that are in no folder


def points(root: pathlib.Path, package: str = "kvjax") -> _Points:
    """Returns (file, mutant) for every place that can be changed, by folder of the package."""
    found: _Points = {}
    for path in sorted((root / package).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        of_file = [(file, mutant) for mutant in operators.mutants(path.read_bytes())]
        if of_file:
            found.setdefault(folder(file), []).extend(of_file)
    return found


def folder(file: str) -> str:
    """Returns the folder of the package that a file is in."""
    _, *between, _ = file.split("/")
    return between[0] if between else ROOT


def draw(points: _Points, root: pathlib.Path, *, count: int, least: int, seed: str) -> list[dict]:
    """Draws about `count` mutants, of each folder its share or `least`, in random order.

    Returns:
      JSON-able: `file`, `lines` of the statement, `operator`, bytes `start` to `end` of the file,
      and the text there, `before` and `after`.
    """
    total, generator, drawn = sum(map(len, points.values())), random.Random(seed), []
    for _, all_of_one in sorted(points.items()):
        wanted = max(least, math.ceil(count * len(all_of_one) / total))
        order = generator.sample(all_of_one, len(all_of_one))
        texts = {file: (root / file).read_bytes() for file, _ in order}
        valid = (pair for pair in order if pair[1].is_valid(texts[pair[0]]))
        for (file, mutant), _ in zip(valid, range(wanted), strict=False):
            drawn.append(
                dict(
                    file=file,
                    lines=list(mutant.lines),
                    operator=mutant.operator,
                    before=mutant.before(texts[file]),
                    after=mutant.after,
                    start=mutant.start,
                    end=mutant.end,
                )
            )
    generator.shuffle(drawn)
    return drawn
