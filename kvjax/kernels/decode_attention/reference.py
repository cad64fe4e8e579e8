"""The definition of decode attention: expand the whole cache to keys and values, then softmax.

Every implementation is tested against this one, in float64. It also measures the cost of expanding
first: temporaries are as large as the expanded cache. Products have the highest precision that the
device supports for their dtype.
"""

import jax
import jax.numpy as jnp

from kvjax.cache import quantized
from kvjax.kernels.decode_attention.cache_layouts import DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.layout import Cache, repeat_heads


def decode_attention(
    inputs: DecodeInputs,
    cache: Cache,
    first_B: jax.Array,
    *,
    window: int = 0,
    softcap: float = 0.0,
    causal: bool = True,
) -> jax.Array:
    """Returns softmax(scale·q k^T + bias) v, [B, T, N, Hv], in float32 or wider.

    Args:
      cache: arrays [B, *shape, S], see `cache_layouts`.
      first_B: [B] position of the first query; query t sees slots 0 .. first_B + t.
      window: if positive, query t sees only the last `window` of these slots.
      softcap: see `api.decode_attention`.
      causal: False: every query sees slots 0 .. first_B.
    """
    with jax.default_matmul_precision("highest"):
        return _attend(inputs, cache, first_B, window, softcap, causal)


def _attend(
    inputs: DecodeInputs,
    cache: Cache,
    first_B: jax.Array,
    window: int,
    softcap: float,
    causal: bool,
) -> jax.Array:
    q_BTNH, k_BSNH, v_BSNV = expand(inputs, cache)
    T, S = q_BTNH.shape[1], k_BSNH.shape[1]
    z_BNTS = inputs.scale * jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH)
    if softcap:
        z_BNTS = softcap * jnp.tanh(z_BNTS / softcap)
    if inputs.bias is not None:
        z_BNTS = z_BNTS + inputs.bias.at(jnp.arange(S), first_B, z_BNTS.dtype)
    last_BT = first_B[:, None] + jnp.arange(T)[None] * causal
    visible_BTS = jnp.arange(S)[None, None] <= last_BT[..., None]
    if window:
        visible_BTS &= jnp.arange(S)[None, None] > last_BT[..., None] - window
    p_BNTS = jax.nn.softmax(jnp.where(visible_BTS[:, None], z_BNTS, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSNV->BTNV", p_BNTS, v_BSNV)


def expand(inputs: DecodeInputs, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Expands to queries [B, T, N, H], keys [B, S, N, H] and values [B, S, N, Hv]."""
    inputs = jax.tree.map(_wide, inputs)
    entry = quantized.dequantize(cache, inputs.query.dtype)
    tokens_second = {name: jnp.moveaxis(array, -1, 1) for name, array in entry.items()}
    query, k, v = inputs.expand(tokens_second)
    N = query.shape[2]
    return query, repeat_heads(k, N), repeat_heads(v, N)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
