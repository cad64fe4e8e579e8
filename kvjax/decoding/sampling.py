"""Samples the next token from logits: greedy, temperature, top-k, top-p. Pure functions.

Options are traced, so that other values do not recompile; `lax.cond` skips disabled ones.
"""

import argparse
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError


class Parameters(NamedTuple):
    """Sampling options as scalar arrays, of NumPy until they are put on devices."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options; raises a UserError for values out of range.

    Attributes:
      temperature: divides the logits; 0 is greedy and ignores the other options.
      top_k: keeps the k most likely tokens; 0 keeps all.
      top_p: of these, keeps the smallest set with probability >= p; 1 keeps all.
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
        return Parameters(np.float32(self.temperature), np.int32(top_k), np.float32(self.top_p))


def add_options(parser: argparse.ArgumentParser, *, temperature: float, top_k: int) -> None:
    """Adds --temperature, --top_k, --top_p and --seed, with these defaults."""
    add = parser.add_argument
    add("--temperature", type=float, default=temperature, help=f"0: greedy ({temperature})")
    text = f"sample among the k most likely; 0: all ({top_k})"
    add("--top_k", type=int, default=top_k, help=text)
    text = "and among the fewest tokens with this total probability (1)"
    add("--top_p", type=float, default=1.0, help=text)
    add("--seed", type=int, default=0, help="the same seed gives the same text (0)")


def from_options(options: argparse.Namespace) -> Sampling:
    """Returns the sampling of a command's options."""
    keys = ("temperature", "top_k", "top_p")
    return Sampling(**{key: getattr(options, key) for key in keys})


def keys(key: jax.Array, streams_B: jax.Array, positions_B: jax.Array) -> jax.Array:
    """Returns a key per sequence [B], a function of its stream and position alone.

    Args:
      streams_B: uint32, one per sequence.
      positions_B: positions of the tokens to sample.
    """

    def fold(stream, position):
        return jax.random.fold_in(jax.random.fold_in(key, stream), position)

    return jax.vmap(fold)(streams_B, positions_B)


def sample(logits_BV: jax.Array, keys_B: jax.Array, parameters: Parameters) -> jax.Array:
    """Samples a token per sequence, [B] int32; greedy ties go to the lowest id.

    The token is -1 if the largest logit is NaN or infinite.
    """
    temperature, top_k, top_p = parameters
    wide = logits_BV.dtype

    def draw() -> jax.Array:
        # The maximum becomes 0 first, so that a tiny temperature cannot make it overflow.
        z_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / temperature.astype(wide)
        z_BV = jax.lax.cond(
            (top_k > 0) | (top_p < 1),
            lambda: jnp.where(candidates(z_BV, top_k, top_p), z_BV, -jnp.inf),
            lambda: z_BV,
        )
        # Gumbel-max: the argmax of logits plus Gumbel noise is a sample of their softmax.
        noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, z_BV.shape[1:], wide))(keys_B)
        return jnp.argmax(z_BV + noise_BV, axis=-1)

    token_B = jax.lax.cond(temperature > 0, draw, lambda: jnp.argmax(logits_BV, axis=-1))
    is_finite_B = jnp.isfinite(jnp.max(logits_BV, axis=-1))
    return jnp.where(is_finite_B, token_B, -1).astype(jnp.int32)


def candidates(logits_BV: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns [B, V] bool, true for tokens that top-k and then top-p keep.

    Ties go to lower ids. The most likely token is always kept.

    Args:
      logits_BV: after division by the temperature.
    """
    rank_V = jnp.arange(logits_BV.shape[1])
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    in_top_k_BV = jnp.broadcast_to((rank_V < top_k) | (top_k == 0), sorted_BV.shape)
    p_BV = jax.nn.softmax(jnp.where(in_top_k_BV, sorted_BV, -jnp.inf), axis=-1)
    p_above_BV = jnp.cumsum(p_BV, axis=-1) - p_BV  # total probability of more likely tokens
    # Despite rounding, top_p = 1 keeps every token, and a tiny top_p the first.
    in_top_p_BV = (p_above_BV < top_p.astype(p_BV.dtype)) | (top_p >= 1)
    in_top_p_BV = in_top_p_BV | jnp.broadcast_to(rank_V == 0, in_top_p_BV.shape)
    count_B1 = jnp.sum(in_top_k_BV & in_top_p_BV, axis=-1, keepdims=True)
    # Maps the kept prefix back to ids without a second sort: keeps all logits above the last of the
    # prefix, then logits equal to it, lowest ids first, until `count` are kept.
    last_B1 = jnp.take_along_axis(sorted_BV, count_B1 - 1, axis=-1)
    above_BV, equal_BV = logits_BV > last_B1, logits_BV == last_B1
    room_B1 = count_B1 - jnp.sum(above_BV, axis=-1, keepdims=True)
    return above_BV | (equal_BV & (jnp.cumsum(equal_BV, axis=-1) <= room_B1))
