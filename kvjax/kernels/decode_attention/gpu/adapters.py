"""Fits cache layouts to the GPU kernel: one adapter per layout, with its plan and its arrays."""

from collections.abc import Mapping
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention.cache_layouts import (
    DecodeInputs,
    FactoredInputs,
    GroupedInputs,
    LatentInputs,
    ResidualInputs,
    latent as latent_lib,
)
from kvjax.kernels.decode_attention.gpu.plans import (
    LATENT_TILE_KV,
    ROTATED_TILE_KV,
    TILE_KV,
    Plan,
    Scales,
)
from kvjax.kernels.decode_attention.gpu.ring import ROWS, slabs
from kvjax.layers import rope

COLUMNS = 8  # wgmma's smallest number of columns: up to 8 query heads cost as much as one
# Lengths of a split, in tokens, that are tried for a RoPE table of rank <= 64. With angles of at
# most 1 radian per token, 128 tokens have a table of rank 52 at most (35 if H = 128, base 10,000).
_SPLITS = (1024, 512, 256, 128)
_TOLERANCE = 1e-5  # relative error of the table's factorisation

Cache = Mapping[str, jax.Array]


def refusal(adapters: Mapping, inputs: DecodeInputs, cache: Cache) -> str | None:
    """Returns why a GPU's kernels do not take the inputs, from shapes and dtypes alone, or None."""
    if jax.config.jax_enable_x64:
        return "counts in 32 bits: here jax_enable_x64 is on"
    if type(inputs) not in adapters:
        return f"does not read a cache of kind {inputs.kind(cache)!r}"
    if inputs.bias is not None:
        return "adds no bias to the logits"
    if inputs.query.shape[1] != 1:
        return f"takes one query per sequence: here T = {inputs.query.shape[1]}"
    for name, array in cache.items():
        scale = cache.get(f"{name}.scale")
        dtype = np.dtype(jnp.bfloat16 if scale is None else jnp.int8)
        if name == "key_scale" or name.endswith(".scale"):
            dtype = np.dtype(jnp.float32)
        if array.dtype != dtype:
            return f"takes {name} in {dtype}: here {array.dtype}"
        if scale is not None and scale.shape[1:-2] != array.shape[1:-2]:
            return f"needs a scale for each row of {name}: here one for all, which are short"
    S = next(iter(cache.values())).shape[-1]
    if S % TILE_KV:  # tiles would read past the end
        return f"needs a capacity in multiples of {TILE_KV}: here S = {S}"
    return adapters[type(inputs)](inputs, cache).refusal


def _scales(cache: Cache, **rows: int | tuple[int, int]) -> tuple[Scales, ...]:
    """Returns the scales that a cache has.

    Args:
      rows: of a program, by field; with the number of programs that share them.
    """
    found = []
    for field, of_program in rows.items():
        name = field if field == "key_scale" else f"{field}.scale"
        if name in cache:
            heads, sharing = of_program if isinstance(of_program, tuple) else (of_program, 1)
            found.append(Scales(name, heads, sharing))
    return tuple(found)


# An adapter fits a cache layout to the kernel. It has
#   plan       the slabs of one program
#   head_tiles programs per sequence and split
#   tile_kv    tokens of a tile
#   max_split  the longest split that the plan allows, in tokens
#   refusal    None, or the reason why the kernel does not take these shapes
#   arrays(split)   the kernel's inputs besides the cache
#   expand     None, or the matrix of `combine`
#   expands    True if `finish` multiplies by a matrix
#   finish(o_BNV)   `combine`'s outputs to [B, N, Hv]


