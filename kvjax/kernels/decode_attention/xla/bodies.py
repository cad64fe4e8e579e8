"""The ways of reading a tile of a cache, one class per kind of operands.

`logits` and `weigh` touch the tile, `finish` does not. All is in float32 or wider; heads come
before tokens, [B, N, T, ...], and tokens of the tile last, [B, K, H, s]: consecutive ones, from
position `start` on.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode_attention import operands as operands_lib
from kvjax.layers import rope

Tile = Mapping[str, jax.Array]
BLOCK = 512  # tokens of a tile

# -- heads -----------------------------------------------------------------------------------------
# N query heads of T tokens are K groups of N/K heads and T tokens: rows that share a key.


def _rows(x_BNTH: jax.Array, K: int) -> jax.Array:
    """[B, N, T, H] to [B, K, N/K·T, H]."""
    B, N, T, H = x_BNTH.shape
    return x_BNTH.reshape(B, K, N // K * T, H)


def _dot(q_BNTH: jax.Array, k_BKHs: jax.Array) -> jax.Array:
    """Logits [B, N, T, s]; keys are not repeated per query head."""
    B, N, T, _ = q_BNTH.shape
    z_BKrs = jnp.einsum("BKrH,BKHs->BKrs", _rows(q_BNTH, k_BKHs.shape[1]), k_BKHs)
    return z_BKrs.reshape(B, N, T, -1)


def _weigh(p_BNTs: jax.Array, v_BKVs: jax.Array) -> jax.Array:
    """Weighted sums [B, N, T, V]."""
    B, N, T, _ = p_BNTs.shape
    o_BKrV = jnp.einsum("BKrs,BKVs->BKrV", _rows(p_BNTs, v_BKVs.shape[1]), v_BKVs)
    return o_BKrV.reshape(B, N, T, -1)


def _by_kv_head(x_BNTR: jax.Array, w_KRH: jax.Array, equation: str) -> jax.Array:
    """A product of every head's rows with its KV head's matrix, [B, N, T, ...]."""
    B, N, T, _ = x_BNTR.shape
    return jnp.einsum(equation, _rows(x_BNTR, w_KRH.shape[0]), w_KRH).reshape(B, N, T, -1)


def _spread(base_BJHs: jax.Array, K: int) -> jax.Array:
    """[B, J, H, s] to [B, K, H, s]: each base once per KV head that reads it."""
    B, J, H, s = base_BJHs.shape
    return jnp.broadcast_to(base_BJHs[:, :, None], (B, J, K // J, H, s)).reshape(B, K, H, s)


# -- keys of a tile --------------------------------------------------------------------------------


def _rotate(x_BKHs: jax.Array, start: jax.Array, base: float) -> jax.Array:
    """Keys of the tile that starts at position `start`, rotated to their positions."""
    H, s = x_BKHs.shape[2:]
    angles = rope.rotary(start + jnp.arange(s, dtype=jnp.int32)[None], H, base)
    x1, x2 = jnp.split(x_BKHs, 2, axis=2)
    cos, sin = (jnp.broadcast_to(a[0].T.astype(x1.dtype), x1.shape) for a in angles)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=2)


def _rotated_dot(q_BKH: jax.Array, k_BKHs: jax.Array, start: jax.Array, base: float) -> jax.Array:
    """Logits [B, K, s] of one query per key head with the rotated keys, which are never made.

    In pairs q·Rot(k) = (q1·k1 + q2·k2) cos + (q2·k1 - q1·k2) sin: one pass over the tile.
    """
    H, s = k_BKHs.shape[2:]
    angles = rope.rotary(start + jnp.arange(s, dtype=jnp.int32)[None], H, base)
    k1, k2 = jnp.split(k_BKHs, 2, axis=2)
    cos, sin = (jnp.broadcast_to(a[0].T.astype(k1.dtype), k1.shape) for a in angles)
    q1, q2 = (jnp.broadcast_to(q[..., None], k1.shape) for q in jnp.split(q_BKH, 2, axis=-1))
    return jnp.sum((q1 * k1 + q2 * k2) * cos + (q2 * k1 - q1 * k2) * sin, axis=2)


def _inverse_rms(x_BKHs: jax.Array, epsilon: float) -> jax.Array:
    """[B, K, s] over the channels."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x_BKHs), axis=2) + epsilon)


def _norm_and_rotate(x_BKHs: jax.Array, start: jax.Array, o) -> jax.Array:
    if o.norm_epsilon is not None:
        scale_BKs = _inverse_rms(x_BKHs, o.norm_epsilon)
        x_BKHs = x_BKHs * jnp.broadcast_to(scale_BKs[:, :, None], x_BKHs.shape)
    if o.gain is not None:
        x_BKHs = x_BKHs * o.gain[None, None, :, None]
    return x_BKHs if o.rope_base is None else _rotate(x_BKHs, start, o.rope_base)


