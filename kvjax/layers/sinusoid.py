"""Fixed sinusoidal position encodings (Vaswani et al., arXiv 1706.03762, section 3.5)."""

import jax
import jax.numpy as jnp

from kvjax.layers import rope

BASE = 10_000.0


def encoding(positions_S: jax.Array, channels: int) -> jax.Array:
    """Returns encodings [S, C]: sin(s / 10000^(2i/C)) in channel 2i, its cosine in 2i + 1."""
    cos, sin = rope.rotary(positions_S, channels, BASE)
    pairs = jnp.stack([sin, cos], axis=-1)
    return pairs.reshape(*positions_S.shape, -1)[..., :channels]
