"""Decode attention for an engine of your own, over a cache of any layout.

    cache = kvjax.KVCache.allocate("grouped", batch=8, capacity=4096, K=8, H=128)
    cache = cache.append({"base_key": k, "base_value": v})       # k, v [B, T, K, H], rotated
    o = kvjax.decode_attention(q, cache.arrays, cache.lengths)   # q [B, T, N, H] -> [B, T, N, H]

The residual layout (LRKV) caches one key and value per base and a latent of R channels per head:

    cache = kvjax.KVCache.allocate("residual", batch=8, capacity=4096, J=1, K=18, H=128, R=64)
    o = kvjax.decode_attention(
        q, cache.arrays, cache.lengths, layout="residual", expand_key=b_key, expand_value=b_value,
        rope_base=10_000.0
    )

`kvjax.LAYOUTS` has every layout; `kvjax.describe_layout("residual")` lists its arrays.
"""

from collections.abc import Mapping
import itertools
import logging
import math

import jax
import jax.numpy as jnp

from kvjax.cache import quantized
from kvjax.cache.stripes import Stripes
from kvjax.foundation.logs import log_once
from kvjax.kernels.decode_attention import api, sharded
from kvjax.layers.rope import Base
from kvjax.library.layouts import LETTERS, Layout, describe_layout, layout_of, shown, stored


