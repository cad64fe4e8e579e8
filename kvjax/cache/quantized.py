"""Quantised cache entries: int8 or int4 with a float32 scale per token and row, by field.

A row is a field's last axis. x is stored as q = round(x / scale), with scale = max|x| / 127 over
the row (of int4: / 7), so that |x - scale·q| <= scale / 2. Rows of fewer than `SHORTEST_ROW`
channels share one scale per token with their whole field, and are int8 in an int4 cache too.
Quantising field `name` gives `name` and `name.scale`:

    bits  dtype of name  its last axis  values
    8     int8           W              -127 .. 127
    4     uint8          W / 2          -7 .. 7, plus 8: channel i in the low half of byte i,
                                        channel i + W / 2 in its high half

A token's bytes depend on that token alone: how a sequence is split into chunks changes none of
them. Wide fields (1/rms) and fields with `keeps` (decoupled RoPE keys) stay as they are.
"""

from collections.abc import Iterable, Mapping
import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.field import Field, HasCacheEntry
from kvjax.foundation.errors import UserError

BITS = {"int8": 8, "int4": 4}  # by --cache_dtype; "": the compute dtype, without scales
# Channels of a row with a scale of its own, which takes 4 bytes: rows of TPA's heads have 2 to 6.
SHORTEST_ROW = 16
_LARGEST = {8: 127, 4: 7}
_ZERO = 8  # the byte half that stands for 0


def bits_of(cache_dtype: str) -> int | None:
    """Returns the bits of a `--cache_dtype`; None for "". Raises a UserError for other values."""
    if cache_dtype not in ("", *BITS):  # kernels need JAX alone, `foundation.configuration` more
        allowed = ", ".join(map(repr, ("", *BITS)))
        raise UserError(f"cache_dtype = {cache_dtype!r}: must be one of {allowed}")
    return BITS.get(cache_dtype)


def entry_of(mechanism: HasCacheEntry, bits: int | None) -> dict[str, Field]:
    """Returns the fields that a cache of `bits` (None: not quantised) stores per token and layer.

    Raises:
      UserError: see `stored`.
    """
    return stored(mechanism.entry(), bits, mechanism.title)


def stored(entry: Mapping[str, Field], bits: int | None, owner: str) -> dict[str, Field]:
    """Returns the fields that an entry of `bits` (None: not quantised) has; `owner` for messages.

    Raises:
      UserError: a row of an int4 cache with an odd number of channels.
    """
    if bits is None:
        return dict(entry)
    fields = {}
    for name, field in entry.items():
        if field.wide or field.keeps:
            fields[name] = field
            continue
        *lead, width = field.shape
        axes, is_short = field.axes.split(), width < SHORTEST_ROW
        if bits == 4 and not is_short and width % 2:
            raise UserError(
                f"cache_dtype = 'int4': {owner} caches {name} of {width} channels, and "
                "two share a byte: give an even number, or cache_dtype = 'int8'"
            )
        if bits == 4 and not is_short:
            fields[name] = Field(field.axes, (*lead, width // 2), dtype=jnp.dtype(jnp.uint8))
        else:
            fields[name] = dataclasses.replace(field, dtype=jnp.dtype(jnp.int8))
        if is_short:
            axes, lead = ["1"] * len(axes), [1] * len(lead)
        fields[_scale(name)] = Field(
            " ".join([*axes[:-1], "1"]), (*lead, 1), dtype=jnp.dtype(jnp.float32)
        )
    return fields


def check(mechanisms: Iterable[HasCacheEntry], bits: int | None) -> None:
    """Raises a UserError if a mechanism's cache cannot have so few bits, see `entry_of`."""
    for mechanism in mechanisms:
        entry_of(mechanism, bits)


def cached_bits(cache: Mapping[str, jax.Array]) -> int | None:
    """Returns the bits of a layer's arrays; None if they are not quantised."""
    if not any(_scale(name) in cache for name in cache):
        return None
    return 4 if any(array.dtype == jnp.uint8 for array in cache.values()) else 8


def quantize(
    entry: Mapping[str, jax.Array], layer: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Quantises new tokens as a layer of the cache stores them.

    Values that are not finite stay so: their scale is NaN or infinite.

    Args:
      entry: arrays [B, T, *field.shape] of the mechanism's entry.
      layer: arrays of the cache, [B, *stored shape, S].

    Returns:
      Arrays [B, T, *stored shape], with scales; those that the layer does not quantise as given.
    """
    stored = {}
    for name, x in entry.items():
        if _scale(name) not in layer:
            stored[name] = x
            continue
        packs = layer[name].dtype == jnp.uint8
        largest = _LARGEST[4 if packs else 8]
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        # A scale of one number for the whole field, or for each row.
        lengths = enumerate(layer[_scale(name)].shape[1:-1], 2)
        axes = tuple(axis for axis, length in lengths if length == 1)
        peak = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
        smallest = largest * jnp.finfo(jnp.float32).tiny  # below it, the scale would be 0
        scale = jnp.where(peak < smallest, 1, peak / largest).astype(jnp.float32)
        q = jnp.clip(jnp.round(x / scale), -largest, largest)
        if packs:
            low, high = jnp.split((q + _ZERO).astype(jnp.uint8), 2, axis=-1)
            stored[name] = low | (high << 4)
        else:
            stored[name] = q.astype(jnp.int8)
        stored[_scale(name)] = scale
    return stored


def dequantize(arrays: Mapping[str, jax.Array], dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Returns the entry's arrays [B, *field.shape, s] in `dtype`, from a tile or layer of a cache.

    Args:
      arrays: arrays [B, *stored shape, s], quantised or not.
    """
    entry = {}
    for name, x in arrays.items():
        if name.endswith(_scale("")):
            continue
        if x.dtype == jnp.uint8:
            halves = jnp.concatenate([x & 15, x >> 4], axis=-2)
            x = halves.astype(jnp.int8) - jnp.int8(_ZERO)
        entry[name] = x.astype(dtype)
        if _scale(name) in arrays:
            entry[name] *= arrays[_scale(name)].astype(dtype)
    return entry


def dequantized_shapes(arrays: Mapping[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes that `dequantize` would give."""
    return jax.eval_shape(lambda arrays: dequantize(arrays, jnp.float32), dict(arrays))


def _scale(name: str) -> str:
    return f"{name}.scale"
