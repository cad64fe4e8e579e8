"""Contents of a report: figures, tables and numbers."""

from collections.abc import Mapping, Sequence
import dataclasses

from kvjax.foundation.intervals import Estimate

Cell = str | int | float | Estimate | None  # None: no number


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a drawing that the page can hide, with readable points.

    Attributes:
      color: in CSS.
      style: number of its dash and marker in `theme`.
      points: (position right, position down, x, y, half of the band at y); positions in the
        drawing's units, x and y in the axes' units.
    """

    name: str
    color: str
    style: int
    points: Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A drawing: SVG of `draw`, and its content in words.

    Attributes:
      curves: of `draw.live_lines`, for a page that shows the numbers at the pointer.
    """

    title: str
    svg: str
    alternative: str  # for screen readers: numbers, not appearance
    caption: str
    curves: Sequence[Curve] = ()


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      format: of numbers, as in `format(x, ...)`.
    """

    name: str
    format: str = ".2f"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells; numbers are rounded when displayed.

    Attributes:
      stacks: on a phone, a row's cells stand one below another with their column's name.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str
    stacks: bool = False

    def shown(self) -> list[list[str]]:
        """Returns the cells as text."""
        return [
            [shown(cell, column) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]


def shown(cell: Cell, column: Column) -> str:
    """Returns a cell as text."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Estimate):
        return cell.shown(column.format)
    text = format(cell, column.format)
    return text if text.strip("-0.% ") else text.removeprefix("-")  # no -0.00


@dataclasses.dataclass(frozen=True)
class Section:
    """One report.

    Attributes:
      name: as on the command line.
      lead: the main numbers, in two or three sentences.
      finding: the main number and verdict in one sentence, for the page's summary.
      data: every number of figures and tables, and more, as JSON values.
    """

    name: str
    title: str
    lead: str
    figures: Sequence[Figure]
    tables: Sequence[Table]
    data: Mapping
    finding: str = ""


@dataclasses.dataclass(frozen=True)
class Point:
    """A line of a page's summary.

    Attributes:
      section: name of the section that the line links to; "": none.
    """

    name: str
    text: str
    section: str = ""