def decode_attention(
    query: jax.Array,
    cache: Mapping[str, jax.Array],
    lengths: jax.Array,
    *,
    layout: str = "grouped",
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    return_lse: bool = False,
    implementation: str | None = None,
    rope_base: Base | None = None,
    norm_epsilon: float | None = None,
    **arrays: jax.Array,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends with the newest T tokens of each sequence to the sequence's whole cache.

    Args:
      query: [B, T, N, H], queries of the newest T tokens, which the cache already holds; also
        [B, N, H] for one token. With the latent layouts: absorbed queries [B, T, N, C].
      cache: the layout's arrays [B, ..., S], as `KVCache.arrays` has them, quantised or not.
      lengths: [B] int32, cached tokens of each sequence including the T new ones, at least T.
      layout: a name of `LAYOUTS`.
      scale: factor on the logits; None: 1/sqrt(H) (latent layouts have no default).
      window: if positive, a token sees only itself and the window - 1 tokens before it.
      softcap: c in c·tanh(z/c) of the scaled logits z, as in Gemma 2; 0: none.
      return_lse: return log-sum-exps too, to merge with attention over other keys.
      implementation: "xla" takes everything; "tpu" and "gpu" are Pallas kernels, without windows,
        soft caps ("gpu" without int4 caches, too); "reference" expands the cache. None: the
        device's kernel if it takes these inputs, else "xla".
      rope_base, norm_epsilon: options of the layouts whose `numbers` list them.
      arrays: the layout's other inputs.

    Returns:
      [B, T, N, Hv] (without T if the query has none) in float32 or wider, and with `return_lse`
      the log-sum-exps [B, T, N] of the scaled and capped logits.

    Raises:
      ValueError: a wrong name or shape; the message has the array, its shape and what is expected.
      NotImplementedError: the implementation does not take these inputs.
    """
    spec = layout_of(layout)
    query, cache = jnp.asarray(query), {name: jnp.asarray(x) for name, x in cache.items()}
    lengths, arrays = jnp.asarray(lengths), {k: jnp.asarray(v) for k, v in arrays.items()}
    if query.ndim not in (3, 4):
        one = spec.query.replace(" T", "")
        raise ValueError(
            f"query has shape {list(query.shape)}: expected {shown(spec.query)}, or {shown(one)} "
            f"for one token ({_meanings(spec.query)})"
        )
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap = {softcap}: must be positive, or 0 for none")
    if window < 0:
        raise ValueError(f"window = {window}: must be positive, or 0 for none")
    one_token = query.ndim == 3
    query = query[:, None] if one_token else query
    numbers = {"rope_base": rope_base, "norm_epsilon": norm_epsilon}
    for name, value in numbers.items():
        if value is not None and name not in spec.numbers:
            raise ValueError(f"{name}: layout {layout!r} has no such option")
    _check_scales(cache)
    sizes = _check(layout, spec, query, quantized.dequantized_shapes(cache), arrays)
    if lengths.shape != (sizes["B"],) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths {lengths.dtype}{list(lengths.shape)}: must be int32 [B] = [{sizes['B']}]"
        )
    if scale is None:
        if "H" not in sizes:
            raise ValueError(f"scale: layout {layout!r} has none; give 1/sqrt(channels of a key)")
        scale = 1 / math.sqrt(sizes["H"])
    if layout == "latent":
        arrays["up_value"] = arrays["up_value"][None]
    options = {name: numbers[name] for name in spec.numbers}
    if layout == "residual":
        options["separate_queries"] = "residual_query" in arrays
        arrays.setdefault("residual_query", query)
    inputs = spec.inputs(query=query, scale=float(scale), **arrays, **options)
    first_B = lengths - query.shape[1]
    changes = dict(window=window, softcap=float(softcap))
    if return_lse:
        o_BTNV, lse_BTN = _with_lse(inputs, cache, first_B, implementation, changes)
        return (o_BTNV[:, 0], lse_BTN[:, 0]) if one_token else (o_BTNV, lse_BTN)
    o_BTNV = api.decode_attention(inputs, cache, first_B, implementation=implementation, **changes)
    return o_BTNV[:, 0] if one_token else o_BTNV


def _check_scales(cache: Mapping[str, jax.Array]) -> None:
    """Raises a ValueError unless each array of integers has a scale that fits, and others none."""
    for name, x in cache.items():
        field, is_scale, _ = name.partition(".scale")
        if not is_scale:
            if not jnp.issubdtype(x.dtype, jnp.floating) and f"{name}.scale" not in cache:
                raise ValueError(
                    f"cache[{name!r}] is in {x.dtype}: cache['{name}.scale'] is missing"
                )
            continue
        if field not in cache:
            raise ValueError(f"cache[{name!r}]: there is no cache[{field!r}]")
        # One scale for each row, or for all rows of a token.
        B, *rows, _, S = cache[field].shape
        allowed = [[B, *rows, 1, S], [B, *[1] * len(rows), 1, S]]
        if list(x.shape) not in allowed:
            raise ValueError(f"cache[{name!r}] has shape {list(x.shape)}: expected {allowed[0]}")


def _check(layout, spec: Layout, query, cache, arrays) -> dict[str, int]:
    """Returns the length of each axis; raises a ValueError for names or shapes that do not fit."""
    for group, values, axes in (("cache", cache, spec.cache), ("input", arrays, spec.arrays)):
        missing = [name for name in axes if name not in values and name not in spec.optional]
        unknown = [name for name in values if name not in axes]
        if missing or unknown:
            error = f"{group} {(missing or unknown)[0]!r} is {'missing' if missing else 'unknown'}"
            raise ValueError(f"{error}. Layout {describe_layout(layout)}")
    if layout == "tied" and ("residual_key" in cache) != ("expand_key" in arrays):
        raise ValueError("cache['residual_key'] and expand_key: give both, or neither")
    shapes = {"query": (spec.query, query.shape)}
    for name, axes in spec.arrays.items():
        if name in arrays:
            shapes[name] = axes, arrays[name].shape
    for name, axes in spec.cache.items():
        if name in cache:
            shapes[f"cache[{name!r}]"] = stored(axes), cache[name].shape
    sizes: dict[str, int] = {"1": 1}
    for name, (axes, shape) in shapes.items():
        letters = axes.split()
        fits = len(shape) == len(letters) and all(
            sizes.get(letter, size) == size for letter, size in zip(letters, shape, strict=True)
        )
        if not fits:
            expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
            hint = ""
            if name.startswith("cache") and len(shape) == len(letters):
                hint = "; caches have tokens last: `KVCache.append` writes [B, T, ...]"
            if letters[0] == "B" and sizes.get("B") not in (None, *shape[:1]):
                hint = f", where B is the query's first axis{hint}"
            raise ValueError(
                f"{name} has shape {list(shape)}: expected {shown(axes)} = [{expected}]{hint}"
            )
        sizes |= dict(zip(letters, shape, strict=True))
    heads = [(name, sizes[name]) for name in ("J", "K", "N") if name in sizes]
    for (letter, divisor), (larger, count) in itertools.pairwise(heads):
        if count % divisor:
            text = f"{letter} = {divisor} must divide {larger} = {count} ({LETTERS[larger]})"
            raise ValueError(text)
    return sizes


def _with_lse(
    inputs, cache, first_B, implementation: str | None, changes: Mapping[str, int | float]
):
    """Calls an implementation that returns log-sum-exps.

    Args:
      changes: window and soft cap, 0 for none.
    """
    options = {key: value for key, value in changes.items() if value}
    name = implementation or api.chosen(inputs, cache, **options)
    if name not in sharded.IMPLEMENTATIONS:
        reason = f"the {name!r} implementation returns no log-sum-exp"
        if implementation:
            raise NotImplementedError(f"{reason}: use one of {', '.join(sharded.IMPLEMENTATIONS)}")
        log_once(__name__, logging.WARNING, f"decode attention: {reason}; using 'xla'")
        name = "xla"
    api.check_takes(name, cache, options)
    return sharded.IMPLEMENTATIONS[name](inputs, cache, first_B, Stripes(), **options)


def _meanings(axes: str) -> str:
    """Returns the axes' letters with their meanings."""
    return ", ".join(f"{letter} {LETTERS[letter]}" for letter in axes.split())