# -- the ways of reading a tile --------------------------------------------------------------------


class _Grouped:
    expands = False  # whether `logits` makes something as large as a tile

    def __init__(self, o: operands_lib.Grouped):
        self.q_BNTH = jnp.moveaxis(o.query, 2, 1)

    def widths(self, cache: Tile) -> tuple[int, ...]:
        return (cache["base_value"].shape[2],)

    def logits(self, tile: Tile, start: jax.Array) -> jax.Array:
        del start
        return _dot(self.q_BNTH, tile["base_key"])

    def weigh(self, p_BNTs: jax.Array, tile: Tile) -> tuple[jax.Array, ...]:
        return (_weigh(p_BNTs, tile["base_value"]),)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        return outputs[0]


class _Residual:
    def __init__(self, o: operands_lib.Residual):
        self.o = o
        self.q_BNTH = jnp.moveaxis(o.query, 2, 1)
        residual_q_BNTH = jnp.moveaxis(o.residual_query, 2, 1)
        N, T = self.q_BNTH.shape[1:3]
        K = o.expand_key.shape[0]
        self.expands = o.rope_base is not None
        self.folded = None
        if o.rope_base is None:
            self.folded = "rank"  # LRKV eq. 3
            self.u_BNTR = _by_kv_head(residual_q_BNTH, o.expand_key, "BKrH,KRH->BKrR")
        elif N * T == K:
            self.folded = "rotating"
            self.fold = _fold(residual_q_BNTH[:, :, 0], o.expand_key)

    def widths(self, cache: Tile) -> tuple[int, ...]:
        return cache["base_value"].shape[2], cache["residual_value"].shape[2]

    def logits(self, tile: Tile, start: jax.Array) -> jax.Array:
        latent_BKRs = tile["residual_key"]
        if self.folded is None:  # several queries share a rebuilt key
            k_BKHs = jnp.einsum("BKRs,KRH->BKHs", latent_BKRs, self.o.expand_key)
            k_BKHs = _rotate(k_BKHs, start, self.o.rope_base)
            z_BNTs = _dot(self.q_BNTH, _spread(tile["base_key"], k_BKHs.shape[1]) + k_BKHs)
        else:
            z_BNTs = _dot(self.q_BNTH, tile["base_key"])
            if self.folded == "rank":
                z_BNTs = z_BNTs + _dot(self.u_BNTR, latent_BKRs)
            else:
                w_BKRs = _rotating_query(self.fold, start, latent_BKRs.shape[-1], self.o.rope_base)
                z_BNTs = z_BNTs + jnp.sum(w_BKRs * latent_BKRs, axis=2)[:, :, None]
        if "key_scale" not in tile:
            return z_BNTs
        B, N, T, s = z_BNTs.shape
        scale_BK1s = tile["key_scale"]
        z_BKrs = _rows(z_BNTs, scale_BK1s.shape[1])
        return (z_BKrs * scale_BK1s).reshape(B, N, T, s)

    def weigh(self, p_BNTs: jax.Array, tile: Tile) -> tuple[jax.Array, ...]:
        return _weigh(p_BNTs, tile["base_value"]), _weigh(p_BNTs, tile["residual_value"])

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        base_BNTV, latent_BNTR = outputs
        return base_BNTV + _by_kv_head(latent_BNTR, self.o.expand_value, "BKrR,KRV->BKrV")


