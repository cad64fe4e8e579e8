"""What a block of the GPU kernel's grid reads and multiplies, for each way of reading a cache.

A block takes `k` of the K KV heads, which are `g` blocks; each KV head has `G` query heads. The
queries of a block are the columns of a matrix whose rows are the channels that it reads: a query
head's column is zero where another head's channels lie.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention.gpu.ring import ROWS
from kvjax.kernels.decode_attention.gpu.ring import Slab
from kvjax.kernels.decode_attention.gpu.ring import slabs
from kvjax.kernels.decode_attention.readings import GroupedReading
from kvjax.kernels.decode_attention.readings import LatentReading
from kvjax.kernels.decode_attention.readings import ResidualReading
from kvjax.kernels.decode_attention.readings import latent as latent_lib
from kvjax.layers import rope

COLUMNS = 8  # query heads that cost as much as one
_PERIODS = (1024, 512, 256, 128)  # tokens; in 128, angles of at most 1 a token have a rank of 50
_TOLERANCE = 1e-5  # of the table of cosines and sines, relative
_SHARED_BYTES = 228 * 1024  # of a multiprocessor; a block takes 1024 more than it uses
_OTHER_BYTES = 3 * 1024  # of a block: barriers, and what a reduction over warps takes
# Products that are in flight at once. On an H200, 8 x 32K tokens of d36: LRKV 415, 404 and 407 us
# for 1, 2 and 3, MLA 168, 161 and 158, of which three spill;
# others gain less than 1 %, LRKV x GQA not timed since its query heads count as products.
TOGETHER = 2
MOST_REGISTERS = 170  # `Plan.registers` that compile without spills where H = 128 and R = 64

Cache = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a block reads and multiplies; see `kernel.attend` for the arrays that go with it."""

    keys: tuple[Slab, ...]  # each met by a query
    turning: tuple[Slab, ...] = ()  # each met by queries that turn with the position
    values: tuple[Slab, ...]  # or the first of `keys`, which then serve as both
    columns: int  # query heads of a block, padded
    heads: int  # KV heads of a block
    group: int  # query heads of a KV head
    scale: float
    lent: int = 0  # slots that hold the basis of queries that turn until they are made

    @property
    def order(self) -> tuple[Slab, ...]:
        """The slabs of a tile as they are read."""
        return self.keys + self.turning + (() if self.held else self.values)

    @property
    def held(self) -> int:
        """Slabs of keys that are values too, and stay until they are weighed."""
        return len(self.values) if self.keys[: len(self.values)] == self.values else 0

    @property
    def fewest_slots(self) -> int:
        return max(3, self.lent + 1, len(self.keys) if self.held else 0)

    def registers(self, block: int) -> int:
        """What sums, logits and weights take of a thread's 255."""
        turned = TOGETHER * block // 2 if self.turning else 0
        return self.columns // 2 * (len(self.values) + 2 * block // ROWS) + turned


