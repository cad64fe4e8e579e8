"""What reports say alike: a model's mechanisms, the names of layers, and a curve in words."""

from collections.abc import Sequence

import numpy as np

from kvjax.attention.mechanism import MechanismConfig


def mechanism_names(configs: Sequence[MechanismConfig]) -> str:
    """The mechanisms of a model's layers, each once."""
    return "; ".join(dict.fromkeys(config.title for config in configs))


def stages(num_layers: int) -> dict[str, int]:
    """The first, the middle and the last layer by name, as the paper's early, middle and late."""
    named = {"early": 0, "middle": num_layers // 2, "late": num_layers - 1}
    kept = {index: name for name, index in reversed(named.items())}
    return {f"{kept[index]}, layer {index}": index for index in sorted(kept)}


def summarise(values: Sequence[float | None], *, of: str = "layer", digits: str = ".1f") -> str:
    """The mean and the ends of a curve, with where they are."""
    there = [(value, i) for i, value in enumerate(values) if value is not None]
    if not there:
        return "no number"
    (low, first), (high, last) = min(there), max(there)
    mean = np.mean([value for value, _ in there])
    return (
        f"mean {mean:{digits}}, lowest {low:{digits}} ({of} {first}), "
        f"highest {high:{digits}} ({of} {last})"
    )
