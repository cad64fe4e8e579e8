"""What a report says: figures, tables and numbers, each with what is to be seen there."""

from collections.abc import Mapping, Sequence
import dataclasses

Cell = str | int | float | None  # None: there is no such number


@dataclasses.dataclass(frozen=True)
class Text:
    """What stands under a figure or a table, for a reader without the paper; a sentence each."""

    shows: str
    read: str  # how to read it
    paper: str = ""  # what the paper found, with its section or table


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a drawing that a page can hide, and whose points it can tell.

    Attributes:
      color: as CSS has it.
      points: (place to the right, place downwards, x, y, half of the band at y); places in the
        drawing's own units, x and y in those of its axes.
    """

    name: str
    color: str
    points: Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A drawing: SVG of `draw`, and the same in words.

    Attributes:
      curves: of `draw.live_lines`; the page then follows the pointer.
    """

    title: str
    svg: str
    alternative: str  # what somebody who cannot see it is told: its numbers, not its looks
    text: Text
    curves: Sequence[Curve] = ()


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      format: of numbers, as in `format(x, ...)`; they are sorted as numbers.
    """

    name: str
    format: str = ".2f"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells; a number stands there as it is and is rounded when it is shown."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    text: Text

    def shown(self) -> list[list[str]]:
        """The cells as text."""
        return [
            [shown(cell, column) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]


def shown(cell: Cell, column: Column) -> str:
    """A cell as text."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    text = format(cell, column.format)
    return text if text.strip("-0.% ") else text.removeprefix("-")  # no -0.00


@dataclasses.dataclass(frozen=True)
class Section:
    """A sub-report.

    Attributes:
      name: as on the command line.
      lead: what is asked and what came out, in two or three sentences.
      data: every number, JSON-able: what figures and tables show and more.
    """

    name: str
    title: str
    lead: str
    figures: Sequence[Figure]
    tables: Sequence[Table]
    data: Mapping
