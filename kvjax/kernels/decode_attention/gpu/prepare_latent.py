"""The GPU kernel before decode attention over MLA's latents: new queries and cache entries.

Grid (B, programs). A program is one warpgroup, and does one of

    latent          norms it, appends it
    RoPE key        norms and rotates it, appends it
    content query   norms a head's, multiplies it by some rows of up_key
    RoPE query      norms and rotates a head's

where appending writes the sequence's slot of the cache, in place. Queries are written as `kernel`
reads them.
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
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs
from kvjax.kernels.decode_attention.gpu import adapters, attention
from kvjax.kernels.decode_attention.gpu.projections import (
    COLUMN,
    Projections,
    dispatch,
    load,
    normed,
    rounded,
)
from kvjax.kernels.decode_attention.gpu.ring import ROWS
from kvjax.kernels.partial_products import partial_products
from kvjax.layers.rope import Positions

_SLABS = 4  # of 64 rows of up_key that one program multiplies at most
# Each sequence's programs read all of up_key, without tensor cores. Not timed: eight sequences at
# d36 read 28 MB through L2, estimated to take as long as the two kernels of XLA that it replaces.
_MOST_SEQUENCES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a layer, and first channels in the product of its input with all projections.

    Attributes:
      columns: of the plan of `kernel`.
      latent_epsilon, epsilon: of the RMSNorm of the latent, and of queries and RoPE key; None: not
        normed.
      first: first channel of all down, rope_key, query, rope_query.
    """

    N: int
    H: int
    C: int
    columns: int
    latent_epsilon: float | None
    epsilon: float | None
    first: tuple[tuple[str, int], ...]


def refusal(sizes: Sizes, layer: Mapping[str, jax.Array], dtype: jnp.dtype) -> str | None:
    """Returns why `prepare` does not take a layer that `attention.check` lets pass, or None.

    Args:
      layer: arrays or shapes.
      dtype: of the layer's input.
    """
    if attention.capability() == 8:
        return "needs Hopper"
    if dtype != jnp.bfloat16:
        return f"takes activations in bfloat16, not {dtype}"
    if quantized.cached_bits(layer):
        return "does not quantise"
    first = dict(sizes.first)
    B, P, _ = layer["rope_key"].shape
    if B > _MOST_SEQUENCES:
        return f"takes at most {_MOST_SEQUENCES} sequences"
    if sizes.H % ROWS or sizes.C % ROWS or P != ROWS:
        return f"takes multiples of {ROWS} channels of queries and latents, and P = {ROWS}"
    if {min(first, key=first.get), max(first, key=first.get)} & {"rope_key", "rope_query"}:
        return "takes RoPE channels between others"
    return None


def columns(inputs: DecodeInputs, layer: Mapping[str, jax.Array]) -> int:
    """Returns the columns of queries that `kernel` reads."""
    return adapters.ADAPTERS[type(inputs)](inputs, layer).plan.columns


