"""A matplotlib figure as SVG text for embedding in a page.

Self-contained, with the page's fonts and unique ids; the same figure gives the same bytes, whatever
style the process has set.
"""

import base64
from collections.abc import Callable, Iterator
import contextlib
import hashlib
import io
import re
import threading
import warnings

from matplotlib import style as style_lib
from matplotlib.figure import Figure
import numpy as np
from PIL import Image

INK, GRAY = "#1f2328", "#59636e"
SERIES = "series-"  # gid prefix of artists that the page can hide
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,
    "font.size": 11.5,
    "axes.titlesize": 12,
    "axes.labelsize": 12,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRAY,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_STYLING = threading.Lock()  # matplotlib's parameters are global


def text(width: float, draw: Callable[[Figure], None], height: float) -> str:
    """Returns the SVG of a function's drawing.

    Args:
      width, height: inches of 72 units, the unit of font sizes.
    """
    buffer = io.StringIO()
    with _figure(width, draw, height) as figure:
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict(Date=None))
    return _clean(buffer.getvalue())


def png(width: float, draw: Callable[[Figure], None], height: float, dpi: int = 144) -> bytes:
    """Returns the drawing as a PNG; see `text`."""
    buffer = io.BytesIO()
    with _figure(width, draw, height) as figure:
        figure.savefig(buffer, format="png", dpi=dpi, metadata=dict(Software=None))
    return buffer.getvalue()


@contextlib.contextmanager
def _figure(width: float, draw: Callable[[Figure], None], height: float) -> Iterator[Figure]:
    """Yields the drawn figure, in the page's style."""
    with _STYLING, style_lib.context(["default", _STYLE]), warnings.catch_warnings():
        # The measuring font lacks some glyphs that the page's fonts have.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        yield figure


def _clean(svg: str) -> str:
    """Returns matplotlib's SVG as a page element, without external references."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # the page's font applies
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"', "", svg)
    svg = re.sub(r'(?<=xlink:href="data:image/png;base64,)[^"]*', _smaller, svg)
    svg = re.sub(r'(?<=[ "][dxy]=")[^"]*', _rounded, svg)
    svg = re.sub(f' id="{SERIES}([0-9]+)"', r' data-series="\1"', svg)
    svg = _own_ids(svg.replace("xlink:href", "href"))
    head, _, rest = svg.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)[0]
    look = 'font-family="system-ui, sans-serif" style="stroke-linejoin: round"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {look}>{rest}'
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def _smaller(png: re.Match) -> str:
    """Returns an image with at most 256 colours as one byte per pixel."""
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(png[0]))).convert("RGBA"))
    colors, index = np.unique(pixels.reshape(-1, 4), axis=0, return_inverse=True)
    if len(colors) > 256 or (colors[:, 3] < 255).any():
        return png[0]
    picture = Image.fromarray(index.reshape(pixels.shape[:2]).astype(np.uint8), "P")
    picture.putpalette(colors[:, :3].tobytes())
    buffer = io.BytesIO()
    picture.save(buffer, format="png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _rounded(text: re.Match) -> str:
    """Rounds coordinates to hundredths."""

    def shorter(number):
        return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")

    return re.sub(r"-?\d+\.\d+", shorter, " ".join(text[0].split()))


def _own_ids(svg: str) -> str:
    """Drops unreferenced ids; renames the others after the figure's digest."""
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    number = {name: i for i, name in enumerate(used)}
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
    parts = r'( id="|href="#|url\(#)([^")]+)'
    svg = re.sub(parts, lambda m: f"{m[1]}@-{number[m[2]]}", svg)
    own = f"f{hashlib.sha256(svg.encode()).hexdigest()[:8]}-"
    return re.sub(r'( id="|href="#|url\(#)@-', lambda m: m[1] + own, svg)
