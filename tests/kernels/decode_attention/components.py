"""Components of a TPU kernel in plain JAX: logits from the inputs, softmax, values."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode_attention.tpu import operators


def attend(components, first_B, *, heads, capacity, scale, key_scale, **options):
    """Returns outputs [B, N, width] and log-sum-exps [B, N], as `pipeline.attend`.

    `options` are tile sizes and orders, which do not change the result.
    """
    z_BNS = scale * sum(_logits(c.keys, heads) for c in components)
    if key_scale is not None:
        z_BNS = z_BNS * _per_head(key_scale, heads)[:, :, 0]
    seen_B1S = jnp.arange(capacity)[None, None] <= first_B[:, None, None]
    z_BNS = jnp.where(seen_B1S, z_BNS, -jnp.inf)
    p_BNS = jax.nn.softmax(z_BNS, axis=-1)
    outputs = [
        jnp.einsum("BNS,BNVS->BNV", p_BNS, _per_head(_values(c), heads))
        for c in components
        if c.values is not None
    ]
    return outputs, jax.nn.logsumexp(z_BNS, axis=-1)


def _logits(keys, N: int):
    x = {name: _channels(operand.array) for name, operand in keys.inputs.items()}
    keys_BNHS = _per_head(x["keys"] * x.get("keys.scale", 1), N)
    match keys:
        case operators.MatrixKeys():
            query_BNH = x["query"].reshape(len(x["query"]), N, -1)
            return jnp.einsum("BNH,BNHS->BNS", query_BNH, keys_BNHS)
        case operators.VectorKeys():
            return jnp.einsum("BHN,BNHS->BNS", x["query"], keys_BNHS)
    # Rotated: the query is rotated to each tile's first slot, then by the table to each slot.
    (q, r), (cos, sin) = jnp.moveaxis(x["query"], 1, 0), jnp.moveaxis(x["angles"], 1, 0)
    q, r, cos, sin = q[:, None], r[:, None], cos[None, :, None], sin[None, :, None]
    rotated = q * cos + r * sin, r * cos - q * sin  # [B, tiles, N, H]
    kv_head = np.arange(N) * len(x["expand"]) // N
    absorbed = sum(
        jnp.einsum("BtNH,NRH->BNRtH", rotated_part, x[name][kv_head])
        for rotated_part, name in zip(rotated, ("expand", "swapped"), strict=True)
    )
    query_BNRS = (absorbed @ _table(x)).reshape(keys_BNHS.shape)
    return jnp.sum(query_BNRS * keys_BNHS, axis=2)


def _channels(array) -> jax.Array:
    """Returns an array in float32; of bytes with two channels each, both."""
    if array.dtype != jnp.uint8:
        return array.astype(jnp.float32)
    return jnp.concatenate([array & 15, array >> 4], axis=-2).astype(jnp.float32) - 8


def _table(x) -> jax.Array:
    """Returns the cosines and sines of a tile's slots: [H, tile_kv]."""
    if "table" in x:
        return x["table"]
    (E, _), H = x["right"].shape, x["left"].shape[1]
    return jnp.concatenate([left.T @ x["right"] for left in x["left"].reshape(-1, E, H)], axis=1)


def _values(component):
    name = "values" if "values" in component.values.inputs else "keys"
    inputs = component.keys.inputs | component.values.inputs
    values = _channels(inputs[name].array)
    scale = inputs.get(f"{name}.scale")
    return values if scale is None else values * scale.array


def _per_head(x_BKHS, N: int):
    """Repeats KV heads for their query heads: [B, N, H, S]."""
    return jnp.take(x_BKHS, np.arange(N) * x_BKHS.shape[1] // N, axis=1)
