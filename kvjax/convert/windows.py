"""Sliding windows of published configs, by family; kvjax has one window for all layers, or none."""

from collections.abc import Callable
from typing import NamedTuple

from kvjax.model.config import BlockConfig
from kvjax.published.config import PublishedConfig

KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})


class WindowKeys(NamedTuple):
    """A family's keys of a sliding window."""

    read: Callable[[PublishedConfig], int]  # window in tokens; 0: none
    write: Callable[[BlockConfig], dict]  # the keys of a window


def _check_none(c: PublishedConfig) -> int:
    """Returns 0; raises a UserError if the config has a sliding window."""
    on = c.flag("use_sliding_window", "sliding_window" in c.values)
    if on and c.integer("sliding_window") < c.integer("max_position_embeddings"):
        raise c.error("sliding_window", "no model of this family has a window: is it a mistral?")
    _check_layers(c, "full_attention")
    return 0


def _check_layers(c: PublishedConfig, *kinds: str) -> None:
    """Raises a UserError for a layer type that the family does not have."""
    if not all(kind in kinds for kind in c.get("layer_types", list, [])):
        raise c.error("layer_types", f"layers of this family are all {' or '.join(kinds)}")


def _size(c: PublishedConfig) -> int:
    """Returns sliding_window; if the key is absent, transformers' default."""
    return 0 if "sliding_window" in c.nulls else c.integer("sliding_window", 4096)


def _in_all_layers_if_given(c: PublishedConfig) -> int:
    """Returns Phi-3's sliding window, which has no default."""
    return _in_all_layers(c) if "sliding_window" in c.values else _without(c)


def _without(c: PublishedConfig) -> int:
    _check_layers(c, "full_attention")
    return 0


def _in_all_layers(c: PublishedConfig) -> int:
    """Returns Mistral's sliding window, shared by all layers."""
    window, full, sliding = _size(c), "full_attention", "sliding_attention"
    if not window:
        return _without(c)
    if window >= c.integer("max_position_embeddings"):
        _check_layers(c, full, sliding)
    elif c.flag("use_sliding_window", True):
        _check_layers(c, sliding)
    else:
        raise c.error(
            "use_sliding_window",
            f"sliding_window = {window} applies to all layers of this family: set sliding_window "
            "to null if the model was trained without a window, else this key to true",
        )
    return window


def _by_layer(c: PublishedConfig) -> int:
    """Returns Qwen's sliding window, which its config allows in some layers only."""
    layers = c.integer("num_hidden_layers")
    window = _size(c) if c.flag("use_sliding_window", False) else 0
    if "layer_types" in c.values:
        key, kinds = "layer_types", c.get("layer_types", list)
        sliding = kinds.count("sliding_attention")
        if kinds.count("full_attention") + sliding != layers:
            raise c.error(key, f"must be full_attention or sliding_attention for {layers} layers")
    else:
        key, first = "max_window_layers", c.get("max_window_layers", int, 28)
        sliding = max(layers - first, 0) if window else 0
    if sliding and not window:
        raise c.error(key, "layers have a sliding window, and use_sliding_window is not set")
    if 0 < sliding < layers:
        raise c.error(
            key,
            f"{sliding} of {layers} layers have a sliding window; kvjax has it in all or in none",
        )
    return window if sliding else 0


def _qwen_keys(block: BlockConfig) -> dict:
    return dict(
        use_sliding_window=bool(block.window),
        sliding_window=block.window or None,
        max_window_layers=0 if block.window else block.num_layers,
    )


NONE = WindowKeys(_check_none, lambda block: {})
MISTRAL = WindowKeys(_in_all_layers, lambda block: dict(sliding_window=block.window or None))
PHI = MISTRAL._replace(read=_in_all_layers_if_given)
QWEN = WindowKeys(_by_layer, _qwen_keys)