def into_cache(
    layer: Mapping[str, jax.Array],
    packed_DE: jax.Array,
    x_BD: jax.Array,
    positions: Positions,
    counts_B: jax.Array,
    *,
    sizes: Sizes,
    up_key_CNH: jax.Array,
    decode_inputs: Callable[[jax.Array, jax.Array], DecodeInputs],
) -> tuple[DecodeInputs, dict[str, jax.Array]]:
    """Calls `prepare`; returns the decode inputs, with `prepared` set, and the cache.

    Args:
      packed_DE: projections of the layer's input, side by side.
      x_BD: the layer's input.
      positions: of the new tokens.
      decode_inputs: returns decode inputs for absorbed queries [B, 1, N, C] and RoPE queries.
      layer, counts_B, up_key_CNH: see `prepare`.
    """
    rotary = positions.rotary
    if rotary is not None:
        # For both halves of the channels, whose products with sines have opposite signs.
        cos, sin = (a[:, 0] for a in rotary)
        rotary = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
        rotary = tuple(jnp.broadcast_to(a, (len(x_BD), ROWS)) for a in rotary)
    partials_PBE = partial_products(x_BD, packed_DE)
    new = positions.index[:, 0], counts_B, rotary
    prepared, layer = prepare(partials_PBE, layer, *new, up_key_CNH, sizes=sizes)
    q_BNX = jnp.swapaxes(prepared[:, 0, :, : sizes.N], 1, 2).reshape(len(x_BD), sizes.N, -1)
    queries = jnp.split(q_BNX[:, None], [sizes.C], axis=-1)
    return dataclasses.replace(decode_inputs(*queries), prepared=prepared), layer


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def prepare(
    partials_PBE: jax.Array,
    layer: Mapping[str, jax.Array],
    first_B: jax.Array,
    counts_B: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    up_key_CNH: jax.Array,
    *,
    sizes: Sizes,
    interpret=False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Appends one token per sequence to the cache, and returns its queries and the cache.

    Args:
      partials_PBE: partial products of the layer's input and all projections, which are added and
        rounded to bfloat16.
      layer: the cache's latent [B, C, S] and rope_key [B, 64, S], bfloat16, updated in place.
      first_B: slot of each sequence's new token; S: the cache is full, and nothing is appended.
      counts_B: 1, or 0 for a sequence that appends nothing.
      rotary: by channel, cosines and sines [B, 64] in float32, sines of the first 32 channels
        negative; None: no RoPE.
      up_key_CNH: expands latents to content keys.

    Returns:
      Queries [B, 1, C/64 + 1, columns, 64] in bfloat16, RoPE's last, and the cache. Columns without
      a query are not written, and `combine` reads none of their outputs.
    """
    z, S, B = sizes, layer["latent"].shape[-1], partials_PBE.shape[1]
    first_channel, names = dict(z.first), list(layer)
    inputs = dict(partials=partials_PBE, first=first_B, counts=counts_B, up_key=up_key_CNH)
    wgmma, slabs = plgpu.Layout.WGMMA, z.C // ROWS
    at_once = max(n for n in range(1, _SLABS + 1) if slabs % n == 0)
    queries = z.N * slabs // at_once  # programs
    inputs |= dict(zip(("cos", "sin"), rotary, strict=True)) if rotary else {}

    def kernel(*refs):
        ref = dict(zip((*inputs, *names, "queries"), refs, strict=True))
        b, index = lax.axis_index("sequence"), lax.axis_index("program")
        slot = ref["first"][b]
        appends = (ref["counts"][b] > 0) & (slot < S)
        projections = Projections(ref["partials"], b, first_channel)

        def rotated(name, head):
            """Returns a head's 64 channels of RoPE, normed and rotated."""
            start = projections.start(name, head, ROWS)
            (x_P,) = normed([projections.slab(start)], z.epsilon)
            if not rotary:
                return x_P
            # The other channel of each pair is 32 further, or 32 before. Both windows reach into
            # neighbouring projections, which `refusal` makes sure are there.
            half = ROWS // 2
            is_first = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=COLUMN) < half
            after_P, before_P = projections.slab(start + half), projections.slab(start - half)
            other_P = jnp.where(is_first, after_P, before_P)
            (other_P,) = normed([other_P], z.epsilon)
            cos_P, sin_P = (load(ref[name], b, pl.ds(0, ROWS)) for name in ("cos", "sin"))
            return x_P * cos_P + other_P * sin_P

        def store(ref, x_H):
            ref[...] = rounded(x_H).astype(jnp.bfloat16)

        def latent(_):
            x = normed(projections.head("down", 0, z.C), z.latent_epsilon)
            for i, x_C in enumerate(x):
                store(ref["latent"].at[b, pl.ds(i * ROWS, ROWS), slot], x_C)

        def rope_key(_):
            store(ref["rope_key"].at[b, pl.ds(0, ROWS), slot], rotated("rope_key", 0))

        def query(index):
            n, first = lax.div(index, slabs // at_once), lax.rem(index, slabs // at_once) * at_once
            start = projections.start("query", n, z.H)
            x = [projections.slab(start + h, layout=wgmma.reduce(0)) for h in range(0, z.H, ROWS)]
            x = normed(x, z.epsilon)
            for i in range(at_once):
                absorbed_C, c = 0.0, (first + i) * ROWS
                for h, x_H in enumerate(x):
                    at = pl.ds(c, ROWS), n, pl.ds(h * ROWS, ROWS)
                    up_CH = load(ref["up_key"], *at, layout=wgmma)
                    absorbed_C += jnp.sum(
                        up_CH * lax.broadcast_in_dim(x_H, up_CH.shape, [1]), axis=1
                    )
                store(ref["queries"].at[b, 0, first + i, n], absorbed_C)

        def rope_query(n):
            store(ref["queries"].at[b, 0, slabs, n], rotated("rope_query", n))

        works = [(1, appends, latent), (1, appends, rope_key), (queries, True, query)]
        dispatch(index, [*works, (z.N, True, rope_query)])

    shape = (B, 1, slabs + 1, z.columns, ROWS)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        grid=(B, 2 + queries + z.N),
        grid_names=("sequence", "program"),
        interpret=interpret or None,
        kernel_name="prepare",
    )
    layer = {name: jax.new_ref(array) for name, array in layer.items()}
    prepared = run(*inputs.values(), *layer.values())
    return prepared, {name: jax.freeze(array) for name, array in layer.items()}
