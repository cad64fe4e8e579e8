"""Decode attention as Pallas kernels for TPUs: one query per sequence over a cache of any length.

A cache layout's kernel is a list of components (`operators`) on one pipeline (`pipeline`, which has
the picture of grid, tiles and buffers). LRKV under RoPE rotates the query in rank space, tile by
tile (`operators.RotatingKeys`, `operators.BasisKeys`): products with constant tables on the matrix
unit, then R or fewer multiply-adds per key on the vector unit; a rebuilt key needs H, and more to
rotate it. Tiles of an int8 or int4 cache are cast to the query's dtype as they are read; integers
up to 127 are exact in bfloat16. Tile sizes and operators are chosen here. Tests compile the kernels
ahead of time for v4, v5e, v5p and v6e, and run them in the interpreter.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvjax.cache.stripes import Stripes
from kvjax.kernels.decode_attention import tuning
from kvjax.kernels.decode_attention.cache_layouts import (
    DecodeInputs,
    FactoredInputs,
    GroupedInputs,
    LatentInputs,
    ResidualInputs,
    latent as latent_lib,
)
from kvjax.kernels.decode_attention.tpu import operators
from kvjax.kernels.decode_attention.tpu.buffers import vmem_bytes
from kvjax.kernels.decode_attention.tpu.interfaces import LANES, Cached, Component
from kvjax.kernels.decode_attention.tpu.pipeline import attend

Cache = Mapping[str, jax.Array]
# Tokens of a grid step (tile_kv) and of one product (score_tile). Both are multiples of 128;
# tile_kv divides the capacity (the stripe, on several chips), score_tile divides tile_kv. Sizes
# that do not, also tuned ones and arguments, are rounded down (`_divisor`). A capacity that is no
# multiple of 128, or a cache that overfills VMEM even with tiles of 128, is refused by `check`, and
# XLA runs.
#
# The default of tile_kv is an eighth of the capacity, between SHORTEST_TILE_KV and the chip's
# `longest_tile_kv` (4,096 where queries are rotated), rounded down: 384 for a capacity of 1,152. A
# tile costs 250 to 960 bundles besides its tokens (static, d36: `kvjax.kernels.profile`), which
# favours long tiles; a sequence's last tile is always read whole, which favours short ones.
# Defaults shrink, to 128 at the least, until they fit into VMEM (`_default_sizes`). Tuned sizes and
# arguments are not held against it: what does not fit is an error of the compiler. Besides the
# cache's tiles, RotatingKeys' table [H, tile_kv] grows with tile_kv; products of all heads, such
# as its [N·R, score_tile] in float32, with score_tile. The FLOPs of
# `cache_layouts.rotating.flops` are with plain JAX's tile.
SHORTEST_TILE_KV = 512
DEFAULT_SCORE_TILE = 512


@dataclasses.dataclass(frozen=True)
class Variant:
    """Operators of which the faster ones depend on the chip.

    Attributes:
      diagonal: True for `DiagonalValues`, False for `VectorValues`, where no two heads share
        values. Bundles per token of LRKV at d36, static: on v4 4.1 with and 5.4 without, on v5p 3.7
        and 2.8 (experiments/LOG.md).
      transposed: see `operators.MatrixValues`. Bundles per token of GQA at d36, static: on v6e 1.03
        with and 1.33 without.
      basis: True for `BasisKeys`, False for `RotatingKeys`, where each query head has a key of its
        own. Bundles per token of LRKV at d36, static: on v5e 2.5 with and 3.0 without, on v6e 2.7
        and 2.6.
    """

    diagonal: bool = False
    transposed: bool = False
    basis: bool = False


@dataclasses.dataclass(frozen=True)
class _Chip:
    """Properties of a chip that the defaults depend on; unknown chips have the least."""

    vmem_bytes: int = 16 * 2**20  # that the kernel may use
    cores: int = 1  # TensorCores that share its memory: a split for each if there is one sequence
    variant: Variant = Variant()
    longest_tile_kv: int = 2048  # by default


_LARGE = 64 * 2**20
_V6E = _Chip(vmem_bytes=_LARGE, variant=Variant(transposed=True), longest_tile_kv=4096)
_V5 = _Chip(vmem_bytes=_LARGE, variant=Variant(basis=True))
_V5P = dataclasses.replace(_V5, cores=2)
_CHIPS = {
    "TPU v4": _Chip(cores=2, variant=Variant(diagonal=True)),  # half the vector slots of v5p
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v5 lite": _V5,
    "TPU v5e": _V5,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "cpu": _V5,  # the interpreter
}


def decode_attention(
    inputs: DecodeInputs, cache: Cache, first_B: jax.Array, **options
) -> jax.Array:
    """See `api.decode_attention`: [B, 1, N, Hv] in float32; options: `attend_with_lse`."""
    return attend_with_lse(inputs, cache, first_B, Stripes(), **options)[0]


def attend_with_lse(
    inputs: DecodeInputs,
    cache: Cache,
    first_B: jax.Array,
    stripes: Stripes,
    *,
    tile_kv: int | None = None,
    score_tile: int | None = None,
    splits: int | None = None,
    variant: Variant | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attends to the tokens of this chip's stripes: [B, 1, N, Hv], and log-sum-exps [B, 1, N].

    Where a query sees none of them, its output is finite and its log-sum-exp -inf.

    Args:
      first_B: position of each sequence's new token, on whichever chip it is.
      stripes: the positions that this chip holds.
      tile_kv: tokens per grid step, rounded down to a divisor of the capacity and the stripe; None,
        here and below: from `tuned.json`, or a default.
      score_tile: tokens of a tile that are scored at once, rounded down to a divisor of `tile_kv`.
      splits: splits of each sequence; one per core of the chip if there is one sequence.
      variant: the chip's, if None.
      interpret: False, or `pltpu.InterpretParams`.

    Raises:
      NotImplementedError: inputs or shapes that this kernel does not take; see `check`.
    """
    check(inputs, cache)
    S, chip = _capacity(cache), _chip()
    default = _default_sizes(inputs, cache)
    key = tuning.key("tpu", inputs, cache)
    sizes = tuning.parameters(key, default=default, nearest=True)
    tile_kv = tile_kv or sizes["tile_kv"]
    origins = None
    if stripes.chips == 1:
        tile_kv = _divisor(S, tile_kv)
    else:  # positions of a tile must be consecutive: no tile crosses a stripe
        tile_kv = _divisor(stripes.size, tile_kv)
        origins = stripes.position(jnp.arange(S // tile_kv, dtype=jnp.int32) * tile_kv)
    seen_B = stripes.num_held(first_B + 1)  # tokens of this chip: its slots 0 .. seen - 1
    o_B1NV, log_sum_exp_B1N = _run(
        inputs,
        dict(cache),
        jnp.clip(seen_B - 1, 0, S - 1),  # first_B is S for a full cache that no longer grows
        origins,
        tile_kv=tile_kv,
        score_tile=_divisor(tile_kv, score_tile or sizes["score_tile"]),
        splits=splits or sizes["splits"],
        variant=variant or chip.variant,
        vmem_bytes=chip.vmem_bytes,
        interpret=interpret,
    )
    # The kernel attends to at least one slot; a log-sum-exp of -inf discards it where none is seen.
    return o_B1NV, jnp.where(seen_B[:, None, None] > 0, log_sum_exp_B1N, -jnp.inf)


@functools.partial(
    jax.jit,
    static_argnames=("tile_kv", "score_tile", "splits", "variant", "vmem_bytes", "interpret"),
)  # a function of its own in the program: lowered once for all layers of a model
def _run(inputs, cache, first_B, origins, *, tile_kv, variant, **options):
    kernel = _kernel(inputs, cache, tile_kv, variant, origins)
    outputs, log_sum_exp_BN = attend(
        kernel.components,
        first_B,
        heads=inputs.query.shape[2],
        capacity=_capacity(cache),
        scale=inputs.scale,
        key_scale=cache.get("key_scale"),
        tile_kv=tile_kv,
        delay_values=kernel.delay_values,
        **options,
    )
    return kernel.expand(*outputs)[:, None], log_sum_exp_BN[:, None]


def candidates(inputs: DecodeInputs, cache: Cache) -> dict[str, tuple[int, ...]]:
    """Returns the values of each parameter that --tune combines; shapes round them down."""
    del inputs, cache
    return {"tile_kv": (512, 1024, 2048, 4096), "score_tile": (256, 512), "splits": (1, 2)}


def check(inputs: DecodeInputs, cache: Cache) -> None:
    """Raises NotImplementedError, with the reason, for inputs that the kernels do not take."""

    def refuse(takes: str, here: str) -> None:
        raise NotImplementedError(f"the TPU kernels take {takes}, not {here}: use 'xla'")

    if type(inputs) not in _KERNELS:
        refuse("grouped, residual, factored and latent caches", f"{inputs.kind(cache)}")
    if inputs.bias is not None:
        refuse("logits without a bias by position", "one")
    if inputs.query.shape[1] != 1:
        refuse("one query per sequence", f"T = {inputs.query.shape[1]}")
    if inputs.query.shape[2] > LANES:
        refuse(f"up to {LANES} heads", f"N = {inputs.query.shape[2]}")
    for name, array in cache.items():
        if array.dtype not in (jnp.bfloat16, jnp.float32, jnp.int8, jnp.uint8):
            refuse("caches in bfloat16, float32, int8 or packed int4", f"{name} in {array.dtype}")
        if array.shape[-1] % LANES:
            refuse(f"capacities in multiples of {LANES}", f"S = {array.shape[-1]}")
        rows, of_tile = array.shape[-2], 32 if array.dtype.itemsize == 1 else 16
        if name != "key_scale" and not name.endswith(".scale") and rows % of_tile:
            refuse(f"head dims and ranks in multiples of {of_tile}", f"{rows} of {name}")
    if inputs.rope_base is not None and inputs.query.shape[-1] % LANES:
        refuse(f"rotated keys of a multiple of {LANES} channels", f"H = {inputs.query.shape[-1]}")
    if jax.config.jax_enable_x64:
        refuse("32-bit programs", "one with jax_enable_x64")
    need, there = _vmem_bytes(inputs, cache, LANES, LANES), _chip().vmem_bytes
    if need > there:
        refuse(f"shapes that fit {there / 2**20:.0f} MiB of VMEM", f"{need / 2**20:.1f} MiB")


def _capacity(cache: Cache) -> int:
    return next(iter(cache.values())).shape[-1]


def _chip() -> _Chip:
    return _CHIPS.get(tuning.current_device_kind(), _Chip())


def _vmem_bytes(inputs: DecodeInputs, cache: Cache, tile_kv: int, score_tile: int) -> int:
    """Returns the VMEM that the kernel takes with these sizes, from shapes alone."""
    taken = []

    def measure(inputs: DecodeInputs, cache: Cache) -> None:
        kernel = _kernel(inputs, cache, tile_kv, _chip().variant)
        sizes = dict(tile_kv=tile_kv, score_tile=score_tile, key_scale=cache.get("key_scale"))
        taken.append(vmem_bytes(kernel.components, heads=inputs.query.shape[2], **sizes))

    jax.eval_shape(measure, inputs, dict(cache))
    return taken[0]


def _default_sizes(inputs: DecodeInputs, cache: Cache) -> dict[str, int]:
    """Returns default `tile_kv`, `score_tile` and `splits`; see SHORTEST_TILE_KV.

    Halves the tiles until the kernel fits into VMEM: first tile_kv to 2,048, then score_tile to
    256, then tile_kv to SHORTEST_TILE_KV, then both to 128.
    """
    S, chip = _capacity(cache), _chip()
    rotates = inputs.rope_base is not None
    longest = 4096 if rotates else chip.longest_tile_kv
    tile_kv = _divisor(S, min(longest, max(SHORTEST_TILE_KV, S // 8)))
    score_tile = DEFAULT_SCORE_TILE
    while _vmem_bytes(inputs, cache, tile_kv, score_tile) > chip.vmem_bytes:
        if tile_kv == score_tile == LANES:
            break  # `check` refuses
        shrinks = score_tile > 256 or (tile_kv <= SHORTEST_TILE_KV and score_tile > LANES)
        if shrinks and tile_kv <= 2048:
            score_tile //= 2
        else:
            tile_kv = _divisor(S, max(tile_kv // 2, LANES))
    B = next(iter(cache.values())).shape[0]
    splits = chip.cores if B == 1 else 1
    return {"tile_kv": tile_kv, "score_tile": score_tile, "splits": splits}


def _divisor(S: int, most: int) -> int:
    """Returns the largest multiple of 128 that divides S and is at most `most`; at least 128."""
    most = max(min(most, S), LANES)
    return next(b for b in range(most // LANES * LANES, 0, -LANES) if S % b == 0)


# -- kernels by cache layout -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The components of a cache layout's kernel.

    Attributes:
      components: see `pipeline.attend`.
      expand: maps their outputs [B, N, width] to [B, N, Hv].
      delay_values: see `pipeline.attend`.
    """

    components: list[Component]
    expand: Callable[..., jax.Array]
    delay_values: bool = False


def _kernel(
    inputs: DecodeInputs, cache: Cache, tile_kv: int, variant: Variant, origins=None
) -> _Kernel:
    """Returns the kernel for tiles that start at positions `origins`; None: of a whole cache."""
    return _KERNELS[type(inputs)](inputs, cache, tile_kv, variant, origins)


def _by_group(query_B1NH: jax.Array, K: int) -> jax.Array:
    """Groups query heads by the KV head that they share: [B, K, N/K, H]."""
    B, _, N, H = query_B1NH.shape
    return query_B1NH.reshape(B, K, N // K, H)


def _cached(inputs: DecodeInputs, cache: Cache, name: str) -> Cached:
    """Returns a field as components read it: if quantised, cast to the compute dtype."""
    array, scale = cache[name], cache.get(f"{name}.scale")
    # Absorbed queries are wider than the compute dtype, and no input is narrower.
    compute = min((x.dtype for x in jax.tree.leaves(inputs)), key=lambda dtype: dtype.itemsize)
    return Cached(array, array.dtype if scale is None else compute, scale)


def _keys_of_heads(query_B1NH: jax.Array, keys: Cached):
    """Returns the operator for keys [B, K, H, S] of N query heads."""
    K = keys.array.shape[1]
    if query_B1NH.shape[2] == K:  # MHA: one query per key, head by head on the vector unit
        return operators.VectorKeys(query_B1NH[:, 0], keys)
    return operators.MatrixKeys(_by_group(query_B1NH, K), keys)


def _values_of_heads(values: Cached, N: int, variant: Variant):
    """Returns the operator for values [B, K, V, S] of N query heads."""
    K = values.array.shape[1]
    if N > K:
        return operators.MatrixValues(values, group=N // K, transposed=variant.transposed)
    if variant.diagonal:
        return operators.DiagonalValues(values)
    return operators.VectorValues(values, N=N)


def _grouped(
    inputs: GroupedInputs, cache: Cache, tile_kv: int, variant: Variant, origins
) -> _Kernel:
    del tile_kv, origins
    values = _values_of_heads(_cached(inputs, cache, "base_value"), inputs.query.shape[2], variant)
    keys = _keys_of_heads(inputs.query, _cached(inputs, cache, "base_key"))
    component = Component(keys, values)
    return _Kernel([component], lambda o_BNV: o_BNV)


def _latent(inputs: LatentInputs, cache: Cache, tile_kv: int, variant: Variant, origins) -> _Kernel:
    del tile_kv, origins
    N, of_field = inputs.query.shape[2], _cached(inputs, cache, "latent")
    latents = dataclasses.replace(
        of_field,
        array=latent_lib.by_group(of_field.array),
        scale=None if of_field.scale is None else latent_lib.by_group(of_field.scale),
    )
    J, C = latents.array.shape[1], latents.rows
    query_B1NC = latent_lib.with_zeros(inputs.query, C)
    content = Component(
        operators.MatrixKeys(_by_group(query_B1NC, J), latents),
        operators.MatrixValues(latents, group=N // J, transposed=variant.transposed, are_keys=True),
    )
    components = [content]
    if inputs.rope_query is not None:  # scores to add, without values of its own
        rope_key = Cached(cache["rope_key"][:, None], cache["rope_key"].dtype)
        components.append(
            Component(operators.MatrixKeys(_by_group(inputs.rope_query, 1), rope_key))
        )
    if inputs.up_value is None:
        return _Kernel(components, lambda o_BNC: o_BNC)
    up_JCrV = inputs.up_value.astype(jnp.float32)

    def expand(o_BNC):
        return latent_lib.expand_values(o_BNC[:, :, None], up_JCrV)[:, :, 0]

    return _Kernel(components, expand)


def _residual(
    inputs: ResidualInputs, cache: Cache, tile_kv: int, variant: Variant, origins
) -> _Kernel:
    B, _, N, _ = inputs.query.shape
    J, (K, R) = cache["base_value"].shape[1], inputs.expand_key.shape[:2]
    field = functools.partial(_cached, inputs, cache)
    base = Component(
        operators.MatrixKeys(_by_group(inputs.query, J), field("base_key")),
        operators.MatrixValues(field("base_value"), group=N // J, transposed=variant.transposed),
    )
    rotated = inputs.rope_base is not None
    if rotated:  # the query in rank space depends on the position: rotated once per tile
        of_keys = operators.BasisKeys if variant.basis or N > K else operators.RotatingKeys
        keys = of_keys(
            inputs.residual_query[:, 0],
            inputs.expand_key,
            field("residual_key"),
            base=inputs.rope_base,
            tile_kv=tile_kv,
            origins=origins,
        )
    else:  # absorbed once, LRKV eq. 3
        q_BKrH = _by_group(inputs.residual_query, K).astype(jnp.float32)
        u_BKrR = jnp.einsum("BKrH,KRH->BKrR", q_BKrH, inputs.expand_key.astype(jnp.float32))
        keys = operators.VectorKeys(u_BKrR.reshape(B, N, R), field("residual_key"))
    values_of_heads = _values_of_heads(field("residual_value"), N, variant)

    def expand(base_BNV: jax.Array, latent_BNR: jax.Array) -> jax.Array:  # LRKV eq. 4
        latent_BKrR = latent_BNR.reshape(B, K, N // K, R)
        values_BKrV = jnp.einsum(
            "BKrR,KRV->BKrV", latent_BKrR, inputs.expand_value.astype(jnp.float32)
        )
        return base_BNV + values_BKrV.reshape(base_BNV.shape)

    # Rotated queries keep the matrix unit busy, values per head the vector unit: one tile's values
    # are accumulated beside the next tile's scores.
    return _Kernel([base, Component(keys, values_of_heads)], expand, delay_values=rotated)


def _factored(
    inputs: FactoredInputs, cache: Cache, tile_kv: int, variant: Variant, origins
) -> _Kernel:
    B, _, N, _ = inputs.query.shape
    if inputs.rope_base is not None and inputs.expand_key is not None:
        # BasisKeys on every chip: RotatingKeys has a table for each query head.
        keys = operators.BasisKeys(
            inputs.query[:, 0],
            inputs.expand_key,
            _cached(inputs, cache, "key"),
            base=inputs.rope_base,
            tile_kv=tile_kv,
            origins=origins,
        )
    else:
        query_B1NR = inputs.query
        if inputs.expand_key is not None:  # absorbed once (thin keys, eq. 12)
            expand_KRH = inputs.expand_key.astype(jnp.float32)
            q_BKrH = _by_group(inputs.query, len(expand_KRH)).astype(jnp.float32)
            query_B1NR = jnp.einsum("BKrH,KRH->BKrR", q_BKrH, expand_KRH).reshape(B, 1, N, -1)
        keys = _keys_of_heads(query_B1NR, _cached(inputs, cache, "key"))

    def expand(o_BNR: jax.Array) -> jax.Array:
        if inputs.expand_value is None:
            return o_BNR
        expand_KRV = inputs.expand_value.astype(jnp.float32)
        o_BKrR = o_BNR.reshape(B, len(expand_KRV), -1, o_BNR.shape[-1])
        return jnp.einsum("BKrR,KRV->BKrV", o_BKrR, expand_KRV).reshape(B, N, -1)

    component = Component(keys, _values_of_heads(_cached(inputs, cache, "value"), N, variant))
    return _Kernel([component], expand, delay_values=isinstance(keys, operators.BasisKeys))


_KERNELS = {
    FactoredInputs: _factored,
    GroupedInputs: _grouped,
    LatentInputs: _latent,
    ResidualInputs: _residual,
}
