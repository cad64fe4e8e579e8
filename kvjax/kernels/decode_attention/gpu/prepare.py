"""The GPU kernel before decode attention: new queries, keys and values of MHA, GQA and LRKV.

Grid (B, heads). A program is one warpgroup, which holds 64 channels at a time in the layout of a
column of wgmma's rows. It does one of

    base key       norms it (without residuals), rotates it, appends it
    base value     appends it
    residual       appends a KV head's latents, and 1/rms of base + latent · expand
    query          norms and rotates it, and writes it as `kernel` reads it

where appending writes the sequence's slot of the cache, in place. A decode step has five programs
fewer per layer of MHA with it, nine per layer of LRKV (experiments/LOG.md).
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvjax.cache import quantized
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs, ResidualInputs
from kvjax.kernels.decode_attention.gpu import adapters, attention
from kvjax.kernels.decode_attention.gpu.projections import (
    Projections,
    dispatch,
    inverse_rms,
    load,
    normed,
    rounded,
)
from kvjax.kernels.decode_attention.gpu.ring import ROWS
from kvjax.kernels.partial_products import partial_products
from kvjax.layers.rope import Positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a layer, and first channels in the product of its input with all projections.

    Attributes:
      R: rank of residuals; 0: none.
      head_tiles, columns: of the plan of `kernel`.
      epsilon: of the RMSNorm of queries and keys; None: they are not normed.
      first: first channel of all base_key, base_value, query, latent_key, latent_value.
    """

    N: int
    K: int
    J: int
    R: int
    H: int
    Hv: int
    head_tiles: int
    columns: int
    epsilon: float | None
    first: tuple[tuple[str, int], ...]


def refusal(inputs: DecodeInputs, layer: Mapping[str, jax.Array], dtype: jnp.dtype) -> str | None:
    """Returns why `prepare` does not take inputs that `attention.check` lets pass, or None.

    Args:
      inputs, layer: arrays or shapes.
      dtype: of the layer's input.
    """
    residual = isinstance(inputs, ResidualInputs)
    if attention.capability() == 8:
        return "needs Hopper"
    if dtype != jnp.bfloat16:
        return f"takes activations in bfloat16, not {dtype}"
    if residual and inputs.rope_base is None:
        return "takes LRKV only if the residual is rotated"
    if quantized.cached_bits(layer):
        return "does not quantise"
    H, Hv = (layer[name].shape[2] for name in ("base_key", "base_value"))
    R = inputs.expand_key.shape[1] if residual else 0
    if H % (2 * ROWS) or Hv % ROWS or R % ROWS:
        return f"takes multiples of {2 * ROWS} channels of keys, {ROWS} of values and residuals"
    return None


