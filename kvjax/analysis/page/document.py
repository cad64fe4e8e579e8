"""Writes sections as one self-contained HTML file."""

from collections.abc import Mapping, Sequence
import html
import json
import math
import numbers
import pathlib

from kvjax.analysis.page import formulas
from kvjax.analysis.page.section import Cell, Column, Figure, Point, Section, Table, shown
from kvjax.foundation.intervals import Estimate

_HERE = pathlib.Path(__file__).parent
_MARKS = "●■◆▲▼✚✖★"  # the shapes of `theme.MARKERS`
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(
    title: str,
    lead: str,
    sections: Sequence[Section],
    about: Mapping[str, str | Mapping],
    *,
    summary: Sequence[Point] = (),
    reload_seconds: int = 0,
) -> str:
    """Returns the text of an HTML file, the same for the same arguments.

    The page can be read on phones and on paper, in light and dark mode. JavaScript sorts tables,
    hides curves and shows the numbers of points; the page can be read without it.

    Args:
      about: facts about how the report was made, by name. The items of a mapping are listed.
      summary: the main findings, at the top of the page.
      reload_seconds: seconds after which the page reloads itself; 0: never.
    """
    links = [(section.name, section.title) for section in sections]
    links.append(("about", "About this report"))
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        *([f'<meta http-equiv="refresh" content="{reload_seconds}">'] if reload_seconds else []),
        f"<title>{_escaped(title)}</title>",
        f"<style>\n{(_HERE / 'page.css').read_text('utf-8')}</style>",
        "</head>",
        "<body>",
        f'<header id="top"><h1>{_escaped(title)}</h1>{_lead(lead)}{_summary(summary)}</header>',
        '<nav aria-label="Contents" id="contents"><h2>Contents</h2><ul>',
        *(f'<li><a href="#{_escaped(to)}">{_escaped(text)}</a></li>' for to, text in links),
        "</ul></nav>",
        "<main>",
        *(f"{_legend(sections, i)}{_section(section)}" for i, section in enumerate(sections)),
        "</main>",
        f"<footer>{_opening('about', 'About this report')}{_list(about)}</section></footer>",
        f"<script>\n{(_HERE / 'page.js').read_text('utf-8')}</script>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _summary(points: Sequence[Point]) -> str:
    if not points:
        return ""
    items = []
    for point in points:
        name = _escaped(point.name)
        if point.section:
            name = f'<a href="#{_escaped(point.section)}">{name}</a>'
        items.append(f"<li>{f'<b>{name}:</b> ' if name else ''}{_with_formulas(point.text)}</li>")
    return f'<ul class="summary">{"".join(items)}</ul>'


def _legend(sections: Sequence[Section], i: int) -> str:
    """Returns the legend of the page's curves if section i is the first with curves; else ""."""

    def curves_of(group):
        return {c.name: c for section in group for figure in section.figures for c in figure.curves}

    if curves_of(sections[:i]) or not curves_of(sections[i : i + 1]):
        return ""
    items = [
        f'<span style="--curve: {curve.color}" data-mark="{_MARKS[curve.style % len(_MARKS)]}">'
        f"{_escaped(curve.name)}</span>"
        for curve in sorted(curves_of(sections).values(), key=lambda curve: curve.style)
    ]
    return f'<div class="legend" role="group" aria-label="Curves">{"".join(items)}</div>\n'


def _section(section: Section) -> str:
    parts = [_opening(section.name, section.title), _lead(section.lead)]
    if section.figures:
        ids = [f"{section.name}-figure-{i + 1}" for i in range(len(section.figures))]
        figures = map(_figure, ids, section.figures)
        parts += ['<div class="figures">', *figures, "</div>"]
    for i, table in enumerate(section.tables):
        parts.append(_table(f"{section.name}-table-{i + 1}", table))
    parts += ['<p class="top"><a href="#contents">Contents</a></p>', "</section>"]
    return "\n".join(parts)


def _opening(name: str, title: str) -> str:
    name = _escaped(name)
    heading = f'<h2 id="{name}-title">{_escaped(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">\n{heading}'


def _lead(text: str) -> str:
    return f'<p class="lead">{_with_formulas(text)}</p>' if text else ""


