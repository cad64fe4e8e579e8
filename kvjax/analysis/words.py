"""Text shared by reports: names of mechanisms and layers."""

from collections.abc import Sequence

from kvjax.attention.mechanism import MechanismConfig


def mechanism_names(configs: Sequence[MechanismConfig]) -> str:
    """Returns the distinct mechanisms of a model's layers."""
    return "; ".join(dict.fromkeys(config.title for config in configs))


def stages(num_layers: int) -> dict[str, int]:
    """Returns the first, middle and last layer by name (early, middle, late in LRKV)."""
    layers = {"early": 0, "middle": num_layers // 2, "late": num_layers - 1}
    name_of_layer = {index: name for name, index in reversed(layers.items())}
    return {f"{name_of_layer[index]}, layer {index}": index for index in sorted(name_of_layer)}