def slots(plan: Plan, block: int, scaled: bool) -> int:
    """Slabs that fit into half a multiprocessor's shared memory; if too few, into all; or 0."""
    aligned = lambda size: round_up(size, 1024)
    queries, weights = 2 * ROWS * plan.columns * len(plan.keys), 2 * plan.columns * block
    turned = 2 * ROWS * ROWS * len(plan.turning) * plan.group
    scales = 4 * 2 * plan.heads * block if scaled else 0
    fixed = sum(map(aligned, (queries, weights, turned, scales))) + _OTHER_BYTES
    for blocks in (2, 1):
        count = (_SHARED_BYTES // blocks - 1024 - fixed) // (2 * ROWS * block)
        if count > plan.fewest_slots:
            return count
    return 0


# A body has a plan, the number of blocks (`groups`), its default tile (`block`), the longest split
# that it takes, and why it takes none at all (`refusal`).


class GroupedBody:
    """Keys and values as they are used. Thin keys share a slab: their heads share a block."""

    block, longest = 128, rope.MAX_POSITION

    def __init__(self, o: GroupedReading, cache: Cache):
        self.o, self.N = o, o.query.shape[2]
        self.K, H = cache["base_key"].shape[1:3]
        Hv = cache["base_value"].shape[2]
        k = ROWS // math.gcd(ROWS, H, Hv)
        self.refusal = None
        if self.K % k:
            self.refusal = f"needs {k} heads of H = {H}, Hv = {Hv} at a time: here K = {self.K}"
        self.groups = self.K // k
        self.plan = Plan(
            keys=slabs("base_key", k * H),
            values=slabs("base_value", k * Hv),
            heads=k,
            group=self.N // self.K,
            columns=_padded(k * self.N // self.K),
            scale=o.scale,
        )

    def arrays(self, split: int) -> dict[str, jax.Array]:
        q_BgkGH = _by_block(self.o.query.astype(jnp.bfloat16), self.K, self.plan.heads)
        return dict(query=_as_slabs(_private(q_BgkGH), self.plan.columns))

    def finish(self, o_BgVn: jax.Array) -> jax.Array:
        return _of_heads(o_BgVn, self.plan)


class LatentBody:
    """Latents that are key and value: a block reads one of them, and the key that all share."""

    block, longest = 64, rope.MAX_POSITION

    def __init__(self, o: LatentReading, cache: Cache):
        self.o, self.N = o, o.query.shape[2]
        *latents, self.C, _ = cache["latent"].shape[1:]
        self.groups = math.prod(latents)
        P = 0 if o.rope_query is None else cache["rope_key"].shape[1]
        self.refusal = None
        if self.C % ROWS or P % ROWS:
            self.refusal = f"needs multiples of {ROWS} channels: here C = {self.C}, P = {P}"
        rope_key = slabs("rope_key", P, sharing=self.groups) if P else ()
        self.plan = Plan(
            keys=slabs("latent", self.C) + rope_key,
            values=slabs("latent", self.C),
            heads=1,
            group=self.N // self.groups,
            columns=_padded(self.N // self.groups),
            scale=o.scale,
        )

    def arrays(self, split: int) -> dict[str, jax.Array]:
        q_BNH = latent_lib.with_zeros(self.o.query, self.C)[:, 0]
        if self.o.rope_query is not None:
            q_BNH = jnp.concatenate([q_BNH, self.o.rope_query[:, 0]], axis=-1)
        q_BNH = q_BNH.astype(jnp.bfloat16)
        q_BgnH = q_BNH.reshape(q_BNH.shape[0], self.groups, -1, q_BNH.shape[-1])
        return dict(query=_as_slabs(jnp.swapaxes(q_BgnH, 2, 3), self.plan.columns))

    def finish(self, o_BgVn: jax.Array) -> jax.Array:
        o_BgnC = jnp.swapaxes(o_BgVn[..., : self.plan.group], 2, 3)
        o_BNC = o_BgnC.reshape(o_BgnC.shape[0], self.N, -1)
        if self.o.up_value is None:
            return o_BNC
        up_value = self.o.up_value.astype(jnp.float32)
        return latent_lib.values(o_BNC[:, :, None], up_value)[:, :, 0]


class ResidualBody:
    """A base that all heads of a block read, and a residual for each.

    Under RoPE a residual turns with its position, and no query in rank space serves two tokens. But
    the table of cosines and sines of a split has a rank P of at most a slab's (`rope.basis`), and a
    head's queries in rank space over a split are a matrix [R, P], times a row of it per token.
    """

    def __init__(self, o: ResidualReading, cache: Cache):
        self.o, self.N = o, o.query.shape[2]
        J, self.H, self.S = cache["base_key"].shape[1:]
        self.Hv = cache["base_value"].shape[2]
        self.K, self.R = o.expand_key.shape[:2]
        of_base, G = self.K // J, self.N // self.K
        # The base is read once for a block: as many heads as cost no more than one.
        k = max(k for k in range(1, of_base + 1) if of_base % k == 0 and k * G <= max(COLUMNS, G))
        self.groups = self.K // k
        self.rotated = o.rope_base is not None
        self.block = 64 if self.rotated else 128
        self.longest = _period(self.H, o.rope_base) if self.rotated else rope.MAX_POSITION
        self.refusal = None
        if self.H % ROWS or self.Hv % ROWS or self.R % ROWS:
            dims = f"H = {self.H}, Hv = {self.Hv}, R = {self.R}"
            self.refusal = f"needs multiples of {ROWS} channels: here {dims}"
        base = functools.partial(slabs, sharing=of_base // k)
        keys, values = slabs("residual_key", k * self.R), slabs("residual_value", k * self.R)
        self.plan = Plan(
            keys=base("base_key", self.H) + (() if self.rotated else keys),
            turning=keys if self.rotated else (),
            values=base("base_value", self.Hv) + values,
            heads=k,
            group=G,
            columns=_padded(k * G),
            scale=o.scale,
            lent=2 * -(-self.H // (2 * ROWS)) if self.rotated else 0,
        )

    def arrays(self, split: int) -> dict[str, jax.Array]:
        o, plan, g = self.o, self.plan, self.groups
        q_BgkGH = _by_block(o.query.astype(jnp.bfloat16), self.K, plan.heads)
        shared_BgHn = jnp.swapaxes(q_BgkGH.reshape(-1, g, plan.heads * plan.group, self.H), 2, 3)
        query = _as_slabs(shared_BgHn, plan.columns)
        if self.rotated:
            return dict(query=query) | self._turning(split, query.dtype)
        q_BgkGH = _by_block(o.residual_query, self.K, plan.heads).astype(jnp.float32)
        expand_gkRH = o.expand_key.reshape(g, -1, self.R, self.H).astype(jnp.float32)
        u_BgkGR = jnp.einsum("BgkGH,gkRH->BgkGR", q_BgkGH, expand_gkRH)  # LRKV eq. 3
        private = _as_slabs(_private(u_BgkGR).astype(query.dtype), plan.columns)
        return dict(query=jnp.concatenate([query, private], axis=2))

    def _turning(self, split: int, dtype: jnp.dtype) -> dict[str, jax.Array]:
        base, H = self.o.rope_base, self.H
        starts_1s = np.arange(0, self.S, split, dtype=np.int32)[None]
        cos, sin = rope.rotary(starts_1s, H, base)
        B, _, N, _ = self.o.residual_query.shape
        q_BsNH = jnp.broadcast_to(self.o.residual_query, (B, starts_1s.size, N, H))
        q_BsNH = rope.rotate(q_BsNH.astype(jnp.float32), rope.Rotary(cos, -sin))
        q_BsgnH = q_BsNH.reshape(B, -1, self.groups, N // self.groups, H)
        left_HP, right_Ps = rope.basis(H, base, split, _TOLERANCE)
        if left_HP.shape[1] > ROWS:
            raise ValueError(f"split = {split}: at most {self.longest} with RoPE base {base}")
        missing = ROWS - left_HP.shape[1]
        cosine_FP, sine_FP = np.split(np.pad(left_HP, ((0, 0), (0, missing))), 2)
        basis_HP = jnp.asarray(np.concatenate([cosine_FP, -sine_FP]), dtype)
        return dict(
            turning_query=_whole_halves(q_BsgnH, axis=-1),
            expand=_whole_halves(self.o.expand_key.reshape(-1, H).astype(dtype), axis=-1),
            basis=_whole_halves(basis_HP, axis=0),
            table=jnp.asarray(np.pad(right_Ps, ((0, missing), (0, 0))).T, jnp.float32),
        )

    def finish(self, o_BgVn: jax.Array) -> jax.Array:
        columns = slice(self.plan.heads * self.plan.group)
        base_BgVn, latent_BgRn = o_BgVn[:, :, : self.Hv, columns], o_BgVn[:, :, self.Hv :]
        latent_BNR = _of_heads(latent_BgRn, self.plan)
        latent_BKGR = latent_BNR.reshape(-1, self.K, self.plan.group, self.R)
        expand_KRV = self.o.expand_value.astype(jnp.float32)
        residual = jnp.einsum("BKGR,KRV->BKGV", latent_BKGR, expand_KRV)  # LRKV eq. 4
        base_BNV = jnp.swapaxes(base_BgVn, 2, 3).reshape(-1, self.N, self.Hv)
        return base_BNV + residual.reshape(base_BNV.shape)


BODIES = {
    GroupedReading: GroupedBody,
    LatentReading: LatentBody,
    ResidualReading: ResidualBody,
}

# -- queries that turn -----------------------------------------------------------------------------


@functools.cache
def _period(H: int, base: float) -> int:
    """Tokens over which the table of cosines and sines has at most the rank of a slab."""
    rank = lambda length: rope.basis(H, base, length, _TOLERANCE)[0].shape[1]
    return next(length for length in _PERIODS if rank(length) <= ROWS)


def _whole_halves(x: jax.Array, axis: int) -> jax.Array:
    """Pads both halves of the rotated channels, first and second of a pair, to whole slabs."""
    halves = jnp.split(x, 2, axis=axis)
    missing = -halves[0].shape[axis] % ROWS
    pads = [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)]
    return jnp.concatenate([jnp.pad(half, pads) for half in halves], axis=axis)


# -- query heads as columns ------------------------------------------------------------------------


def _by_block(q_B1NH: jax.Array, K: int, k: int) -> jax.Array:
    """[B, g, k, G, H]."""
    B, _, N, H = q_B1NH.shape
    return q_B1NH.reshape(B, K // k, k, N // K, H)


def _padded(columns: int) -> int:
    return round_up(columns, COLUMNS)


def _private(q_BgkGH: jax.Array) -> jax.Array:
    """[B, g, k·H, k·G]: every KV head's channels meet its own query heads only."""
    B, g, k, G, H = q_BgkGH.shape
    own_kk = jnp.eye(k, dtype=q_BgkGH.dtype)
    return jnp.einsum("BgkGH,kl->BgkHlG", q_BgkGH, own_kk).reshape(B, g, k * H, k * G)


def _as_slabs(q_BgHn: jax.Array, columns: int) -> jax.Array:
    """[B, g, slabs, columns, 64], padded with zeros."""
    B, g, H, n = q_BgHn.shape
    q_BgHn = jnp.pad(q_BgHn, ((0, 0), (0, 0), (0, 0), (0, columns - n)))
    return jnp.swapaxes(q_BgHn.reshape(B, g, H // ROWS, ROWS, columns), 3, 4)


def _of_heads(o_BgVn: jax.Array, plan: Plan) -> jax.Array:
    """[B, N, V]: of every KV head's channels, the columns of its own query heads."""
    B, g = o_BgVn.shape[:2]
    k, G = plan.heads, plan.group
    o_BgkVkG = o_BgVn[..., : k * G].reshape(B, g, k, -1, k, G)
    own_BgVGk = jnp.diagonal(o_BgkVkG, axis1=2, axis2=4)
    return jnp.transpose(own_BgVGk, (0, 1, 4, 3, 2)).reshape(B, g * k * G, -1)