def _figure(name: str, figure: Figure) -> str:
    alternative = _escaped(f"{figure.title}. {figure.alternative}")
    drawing = figure.svg.replace("<svg", f'<svg role="img" aria-label="{alternative}"', 1)
    return (
        f'<figure id="{_escaped(name)}"><h3>{_escaped(figure.title)}</h3>\n'
        f'<div class="card">{drawing}</div>\n{_curves(figure)}{_caption(figure.caption)}</figure>'
    )


def _curves(figure: Figure) -> str:
    """Returns a script element with the points that page.js shows; "" without curves."""
    if not figure.curves:
        return ""

    def rounded(point):
        return [*(round(x, 1) for x in point[:2]), *(float(f"{x:.6g}") for x in point[2:])]

    curves = [
        dict(name=curve.name, color=curve.color, points=[rounded(point) for point in curve.points])
        for curve in figure.curves
    ]
    text = json.dumps(curves, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" class="curves">{text}</script>\n'


def _caption(text: str) -> str:
    return f"<figcaption>{_with_formulas(text)}</figcaption>"


def _table(name: str, table: Table) -> str:
    name = _escaped(name)
    rows = [[_plain(cell) for cell in row] for row in table.rows]
    numeric = [_is_numeric([row[i] for row in rows]) for i in range(len(table.columns))]
    classes = [' class="number"' if is_number else "" for is_number in numeric]
    stacks = ' class="stacks"' * table.stacks
    head = "".join(
        f'<th scope="col"{class_}>{_escaped(column.name)}</th>'
        for column, class_ in zip(table.columns, classes, strict=True)
    )
    lines = "\n".join(_row(row, table.columns, numeric) for row in table.rows)
    return (
        f'<figure class="table"><h3 id="{name}">{_escaped(table.title)}</h3>\n'
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}">'
        f'<table{stacks} aria-labelledby="{name}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>\n{_caption(table.caption)}</figure>"
    )


def _row(row: Sequence[Cell], columns: Sequence[Column], numeric: Sequence[bool]) -> str:
    """Returns a table row; its first cell is a header."""
    cells = []
    for i, (cell, column) in enumerate(zip(row, columns, strict=True)):
        tag = "td" if i else "th"
        classes = ["number"] * numeric[i] + ["missing"] * _is_missing(_plain(cell))
        attributes = ' scope="row"' * (not i)
        attributes += f' class="{" ".join(classes)}"' if classes else ""
        number = _plain(cell)
        if isinstance(number, numbers.Real) and not _is_missing(number):
            attributes += f' data-value="{_value(number)}"'
        attributes += f' data-column="{_escaped(column.name)}"' * bool(i)
        text = shown(None if _is_missing(number) else cell, column)
        cells.append(f"<{tag}{attributes}>{_escaped(text)}</{tag}>")
    return f"<tr>{''.join(cells)}</tr>"


def _plain(cell: Cell) -> Cell:
    """Returns the mean of an estimate, or the cell itself."""
    return cell.mean if isinstance(cell, Estimate) else cell


def _is_missing(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, numbers.Real) and math.isnan(cell))


def _is_numeric(cells: Sequence[Cell]) -> bool:
    """Returns True for a column of numbers and missing cells."""
    present = [cell for cell in cells if cell is not None]
    return bool(present) and all(isinstance(cell, numbers.Real) for cell in present)


def _value(number: float) -> str:
    """Returns a number as JavaScript's Number reads it."""
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return str(int(number)) if isinstance(number, numbers.Integral) else repr(float(number))


def _list(about: Mapping[str, str | Mapping]) -> str:
    def shown_value(value):
        return (
            ", ".join(f"{name} {item}" for name, item in value.items())
            if isinstance(value, Mapping)
            else str(value)
        )

    rows = (
        f"<dt>{_escaped(k)}</dt><dd>{_escaped(shown_value(v))}</dd>" for k, v in about.items() if v
    )
    return f"\n<dl>{''.join(rows)}</dl>\n"


def _with_formulas(text: str) -> str:
    """Returns text as HTML, with formulas as MathML."""
    return formulas.set_in(_escaped(text))


def _escaped(text: str) -> str:
    """Escapes text for HTML and attributes; keeps percent signs on the line of their numbers."""
    return html.escape(text.replace(" %", "\N{NO-BREAK SPACE}%"))
