"""The contents of a report: figures, tables and numbers."""

from collections.abc import Mapping, Sequence
import dataclasses

from kvjax.foundation.intervals import Estimate

Cell = str | int | float | Estimate | None  # None: no number


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a drawing that the page can hide, and the points whose numbers it can show.

    Attributes:
      color: a CSS colour.
      style: index of its dash and marker in `theme`.
      points: (right, down, x, y, half), where right and down are the position in the drawing's
        units, x and y are in the axes' units, and half is half the height of the band at x.
    """

    name: str
    color: str
    style: int
    points: Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A drawing (an SVG of `draw`), and its content as text.

    Attributes:
      curves: curves of `draw.live_lines`, for a page that shows the numbers at the pointer.
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
      format: format of numbers, as in `format(x, ".2f")`.
    """

    name: str
    format: str = ".2f"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells; numbers are rounded when displayed.

    Attributes:
      stacks: True to stack the cells of a row on a phone, each with its column's name.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str
    stacks: bool = False


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
      lead: two or three sentences with the main numbers.
      finding: one sentence with the main number or verdict, for the page's summary.
      data: every number of figures and tables, and further ones, JSON-able.
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
