"""The definition of decode attention: expand the whole cache to keys and values, then softmax.

Every implementation is held against this one, in float64. It is also what "expanding first" costs:
its temporary memory grows with the expanded cache. Products are in the highest precision that the
device has for their dtype.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.operands import Grouped
from kvjax.kernels.decode_attention.operands import Latent
from kvjax.kernels.decode_attention.operands import Operands
from kvjax.kernels.decode_attention.operands import RebuiltLatent
from kvjax.kernels.decode_attention.operands import Residual
from kvjax.kernels.decode_attention.operands import Tied
from kvjax.layers import rope
from kvjax.layers import sinusoid
from kvjax.layers.norm import inverse_rms

Cache = Mapping[str, jax.Array]


def decode_attention(operands: Operands, cache: Cache, first_B: jax.Array) -> jax.Array:
    """softmax(scale·q k^T + bias) v, [B, T, N, Hv], in float32 or wider.

    Args:
      cache: arrays [B, *shape, S], see `operands`.
      first_B: [B] position of the first query; query t sees slots 0 .. first_B + t.
    """
    with jax.default_matmul_precision("highest"):
        return _attend(operands, cache, first_B)


def _attend(operands: Operands, cache: Cache, first_B: jax.Array) -> jax.Array:
    q_BTNH, k_BSNH, v_BSNV = (_wide(x) for x in expand(operands, cache))
    T, S = q_BTNH.shape[1], k_BSNH.shape[1]
    z_BNTS = operands.scale * jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH)
    bias = getattr(operands, "bias", None)
    if bias is not None:
        weights_C = _wide(bias.weights)
        bias_S = sinusoid.encoding(jnp.arange(S), weights_C.shape[0]).astype(z_BNTS.dtype)
        z_BNTS = z_BNTS + (bias_S @ weights_C)[None, None, None]
    last_BT = first_B[:, None] + jnp.arange(T)[None]
    seen_BTS = jnp.arange(S)[None, None] <= last_BT[..., None]
    p_BNTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], z_BNTS, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSNV->BTNV", p_BNTS, v_BSNV)


def expand(operands: Operands, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, H], keys [B, S, N, H] and values [B, S, N, Hv], one head per query head."""
    c = {name: jnp.moveaxis(_wide(array), -1, 1) for name, array in cache.items()}  # tokens second
    o, query = operands, operands.query
    N = query.shape[2]
    if isinstance(o, Grouped):
        k, v = c["base_key"], c["base_value"]
    elif isinstance(o, Latent):
        query = jnp.concatenate([_wide(query), _wide(o.rope_query)], axis=-1)
        k = jnp.concatenate([c["latent"], c["rope_key"]], axis=-1)[:, :, None]
        v = jnp.einsum("BSC,CNV->BSNV", c["latent"], _wide(o.up_value))
    elif isinstance(o, RebuiltLatent):
        k = jnp.einsum("BSC,CNH->BSNH", c["latent"], _wide(o.up_key))
        k = _normed_and_rotated(k, o)
        v = jnp.einsum("BSC,CNV->BSNV", c["latent"], _wide(o.up_value))
    elif isinstance(o, Tied):
        v = c["base_key"]
        if o.expand_key is not None:
            residual = jnp.einsum("BSKR,KRH->BSKH", c["residual_key"], _wide(o.expand_key))
            v = _heads(v, residual.shape[2]) + residual
        k = _normed_and_rotated(v, o)
    elif isinstance(o, Residual):
        residual = jnp.einsum("BSKR,KRH->BSKH", c["residual_key"], _wide(o.expand_key))
        if o.rope_base is not None:
            residual = _rotated(residual, o.rope_base)
        K = residual.shape[2]
        # The base meets one query and the residual another: side by side, so that they may differ.
        query = jnp.concatenate([_wide(query), _wide(o.residual_query)], axis=-1)
        k = jnp.concatenate([_heads(c["base_key"], K), residual], axis=-1)
        if "key_scale" in c:
            k = k * c["key_scale"]
        v = _heads(c["base_value"], K)
        v = v + jnp.einsum("BSKR,KRV->BSKV", c["residual_value"], _wide(o.expand_value))
    else:
        raise TypeError(f"{type(o).__name__} is not one of {Operands}")
    return query, _heads(k, N), _heads(v, N)


def _heads(x_BSKH: jax.Array, N: int) -> jax.Array:
    return jnp.repeat(x_BSKH, N // x_BSKH.shape[2], axis=2)


def _normed_and_rotated(x_BSNH: jax.Array, operands: Tied | RebuiltLatent) -> jax.Array:
    if operands.norm_epsilon is not None:
        x_BSNH = x_BSNH * inverse_rms(x_BSNH, operands.norm_epsilon)
    if operands.gain is not None:
        x_BSNH = x_BSNH * _wide(operands.gain)[None, None, None]
    return x_BSNH if operands.rope_base is None else _rotated(x_BSNH, operands.rope_base)


def _rotated(x_BSNH: jax.Array, base: float) -> jax.Array:
    S, H = x_BSNH.shape[1], x_BSNH.shape[-1]
    return rope.rotate(x_BSNH, rope.rotary(jnp.arange(S)[None], H, base))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
