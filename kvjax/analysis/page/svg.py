"""Turns a matplotlib figure into SVG text that can be embedded in a page.

The SVG needs no other file, uses the page's fonts, and its ids are unique in the page. Equal
figures give equal bytes, whatever matplotlib style the process has set.
"""

import base64
from collections.abc import Callable, Iterator
import contextlib
import hashlib
import io
import re
import warnings

from matplotlib.figure import Figure
import numpy as np
from PIL import Image

from kvjax.foundation import theme

SERIES = "series-"  # gids that begin so are of artists that the page can hide


def text(width: float, draw: Callable[[Figure], None], height: float) -> str:
    """Returns a figure as SVG.

    Args:
      draw: called with an empty figure to draw on.
      width, height: inches; an inch is 72 units of the SVG and of font sizes.
    """
    buffer = io.StringIO()
    with _figure(width, draw, height) as figure:
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict(Date=None))
    return _clean(buffer.getvalue())


def png(width: float, draw: Callable[[Figure], None], height: float, dpi: int = 144) -> bytes:
    """Returns a figure as PNG; see `text`."""
    buffer = io.BytesIO()
    with _figure(width, draw, height) as figure:
        figure.savefig(buffer, format="png", dpi=dpi, metadata=dict(Software=None))
    return buffer.getvalue()


@contextlib.contextmanager
def _figure(width: float, draw: Callable[[Figure], None], height: float) -> Iterator[Figure]:
    """Yields a figure in the page's style, after calling `draw` with it."""
    with theme.styled(svg__fonttype="none"), warnings.catch_warnings():  # text stays text
        # matplotlib measures text in a font that lacks some glyphs of the page's fonts.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        yield figure


def _clean(svg: str) -> str:
    """Returns matplotlib's SVG as an element of a page, without references to other files."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # the page's font applies
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"', "", svg)
    svg = re.sub(r'(?<=xlink:href="data:image/png;base64,)[^"]*', _with_palette, svg)
    svg = re.sub(r'(?<=[ "][dxy]=")[^"]*', _rounded, svg)
    svg = re.sub(f' id="{SERIES}([0-9]+)"', r' data-series="\1"', svg)
    svg = _unique_ids(svg.replace("xlink:href", "href"))
    head, _, rest = svg.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)[0]
    style = 'font-family="system-ui, sans-serif" style="stroke-linejoin: round"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>{rest}'
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def _with_palette(png: re.Match) -> str:
    """Returns a smaller base64 PNG, with a palette, if it has at most 256 opaque colours."""
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(png[0]))).convert("RGBA"))
    colors, index = np.unique(pixels.reshape(-1, 4), axis=0, return_inverse=True)
    if len(colors) > 256 or (colors[:, 3] < 255).any():
        return png[0]
    picture = Image.fromarray(index.reshape(pixels.shape[:2]).astype(np.uint8), "P")
    picture.putpalette(colors[:, :3].tobytes())
    buffer = io.BytesIO()
    picture.save(buffer, format="png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _rounded(coordinates: re.Match) -> str:
    """Rounds coordinates to hundredths."""

    def hundredths(number):
        return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")

    return re.sub(r"-?\d+\.\d+", hundredths, " ".join(coordinates[0].split()))


def _unique_ids(svg: str) -> str:
    """Drops unused ids; replaces the others by a digest of the figure and a number."""
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    number = {name: i for i, name in enumerate(used)}
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
    pattern = r'( id="|href="#|url\(#)([^")]+)'
    svg = re.sub(pattern, lambda m: f"{m[1]}@-{number[m[2]]}", svg)
    digest = hashlib.sha256(svg.encode()).hexdigest()[:8]
    return re.sub(r'( id="|href="#|url\(#)@-', lambda m: f"{m[1]}f{digest}-", svg)
