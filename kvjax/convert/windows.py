"""Reads and writes the keys of sliding windows in published configs, by family."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvjax.model.config import BlockConfig
from kvjax.published.config import PublishedConfig

KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
FULL, SLIDING = "full_attention", "sliding_attention"  # layer types


class WindowKeys(NamedTuple):
    """The keys by which a family's config.json describes a sliding window.

    Attributes:
      read: returns keys of BlockConfig for a published config.
      write: returns keys of config.json.
      keys: keys that are read besides those of every family.
    """

    read: Callable[[PublishedConfig], dict]
    write: Callable[[BlockConfig], dict]
    keys: frozenset[str] = frozenset()


def layer_types(block: BlockConfig) -> list[str]:
    """Returns the type of every layer, for a config.json."""
    return [SLIDING if kind.window else FULL for kind in block.layer_kinds]


def _window(window: int, kinds: Sequence[str]) -> dict:
    """Returns BlockConfig's keys of a window in the layers whose kind is SLIDING."""
    sliding = tuple(int(kind == SLIDING) for kind in kinds)
    if not window or not any(sliding):
        return {}
    return dict(window=window) if all(sliding) else dict(window=window, window_layers=sliding)


def _check_none(c: PublishedConfig) -> dict:
    """Returns no keys; raises a UserError if the config has a sliding window."""
    on = c.flag("use_sliding_window", "sliding_window" in c.values)
    if on and c.integer("sliding_window") < c.integer("max_position_embeddings"):
        raise c.error("sliding_window", "no model of this family has a window: is it a mistral?")
    _check_layers(c, FULL)
    return {}


def _check_layers(c: PublishedConfig, *kinds: str) -> None:
    """Raises a UserError for a layer type that the family does not have."""
    if not all(kind in kinds for kind in c.get("layer_types", list, [])):
        raise c.error("layer_types", f"layers of this family are all {' or '.join(kinds)}")


def _size(c: PublishedConfig) -> int:
    """Returns sliding_window; if the key is absent, transformers' default."""
    return 0 if "sliding_window" in c.nulls else c.integer("sliding_window", 4096)


def _in_all_layers_if_given(c: PublishedConfig) -> dict:
    """Returns Phi-3's sliding window, whose size has no default."""
    return _in_all_layers(c) if "sliding_window" in c.values else _without(c)


def _without(c: PublishedConfig) -> dict:
    _check_layers(c, FULL)
    return {}


def _in_all_layers(c: PublishedConfig) -> dict:
    """Returns Mistral's sliding window, shared by all layers."""
    window = _size(c)
    if not window:
        return _without(c)
    if window >= c.integer("max_position_embeddings"):
        _check_layers(c, FULL, SLIDING)
    elif c.flag("use_sliding_window", True):
        _check_layers(c, SLIDING)
    else:
        raise c.error(
            "use_sliding_window",
            f"sliding_window = {window} applies to all layers of this family: set sliding_window "
            "to null if the model was trained without a window, else this key to true",
        )
    return dict(window=window)


def _types(c: PublishedConfig, default: Sequence[str]) -> Sequence[str]:
    """Returns the type of every layer: layer_types, or the family's default."""
    if "layer_types" not in c.values:
        return default
    kinds, layers = c.get("layer_types", list), c.integer("num_hidden_layers")
    if len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise c.error("layer_types", f"must be {FULL} or {SLIDING} for each of {layers} layers")
    return kinds


def _if_used(c: PublishedConfig, default: Callable[[int], str]) -> dict:
    """Returns the window of a family whose models have one only if use_sliding_window is true.

    Args:
      default: returns the type of layer i for a config without layer_types.
    """
    window = _size(c) if c.flag("use_sliding_window", False) else 0
    layers = range(c.integer("num_hidden_layers"))
    kinds = _types(c, [default(i) if window else FULL for i in layers])
    if SLIDING in kinds and not window:
        raise c.error(
            "layer_types", "layers have a sliding window, and use_sliding_window is not set"
        )
    return _window(window, kinds)


def _qwen(c: PublishedConfig) -> dict:
    """Returns Qwen's sliding window, by default in the layers from max_window_layers on."""
    first = c.get("max_window_layers", int, 28)
    return _if_used(c, lambda i: SLIDING if i >= first else FULL)


def _write_qwen(block: BlockConfig) -> dict:
    kinds = layer_types(block)
    first = kinds.index(SLIDING) if SLIDING in kinds else len(kinds)
    keys = dict(
        use_sliding_window=bool(block.window),
        sliding_window=block.window or None,
        max_window_layers=first,
    )
    return keys if FULL not in kinds[first:] else keys | dict(layer_types=kinds)


def _smollm3(c: PublishedConfig) -> dict:
    """Returns SmolLM3's sliding window, by default in the layers without RoPE."""
    rotated = no_rope_layers(c)
    return _if_used(c, lambda i: FULL if rotated[i] else SLIDING)


def no_rope_layers(c: PublishedConfig) -> list[int]:
    """Returns a 1 for each layer of a SmolLM3 with RoPE, and a 0 for each without."""
    key, layers = "no_rope_layers", c.integer("num_hidden_layers")
    if key not in c.values:
        interval = c.integer("no_rope_layer_interval", 4)
        return [int((i + 1) % interval != 0) for i in range(layers)]
    rotated = c.get(key, list)
    if len(rotated) < layers or not all(type(x) is int and x in (0, 1) for x in rotated):
        raise c.error(key, f"must have a 0 or a 1 for each of {layers} layers")
    return rotated[:layers]


def _write_smollm3(block: BlockConfig) -> dict:
    keys = dict(use_sliding_window=bool(block.window), sliding_window=block.window or None)
    return keys | dict(layer_types=layer_types(block))


def every(interval: int, *, key: str = "") -> WindowKeys:
    """Returns the keys of families in which all but every `interval`-th layer have a window.

    Args:
      key: key of config.json that may give another interval; "": none.
    """

    def read(c: PublishedConfig) -> dict:
        interval_of_model = c.integer(key, interval) if key else interval
        layers = range(c.integer("num_hidden_layers"))
        kinds = _types(c, [FULL if (i + 1) % interval_of_model == 0 else SLIDING for i in layers])
        window = _size(c)
        if SLIDING in kinds and not window:
            raise c.error("sliding_window", "must be a number: layers have a sliding window")
        return _window(window, kinds)

    def write(block: BlockConfig) -> dict:
        # No null: transformers makes a mask for the window even if no layer has one.
        window = dict(sliding_window=block.window) if block.window else {}
        return window | dict(layer_types=layer_types(block))

    return WindowKeys(read, write, frozenset({key} if key else ()))


NONE = WindowKeys(_check_none, lambda block: {})
MISTRAL = WindowKeys(_in_all_layers, lambda block: dict(sliding_window=block.window or None))
PHI = MISTRAL._replace(read=_in_all_layers_if_given)
QWEN = WindowKeys(_qwen, _write_qwen)
SMOLLM3 = WindowKeys(_smollm3, _write_smollm3)
