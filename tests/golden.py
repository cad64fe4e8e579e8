"""Compares a report's prose, drawings, tables and data with its golden file.

If a report changes on purpose, delete its file in tests/goldens and run its tests, which write it.
Numbers may differ in the last digit that is shown.
"""

import pathlib
import re

import jax
import numpy as np
import pytest

from kvjax.analysis.page import draw
from kvjax.analysis.page.section import Section, Table, shown

FOLDER = pathlib.Path(__file__).parent / "goldens"
_NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def note_drawings(patch: pytest.MonkeyPatch) -> None:
    """Replaces drawings by texts that list what would be drawn."""
    patch.setattr(draw, "lines", _noted)
    patch.setattr(draw, "heatmaps", _noted)
    patch.setattr(draw, "live_lines", lambda **options: (_noted(**options), []))


def _noted(*arguments, **options) -> str:
    return "\n".join(_lines([*arguments, options]))


def check(section: Section, folder: str = "reports", rtol: float = 0.012) -> None:
    """Compares a section, made while drawings are noted, with its file."""
    check_text(_text(section), f"{folder}/{section.name}", rtol)


def check_text(text: str, name: str, rtol: float) -> None:
    """Compares a text with the file of a name, numbers to a tolerance."""
    file, lines = FOLDER / f"{name}.txt", [line.rstrip() for line in text.splitlines()]
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(lines) + "\n", "utf-8")
        pytest.fail(f"{file} is written: read it, and run this again")
    expected = file.read_text("utf-8").splitlines()

    def plain(lines):
        return [_NUMBER.sub("#", line) for line in lines]

    assert plain(lines) == plain(expected)
    for line, golden in zip(lines, expected, strict=True):
        pair = _numbers(line), _numbers(golden)
        np.testing.assert_allclose(*pair, rtol=rtol, atol=rtol, err_msg=golden)


def _numbers(line: str) -> list[float]:
    return [float(x.replace(",", "").replace("−", "-")) for x in _NUMBER.findall(line)]


def _lines(value) -> list[str]:
    """Returns lines for a tree: per path of keys, its texts and a summary of its numbers."""
    texts, numbers = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda x: x is None):
        keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        name = " ".join(keys)
        if leaf is None or isinstance(leaf, str):
            texts.setdefault(name, []).append(str(leaf))
        else:
            numbers.setdefault(name, []).append(np.asarray(leaf, np.float64))
    lines = [f"  {name}: {' | '.join(values)}" for name, values in texts.items()]
    for name, arrays in numbers.items():
        shapes = dict.fromkeys(str(x.shape) for x in arrays if x.ndim)
        x = np.concatenate([x.ravel() for x in arrays])
        finite = x[np.isfinite(x)]
        weights = np.cos(np.arange(finite.size))  # a weighted sum depends on the order
        sums = " ".join(f"{y:.3g}" for y in [*finite[:2], finite.sum(), finite @ weights])
        lines.append(f"  {name}: {x.size - finite.size} of {x.size} {' '.join(shapes)} {sums}")
    return lines


def cells(table: Table) -> list[list[str]]:
    """Returns a table's cells as text."""
    return [list(map(shown, row, table.columns)) for row in table.rows]


def _text(section: Section) -> str:
    lines = [section.name, section.title, section.finding, section.lead]
    for figure in section.figures:
        lines += ["", figure.title, figure.svg, figure.alternative]
        lines += [figure.caption, *map(str, figure.curves)]
    for table in section.tables:
        lines += ["", table.title, " | ".join(column.name for column in table.columns)]
        lines += [" | ".join(row) for row in cells(table)]
        lines.append(table.caption)
    return "\n".join([*lines, "", "data", *_lines(section.data)])
