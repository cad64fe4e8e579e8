"""What parts of a TPU kernel come to, as plain JAX: logits from their inputs, softmax, values."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode_attention.tpu import operators


def attended(parts, first_B, *, heads, capacity, scale, key_scale, **options):
    """As `pipeline.attend`: outputs [B, N, width] of parts that have values, log-sum-exps [B, N].

    Of options, sizes and ways of going through a cache, the result does not depend on any.
    """
    z_BNS = scale * sum(_logits(part.keys, heads) for part in parts)
    if key_scale is not None:
        z_BNS = z_BNS * _of_heads(key_scale, heads)[:, :, 0]
    seen_B1S = jnp.arange(capacity)[None, None] <= first_B[:, None, None]
    z_BNS = jnp.where(seen_B1S, z_BNS, -jnp.inf)
    p_BNS = jax.nn.softmax(z_BNS, axis=-1)
    outputs = [
        jnp.einsum("BNS,BNVS->BNV", p_BNS, _of_heads(_values(part), heads))
        for part in parts
        if part.values is not None
    ]
    return outputs, jax.nn.logsumexp(z_BNS, axis=-1)


def _logits(keys, N: int):
    x = {name: given.array.astype(jnp.float32) for name, given in keys.inputs.items()}
    keys_BNHS = _of_heads(x["keys"], N)
    match keys:
        case operators.MatrixKeys():
            query_BNH = x["query"].reshape(len(x["query"]), N, -1)
            return jnp.einsum("BNH,BNHS->BNS", query_BNH, keys_BNHS)
        case operators.VectorKeys():
            return jnp.einsum("BHN,BNHS->BNS", x["query"], keys_BNHS)
    # RotatingKeys: the query is rotated to each tile's first slot, then by the table to each slot.
    (q, r), (cos, sin) = jnp.moveaxis(x["query"], 1, 0), jnp.moveaxis(x["angles"], 1, 0)
    at = lambda q, a: q[:, None] * a[None, :, None]  # [B, blocks, N, H]
    turned = at(q, cos) + at(r, sin), at(r, cos) - at(q, sin)
    of_head = np.arange(N) * len(x["expand"]) // N
    folded = sum(
        jnp.einsum("BbNH,NRH->BNRbH", t, x[name][of_head])
        for t, name in zip(turned, ("expand", "swapped"), strict=True)
    )
    query_BNRS = (folded @ x["table"]).reshape(keys_BNHS.shape)
    return jnp.sum(query_BNRS * keys_BNHS, axis=2)


def _values(part):
    return part.values.inputs.get("values", part.keys.inputs["keys"]).array.astype(jnp.float32)


def _of_heads(x_BKHS, N: int):
    """[B, N, H, S]: of every query head its KV head's."""
    return jnp.take(x_BKHS, np.arange(N) * x_BKHS.shape[1] // N, axis=1)
