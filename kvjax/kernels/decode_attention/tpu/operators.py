"""Keys and values of the TPU decode kernels.

Keys   `MatrixKeys`      all query heads of a group at once, on the matrix unit: MQA, GQA, MLA, and
                         LRKV's base
       `VectorKeys`      head by head, on the vector unit: MHA, and LRKV's residual without RoPE,
                         where the query is absorbed into rank space (LRKV eq. 3)
       `RotatingKeys`    LRKV's residual and low-rank keys under RoPE: a query in rank space for
                         every position
       `BasisKeys`       the same through a RoPE basis of 128 tokens, with fewer multiply-adds
Values `MatrixValues`    all query heads of a group at once, on the matrix unit
       `VectorValues`    head by head, on the vector unit
       `DiagonalValues`  multiplies every head's weights with every head's values on the matrix
                         unit, and keeps the products of a head with itself
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from kvjax.foundation.rounding import round_up
from kvjax.kernels.decode_attention.tpu.interfaces import (
    LANES,
    ByHead,
    Cached,
    Input,
    Keys,
    Refs,
    Rows,
    Values,
    columns,
)
from kvjax.layers import rope

_NT = (((1,), (1,)), ((), ()))  # a · bᵀ: contracts the last axis of both, tokens on lanes


def _dot(a: jax.Array, b: jax.Array, dimensions=(((1,), (0,)), ((), ()))) -> jax.Array:
    """Returns a · b accumulated in float32; float32 operands are multiplied in full precision."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a.astype(b.dtype),
        b,
        dimensions,
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _cast(tile: jax.Array, dtype) -> jax.Array:
    """Returns a cache's channels [..., rows, tokens] in `dtype`; a byte of int4 has two of them.

    They are unpacked a word of four bytes at a time.
    """
    if tile.dtype != jnp.uint8:
        return tile.astype(dtype)
    words, halves = pltpu.bitcast(tile, jnp.int32), []
    for half in (words, words >> 4):
        # The lower four bits less 8, in each byte, without a carry into the next.
        signed = ((half & 0x0F0F0F0F) + 0x78787878) ^ -0x7F7F7F80
        halves.append(pltpu.bitcast(signed, jnp.int8))
    return jnp.concatenate(halves, axis=-2).astype(dtype)


def _scaled(weights_rl: jax.Array, refs: Refs, name: str, k, at: pl.Slice) -> jax.Array:
    """Multiplies weights [rows, 128] with the scales of quantised values.

    Args:
      name: of the values' ref.
      k: a KV head, or a slice of as many as there are rows.
    """
    if f"{name}.scale" not in refs:
        return weights_rl
    scales = refs[f"{name}.scale"]  # [1, K, 1, tile_kv]
    return weights_rl * (scales[0, k, :, at] if isinstance(k, int) else scales[0, k, 0, at])


# -- keys ------------------------------------------------------------------------------------------


