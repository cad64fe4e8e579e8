"""Names of mechanisms and layers, and other text that reports share."""

from collections.abc import Sequence

from kvjax.attention.mechanism import MechanismConfig
from kvjax.model.config import TransformerConfig


def mechanism_names(configs: Sequence[MechanismConfig]) -> str:
    """Returns the titles of the distinct mechanisms of a model's layers, joined."""
    return "; ".join(dict.fromkeys(config.title for config in configs))


def before_cap(config: TransformerConfig) -> str:
    """Returns a sentence that logits are measured before their soft cap; "" without a soft cap."""
    cap = config.block.attention_softcap
    return (
        f" E has the logits before their soft cap of {cap:g}, which attention applies."
        if cap
        else ""
    )


def stages(num_layers: int) -> dict[str, int]:
    """Returns the first, middle and last layer by name; LRKV calls them early, middle and late."""
    layers = {"early": 0, "middle": num_layers // 2, "late": num_layers - 1}
    name_of_layer = {index: name for name, index in reversed(layers.items())}
    return {f"{name_of_layer[index]}, layer {index}": index for index in sorted(name_of_layer)}
