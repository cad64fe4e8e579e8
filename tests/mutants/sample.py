"""A random sample of a package's mutants, stratified by folder."""

import math
import pathlib
import random

from tests.mutants import operators

_Points = dict[str, list[tuple[str, operators.Mutant]]]
ROOT = "."  # stands for files that are in no folder


def points(root: pathlib.Path, package: str = "kvjax") -> _Points:
    """Returns (file, mutant) for every possible mutant, by folder of the package."""
    by_folder: _Points = {}
    for path in sorted((root / package).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        file_points = [(file, mutant) for mutant in operators.mutants(path.read_bytes())]
        if file_points:
            by_folder.setdefault(folder(file), []).extend(file_points)
    return by_folder


def folder(file: str) -> str:
    """Returns a file's folder in the package."""
    _, *between, _ = file.split("/")
    return between[0] if between else ROOT


def draw(points: _Points, root: pathlib.Path, *, count: int, least: int, seed: str) -> list[dict]:
    """Draws about `count` mutants: each folder's share, but at least `least`; in random order.

    Returns:
      JSON-able: `file`, `lines` of the statement, `operator`, bytes `start` to `end` of the file,
      and the text there, `before` and `after`.
    """
    total, generator, chosen = sum(map(len, points.values())), random.Random(seed), []
    for _, folder_points in sorted(points.items()):
        wanted = max(least, math.ceil(count * len(folder_points) / total))
        order = generator.sample(folder_points, len(folder_points))
        texts = {file: (root / file).read_bytes() for file, _ in order}
        valid = (pair for pair in order if pair[1].is_valid(texts[pair[0]]))
        for (file, mutant), _ in zip(valid, range(wanted), strict=False):
            chosen.append(
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
    generator.shuffle(chosen)
    return chosen
