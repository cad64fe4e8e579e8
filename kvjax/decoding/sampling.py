"""The next token from logits: temperature, top-k, top-p, greedy. Pure functions of arrays.

Every parameter is traced, so another value compiles nothing; what a value switches off is not
computed.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError


class Parameters(NamedTuple):
    """Sampling parameters as arrays, scalars all."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; a UserError for values that cannot be.

    Attributes:
      temperature: logits are divided by it; 0 is greedy, and the others then change nothing.
      top_k: only the k most likely tokens; 0: all.
      top_p: of those, the fewest whose share of the probability reaches p; 1: all.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(
                f"temperature = {self.temperature}: must be a number, 0 (greedy) or above"
            )
        at_least("top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: must be above 0 and at most 1 (all tokens)")

    def parameters(self) -> Parameters:
        top_k = min(self.top_k, np.iinfo(np.int32).max)
        return Parameters(jnp.float32(self.temperature), jnp.int32(top_k), jnp.float32(self.top_p))


def keys(key: jax.Array, streams_B: jax.Array, positions_B: jax.Array) -> jax.Array:
    """One key per sequence and position, [B]: what is drawn does not depend on the batch.

    Args:
      streams_B: uint32, what tells sequences apart.
      positions_B: where the drawn tokens will stand.
    """
    fold = lambda stream, position: jax.random.fold_in(jax.random.fold_in(key, stream), position)
    return jax.vmap(fold)(streams_B, positions_B)


def sample(logits_BV: jax.Array, keys_B: jax.Array, parameters: Parameters) -> jax.Array:
    """A token per sequence, [B] int32; the first of equally likely ones where it is greedy."""
    temperature, top_k, top_p = parameters
    wide = logits_BV.dtype

    def draw() -> jax.Array:
        # The largest logit becomes 0 first: no temperature is too small to divide by.
        z_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / temperature.astype(wide)
        z_BV = jax.lax.cond(
            (top_k > 0) | (top_p < 1),
            lambda: jnp.where(candidates(z_BV, top_k, top_p), z_BV, -jnp.inf),
            lambda: z_BV,
        )
        noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, z_BV.shape[1:], wide))(keys_B)
        return jnp.argmax(z_BV + noise_BV, axis=-1)

    token_B = jax.lax.cond(temperature > 0, draw, lambda: jnp.argmax(logits_BV, axis=-1))
    return token_B.astype(jnp.int32)


def candidates(logits_BV: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """[B, V] bool: the tokens that top-k, and then top-p among those, leave.

    Among equally likely tokens the lower ids go first. The most likely token always stays.

    Args:
      logits_BV: after division by the temperature.
    """
    rank_V = jnp.arange(logits_BV.shape[1])
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    in_top_k_BV = jnp.broadcast_to((rank_V < top_k) | (top_k == 0), sorted_BV.shape)
    p_BV = jax.nn.softmax(jnp.where(in_top_k_BV, sorted_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV  # the share of all more likely tokens
    # Shares are rounded: p = 1 must not lose a token to that, nor a tiny p the first.
    in_top_p_BV = (before_BV < top_p.astype(p_BV.dtype)) | (top_p >= 1)
    in_top_p_BV = in_top_p_BV | jnp.broadcast_to(rank_V == 0, in_top_p_BV.shape)
    count_B1 = jnp.sum(in_top_k_BV & in_top_p_BV, axis=-1, keepdims=True)
    # Back to the order of ids without a second sort: what is above the last one kept, and of its
    # equals the first.
    last_B1 = jnp.take_along_axis(sorted_BV, count_B1 - 1, axis=-1)
    above_BV, equal_BV = logits_BV > last_B1, logits_BV == last_B1
    room_B1 = count_B1 - jnp.sum(above_BV, axis=-1, keepdims=True)
    return above_BV | (equal_BV & (jnp.cumsum(equal_BV, axis=-1) <= room_B1))
