"""The attention module: a mechanism, softmax attention from a library, an output projection."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.mechanism import MechanismConfig
from kvjax.layers.rope import Rotary
from kvjax.layers.weight import linear
from kvjax.layers.weight import weight


class Attention(nnx.Module):
    """Softmax attention [B, T, D] -> [B, T, D] with the keys and values of a mechanism."""

    def __init__(self, config: MechanismConfig, d_model: int, *, rngs: nnx.Rngs):
        sizes = dict(N=config.num_heads, H=config.value_dim, D=d_model)
        self.out = weight("N H -> D", rngs, init="zeros", **sizes)
        self.out_bias = weight("D", rngs, init="zeros", D=d_model) if config.bias else None
        self.mechanism = config.build(d_model, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, rotary: Rotary | None, *, causal: bool, query_chunk: int = 0
    ) -> jax.Array:
        q_BTNH, raw = self.mechanism.project(x_BTD, rotary)
        k_BTKH, v_BTKH = self.mechanism.keys_values(raw, rotary)
        o_BTNH = softmax_attention(q_BTNH, k_BTKH, v_BTKH, causal=causal, query_chunk=query_chunk)
        B, T, N, Hv = o_BTNH.shape
        y_BTD = linear(o_BTNH.reshape(B, T, N * Hv), self.out[...].reshape(N * Hv, -1))
        return y_BTD if self.out_bias is None else y_BTD + self.out_bias[...][None, None]


def softmax_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    *,
    causal: bool,
    query_chunk: int = 0,
) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v of the training pass: [B, T, N, Hv].

    Args:
      q_BTNH: queries, N heads.
      k_BTKH, v_BTKV: keys and values, K heads, K dividing N; key and value dims may differ.
      causal: whether query t sees keys 0..t only.
      query_chunk: if positive and causal, queries go in chunks of this many, each against the keys
        it can see: half the work where the library computes masked logits (CPU).
    """
    H, Hv = k_BTKH.shape[-1], v_BTKV.shape[-1]
    dim = max(H, Hv)  # the library refuses unequal dims: pad with zeros, slice
    pad = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, dim - x.shape[-1])])
    q, k, v = (x if x.shape[-1] == dim else pad(x) for x in (q_BTNH, k_BTKH, v_BTKV))
    attend = functools.partial(jax.nn.dot_product_attention, scale=H**-0.5)
    if q.dtype == jnp.float64:  # the library's softmax is float32 whatever its inputs are
        attend = functools.partial(_float64_attention, scale=H**-0.5)
    T = q.shape[1]
    if not causal or not 0 < query_chunk < T:
        return attend(q, k, v, is_causal=causal)[..., :Hv]
    outputs = []
    for start in range(0, T, query_chunk):
        stop = min(start + query_chunk, T)
        visible_TS = jnp.arange(stop)[None, :] <= jnp.arange(start, stop)[:, None]
        outputs.append(
            attend(q[:, start:stop], k[:, :stop], v[:, :stop], mask=visible_TS[None, None])
        )
    return jnp.concatenate(outputs, axis=1)[..., :Hv]


def _float64_attention(q_BTNH, k_BSKH, v_BSKV, *, scale, mask=None, is_causal=False) -> jax.Array:
    """`jax.nn.dot_product_attention`, in float64 throughout."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    z_BKGTS = scale * jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH)
    if is_causal:
        mask = jnp.tril(jnp.ones((T, S), bool))[None, None]
    if mask is not None:
        z_BKGTS = jnp.where(mask[:, :, None], z_BKGTS, -jnp.inf)
    o_BTKGV = jnp.einsum("BKGTS,BSKV->BTKGV", jax.nn.softmax(z_BKGTS, axis=-1), v_BSKV)
    return o_BTKGV.reshape(B, T, N, -1)
