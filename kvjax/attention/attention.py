"""The attention module: a mechanism, softmax attention, an output projection.

Training's softmax attention is a library's, over expanded keys and values; `decode` reads a cache.
"""

import functools

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.mechanism import MechanismConfig
from kvjax.cache import append
from kvjax.kernels.decode_attention.api import decode_attention
from kvjax.layers.rope import Positions
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
        self, x_BTD: jax.Array, positions: Positions, *, causal: bool, query_chunk: int = 0
    ) -> jax.Array:
        q_BTNH, raw = self.mechanism.project(x_BTD, positions)
        k_BTKH, v_BTKH = self.mechanism.keys_values(raw, positions)
        options = dict(causal=causal, query_chunk=query_chunk)
        scale = self.mechanism.config.scale
        return self._project_out(softmax_attention(q_BTNH, k_BTKH, v_BTKH, scale=scale, **options))

    def decode(
        self,
        x_BTD: jax.Array,
        positions: Positions,
        layer: dict[str, jax.Array],
        counts_B: jax.Array,
        *,
        rope_base: float | None,
        implementation: str | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Attention of T new tokens over a cache that they join: ([B, T, D], the layer's cache).

        Args:
          positions: of the new tokens; those of a sequence follow its cached ones.
          layer: one layer of a `kvjax.cache.Cache`; the result takes its place.
          counts_B: how many of the T tokens are real; the rest is padding at the end.
          implementation: see `decode_attention`.
        """
        q_BTNH, raw = self.mechanism.project(x_BTD, positions)
        first_B = positions.index[:, 0]
        layer = append(layer, self.mechanism.encode(raw, positions), first_B, counts_B)
        inputs = self.mechanism.decode_inputs(q_BTNH, rope_base)
        o_BTNH = decode_attention(inputs, layer, first_B, implementation=implementation)
        return self._project_out(o_BTNH.astype(x_BTD.dtype)), layer

    def _project_out(self, o_BTNH: jax.Array) -> jax.Array:
        B, T, N, Hv = o_BTNH.shape
        y_BTD = linear(o_BTNH.reshape(B, T, N * Hv), self.out[...].reshape(N * Hv, -1))
        return y_BTD if self.out_bias is None else y_BTD + self.out_bias[...][None, None]


def softmax_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    *,
    causal: bool,
    scale: float | None = None,
    query_chunk: int = 0,
) -> jax.Array:
    """softmax(scale · q k^T) v of the training pass: [B, T, N, Hv].

    Args:
      q_BTNH: queries, N heads.
      k_BTKH, v_BTKV: keys and values, K heads, K dividing N; key and value dims may differ.
      scale: 1/sqrt(H) if not given.
      causal: whether query t sees keys 0..t only.
      query_chunk: if positive and causal, queries go in chunks of this many, each against the keys
        it can see: half the work where the library computes masked logits (CPU).
    """
    H, Hv = k_BTKH.shape[-1], v_BTKV.shape[-1]
    dim = max(H, Hv)  # the library refuses unequal dims: pad with zeros, slice
    pad = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, dim - x.shape[-1])])
    q, k, v = (x if x.shape[-1] == dim else pad(x) for x in (q_BTNH, k_BTKH, v_BTKV))
    float64 = q.dtype == jnp.float64  # the library's softmax is float32 whatever its inputs are
    attend = _float64_attention if float64 else jax.nn.dot_product_attention
    attend = functools.partial(attend, scale=H**-0.5 if scale is None else scale)
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
