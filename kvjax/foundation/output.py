"""Output of commands: text and tables that fit the terminal, Markdown, or JSON."""

import argparse
from collections.abc import Iterable, Sequence
import dataclasses
import json
import shutil
import sys
import textwrap

from kvjax.foundation import json_text

GAP = "  "
NARROWEST = 12  # minimum width of a column whose words are broken


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with a title above it and notes below."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence]
    notes: Sequence[str] = ()


class Output:
    """Text and tables on standard output; on standard error with --json.

    Args:
      options: parsed options, among them `json` and `markdown` of `Parser.add_output`.
    """

    def __init__(self, options: argparse.Namespace):
        self._json, self._markdown = options.json, options.markdown

    @property
    def _stream(self):
        return sys.stderr if self._json else sys.stdout

    def say(self, text: str = "", *, wrap: bool = True) -> None:
        """Prints a line or paragraph, wrapped to the terminal's width unless it is Markdown.

        Args:
          wrap: False keeps it on one line, as for commands to copy.
        """
        if wrap and not self._markdown:
            text = "\n".join(
                textwrap.fill(line, width(), break_on_hyphens=False) for line in text.split("\n")
            )
        print(text, file=self._stream, flush=True)

    def table(self, header: Sequence[str], rows: Iterable[Sequence]) -> None:
        """Prints a table after an empty line."""
        make = markdown if self._markdown else aligned
        print("\n" + "\n".join(make(header, rows)), file=self._stream, flush=True)

    def show(self, table: Table) -> None:
        """Prints a table with its title and notes."""
        self.say(table.title)
        self.table(table.header, table.rows)
        for note in table.notes:
            self.say(f"\n{note}")

    def result(self, result: dict) -> None:
        """Prints one line of JSON with --json."""
        if self._json:
            print(json.dumps(json_text.plain(result)), flush=True)


def width() -> int:
    """Returns the terminal's columns ($COLUMNS takes precedence); 80 without a terminal."""
    return max(shutil.get_terminal_size().columns, 40)


def markdown(header: Sequence[str], rows: Iterable[Sequence]) -> list[str]:
    """Returns the lines of a Markdown table, with numbers aligned to the right."""
    rows = [[str(cell) for cell in row] for row in rows]
    right = _are_figures(header, rows)

    def line(cells):
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join("---:" if figures else "---" for figures in right) + "|"
    return [line(header), rule, *(line(row) for row in rows)]


def aligned(header: Sequence[str], rows: Iterable[Sequence]) -> list[str]:
    """Returns the lines of a table no wider than the terminal.

    Headers and words wrap, numbers never do. Columns that do not fit continue below, in blocks that
    each repeat the first column.
    """
    rows = [[str(cell) for cell in row] for row in rows]
    right = _are_figures(header, rows)
    columns = list(zip(header, *rows, strict=True))
    words = [[w for cell in column for w in cell.split()] or [""] for column in columns]
    min_widths = [max(map(len, w)) for w in words]
    for i, figures in enumerate(right):
        longest = max(map(len, columns[i][1:]), default=0)
        if figures and longest <= width() // 2:  # "1.9 ± 0.1" stays on one line, sentences wrap
            min_widths[i] = max(min_widths[i], longest)
        else:
            min_widths[i] = min(min_widths[i], max(NARROWEST, width() // 2))
    lines = []
    for block in _blocks(min_widths):
        if lines:
            lines.append("")
        lines += _lines(
            [columns[i] for i in block], [min_widths[i] for i in block], [right[i] for i in block]
        )
    return lines


def _blocks(min_widths: Sequence[int]) -> list[list[int]]:
    """Returns the columns of each block, with the first column in every block."""
    blocks = [[0]]
    for i in range(1, len(min_widths)):
        block = [*blocks[-1], i]
        if sum(min_widths[j] for j in block) + len(GAP) * (len(block) - 1) > width():
            if len(blocks[-1]) > 1:
                blocks.append([0])
        blocks[-1].append(i)
    return blocks


def _lines(columns, min_widths, right) -> list[str]:
    """Returns the lines of a block, with columns as wide as their longest cell if there is room."""
    max_widths = [max(map(len, column)) for column in columns]
    room = width() - len(GAP) * (len(columns) - 1)
    widths = list(min_widths)
    while sum(widths) < room and widths != max_widths:  # widen the narrowest column that wraps
        wrapping = [i for i in range(len(widths)) if widths[i] < max_widths[i]]
        i = min(wrapping, key=widths.__getitem__)
        widths[i] += 1
    lines = []
    for n, cells in enumerate(zip(*columns, strict=True)):
        wrapped = [textwrap.wrap(c, w) or [""] for c, w in zip(cells, widths, strict=True)]
        for k in range(max(map(len, wrapped))):
            parts = [cell[k] if k < len(cell) else "" for cell in wrapped]
            padded = [
                part.rjust(w) if r else part.ljust(w)
                for part, w, r in zip(parts, widths, right, strict=True)
            ]
            lines.append(GAP.join(padded).rstrip())
        if n == 0:
            lines.append(GAP.join("-" * w for w in widths))
    return lines


def _are_figures(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Returns for each column True if most of its non-empty cells begin like numbers."""
    are_figures = []
    for i in range(len(header)):
        cells = [c for row in rows if (c := row[i].strip("*`")) and c != "-"]
        numbers = [c for c in cells if c.lstrip("+-±≤<≥~")[:1].isdigit()]
        are_figures.append(i > 0 and 2 * len(numbers) > len(cells) if cells else i > 0)
    return are_figures
