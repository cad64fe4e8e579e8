"""ALiBi (arXiv 2108.12409) as channels of queries and keys: any attention kernel adds it.

A logit falls by slope times distance. The query's position is the same for all keys and leaves
softmax unchanged; what remains is slope times the key's position, a product. A key's channels are
the digits of its position, a query's its head's slope times what each digit stands for. bfloat16
holds neither a position nor a slope: digits have 8 bits, and a slope is two numbers, a coarse one
and what it leaves.
"""

import jax
import jax.numpy as jnp
import numpy as np

_PLACES = np.array([65_536, 256, 1])  # of a position's digits
CHANNELS = 2 * len(_PLACES)


def slopes(num_heads: int) -> np.ndarray:
    """[N] float64, as the authors' code has them: 2^(-8 i/N) for powers of two.

    For other N those of the power below, and every second one of the power above.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    of = lambda n: 2.0 ** (-8 / n * np.arange(1, n + 1))
    return np.concatenate([of(whole), of(2 * whole)[::2][: num_heads - whole]])


def append_position_digits(k_BTKH: jax.Array, positions_BT: jax.Array | np.ndarray) -> jax.Array:
    """Keys with the digits of their positions, below 2**24, as last channels."""
    s_BT1 = jnp.asarray(positions_BT)[..., None]
    digits_BTC = jnp.tile(s_BT1 // _PLACES[None, None] % 256, 2)
    return _append(k_BTKH, digits_BTC[:, :, None])


def append_slopes(q_BTNH: jax.Array, scale: float) -> jax.Array:
    """Queries with what meets those digits; logits are multiplied by `scale`."""
    slope_N1 = slopes(q_BTNH.shape[2])[:, None] / scale
    coarse_N1 = slope_N1.astype(jnp.bfloat16).astype(np.float64)
    weights_NC = np.hstack([coarse_N1 * _PLACES, (slope_N1 - coarse_N1) * _PLACES])
    return _append(q_BTNH, jnp.asarray(weights_NC)[None, None])


def _append(x_BTNH: jax.Array, more: jax.Array) -> jax.Array:
    """Further channels, the same for all of the axes in which `more` has one element."""
    more_BTNC = jnp.broadcast_to(more.astype(x_BTNH.dtype), (*x_BTNH.shape[:3], CHANNELS))
    return jnp.concatenate([x_BTNH, more_BTNC], axis=-1)
