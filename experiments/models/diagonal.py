"""Tied queries and keys, with the diagonal of K Kᵀ divided by its mean over the row.

    S = K Kᵀ        S'_tt = S_tt / mean_s S_ss        # projection sharing (arXiv 2606.04032) fig. 5

A token's score with itself is its squared norm, which usually exceeds its other scores; the paper
tried this remedy (section 2.5). Logits are S' times 1/sqrt(H), as usual. The mean over the row
includes later tokens, so this is for bidirectional models, which have no cache. It works with any
attention kernel: T more channels of the keys are one-hot at the key's position, and T more channels
of the queries have S'_tt - S_tt at the query's position. Since T channels are added, rows should be
short.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.grouped import Grouped, GroupedConfig
from kvjax.attention.mechanism import require
from kvjax.layers.rope import Positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagonalConfig(GroupedConfig):
    """Q=K-V or Q=K=V with a normalised diagonal."""

    def __post_init__(self):
        super().__post_init__()
        ties = "must be 'qk' or 'qkv' where the diagonal of K K' is normalised"
        require(self.ties_queries, "tie", repr(self.tie), ties)
        condition = "where the diagonal of K K' is normalised"
        channels = self.position_channels
        require(not channels, "position_channels", channels, f"must be 0 {condition}")
        require(not self.alibi, "alibi", self.alibi, f"must be False {condition}")

    @property
    def needs_whole_rows(self) -> bool:
        return True

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "Diagonal":
        return Diagonal(self, d_model, rngs=rngs)


class Diagonal(Grouped):
    """The grouped projections, with channels that change S_tt to S'_tt."""

    def queries(self, x_BTD: jax.Array, raw: dict, positions: Positions) -> jax.Array:
        q_BTNH = super().queries(x_BTD, raw, positions)
        diagonal_BTN = jnp.sum(q_BTNH * q_BTNH, axis=-1)
        mean_B1N = jnp.mean(diagonal_BTN, axis=1, keepdims=True)
        mean_B1N = jnp.where(mean_B1N > 0, mean_B1N, 1)  # rows of zeros
        change_BTN = diagonal_BTN / mean_B1N - diagonal_BTN
        return _with_places(q_BTNH, change_BTN, positions)

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        k_BTNH, v_BTNH = super().keys_values(raw, positions)
        ones_BTN = jnp.ones(k_BTNH.shape[:3], k_BTNH.dtype)
        return _with_places(k_BTNH, ones_BTN, positions), v_BTNH


def _with_places(x_BTNH: jax.Array, amount_BTN: jax.Array, positions: Positions) -> jax.Array:
    """Appends T channels: one-hot at the token's position, times `amount_BTN`."""
    T = x_BTNH.shape[1]
    places_BTT = jax.nn.one_hot(jnp.asarray(positions.index), T, dtype=x_BTNH.dtype)
    return jnp.concatenate([x_BTNH, amount_BTN[..., None] * places_BTT[:, :, None]], axis=-1)
