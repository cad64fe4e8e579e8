"""ALiBi (arXiv 2108.12409) as extra channels of queries and keys, for any attention kernel.

ALiBi subtracts slope_n·(t - s) from the logit of query position t and key position s. The term
slope_n·t is the same for all keys and leaves softmax unchanged; slope_n·s is a dot product:

    slope_n·s = sum_i (slope_n·256^i)·digit_i(s)        key channels: digits of s in base 256
                                                        query channels: slope_n·256^i

bfloat16 represents an 8-bit digit exactly, but neither s nor a slope. Each slope is therefore the
sum of two bfloat16 numbers (its rounding and the remainder), and every digit is stored twice.
"""

import jax
import jax.numpy as jnp
import numpy as np

_DIGIT_VALUES = np.array([65_536, 256, 1])  # base 256: positions below 2**24
CHANNELS = 2 * len(_DIGIT_VALUES)


def slopes(num_heads: int) -> np.ndarray:
    """Returns the slopes of the authors' code, [N] float64.

    If N is a power of two, head i = 1, ..., N has the slope 2^(-8 i/N). Otherwise the first heads
    have the slopes of the next lower power of two, and the others every second slope of the next
    higher one.
    """

    def geometric(n: int) -> np.ndarray:
        return 2.0 ** (-8 / n * np.arange(1, n + 1))

    power = 1 << (num_heads.bit_length() - 1)
    return np.concatenate([geometric(power), geometric(2 * power)[::2][: num_heads - power]])


def append_position_digits(k_BTKH: jax.Array, positions_BT: jax.Array | np.ndarray) -> jax.Array:
    """Appends the digits of each key's position (below 2**24) as channels."""
    s_BT1 = jnp.asarray(positions_BT)[..., None]
    digits_BTC = jnp.tile(s_BT1 // _DIGIT_VALUES[None, None] % 256, 2)
    return _append_channels(k_BTKH, digits_BTC[:, :, None])


def append_slopes(q_BTNH: jax.Array, scale: float) -> jax.Array:
    """Appends the slopes times digit values as channels.

    Args:
      scale: factor that attention applies to logits; divided out here.
    """
    slope_N1 = slopes(q_BTNH.shape[2])[:, None] / scale
    coarse_N1 = slope_N1.astype(jnp.bfloat16).astype(np.float64)
    weights_NC = np.hstack([coarse_N1 * _DIGIT_VALUES, (slope_N1 - coarse_N1) * _DIGIT_VALUES])
    return _append_channels(q_BTNH, jnp.asarray(weights_NC)[None, None])


def _append_channels(x_BTNH: jax.Array, channels: jax.Array) -> jax.Array:
    """Concatenates channels, broadcast over axes of length 1, in the dtype of x."""
    channels_BTNC = jnp.broadcast_to(channels.astype(x_BTNH.dtype), (*x_BTNH.shape[:3], CHANNELS))
    return jnp.concatenate([x_BTNH, channels_BTNC], axis=-1)
