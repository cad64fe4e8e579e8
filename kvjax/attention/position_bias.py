"""Position biases on logits: ALiBi, and the "+" of projection sharing.

In training a bias is a dot product of extra channels of queries and keys, so that any attention
kernel adds it. Decoding passes a `Bias` to decode attention instead, so that the cache stores no
extra channels.

ALiBi's channels are in `kvjax.layers.alibi`. The "+" of projection sharing (arXiv 2606.04032)
replaces logits A_ts by w·(A_ts + P_ts)/m, summed over m channels, where P_ts holds the sinusoidal
encodings e of row t and column s in m/2 channels each:

    logit = mean(w)·A_ts + sum_i w_i e_i(t)/m + sum_i w_(m/2+i) e_i(s)/m

The first term is a temperature; the second is the same for all keys, so softmax cancels it; the
third is a bias per key.
"""

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts.layout import Bias
from kvjax.layers import alibi, sinusoid
from kvjax.layers.rope import Positions


def channels(config) -> int:
    """Returns the number of extra channels of a `GroupedConfig`."""
    return alibi.CHANNELS if config.alibi else config.position_channels // 2


def keys_with_channels(config, k_BTKH: jax.Array, positions: Positions) -> jax.Array:
    """Appends the bias channels to keys."""
    if config.alibi:
        return alibi.append_position_digits(k_BTKH, positions.index)
    if not config.position_channels:
        return k_BTKH
    e_BTC = sinusoid.encoding(jnp.asarray(positions.index), channels(config))
    shape = (*k_BTKH.shape[:3], e_BTC.shape[-1])
    e_BTKC = jnp.broadcast_to(e_BTC[:, :, None].astype(k_BTKH.dtype), shape)
    return jnp.concatenate([k_BTKH, e_BTKC], axis=-1)


def queries_with_channels(config, q_BTNH: jax.Array, map_C: jax.Array | None) -> jax.Array:
    """Appends the bias channels to queries, and applies the temperature of "+".

    Args:
      map_C: the learned vector w of "+"; None: no "+".
    """
    if config.alibi:
        return alibi.append_slopes(q_BTNH, config.scale)
    if map_C is None:
        return q_BTNH
    temperature = jnp.mean(map_C).astype(q_BTNH.dtype)
    bias_C = _column_weights(map_C) / config.scale
    bias_BTNC = jnp.broadcast_to(
        bias_C.astype(q_BTNH.dtype)[None, None, None], (*q_BTNH.shape[:3], bias_C.shape[0])
    )
    return jnp.concatenate([q_BTNH * temperature, bias_BTNC], axis=-1)


def split_queries(
    config, q_BTNH: jax.Array, map_C: jax.Array | None
) -> tuple[jax.Array, Bias | None]:
    """Removes the bias channels from queries, and returns the bias itself (None: no bias)."""
    if config.alibi:
        wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
        bias = cache_layouts.SlopeBias(slopes=jnp.asarray(alibi.slopes(config.num_heads), wide))
    elif map_C is not None:
        bias = cache_layouts.PositionBias(weights=_column_weights(map_C))
    else:
        return q_BTNH, None
    return q_BTNH[..., : -channels(config)], bias


def _column_weights(map_C: jax.Array) -> jax.Array:
    """Returns the factors of e_i(s) in the logits, [m/2]: w_(m/2+i)/m."""
    m = map_C.shape[0]
    return map_C[m // 2 :] / m
