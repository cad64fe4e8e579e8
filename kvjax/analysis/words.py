"""Text shared by reports: mechanisms, layer names, curves in words."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvjax.attention.mechanism import MechanismConfig

Curves = Mapping[str, tuple[Sequence[float], Sequence[float | None]]]  # name: (xs, ys)
_LISTED = 8  # points of a curve that are listed one by one


def mechanism_names(configs: Sequence[MechanismConfig]) -> str:
    """Returns the distinct mechanisms of a model's layers."""
    return "; ".join(dict.fromkeys(config.title for config in configs))


def stages(num_layers: int) -> dict[str, int]:
    """Returns the first, middle and last layer by name (early, middle, late in LRKV)."""
    named = {"early": 0, "middle": num_layers // 2, "late": num_layers - 1}
    kept = {index: name for name, index in reversed(named.items())}
    return {f"{kept[index]}, layer {index}": index for index in sorted(kept)}


def summarise(values: Sequence[float | None], *, of: str = "layer", digits: str = ".1f") -> str:
    """Returns a curve's mean, and its lowest and highest value with their positions."""
    points = [(value, i) for i, value in enumerate(values) if value is not None]
    if not points:
        return "no number"
    (low, first), (high, last) = min(points), max(points)
    mean = np.mean([value for value, _ in points])
    return (
        f"mean {mean:{digits}}, lowest {low:{digits}} ({of} {first}), "
        f"highest {high:{digits}} ({of} {last})"
    )


def describe(series: Curves, digits: str = ".3g") -> str:
    """Returns the points of short curves, and the ends and range of long ones."""
    parts = []
    for name, (xs, ys) in series.items():
        points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
        if len(points) > _LISTED:
            low, high = min(y for _, y in points), max(y for _, y in points)
            points = [points[0], points[-1]]
            name = f"{name} ({low:{digits}} to {high:{digits}})"
        parts.append(f"{name}: " + ", ".join(f"{y:{digits}} at {x:,.3g}" for x, y in points))
    return "; ".join(parts) + "."