def into_cache(
    inputs: DecodeInputs,
    layer: Mapping[str, jax.Array],
    packed_DE: jax.Array,
    x_BD: jax.Array,
    positions: Positions,
    counts_B: jax.Array,
    *,
    expand_KRH: jax.Array | None,
    epsilon: float | None,
    first: tuple[tuple[str, int], ...],
    decode_inputs: Callable[[jax.Array], DecodeInputs],
) -> tuple[DecodeInputs, dict[str, jax.Array]]:
    """Calls `prepare`; returns the decode inputs, with `prepared` set, and the cache.

    Args:
      inputs: decode inputs, as shapes.
      packed_DE: projections of the layer's input, side by side.
      x_BD: the layer's input.
      positions: of the new tokens.
      epsilon, first: see `Sizes`.
      decode_inputs: returns decode inputs for queries [B, 1, N, H].
      layer, counts_B, expand_KRH: see `prepare`.
    """
    B, _, N, H = inputs.query.shape
    adapter = adapters.ADAPTERS[type(inputs)](inputs, layer)
    sizes = Sizes(
        N=N,
        K=len(expand_KRH) if expand_KRH is not None else layer["base_key"].shape[1],
        J=layer["base_key"].shape[1],
        R=0 if expand_KRH is None else expand_KRH.shape[1],
        H=H,
        Hv=layer["base_value"].shape[2],
        head_tiles=adapter.head_tiles,
        columns=adapter.plan.columns,
        epsilon=epsilon,
        first=first,
    )
    rotary = positions.rotary
    if rotary is not None:
        rotary = tuple(jnp.broadcast_to(a[:, 0], (B, a.shape[-1])) for a in rotary)
    new = positions.index[:, 0], counts_B, rotary, expand_KRH
    partials_PBE = partial_products(x_BD, packed_DE)
    prepared, layer = prepare(partials_PBE, layer, *new, sizes=sizes)
    # [B, head tiles, slabs, columns, 64], whose first columns are a tile's own queries.
    own = prepared[:, :, :, : N // adapter.head_tiles]
    q_B1NH = jnp.moveaxis(own, 2, 3).reshape(B, 1, N, H)
    return dataclasses.replace(decode_inputs(q_B1NH), prepared=prepared), layer


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def prepare(
    partials_PBE: jax.Array,
    layer: Mapping[str, jax.Array],
    first_B: jax.Array,
    counts_B: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    expand_KRH: jax.Array | None = None,
    *,
    sizes: Sizes,
    interpret=False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Appends one token per sequence to the cache, and returns its queries and the cache.

    Args:
      partials_PBE: partial products of the layer's input and all projections, which are added and
        rounded to bfloat16.
      layer: the cache's arrays, updated in place: base_key and base_value [B, J, H, S], with
        residuals residual_key and residual_value [B, K, R, S], bfloat16, and key_scale [B, K, 1, S]
        float32 if keys are normed.
      first_B: slot of each sequence's new token; S: the cache is full, and nothing is appended.
      counts_B: 1, or 0 for a sequence that appends nothing.
      rotary: cosines and sines of the new tokens' positions, [B, H/2] float32; None: no RoPE.
      expand_KRH: expands residual keys.

    Returns:
      Queries [B, head tiles, H/64, columns, 64], and the cache. Columns without a query are not
      written, and `combine` reads none of their outputs.
    """
    z, S = sizes, layer["base_key"].shape[-1]
    first_channel, names = dict(z.first), list(layer)
    own = z.N // z.head_tiles  # query heads of a head tile
    wgmma, bf16, B = plgpu.Layout.WGMMA, jnp.dtype(jnp.bfloat16), partials_PBE.shape[1]
    inputs = dict(partials=partials_PBE, first=first_B, counts=counts_B)
    inputs |= dict(zip(("cos", "sin"), rotary, strict=True)) if rotary else {}
    inputs |= dict(expand=expand_KRH) if z.R else {}

    def kernel(*refs):
        ref = dict(zip((*inputs, *names, "queries"), refs, strict=True))
        b, index = lax.axis_index("sequence"), lax.axis_index("head")
        slot = ref["first"][b]
        appends = (ref["counts"][b] > 0) & (slot < S)
        projections = Projections(ref["partials"], b, first_channel)

        def append(name, head, row, x_H):
            ref[name].at[b, head, pl.ds(row, ROWS), slot][...] = x_H.astype(bf16)

        def rotated(x):
            half = len(x) // 2  # slabs of the pairs' first channels, then of their second
            for j in range(half) if rotary else ():
                cos, sin = (load(ref[n], b, pl.ds(j * ROWS, ROWS)) for n in ("cos", "sin"))
                x1, x2 = x[j], x[half + j]
                x[j], x[half + j] = x1 * cos - x2 * sin, x2 * cos + x1 * sin
            return x

        def base_key(j):
            x = projections.head("base_key", j, z.H)
            for i, x_H in enumerate(rotated(x if z.R else normed(x, z.epsilon))):
                append("base_key", j, i * ROWS, x_H)

        def base_value(j):
            for i, x_V in enumerate(projections.head("base_value", j, z.Hv)):
                append("base_value", j, i * ROWS, x_V)

        def residual(k):
            for kind in ("key", "value"):
                for i, x_R in enumerate(projections.head(f"latent_{kind}", k, z.R)):
                    append(f"residual_{kind}", k, i * ROWS, x_R)
            if "key_scale" in ref:
                latents, key = projections.head("latent_key", k, z.R), []
                base = projections.start("base_key", lax.div(k, z.K // z.J), z.H)
                for h in range(0, z.H, ROWS):
                    expanded_H = 0.0
                    for i, latent_R in enumerate(latents):
                        at = k, pl.ds(i * ROWS, ROWS), pl.ds(h, ROWS)
                        expand_RH = load(ref["expand"], *at, layout=wgmma)
                        latent_RH = lax.broadcast_in_dim(latent_R, expand_RH.shape, [0])
                        expanded_H += jnp.sum(latent_RH * expand_RH, axis=0)
                    base_H = projections.slab(base + h, layout=wgmma.reduce(0))
                    key.append(rounded(base_H + rounded(expanded_H)))
                ref["key_scale"][b, k, 0, slot] = inverse_rms(key, z.H, z.epsilon)

        def query(n):
            at, x = (b, lax.div(n, own)), projections.head("query", n, z.H)
            for i, x_H in enumerate(rotated(normed(x, z.epsilon))):
                ref["queries"].at[*at, i, lax.rem(n, own)][...] = x_H.astype(bf16)

        queries, base_keys, base_values, residuals = _counts(z)
        works = [(queries, True, query), (base_keys, appends, base_key)]
        works += [(base_values, appends, base_value), (residuals, appends, residual)]
        dispatch(index, works)

    shape = (B, z.head_tiles, z.H // ROWS, z.columns, ROWS)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, bf16),
        grid=(B, sum(_counts(z))),
        grid_names=("sequence", "head"),
        interpret=interpret or None,
        kernel_name="prepare",
    )
    layer = {name: jax.new_ref(array) for name, array in layer.items()}
    queries = run(*inputs.values(), *layer.values())
    return queries, {name: jax.freeze(array) for name, array in layer.items()}


def _counts(z: Sizes) -> tuple[int, ...]:
    """Returns programs per sequence: queries, base keys, base values, residuals."""
    return z.N, z.J, z.J, z.K if z.R else 0
