"""Finds which layers of a published model cache keys and values, and which have a window."""

from kvjax.published.config import PublishedConfig

FULL = ("full_attention", "attention", "global", "hybrid", "*")
# Kinds of layers that cache keys and values, with the config key of their window ("": no window).
WINDOWS = dict.fromkeys(FULL, "") | dict(
    sliding_attention="sliding_window",
    local="sliding_window",
    chunked_attention="attention_chunk_size",
)
_LETTERS = {"*": "*", "M": "mamba", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
_WITHOUT = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "mlp", "moe")
_RECURRENT = ("mamba_", "ssm_", "linear_", "lru_", "conv_", "time_mix", "rwkv")
_WINDOW_IN_ALL = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")


def kinds(c: PublishedConfig, count: int) -> list[str]:
    """Returns the kind of each layer: a key of `WINDOWS`, or a kind that caches nothing."""
    if "layer_types" in c.values:
        layer_types = c.get("layer_types", list)
        known = (*WINDOWS, *_WITHOUT)
        if len(layer_types) < count or not all(kind in known for kind in layer_types):
            raise c.error("layer_types", f"must be {count} of {', '.join(known)}")
        return layer_types[:count]
    if "hybrid_override_pattern" in c.values:
        letters = c.get("hybrid_override_pattern", str)
        if len(letters) != count or not set(letters) <= set(_LETTERS):
            raise c.error("hybrid_override_pattern", f"must be {count} of {' '.join(_LETTERS)}")
        return [_LETTERS[letter] for letter in letters]
    full = None  # indices of the layers with attention, if other layers have none
    if "full_attention_interval" in c.values:
        interval = c.integer("full_attention_interval")
        full = [i for i in range(count) if (i + 1) % interval == 0]
    elif "attn_layer_period" in c.values:
        period, offset = c.integer("attn_layer_period"), c.get("attn_layer_offset", int, 0)
        full = [i for i in range(count) if i % period == offset]
    elif "attn_layer_indices" in c.values or "full_attn_idxs" in c.values:
        key = "attn_layer_indices" if "attn_layer_indices" in c.values else "full_attn_idxs"
        full = c.get(key, list)
    if full is not None:
        return ["full_attention" if i in full else "recurrent" for i in range(count)]
    family = c.values.get("model_type")
    recurrent = [key for key in c.values if key.startswith(_RECURRENT)]
    if recurrent and family != "falcon_h1":  # falcon_h1 has attention in every layer, too
        raise c.error(recurrent[0], "needs layer_types, to tell which layers have keys and values")
    return _windows(c, count)


def _windows(c: PublishedConfig, count: int) -> list[str]:
    """Returns the kind of each layer of a model whose layers all have attention."""
    full, sliding = "full_attention", "sliding_attention"
    if "attention_chunk_size" in c.values:
        interval = c.integer("no_rope_layer_interval", 4)
        chunked = c.get("no_rope_layers", list, []) or [(i + 1) % interval for i in range(count)]
        return ["chunked_attention" if is_chunked else full for is_chunked in chunked[:count]]
    if "sliding_window" not in c.values or not c.flag("use_sliding_window", True):
        return [full] * count
    pattern = c.values.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return [full if pattern[i % len(pattern)] == "G" else sliding for i in range(count)]
    if pattern is not None:
        interval = c.integer("sliding_window_pattern")
        return [full if (i + 1) % interval == 0 else sliding for i in range(count)]
    if "use_sliding_window" in c.values and "max_window_layers" in c.values:
        first = c.get("max_window_layers", int)
        return [full if i < first else sliding for i in range(count)]
    context = c.values.get("max_position_embeddings")
    covers_context = type(context) is int and c.integer("sliding_window") >= context
    if not covers_context and c.values.get("model_type") not in _WINDOW_IN_ALL:
        raise c.error("sliding_window", "needs layer_types, to tell which layers have the window")
    return [sliding] * count
