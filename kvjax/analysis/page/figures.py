"""Makes figures of curves or heatmaps, with their numbers as text for screen readers."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvjax.analysis.page import draw
from kvjax.analysis.page.section import Figure

Curves = Mapping[str, tuple[Sequence[float], Sequence[float | None]]]  # name: (xs, ys)
_LISTED = 8  # curves of at most this many points have all points listed


def curves(title: str, series: Curves, caption: str, *, digits: str = ".3g", **options) -> Figure:
    """Returns a figure of curves; leaves out curves without numbers.

    Args:
      digits: format of y in the text.
      options: further arguments of `draw.lines`.
    """
    shown = {k: (xs, ys) for k, (xs, ys) in series.items() if any(y is not None for y in ys)}
    levels = "".join(f" {k}: {y:{digits}}." for k, y in options.get("levels", {}).items())
    return Figure(title, draw.lines(shown, **options), describe(shown, digits) + levels, caption)


def heatmaps(
    title: str, matrices: Mapping[str, np.ndarray], caption: str, *, low: float = 0, **options
) -> Figure:
    """Returns a figure of heatmaps with colours from `low` to 1.

    Args:
      options: further arguments of `draw.heatmaps`.
    """
    sentences = []
    for name, matrix in matrices.items():
        x = matrix[np.isfinite(matrix)]
        spread = f"{x.mean():z.2f} on average, {x.min():z.2f} to {x.max():z.2f}" if x.size else ""
        sentences.append(f"{name}: {spread or 'undefined everywhere'}")
    return Figure(
        title,
        draw.heatmaps(matrices, low=low, high=1, **options),
        f"{'; '.join(sentences)}.",
        caption,
    )


def over_layers(series: Mapping[str, Sequence[float | None]]) -> Curves:
    """Returns curves over layers, given one value per layer."""
    return {name: (list(range(len(ys))), ys) for name, ys in series.items()}


def describe(series: Curves, digits: str = ".3g") -> str:
    """Returns a text with all points of short curves, and with the ends and range of long ones."""
    parts = []
    for name, (xs, ys) in series.items():
        points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
        if len(points) > _LISTED:
            low, high = min(y for _, y in points), max(y for _, y in points)
            points = [points[0], points[-1]]
            name = f"{name} ({low:{digits}} to {high:{digits}})"
        parts.append(f"{name}: " + ", ".join(f"{y:{digits}} at {x:,.6g}" for x, y in points))
    return "; ".join(parts) + "."