def _fold(q_BKH: jax.Array, expand_KRH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """conj(q)·B with channel pairs as complex numbers, as real and imaginary [B, K, R, H/2].

    q is rotated already, so that a key's logit is Re(sum_j conj(q_j) B_j e^{i t theta_j}) times its
    latent.
    """
    q1_BK1F, q2_BK1F = jnp.split(q_BKH[:, :, None], 2, axis=-1)
    b1_1KRF, b2_1KRF = jnp.split(expand_KRH[None], 2, axis=-1)
    shape = (*q_BKH.shape[:2], expand_KRH.shape[1], q1_BK1F.shape[-1])
    q1, q2, b1, b2 = (jnp.broadcast_to(x, shape) for x in (q1_BK1F, q2_BK1F, b1_1KRF, b2_1KRF))
    return q1 * b1 + q2 * b2, q1 * b2 - q2 * b1


def _rotating_query(
    fold: tuple[jax.Array, jax.Array], start: jax.Array, length: int, base: float
) -> jax.Array:
    """[B, K, R, s]: the query in rank space, as every position of a tile sees it.

    w(t) = sum_j Re G_j cos t·theta_j - Im G_j sin t·theta_j. The table of cosines and sines of a
    tile has a low rank (57 of 128 for 512 tokens): `rope.basis`.
    """
    real, imaginary = fold
    F = real.shape[-1]
    angles = rope.rotary(start[None, None], 2 * F, base)  # turns G to the tile's start
    cos, sin = (jnp.broadcast_to(a[0][None, None].astype(real.dtype), real.shape) for a in angles)
    turned = (real * cos - imaginary * sin, -(imaginary * cos + real * sin))
    left_HP, right_Ps = rope.basis(2 * F, base, length, _tolerance(real.dtype))
    g_BKRP = jnp.einsum(
        "BKRH,HP->BKRP", jnp.concatenate(turned, axis=-1), jnp.asarray(left_HP, real.dtype)
    )
    return jnp.einsum("BKRP,Ps->BKRs", g_BKRP, jnp.asarray(right_Ps, real.dtype))


def rotating_flops(rank: int, key_dim: int, base: float) -> float:
    """FLOPs of `_rotating_query` and its product with the latents, per head and key."""
    P = rope.basis(key_dim, base, BLOCK, _tolerance(np.float32))[0].shape[1]
    per_tile = rank * key_dim * (3 + 2 * P)  # turning G, and its product with the basis
    return per_tile / BLOCK + 2 * rank * P + 2 * rank


def _tolerance(dtype) -> float:
    return float(jnp.finfo(dtype).eps) / 8


class _Tied:
    expands = True

    def __init__(self, o: operands_lib.Tied):
        self.o = o
        self.q_BNTH = jnp.moveaxis(o.query, 2, 1)

    def widths(self, cache: Tile) -> tuple[int, ...]:
        residual = (cache["residual_key"].shape[2],) if self.o.expand_key is not None else ()
        return (cache["base_key"].shape[2], *residual)

    def logits(self, tile: Tile, start: jax.Array) -> jax.Array:
        k_BKHs = tile["base_key"]
        if self.o.expand_key is not None:
            residual = jnp.einsum("BKRs,KRH->BKHs", tile["residual_key"], self.o.expand_key)
            k_BKHs = _spread(k_BKHs, residual.shape[1]) + residual
        N, T = self.q_BNTH.shape[1:3]
        if self.o.rope_base is None or self.o.gain is not None or N * T > k_BKHs.shape[1]:
            return _dot(self.q_BNTH, _norm_and_rotate(k_BKHs, start, self.o))
        z_BKs = _rotated_dot(self.q_BNTH[:, :, 0], k_BKHs, start, self.o.rope_base)
        if self.o.norm_epsilon is not None:
            z_BKs = z_BKs * _inverse_rms(k_BKHs, self.o.norm_epsilon)
        return z_BKs[:, :, None]

    def weigh(self, p_BNTs: jax.Array, tile: Tile) -> tuple[jax.Array, ...]:
        base = _weigh(p_BNTs, tile["base_key"])
        if self.o.expand_key is None:
            return (base,)
        return base, _weigh(p_BNTs, tile["residual_key"])

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        if self.o.expand_key is None:
            return outputs[0]
        base_BNTH, latent_BNTR = outputs
        return base_BNTH + _by_kv_head(latent_BNTR, self.o.expand_key, "BKrR,KRH->BKrH")


class _Latent:
    expands = False

    def __init__(self, o: operands_lib.Latent):
        self.o = o
        self.q_BNTC, self.q_BNTP = (jnp.moveaxis(q, 2, 1) for q in (o.query, o.rope_query))

    def widths(self, cache: Tile) -> tuple[int, ...]:
        return (cache["latent"].shape[1],)

    def logits(self, tile: Tile, start: jax.Array) -> jax.Array:
        del start
        content = _dot(self.q_BNTC, tile["latent"][:, None])
        return content + _dot(self.q_BNTP, tile["rope_key"][:, None])

    def weigh(self, p_BNTs: jax.Array, tile: Tile) -> tuple[jax.Array, ...]:
        return (_weigh(p_BNTs, tile["latent"][:, None]),)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.einsum("BNTC,CNV->BNTV", outputs[0], self.o.up_value)


class _RebuiltLatent(_Latent):
    expands = True

    def __init__(self, o: operands_lib.RebuiltLatent):
        self.o = o
        self.q_BNTH = jnp.moveaxis(o.query, 2, 1)

    def logits(self, tile: Tile, start: jax.Array) -> jax.Array:
        k_BNHs = jnp.einsum("BCs,CNH->BNHs", tile["latent"], self.o.up_key)
        return _dot(self.q_BNTH, _norm_and_rotate(k_BNHs, start, self.o))


BODIES = {
    operands_lib.Grouped: _Grouped,
    operands_lib.Residual: _Residual,
    operands_lib.Tied: _Tied,
    operands_lib.Latent: _Latent,
    operands_lib.RebuiltLatent: _RebuiltLatent,
}
