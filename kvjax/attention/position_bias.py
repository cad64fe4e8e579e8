"""What places of tokens add to logits, as last channels of queries and keys.

Any attention kernel adds it; decoding takes the channels off again and gives a bias instead, so
that the cache keeps none of them.

ALiBi's are in `kvjax.layers.alibi`. The others are the "+" of projection sharing (arXiv
2606.04032): a map w/m on A_ts + P_ts, with P_ts the encodings of row t and column s in m/2 channels
each. A row's part is the same for all keys and leaves softmax unchanged. What remains is
mean(w)·A_ts, a temperature, plus w's second half times the encoding of s: a bias per key.
"""

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts.layout import Bias
from kvjax.layers import alibi, sinusoid
from kvjax.layers.rope import Positions


def channels(config) -> int:
    """How many there are, of a `GroupedConfig`."""
    return alibi.CHANNELS if config.alibi else config.position_channels // 2


def keys_with_channels(config, k_BTKH: jax.Array, positions: Positions) -> jax.Array:
    """Keys and their channels."""
    if config.alibi:
        return alibi.append_position_digits(k_BTKH, positions.index)
    if not config.position_channels:
        return k_BTKH
    e_ATC = sinusoid.encoding(jnp.asarray(positions.index), channels(config))
    shape = (*k_BTKH.shape[:3], e_ATC.shape[-1])
    e_BTKC = jnp.broadcast_to(e_ATC[:, :, None].astype(k_BTKH.dtype), shape)
    return jnp.concatenate([k_BTKH, e_BTKC], axis=-1)


def queries_with_channels(config, q_BTNH: jax.Array, map_C: jax.Array | None) -> jax.Array:
    """Queries and their channels.

    Args:
      map_C: w of the "+", where there is one.
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
    """Queries without their channels, and the bias that stands for these; None for none."""
    if config.alibi:
        wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
        bias = cache_layouts.SlopeBias(slopes=jnp.asarray(alibi.slopes(config.num_heads), wide))
    elif map_C is not None:
        bias = cache_layouts.PositionBias(weights=_column_weights(map_C))
    else:
        return q_BTNH, None
    return q_BTNH[..., : -channels(config)], bias


def _column_weights(map_C: jax.Array) -> jax.Array:
    """[C/2]: what the second half of the map gives a key's encoding."""
    m = map_C.shape[0]
    return map_C[m // 2 :] / m
