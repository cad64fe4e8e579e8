"""Rotary position embedding (RoPE, arXiv 2104.09864), accurate at any position below 2**20.

Channel i is paired with i + H/2, as in NeoX and LLaMA, and keys rotate by +t·theta. (nanochat
rotates by -t·theta: the same model with sine and cosine channels renamed.)
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MAX_POSITION = 1 << 20
_STRIDE = 1 << 10  # t = 1024·a + b; the angles of 1024·a and of b come from one float64 table each


# Keys of caches, so no NamedTuples: those of two classes with equal fields compare equal.
@dataclasses.dataclass(frozen=True)
class Llama3:
    """RoPE frequencies of Llama 3.1, for contexts longer than the first training context.

    Pairs with fewer than `low` turns in `original` tokens are slowed by `factor`; pairs with more
    than `high` turns are unchanged; in between, the two frequencies are interpolated linearly.
    """

    base: float
    factor: float
    low: float
    high: float
    original: int  # tokens of the first training context


@dataclasses.dataclass(frozen=True)
class Yarn:
    """RoPE frequencies of YaRN (arXiv 2309.00071), as transformers computes them.

    As with `Llama3`, low frequencies are slowed by `factor` and high ones are unchanged. In
    between, the weight of the slowed frequency grows linearly with the pair's index.
    """

    base: float
    factor: float
    low: float  # turns, beta_slow
    high: float  # turns, beta_fast
    original: int  # tokens of the first training context

    def unchanged(self, dim: int) -> np.ndarray:
        """Returns the share of the unscaled frequency in every pair of `dim` channels, [H/2]."""
        first, last = (self._pair(dim, turns) for turns in (self.high, self.low))
        first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        last += 0.001 if first == last else 0
        return 1 - np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)

    def _pair(self, dim: int, turns: float) -> float:
        """Returns the fractional index of the pair with `turns` turns in `original` tokens."""
        return dim * math.log(self.original / (2 * math.pi * turns)) / (2 * math.log(self.base))


@dataclasses.dataclass(frozen=True)
class Linear:
    """RoPE with all pairs slowed by `factor`: positions are divided by it."""

    base: float
    factor: float


@dataclasses.dataclass(frozen=True)
class Partial:
    """RoPE on a head's first pairs only, like GPT-NeoX's rotary_pct."""

    base: "float | Llama3 | Yarn | Linear"
    fraction: float  # of all pairs, in (0, 1]

    def num_rotated_pairs(self, dim: int) -> int:
        """Returns the number of rotated pairs of `dim` channels, at least 1."""
        return min(max(1, round(self.fraction * dim / 2)), dim // 2)


# Specifies the frequencies of all pairs; see `frequencies`.
Base = float | Llama3 | Yarn | Linear | Partial


class Rotary(NamedTuple):
    """cos(t·theta) and sin(t·theta), [B or 1, T, H/2] each."""

    cos: jax.Array
    sin: jax.Array


class Positions(NamedTuple):
    """Positions of a row's tokens, with RoPE's angles if the model has RoPE."""

    index: jax.Array | np.ndarray  # [B or 1, T] int32
    rotary: Rotary | None


def positions(index_BT: jax.Array | np.ndarray, dim: int, base: Base | None) -> Positions:
    """Returns positions with the angles of `dim` rotated channels; base None means no RoPE."""
    return Positions(index_BT, None if base is None else rotary(index_BT, dim, base))


def frequencies(dim: int, base: Base) -> np.ndarray:
    """Returns theta, [H/2] float64: radians per token of every pair.

    Args:
      base: if a number, pair i rotates by base^(-2i/H) per token. Otherwise see `Llama3`, `Yarn`,
        `Linear` and `Partial`.
    """
    if isinstance(base, Partial):
        rotated = base.num_rotated_pairs(dim)
        unrotated = np.zeros(dim // 2 - rotated)
        return np.concatenate([frequencies(2 * rotated, base.base), unrotated])
    exponents = -np.arange(0, dim, 2, dtype=np.float64) / dim
    if not isinstance(base, (Llama3, Yarn, Linear)):
        return base**exponents
    theta = base.base**exponents
    if isinstance(base, Linear):
        return theta / base.factor
    if isinstance(base, Yarn):
        unchanged = base.unchanged(dim)
    else:
        turns = base.original * theta / (2 * np.pi)
        unchanged = np.clip((turns - base.low) / (base.high - base.low), 0, 1)
    return theta * (unchanged + (1 - unchanged) / base.factor)


@functools.cache
def _tables(dim: int, base: Base) -> tuple[np.ndarray, np.ndarray]:
    """Returns exp(i·t·theta), [1024, H/2] each, for t = 0, 1, ... and for t = 0, 1024, 2048, ..."""
    theta = frequencies(dim, base)
    steps = np.arange(_STRIDE, dtype=np.float64)
    return np.exp(1j * np.outer(steps, theta)), np.exp(1j * np.outer(steps * _STRIDE, theta))


def rotary(positions_BT: jax.Array | np.ndarray, dim: int, base: Base) -> Rotary:
    """Returns cos and sin of t·theta, from tables computed in float64.

    In float32 the product t·theta is off by 0.06 radians at a million tokens. Combining two table
    entries by the addition theorem keeps the error at rounding.

    Args:
      positions_BT: int32 positions in [0, 2**20). A NumPy array becomes a constant of the program.
      dim: number of rotated channels H, even.
      base: see `frequencies`.
    """
    fine, coarse = _tables(dim, base)
    if isinstance(positions_BT, np.ndarray):
        angle = fine[positions_BT % _STRIDE] * coarse[positions_BT // _STRIDE]
        return Rotary(jnp.asarray(angle.real), jnp.asarray(angle.imag))
    low, high = positions_BT % _STRIDE, positions_BT // _STRIDE
    cos_low, sin_low = jnp.asarray(fine.real)[low], jnp.asarray(fine.imag)[low]
    cos_high, sin_high = jnp.asarray(coarse.real)[high], jnp.asarray(coarse.imag)[high]
    return Rotary(cos_low * cos_high - sin_low * sin_high, sin_low * cos_high + cos_low * sin_high)


@functools.cache
def basis(dim: int, base: Base, length: int, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Factors the table [cos t·theta; sin t·theta], t < length, as [H, E] times [E, length].

    Pairs of low frequency rotate little within `length` tokens, so the table has low numerical
    rank E. For H = 128 and base 10,000, E is 57 for 512 tokens and 76 for 2,048, at tolerance 1e-8.

    Args:
      tolerance: singular values below this times the largest are dropped.
    """
    angle = np.outer(frequencies(dim, base), np.arange(length, dtype=np.float64))
    table = np.concatenate([np.cos(angle), np.sin(angle)])
    left, values, right = np.linalg.svd(table, full_matrices=False)
    rank = int(np.sum(values > tolerance * values[0]))
    root = np.sqrt(values[:rank])
    return left[:, :rank] * root, root[:, None] * right[:rank]


def rotate(x_BTNH: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotates every pair (i, i + H/2) of every head by t·theta, in float32 or wider."""
    wide = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    cos_BT1F, sin_BT1F = (a[:, :, None, :].astype(wide) for a in rotary)
    x1_BTNF, x2_BTNF = jnp.split(x_BTNH.astype(wide), 2, axis=-1)
    cos, sin = (jnp.broadcast_to(a, x1_BTNF.shape) for a in (cos_BT1F, sin_BT1F))
    rotated = (x1_BTNF * cos - x2_BTNF * sin, x2_BTNF * cos + x1_BTNF * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)