class GroupedAdapter:
    """Keys and values as they are cached; heads of fewer than 64 channels share slabs."""

    tile_kv, max_split, expand, expands = TILE_KV, rope.MAX_POSITION, None, False

    def __init__(self, inputs: GroupedInputs, cache: Cache):
        self.inputs, self.N = inputs, inputs.query.shape[2]
        self.K, H = cache["base_key"].shape[1:3]
        Hv = cache["base_value"].shape[2]
        k = ROWS // math.gcd(ROWS, H, Hv)
        self.refusal = None
        if self.K % k:
            self.refusal = f"needs {k} heads of H = {H}, Hv = {Hv} at a time: here K = {self.K}"
        self.head_tiles = self.K // k
        self.plan = Plan(
            keys=slabs("base_key", k * H),
            values=slabs("base_value", k * Hv),
            heads=k,
            group_size=self.N // self.K,
            columns=_padded(k * self.N // self.K),
            scale=inputs.scale,
            scales=_scales(cache, base_key=k, base_value=k),
        )

    def arrays(self, split: int) -> dict[str, jax.Array]:
        if self.inputs.prepared is not None:
            return dict(query=self.inputs.prepared)
        q_BgkrH = _by_head_tile(self.inputs.query.astype(jnp.bfloat16), self.K, self.plan.heads)
        return dict(query=_in_slabs(_block_diagonal(q_BgkrH), self.plan.columns))

    def finish(self, o_BNV: jax.Array) -> jax.Array:
        return _own_channels(o_BNV, self.head_tiles, self.plan.heads)


class LatentAdapter:
    """Latents that are keys and values: a program reads one latent and the shared RoPE key."""

    tile_kv, max_split, expand = LATENT_TILE_KV, rope.MAX_POSITION, None

    def __init__(self, inputs: LatentInputs, cache: Cache):
        self.inputs, self.N = inputs, inputs.query.shape[2]
        self.expands = inputs.up_value is not None
        *latents, self.C, _ = cache["latent"].shape[1:]
        self.head_tiles = math.prod(latents)
        P = 0 if inputs.rope_query is None else cache["rope_key"].shape[1]
        self.refusal = None
        if self.C % ROWS or P % ROWS:
            self.refusal = f"needs multiples of {ROWS} channels: here C = {self.C}, P = {P}"
        rope_key = slabs("rope_key", P, sharing=self.head_tiles) if P else ()
        self.plan = Plan(
            keys=slabs("latent", self.C) + rope_key,
            values=slabs("latent", self.C),
            heads=1,
            group_size=self.N // self.head_tiles,
            columns=_padded(self.N // self.head_tiles),
            scale=inputs.scale,
            scales=_scales(cache, latent=1),
        )

    def arrays(self, split: int) -> dict[str, jax.Array]:
        if self.inputs.prepared is not None:
            return dict(query=self.inputs.prepared)
        q_BNH = latent_lib.with_zeros(self.inputs.query, self.C)[:, 0]
        if self.inputs.rope_query is not None:
            q_BNH = jnp.concatenate([q_BNH, self.inputs.rope_query[:, 0]], axis=-1)
        q_BNH = q_BNH.astype(jnp.bfloat16)
        q_BgnH = q_BNH.reshape(q_BNH.shape[0], self.head_tiles, -1, q_BNH.shape[-1])
        return dict(query=_in_slabs(jnp.swapaxes(q_BgnH, 2, 3), self.plan.columns))

    def finish(self, o_BNC: jax.Array) -> jax.Array:
        if self.inputs.up_value is None:
            return o_BNC
        up_value = self.inputs.up_value.astype(jnp.float32)
        return latent_lib.expand_values(o_BNC[:, :, None], up_value)[:, :, 0]


class Rotating:
    """Queries of unrotated keys' latents under RoPE; a subclass sets these attributes.

    inputs, plan, head_tiles, H, S; `query` [B, 1, N, H], rotated to its own position.
    """

    def expand_of_heads(self) -> jax.Array:
        """Returns the rows of the latents that a query head reads, [N, slabs · 64, H]."""
        raise NotImplementedError

    def by_slab(self, x_NRH: jax.Array) -> jax.Array:
        """Returns rows [.., N, slabs · 64, H] by slab, then head: [.., g, slabs · r, 64, H]."""
        *lead, _, _, H = x_NRH.shape
        plan, slabs_of_head = self.plan, len(self.plan.rotated) // self.plan.heads
        dims = self.head_tiles, plan.heads, plan.group_size, slabs_of_head, ROWS, H
        x_gkrsRH = x_NRH.reshape(*lead, *dims)
        return jnp.swapaxes(x_gkrsRH, -4, -3).reshape(*lead, self.head_tiles, -1, ROWS, H)

    def rotated_arrays(self, split: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """Returns queries rotated by minus each split's start, and factors of the RoPE table."""
        base, H = self.inputs.rope_base, self.H
        starts_1X = np.arange(0, self.S, split, dtype=np.int32)[None]
        cos, sin = rope.rotary(starts_1X, H, base)
        B, _, N, _ = self.query.shape
        q_BXNH = jnp.broadcast_to(self.query, (B, starts_1X.size, N, H))
        q_BXNH = rope.rotate(q_BXNH.astype(jnp.float32), rope.Rotary(cos, -sin))
        q_BXgnH = q_BXNH.reshape(B, -1, self.head_tiles, N // self.head_tiles, H)
        cosine_FE, sine_FE, table_Es = self.basis(split)
        basis_HE = jnp.asarray(np.concatenate([cosine_FE, -sine_FE]), dtype)
        expand = self.inputs.expand_key
        if self.plan.own_expand:
            expand = self.by_slab(self.expand_of_heads())
        return dict(
            rotated_query=pad_halves(q_BXgnH, axis=-1),
            expand=pad_halves(expand.reshape(-1, H).astype(dtype), axis=-1),
            basis=pad_halves(basis_HE, axis=0),
            table=jnp.asarray(table_Es.T, jnp.float32),
        )

    def basis(self, split: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns `rope.basis` of a split, E padded to 64: cosines and sines [H/2, E], [E, split].

        Raises:
          ValueError: a split whose table has a higher rank.
        """
        left_HE, right_Es = rope.basis(self.H, self.inputs.rope_base, split, _TOLERANCE)
        missing = ROWS - left_HE.shape[1]
        if missing < 0:
            allowed = f"at most {self.max_split} with RoPE base {self.inputs.rope_base}"
            raise ValueError(f"split = {split}: {allowed}")
        cosine_FE, sine_FE = np.split(np.pad(left_HE, ((0, 0), (0, missing))), 2)
        return cosine_FE, sine_FE, np.pad(right_Es, ((0, missing), (0, 0)))


class ResidualAdapter(Rotating):
    """LRKV: a base that all heads of a program share, and a residual per KV head.

    Without RoPE the query is absorbed into rank space once (LRKV eq. 3). Under RoPE the query in
    rank space depends on the position (`cache_layouts.rotating`). The split's table of cosines and
    sines has a rank E of at most 64 (`rope.basis`), so that a head's queries in rank space are
    [R, E] times the token's row of the table (`rank_space`). The tile is TILE_KV, under RoPE
    ROTATED_TILE_KV.
    """

    expands = False
    most_columns = COLUMNS  # query heads of a program, unless one KV head has more

    def __init__(self, inputs: ResidualInputs, cache: Cache):
        self.inputs, self.N, self.query = inputs, inputs.query.shape[2], inputs.residual_query
        J, self.H, self.S = cache["base_key"].shape[1:]
        self.Hv = cache["base_value"].shape[2]
        self.K, self.R = inputs.expand_key.shape[:2]
        self.expand = inputs.expand_value
        heads_per_base, group = self.K // J, self.N // self.K
        # A program reads the base once for k KV heads: the largest divisor that fits the columns.
        divisors = [k for k in range(1, heads_per_base + 1) if heads_per_base % k == 0]
        k = max(k for k in divisors if k * group <= max(self.most_columns, group))
        self.head_tiles = self.K // k
        self.rotated = inputs.rope_base is not None
        self.tile_kv = ROTATED_TILE_KV if self.rotated else TILE_KV
        self.max_split = _max_split(self.H, inputs.rope_base) if self.rotated else rope.MAX_POSITION
        self.refusal = None
        if self.H % ROWS or self.Hv % ROWS or self.R % ROWS:
            dims = f"H = {self.H}, Hv = {self.Hv}, R = {self.R}"
            self.refusal = f"needs multiples of {ROWS} channels: here {dims}"
        sharing = heads_per_base // k
        base = functools.partial(slabs, sharing=sharing)
        keys, values = slabs("residual_key", k * self.R), slabs("residual_value", k * self.R)
        self.plan = Plan(
            keys=base("base_key", self.H) + (() if self.rotated else keys),
            rotated=keys if self.rotated else (),
            values=base("base_value", self.Hv) + values,
            heads=k,
            group_size=group,
            columns=_padded(k * group),
            scale=inputs.scale,
            scales=_scales(
                cache,
                base_key=(1, sharing),
                base_value=(1, sharing),
                residual_key=k,
                residual_value=k,
                key_scale=k,
            ),
            basis_slots=_basis_slots(self.H) if self.rotated else 0,
        )

    def arrays(self, split: int) -> dict[str, jax.Array]:
        inputs, plan, g = self.inputs, self.plan, self.head_tiles
        if inputs.prepared is not None:  # under RoPE alone
            return dict(query=inputs.prepared) | self.rotated_arrays(split, inputs.prepared.dtype)
        q_BgkrH = _by_head_tile(inputs.query.astype(jnp.bfloat16), self.K, plan.heads)
        shared_BgHn = jnp.swapaxes(
            q_BgkrH.reshape(-1, g, plan.heads * plan.group_size, self.H), 2, 3
        )
        query = _in_slabs(shared_BgHn, plan.columns)
        if self.rotated:
            return dict(query=query) | self.rotated_arrays(split, query.dtype)
        q_BgkrH = _by_head_tile(inputs.residual_query, self.K, plan.heads).astype(jnp.float32)
        expand_gkRH = inputs.expand_key.reshape(g, -1, self.R, self.H).astype(jnp.float32)
        u_BgkrR = jnp.einsum("BgkrH,gkRH->BgkrR", q_BgkrH, expand_gkRH)  # LRKV eq. 3
        private = _in_slabs(_block_diagonal(u_BgkrR).astype(query.dtype), plan.columns)
        return dict(query=jnp.concatenate([query, private], axis=2))

    def expand_of_heads(self) -> jax.Array:
        return jnp.repeat(self.inputs.expand_key, self.plan.group_size, axis=0)

    def finish(self, o_BNV: jax.Array) -> jax.Array:
        return o_BNV


class FactoredAdapter(Rotating):
    """Low-rank latents in place of keys, values or both, without a base.

    A program reads as many latents as fill whole slabs, and attends for all their query heads.
    Under RoPE every one of these has a query in rank space for each slab, with zeros for the
    latents of other heads (`Plan.own_expand`).
    """

    expand = None

    def __init__(self, inputs: FactoredInputs, cache: Cache):
        self.inputs, self.N, self.query = inputs, inputs.query.shape[2], inputs.query
        self.H, self.expands = inputs.query.shape[3], inputs.expand_value is not None
        (keys, R, self.S), (values, V) = cache["key"].shape[1:], cache["value"].shape[1:3]
        latents = min(keys, values)  # whole keys or values are as many as KV heads
        per_key, per_value = keys // latents, values // latents
        at_once = ROWS // math.gcd(ROWS, per_key * R, per_value * V)
        self.refusal = None
        if latents % at_once:
            dims = f"R = {R} of keys and {V} of values"
            self.refusal = f"needs {at_once} latents of {dims} at a time: here {latents}"
        self.head_tiles = max(latents // at_once, 1)
        self.keys, self.values = at_once * per_key, at_once * per_value  # of a program
        self.rotated = inputs.rope_base is not None and inputs.expand_key is not None
        self.tile_kv = ROTATED_TILE_KV if self.rotated else TILE_KV
        self.max_split = _max_split(self.H, inputs.rope_base) if self.rotated else rope.MAX_POSITION
        key_slabs, columns = slabs("key", self.keys * R), self.N // self.head_tiles
        heads = 0 if inputs.expand_key is None else len(inputs.expand_key) // self.head_tiles
        self.plan = Plan(
            keys=() if self.rotated else key_slabs,
            rotated=key_slabs if self.rotated else (),
            values=slabs("value", self.values * V),
            heads=1,
            group_size=columns,
            columns=_padded(columns),
            scale=inputs.scale,
            scales=_scales(cache, key=self.keys, value=self.values, key_scale=heads),
            basis_slots=_basis_slots(self.H) if self.rotated else 0,
            own_expand=self.rotated,
        )

    def arrays(self, split: int) -> dict[str, jax.Array]:
        if self.rotated:
            return self.rotated_arrays(split, jnp.bfloat16)
        q_B1NR, expand = self.query, self.inputs.expand_key
        if expand is not None:  # thin keys, eq. 12
            q_BKrH = _by_head_tile(q_B1NR, len(expand), len(expand))[:, 0].astype(jnp.float32)
            u_BKrR = jnp.einsum("BKrH,KRH->BKrR", q_BKrH, expand.astype(jnp.float32))
            q_B1NR = u_BKrR.reshape(len(q_B1NR), 1, self.N, -1)
        keys = self.keys * self.head_tiles
        q_BgkrR = _by_head_tile(q_B1NR.astype(jnp.bfloat16), keys, self.keys)
        return dict(query=_in_slabs(_block_diagonal(q_BgkrR), self.plan.columns))

    def expand_of_heads(self) -> jax.Array:
        expand_KRH = self.inputs.expand_key
        expand_NRH = jnp.repeat(expand_KRH, self.N // len(expand_KRH), axis=0)
        head_N = np.arange(self.N) * self.keys * self.head_tiles // self.N % self.keys
        own_Nk = jnp.asarray(head_N[:, None] == np.arange(self.keys)[None], expand_NRH.dtype)
        expand_NkRH = own_Nk[:, :, None, None] * expand_NRH[:, None]
        return expand_NkRH.reshape(self.N, -1, self.H)

    def finish(self, o_BNR: jax.Array) -> jax.Array:
        o_BNR = _own_channels(o_BNR, self.head_tiles, self.values)
        if self.inputs.expand_value is None:
            return o_BNR
        expand_KRV = self.inputs.expand_value.astype(jnp.float32)
        B, N, R = o_BNR.shape
        o_BKrR = o_BNR.reshape(B, len(expand_KRV), -1, R).astype(jnp.float32)
        return jnp.einsum("BKrR,KRV->BKrV", o_BKrR, expand_KRV).reshape(B, N, -1)


ADAPTERS = {
    FactoredInputs: FactoredAdapter,
    GroupedInputs: GroupedAdapter,
    LatentInputs: LatentAdapter,
    ResidualInputs: ResidualAdapter,
}

# -- rotated queries -------------------------------------------------------------------------------


@functools.cache
def _max_split(H: int, base: float) -> int:
    """Returns the longest split whose table of cosines and sines has a rank of at most 64."""
    for length in _SPLITS:
        basis_HE, _ = rope.basis(H, base, length, _TOLERANCE)
        if basis_HE.shape[1] <= ROWS:
            return length
    raise AssertionError("128 tokens have a table of rank 52 at most")


def _basis_slots(H: int) -> int:
    """Returns the ring slots of the RoPE basis, whose halves are padded to slabs."""
    return 2 * -(-H // (2 * ROWS))


def pad_halves(x: jax.Array, axis: int) -> jax.Array:
    """Pads the halves (first and second channels of RoPE's pairs) to multiples of 64 channels."""
    halves = jnp.split(x, 2, axis=axis)
    missing = -halves[0].shape[axis] % ROWS
    pads = [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)]
    return jnp.concatenate([jnp.pad(half, pads) for half in halves], axis=axis)


# -- query heads as columns ------------------------------------------------------------------------


def _by_head_tile(q_B1NH: jax.Array, K: int, k: int) -> jax.Array:
    """Groups query heads by head tile and KV head: [B, g, k, r, H]."""
    B, _, N, H = q_B1NH.shape
    return q_B1NH.reshape(B, K // k, k, N // K, H)


def _own_channels(o_BNV: jax.Array, head_tiles: int, k: int) -> jax.Array:
    """Returns the channels of each query head's own values, of the k that its program reads."""
    B, N, _ = o_BNV.shape
    if k == 1:
        return o_BNV
    o_BgkrkV = o_BNV.reshape(B, head_tiles, k, N // head_tiles // k, k, -1)
    own_BgrVk = jnp.diagonal(o_BgkrkV, axis1=2, axis2=4)
    return jnp.moveaxis(own_BgrVk, -1, 2).reshape(B, N, -1)


def _padded(columns: int) -> int:
    return round_up(columns, COLUMNS)


def _block_diagonal(q_BgkrH: jax.Array) -> jax.Array:
    """Returns [B, g, k·H, k·r], zero where a query head is not of the channels' KV head."""
    B, g, k, r, H = q_BgkrH.shape
    own_kk = jnp.eye(k, dtype=q_BgkrH.dtype)
    return jnp.einsum("BgkrH,kl->BgkHlr", q_BgkrH, own_kk).reshape(B, g, k * H, k * r)


def _in_slabs(q_BgHn: jax.Array, columns: int) -> jax.Array:
    """Returns [B, g, slabs, columns, 64], padded with zero columns."""
    B, g, H, n = q_BgHn.shape
    q_BgHn = jnp.pad(q_BgHn, ((0, 0), (0, 0), (0, 0), (0, columns - n)))
    return jnp.swapaxes(q_BgHn.reshape(B, g, H // ROWS, ROWS, columns), 3, 4)