class MatrixKeys(Keys):
    """Queries [B, K, r, H] and keys [B, K, H, S]: r query heads share each KV head."""

    by_head = False

    def __init__(self, query_BKrH: jax.Array, keys: Cached):
        self.K, self.group = query_BKrH.shape[1:3]
        self.dtype = keys.dtype
        query = Input(query_BKrH.astype(self.dtype), "sequence")
        super().__init__(dict(query=query) | keys.inputs("keys"))

    def score(self, refs: Refs, tokens: pl.Slice, scores: Rows) -> None:
        for k in range(self.K):
            keys_Hs = _cast(refs["keys"][0, k, :, tokens], self.dtype)  # of [1, K, H, tile_kv]
            z_rs = _dot(refs["query"][0, k], keys_Hs)  # query: [1, K, r, H]
            for c in range(tokens.size // LANES):
                scores[c, k * self.group, self.group] = z_rs[:, c * LANES : (c + 1) * LANES]


class VectorKeys(Keys):
    """Queries [B, N, H] and keys [B, K, H, S]."""

    def __init__(self, query_BNH: jax.Array, keys: Cached):
        self.N, self.H = query_BNH.shape[1:]
        self.K = keys.array.shape[1]
        query = Input(jnp.moveaxis(query_BNH, 1, 2).astype(jnp.float32), "sequence")
        super().__init__(
            dict(query=query) | keys.inputs("keys"),
            dict(wide=pltpu.VMEM((self.N, self.H, LANES), jnp.float32)),
        )

    def start(self, refs: Refs) -> None:
        # Repeats every channel of the query over 128 lanes, once per split: tokens are on lanes.
        for n in range(self.N):
            column_H1 = refs["query"][0, :, n : n + 1]
            refs["wide"][n] = jnp.broadcast_to(column_H1, (self.H, LANES))

    def score(self, refs: Refs, tokens: pl.Slice, scores: Rows) -> ByHead:
        def head(n: int) -> None:
            query_Hl = refs["wide"][n]  # [H, 128]
            for c, (_, at) in enumerate(columns(tokens)):
                keys_Hl = _cast(refs["keys"][0, n * self.K // self.N, :, at], jnp.float32)
                scores[c, n] = jnp.sum(query_Hl * keys_Hl, axis=0, keepdims=True)

        return head


class RotatingKeys(Keys):
    """Rotated queries [B, N, H], factors [K', R, H] and latents [B, K, R, S] of unrotated keys.

    K' is a multiple of K: KV heads may share latents.

    With channel pairs as complex numbers and a = conj(q) · expand, slot t has the score latent
    · Re(sum_j a_j e^{i t theta_j}): the query is rotated by minus the position, in rank space,
    instead of rebuilding and rotating the key.

        per tile   rotated [2, N, H]            rotated by minus the first slot's position
                   rank_queries [N·R, H]        W = [Re a | -Im a], vector unit
        per score  W · table [H, score_tile]    a query in rank space for every slot, matrix unit
                   times latents [R, score_tile], summed over R: one multiply-add per element

    FLOPs per head and cached token: 2 R H on the matrix unit and 2 R on the vector unit, and 3 R H
    per tile; at d36 about 60 per byte of the cache, where plain JAX and the GPU kernel do 34.

    The constant table has the cosines and sines of slots 0 .. tile_kv - 1 of any tile. Unlike plain
    JAX this factors no low-rank basis out of it (`cache_layouts.rotating`); `BasisKeys` does.
    """

    def __init__(
        self, query_BNH, expand_KRH, latents: Cached, *, base: float, tile_kv: int, origins
    ):
        self.N, H = query_BNH.shape[1:]
        self.heads = len(expand_KRH)  # K'
        self.K, self.R, S = latents.array.shape[1], latents.rows, latents.array.shape[-1]
        dtype = latents.dtype
        q1, q2 = jnp.split(query_BNH.astype(jnp.float32), 2, axis=-1)

        def join(a, b):
            return jnp.concatenate([a, b], axis=-1)

        query_B2NH = jnp.stack([join(q1, -q1), join(q2, q2)], axis=1)
        # W = [q1 | -q1]·[b1 | b2] + [q2 | q2]·[b2 | b1] uses full rows of lanes. Half rows took 0.4
        # bundles per token more at tiles of 1,024 (static: experiments/LOG.md).
        swapped_KRH = jnp.roll(expand_KRH, H // 2, axis=-1)
        if origins is None:  # a whole cache: the tiles' first positions are constants
            origins = np.arange(-(-S // tile_kv)) * tile_kv
        cos, sin = _angles(origins, H, base)
        angles = jnp.stack([join(cos, cos), join(sin, -sin)], axis=1)
        inputs = {  # refs in the kernel
            "query": Input(query_B2NH, "sequence"),  # [1, 2, N, H]
            "expand": Input(expand_KRH.astype(dtype), "all"),  # [K', R, H]
            "swapped": Input(swapped_KRH.astype(dtype), "all"),  # [K', R, H]
            "angles": Input(angles, "tile"),  # [1, 2, H]
            **latents.inputs("keys"),  # [1, K, R, tile_kv]
        }
        scratch = {"rotated": pltpu.VMEM((2, self.N, H), jnp.float32)}
        super().__init__(inputs, scratch)
        self._prepare(H, base, tile_kv, dtype)

    def _prepare(self, H: int, base, tile_kv: int, dtype) -> None:
        """Adds constant inputs, and scratch `rank_queries`, in the dtype of products."""
        cos, sin = _angles(np.arange(tile_kv), H, base)
        table_Hs = jnp.concatenate([cos.T, sin.T]).astype(dtype)
        self.product_rows = self.N * self.R
        self.inputs["table"] = Input(table_Hs, "all")  # [H, tile_kv]
        self.scratch["rank_queries"] = pltpu.VMEM((self.product_rows, H), dtype)

    def _first_row(self, n: int) -> int:
        """Returns the first of head n's R rows in `rank_queries`."""
        return n * self.R

    def rotate(self, refs: Refs) -> None:
        cos, sin = refs["angles"][0, 0:1, :], refs["angles"][0, 1:2, :]
        first_NH, second_NH = refs["query"][0, 0], refs["query"][0, 1]
        refs["rotated"][0] = first_NH * cos + second_NH * sin
        refs["rotated"][1] = second_NH * cos - first_NH * sin
        for n in range(self.N):  # row by row: 3-d broadcasts over sublanes do not compile for v4
            k, rows = n * self.heads // self.N, pl.ds(self._first_row(n), self.R)
            expand_RH, swapped_RH = (refs[x][k].astype(jnp.float32) for x in ("expand", "swapped"))
            first, second = refs["rotated"][0, n : n + 1, :], refs["rotated"][1, n : n + 1, :]
            rank_query_RH = first * expand_RH + second * swapped_RH
            refs["rank_queries"][rows, :] = rank_query_RH.astype(refs["rank_queries"].dtype)

    def score(self, refs: Refs, tokens: pl.Slice, scores: Rows) -> ByHead:
        query_NRs = _dot(refs["rank_queries"][...], refs["table"][:, tokens])  # all heads at once

        def head(n: int) -> None:
            query_Rs = query_NRs[n * self.R : (n + 1) * self.R]
            latent_Rs = _cast(refs["keys"][0, n * self.K // self.N, :, tokens], jnp.float32)
            z_1s = jnp.sum(query_Rs * latent_Rs, axis=0, keepdims=True)
            for c in range(tokens.size // LANES):
                scores[c, n] = z_1s[:, c * LANES : (c + 1) * LANES]

        return head


class BasisKeys(RotatingKeys):
    """`RotatingKeys` whose table is factored, 128 tokens at a time, into a RoPE basis.

    The table of 128 consecutive slots is left [H, E] · right [E, 128], with E = 32 for H = 128 and
    base 10,000 in bfloat16. Only left depends on which slots of the tile they are, so that scores
    are right · (leftᵀ Wᵀ latents), summed over E:

        per tile        rank_queries [blocks · width, H]  W, vector unit
        per 128 tokens  leftᵀ · Wᵀ [E, width]             queries in the basis, matrix unit
                        · latents [E, 128]                matrix unit
                        times right [E, 128], summed over E: one multiply-add per element

    FLOPs per head and cached token, without zeros: 2 R E + 2 R H E / 128 on the matrix unit, half
    of `RotatingKeys` (three quarters with the zeros of two heads of R = 64); 2 E on the vector
    unit, half, which need not convert latents to float32.

    A block of W has one query of each of `packed` KV heads, as many as fill 128 lanes; the latents
    of one of them are multiplied with zeros in place of the others'.
    """

    def _prepare(self, H: int, base, tile_kv: int, dtype) -> None:
        self.group = self.N // self.K
        self.packed = min(max(1, LANES // self.R), self.K)
        self.width = self.packed * self.R
        self.bundles = -(-self.K // self.packed)  # of KV heads
        runs = tile_kv // LANES
        left_EH, right_El = _basis(H, base, runs, jnp.dtype(dtype))
        left_EH, right_El = jnp.asarray(left_EH, dtype), jnp.asarray(right_El, jnp.float32)
        self.E = right_El.shape[0]
        blocks = self.bundles * self.group
        self.product_rows = (self.N + blocks) * self.E
        self.inputs["left"] = Input(left_EH, "all")  # [runs·E, H]
        self.inputs["right"] = Input(right_El, "all")  # [E, 128]
        in_basis = (self.bundles, runs, self.group * self.E, self.width)
        self.scratch["rank_queries"] = pltpu.VMEM((blocks * self.width, H), dtype)
        self.scratch["basis_queries"] = pltpu.VMEM(in_basis, dtype)

    def _block(self, bundle: int, query: int) -> int:
        """Returns the first row of a block in `rank_queries`."""
        return (bundle * self.group + query) * self.width

    def _first_row(self, n: int) -> int:
        k, query = divmod(n, self.group)
        bundle, place = divmod(k, self.packed)
        return self._block(bundle, query) + place * self.R

    def start(self, refs: Refs) -> None:
        if self.bundles * self.packed > self.K:  # places without a KV head: NaN times 0 is NaN
            refs["rank_queries"][...] = jnp.zeros_like(refs["rank_queries"])

    def score(self, refs: Refs, tokens: pl.Slice, scores: Rows) -> ByHead:
        # Every query in the basis before the first product with latents, and every product before
        # the first head's vector work: else the scheduler has each wait for the one before (5.4
        # bundles per token instead of 2.8 on v5e: experiments/LOG.md).
        E, count = self.E, tokens.size // LANES
        left_rows = pl.ds(tokens.start // LANES * E, count * E)
        for bundle in range(self.bundles):
            for query in range(self.group):
                rows = pl.ds(self._block(bundle, query), self.width)
                query_EW = _dot(refs["left"][left_rows, :], refs["rank_queries"][rows, :], _NT)
                query_EW = query_EW.astype(refs["basis_queries"].dtype)
                at = slice(query * E, (query + 1) * E)
                for c, (run, _) in enumerate(columns(tokens)):
                    refs["basis_queries"][bundle, run, at, :] = query_EW[c * E : (c + 1) * E]
        products = {}  # [r·E, 128] by KV head and run of 128 tokens
        for k in range(self.K):
            bundle, place = divmod(k, self.packed)
            for c, (run, at) in enumerate(columns(tokens)):
                latents_Rl = _cast(refs["keys"][0, k, :, at], refs["basis_queries"].dtype)
                latents_Wl = self._among_zeros(latents_Rl, place)
                products[k, c] = _dot(refs["basis_queries"][bundle, run], latents_Wl)

        def head(n: int) -> None:
            k, query = divmod(n, self.group)
            for c in range(count):
                product_El = products[k, c][query * E : (query + 1) * E]
                scores[c, n] = jnp.sum(product_El * refs["right"][...], axis=0, keepdims=True)

        return head

    def _among_zeros(self, latent_Rl: jax.Array, place: int) -> jax.Array:
        """Returns a KV head's latents at its place in a bundle, and zeros: [width, 128]."""
        rows = [jnp.zeros_like(latent_Rl)] * self.packed
        rows[place] = latent_Rl
        return jnp.concatenate(rows, axis=0)


@functools.cache  # a model's layers share it
def _basis(H: int, base, count: int, dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Factors the tables of `count` consecutive runs of 128 slots, from slot 0 on.

    In bfloat16 a base of 10,000 has rank 32: the largest error of the table is then 1.5e-2, where
    rounding it costs 2e-3, and that of outputs 6.2 thousandths of the largest instead of 3.6. Rank
    48 has 4.0, but takes more bundles than `RotatingKeys` (v5e: 3.2 and 3.0; experiments/LOG.md).

    Args:
      dtype: of the queries in the basis; it sets the rank.

    Returns left [count · E, H], of which each run has E rows, and right [E, 128], which all share.
    """
    # The least squared error of rank 32 is four times as large in a run's first and last slot as on
    # average; with their weights doubled it is twice as large.
    slots = np.arange(LANES)
    weights = 1 + np.abs(2 * slots / (LANES - 1) - 1) ** 16
    frequencies = rope.frequencies(H, base)
    angle = np.outer(frequencies, slots)
    table = np.concatenate([np.cos(angle), np.sin(angle)]) * weights
    left_HE, values, right_El = np.linalg.svd(table, full_matrices=False)
    E = round_up(int(np.sum(values > jnp.finfo(dtype).eps / 2 * values[0])), 16)
    left_HE, right_El = left_HE[:, :E] * np.sqrt(values[:E]), right_El[:E] / weights
    right_El *= np.sqrt(values[:E, None])
    cos, sin = np.split(left_HE, 2)
    angle = np.outer(np.arange(count) * LANES, frequencies)[:, :, None]
    # A run's table is that of slots 0 .. 127, rotated by the run's first slot.
    rotated = cos * np.cos(angle) - sin * np.sin(angle), sin * np.cos(angle) + cos * np.sin(angle)
    left_EH = np.swapaxes(np.concatenate(rotated, axis=1), 1, 2).reshape(-1, H)
    return left_EH, right_El


def _angles(at: np.ndarray | jax.Array, dim: int, base: float) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines [positions, H/2] in float32."""
    return tuple(a[0].astype(jnp.float32) for a in rope.rotary(at[None], dim=dim, base=base))


# -- values ----------------------------------------------------------------------------------------


class MatrixValues(Values):
    """Values [B, K, Hv, S] shared by `group` query heads each.

    Args:
      transposed: True to transpose values on the XLU before the product, False to have the matrix
        unit contract over lanes.
      are_keys: True if the component's keys are its values, so that one tile is read.
    """

    def __init__(self, values: Cached, *, group: int, transposed: bool, are_keys: bool = False):
        self.K, V = values.array.shape[1], values.rows
        self.group, self.transposed, self.dtype = group, transposed, values.dtype
        self.name = "keys" if are_keys else "values"
        self.copied = transposed
        super().__init__(
            {} if are_keys else values.inputs("values"),
            out_dims=(self.K, group, V),
            scratch=dict(accumulator=pltpu.VMEM((self.K, group, V), jnp.float32)),
        )

    def start(self, refs: Refs) -> None:
        refs["accumulator"][...] = jnp.zeros_like(refs["accumulator"])

    def accumulate(self, refs: Refs, tokens: pl.Slice, weights: Rows) -> None:
        for k in range(self.K):
            values_Vs = _cast(refs[self.name][0, k, :, tokens], self.dtype)  # [1, K, Hv, tile_kv]
            rows = [
                _scaled(weights[c, k * self.group, self.group], refs, self.name, k, at)
                for c, at in columns(tokens)
            ]
            weights_rs = jnp.concatenate(rows, axis=1)
            if self.transposed:
                # A bitcast to the same dtype: the compiler does not merge a transpose before it
                # with the product.
                values_sV = pltpu.bitcast(values_Vs.T, values_Vs.dtype)
                refs["accumulator"][k] += _dot(weights_rs, values_sV)
            else:
                refs["accumulator"][k] += _dot(weights_rs, values_Vs, _NT)

    def rescale(self, refs: Refs, decay: jax.Array) -> None:
        for k in range(self.K):
            refs["accumulator"][k] *= decay[k * self.group : (k + 1) * self.group, :1]

    def finish(self, refs: Refs, inverse: jax.Array) -> None:
        for k in range(self.K):
            inverse_r1 = inverse[k * self.group : (k + 1) * self.group, :1]
            refs["out"][0, 0, k] = refs["accumulator"][k] * inverse_r1  # out: [1, 1, K, r, Hv]


class VectorValues(Values):
    """Values [B, K, V, S], accumulated head by head; only `finish` sums over lanes."""

    by_head = True

    def __init__(self, values: Cached, *, N: int):
        self.N, self.K, self.V = N, values.array.shape[1], values.rows
        super().__init__(values.inputs("values"), out_dims=(N, self.V), buffer_rows=N * self.V)

    def accumulate(self, refs: Refs, tokens: pl.Slice, weights: Rows) -> ByHead:
        def head(n: int) -> None:
            added = 0  # summed in registers, added to VMEM once per `score_tile`
            k = n * self.K // self.N
            for c, at in columns(tokens):
                values_Vl = _cast(refs["values"][0, k, :, at], jnp.float32)
                weights_1l = _scaled(weights[c, n], refs, "values", k, at)
                added += jnp.broadcast_to(weights_1l, values_Vl.shape) * values_Vl
            refs["sums"][0, n * self.V, self.V] += added

        return head

    def rescale(self, refs: Refs, decay: jax.Array) -> None:
        for n in range(self.N):
            decay_Vl = jnp.broadcast_to(decay[n : n + 1, :], (self.V, LANES))
            refs["sums"][0, n * self.V, self.V] *= decay_Vl

    def finish(self, refs: Refs, inverse: jax.Array) -> None:
        for n in range(self.N):
            sums_lV = refs["sums"][0, n * self.V, self.V].T
            refs["out"][0, 0, n : n + 1, :] = jnp.sum(sums_lV, axis=0, keepdims=True)
        refs["out"][0, 0] *= inverse[: self.N, :1]


class DiagonalValues(Values):
    """Values [B, N, V, S] of few channels, one KV head per query head.

    Multiplies the weights of all heads with the values of all heads, and keeps the diagonal in
    `finish`: N times the multiply-adds, on the matrix unit instead of the vector unit.
    """

    def __init__(self, values: Cached):
        self.N, self.V = values.array.shape[1], values.rows
        self.dtype = values.dtype
        super().__init__(
            values.inputs("values"),
            out_dims=(self.N, self.V),
            scratch=dict(accumulator=pltpu.VMEM((self.N, self.N * self.V), jnp.float32)),
        )

    def start(self, refs: Refs) -> None:
        refs["accumulator"][...] = jnp.zeros_like(refs["accumulator"])

    def accumulate(self, refs: Refs, tokens: pl.Slice, weights: Rows) -> None:
        values_NVs = _cast(refs["values"][0, :, :, tokens], self.dtype)
        heads = slice(0, self.N)
        rows = [
            _scaled(weights[c, 0, self.N], refs, "values", heads, at) for c, at in columns(tokens)
        ]
        refs["accumulator"][...] += _dot(
            jnp.concatenate(rows, axis=1), values_NVs.reshape(self.N * self.V, -1), _NT
        )

    def rescale(self, refs: Refs, decay: jax.Array) -> None:
        refs["accumulator"][...] *= decay[: self.N, :1]

    def finish(self, refs: Refs, inverse: jax.Array) -> None:
        for n in range(self.N):
            diagonal = refs["accumulator"][n : n + 1, n * self.V : (n + 1) * self.V]
            refs["out"][0, 0, n : n + 1, :] = diagonal * inverse[n : n + 1, :1]
