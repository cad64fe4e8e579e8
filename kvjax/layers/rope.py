"""Rotary positions, accurate at any position below 2**20.

Pairs are (i, i + H/2), as in NeoX and LLaMA; keys rotate by +t·theta. (nanochat rotates by
-t·theta: the same model with sine and cosine channels renamed.)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MAX_POSITION = 1 << 20
_STRIDE = 1 << 10  # positions split into t = 1024·a + b, each half from a float64 table


class Llama3(NamedTuple):
    """RoPE for longer contexts, as in Llama 3.1: slow pairs turn slower, fast ones as before.

    It stands wherever a base does.
    """

    base: float
    factor: float  # by which pairs slow down that turn less than `low` times in `original` tokens
    low: float
    high: float  # pairs that turn more often than this are as before; between both, a mixture
    original: int  # tokens of the context that the model was first trained on


class Partial(NamedTuple):
    """RoPE of a part of the channels: its pairs turn as if they were all, the others stay.

    Which pairs those are means nothing to a model that is trained so: the first ones.
    """

    base: "float | Llama3"
    fraction: float  # of the channels, above 0 and up to 1

    def pairs(self, dim: int) -> int:
        """That turn, of dim / 2: at least one, where there is one."""
        return min(max(1, round(self.fraction * dim / 2)), dim // 2)


Base = float | Llama3 | Partial  # what gives pairs their frequencies


class Rotary(NamedTuple):
    """cos and sin of t·theta: [B or 1, T, H/2] each."""

    cos: jax.Array
    sin: jax.Array


class Positions(NamedTuple):
    """Where tokens stand: their indices, and the angles of those in a model with RoPE."""

    index: jax.Array | np.ndarray  # [B or 1, T] int32
    rotary: Rotary | None


def positions(index_BT: jax.Array | np.ndarray, dim: int, base: Base | None) -> Positions:
    """Positions with angles for `dim` rotated channels; base None means no RoPE."""
    return Positions(index_BT, None if base is None else rotary(index_BT, dim, base))


def frequencies(dim: int, base: Base) -> np.ndarray:
    """[H/2] float64: the radians that each pair turns per token.

    Args:
      base: pair i turns by base^(-2i/H), or what `Llama3` or `Partial` makes of that.
    """
    if isinstance(base, Partial):
        turned = base.pairs(dim)
        still = np.zeros(dim // 2 - turned)
        return np.concatenate([frequencies(2 * turned, base.base), still])
    exponents = -np.arange(0, dim, 2, dtype=np.float64) / dim
    if not isinstance(base, Llama3):
        return base**exponents
    theta = base.base**exponents
    turns = base.original * theta / (2 * np.pi)
    as_before = np.clip((turns - base.low) / (base.high - base.low), 0, 1)
    return theta * (as_before + (1 - as_before) / base.factor)


@functools.cache
def _tables(dim: int, base: Base) -> tuple[np.ndarray, np.ndarray]:
    """e^{i·t·theta} for t = b and t = 1024·a: complex128 [1024, H/2] each."""
    theta = frequencies(dim, base)
    steps = np.arange(_STRIDE, dtype=np.float64)
    return np.exp(1j * np.outer(steps, theta)), np.exp(1j * np.outer(steps * _STRIDE, theta))


def rotary(positions_BT: jax.Array | np.ndarray, dim: int, base: Base) -> Rotary:
    """Angles for the given positions, from tables made in float64.

    A float32 product t·theta is off by 0.06 radians at a million tokens; adding the angles of two
    table entries keeps the error at rounding.

    Args:
      positions_BT: int32 positions in [0, 2**20), concrete or traced.
      dim: the number of rotated channels H, even.
      base: see `frequencies`.
    """
    fine, coarse = _tables(dim, base)
    if isinstance(positions_BT, np.ndarray):  # known when compiling: constants
        angle = fine[positions_BT % _STRIDE] * coarse[positions_BT // _STRIDE]
        return Rotary(jnp.asarray(angle.real), jnp.asarray(angle.imag))
    low, high = positions_BT % _STRIDE, positions_BT // _STRIDE
    cos_low, sin_low = jnp.asarray(fine.real)[low], jnp.asarray(fine.imag)[low]
    cos_high, sin_high = jnp.asarray(coarse.real)[high], jnp.asarray(coarse.imag)[high]
    return Rotary(cos_low * cos_high - sin_low * sin_high, sin_low * cos_high + cos_low * sin_high)


@functools.cache
def basis(dim: int, base: Base, length: int, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Factors [H, P] and [P, length] of the table of cos t·theta over sin t·theta, t < length.

    Low frequencies hardly turn within `length` tokens, so the table's rank P is far below H to any
    precision: H = 128, base 10,000: 57 for 512 tokens and 76 for 2,048, to 1e-8 (float64 SVD).

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
    """Rotates every pair (i, i + H/2) of every head by its position's angle."""
    wide = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    cos_BT1F, sin_BT1F = (a[:, :, None, :].astype(wide) for a in rotary)
    x1_BTNF, x2_BTNF = jnp.split(x_BTNH.astype(wide), 2, axis=-1)
    cos, sin = (jnp.broadcast_to(a, x1_BTNF.shape) for a in (cos_BT1F, sin_BT1F))
    rotated = (x1_BTNF * cos - x2_BTNF * sin, x2_BTNF * cos + x1_BTNF * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)
