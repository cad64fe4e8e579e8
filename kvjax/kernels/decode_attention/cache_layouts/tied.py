"""Values that are keys before norm and RoPE: Q-K=V, Q=K=V, and LRKV with tied values."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.cache_layouts import tiles
from kvjax.kernels.decode_attention.cache_layouts.layout import (
    Bias,
    Cache,
    DecodeFlops,
    DecodeInputs,
    Tiles,
    normed_and_rotated,
    pytree,
    repeat_heads,
    static,
)
from kvjax.layers.rope import Base


@pytree
class TiedInputs(DecodeInputs):
    """value = base_key + residual_key expand_key, key = Rot(norm(value)·gain).

    cache: base_key [B, J, H, S]; residual_key [B, K, R, S] if there is `expand_key`.
    """

    query: jax.Array  # [B, T, N, H]
    expand_key: jax.Array | None = None  # [K, R, H]
    gain: jax.Array | None = None  # [H]
    bias: Bias | None = None
    scale: float = static()
    rope_base: Base | None = static()
    norm_epsilon: float | None = static()  # of RMSNorm; None: keys are not normed

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        v = cache["base_key"]
        if self.expand_key is not None:
            residual = jnp.einsum("BSKR,KRH->BSKH", cache["residual_key"], self.expand_key)
            v = repeat_heads(v, residual.shape[2]) + residual
        return self.query, normed_and_rotated(v, self), v

    def tiles(self) -> "_Tiles":
        return _Tiles(self)


def _fuses_rotation(queries: int, keys: int, *, rotates: bool, gain: bool) -> bool:
    """Returns True if one product rotates keys and scores them, so that no such keys are stored."""
    return rotates and not gain and queries <= keys


class _Tiles(Tiles):
    large_logits = True

    def __init__(self, inputs: TiedInputs):
        self.inputs = inputs
        self.q_BNTH = jnp.moveaxis(inputs.query, 2, 1)

    def widths(self, cache: Cache) -> tuple[int, ...]:
        residual = (cache["residual_key"].shape[2],) if self.inputs.expand_key is not None else ()
        return (cache["base_key"].shape[2], *residual)

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        inputs, k_BKHs = self.inputs, tile["base_key"]
        if inputs.expand_key is not None:
            residual = jnp.einsum("BKRs,KRH->BKHs", tile["residual_key"], inputs.expand_key)
            k_BKHs = tiles.spread(k_BKHs, residual.shape[1]) + residual
        N, T = self.q_BNTH.shape[1:3]
        rotates, gain = inputs.rope_base is not None, inputs.gain is not None
        if not _fuses_rotation(N * T, k_BKHs.shape[1], rotates=rotates, gain=gain):
            return tiles.dot(self.q_BNTH, tiles.norm_and_rotate(k_BKHs, start, inputs))
        z_BKs = tiles.rotated_dot(self.q_BNTH[:, :, 0], k_BKHs, start, inputs.rope_base)
        if inputs.norm_epsilon is not None:
            z_BKs = z_BKs * tiles.inverse_rms(k_BKHs, inputs.norm_epsilon)
        return z_BKs[:, :, None]

    def weighted_sums(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        base = tiles.weighted_sum(p_BNTs, tile["base_key"])
        if self.inputs.expand_key is None:
            return (base,)
        return base, tiles.weighted_sum(p_BNTs, tile["residual_key"])

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        if self.inputs.expand_key is None:
            return outputs[0]
        base_BNTH, latent_BNTR = outputs
        return base_BNTH + tiles.by_kv_head(latent_BNTR, self.inputs.expand_key, "BKrR,KRH->BKrH")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiedSizes:
    """N query heads, K KV heads with residuals of rank R on J bases; R = 0: the bases are keys."""

    N: int
    K: int
    J: int
    R: int
    H: int
    rope_base: Base | None
    normed: bool
    gain: bool

    def flops(self) -> DecodeFlops:
        N, R, H = self.N, self.R, self.H
        keys, rotates = self.K if R else self.J, self.rope_base is not None
        per_key = 4 * N * H + (3 * keys * H if rotates else 0)
        if self.normed:
            fused = _fuses_rotation(N, keys, rotates=rotates, gain=self.gain)
            per_key += (2 if fused else 3) * keys * H
        if not R:
            return DecodeFlops(0, per_key)
        return DecodeFlops(2 * N * R * H, per_key + keys * H * (2 * R + 1) + 2 * N * R)
