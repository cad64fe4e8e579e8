"""An attention layer for a model of your own, with any mechanism and its small KV cache.

attention = kvjax.Attention(kvjax.lrkv(num_heads=18, rank=64), d_model=2304, rngs=nnx.Rngs(0))
y = attention(x)                                   # [B, T, D]: training
cache = attention.cache(batch=8, capacity=4096)    # bfloat16
y, cache = attention.prefill(x, cache)             # the prompts
y, cache = attention.decode(x_next, cache)         # [B, 1, D]: exact, from the small cache
"""

import math
from typing import cast

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax import cache as cache_lib
from kvjax.attention import Attention as Core
from kvjax.attention.mechanism import MechanismConfig
from kvjax.cache import quantized
from kvjax.kernels.softmax_attention.api import softmax_attention
from kvjax.layers import rope
from kvjax.layers.weight import InitRngs
from kvjax.library import layouts
from kvjax.library.kv_cache import KVCache


class Attention(nnx.Module):
    """Causal self-attention [B, T, D] -> [B, T, D] with RoPE, and its decoding from a cache.

    Weights are float32; the result has the promoted dtype of input and weights, so cast weights
    (`nnx.state`, `jax.tree.map`) to compute in bfloat16.
    """

    def __init__(
        self,
        config: MechanismConfig,
        d_model: int,
        *,
        rope_base: rope.Base | None = 10_000.0,
        window: int = 0,
        softcap: float = 0.0,
        zero_output: bool = False,
        rngs: nnx.Rngs,
    ):
        """Creates the weights.

        Args:
          config: a mechanism with its sizes, as `kvjax.lrkv(num_heads=18, rank=64)`.
          d_model: model width D.
          rope_base: base of RoPE's frequencies; None: no RoPE.
          window: if positive, a token sees only itself and the window - 1 tokens before it.
          softcap: c in c·tanh(z/c) of the scaled logits z, as in Gemma 2; 0: none.
          zero_output: initialise the output projection with zeros, as in nanochat.
        """
        if not (math.isfinite(softcap) and softcap >= 0):
            raise ValueError(f"softcap = {softcap}: must be positive, or 0 for none")
        if window < 0:
            raise ValueError(f"window = {window}: must be positive, or 0 for none")
        for key in ("alibi", "position_channels"):  # in training they are channels of the logits
            if softcap and getattr(config, key, False):
                raise ValueError(f"softcap = {softcap}: must be 0 with {key}")
        self.rope_base, self.window, self.d_model = rope_base, window, d_model
        self.softcap = float(softcap)
        init = InitRngs(rngs.params(), zero_outputs=zero_output)
        self.core = Core(config, d_model, rngs=cast(nnx.Rngs, init))  # has the same interface

    @property
    def config(self) -> MechanismConfig:
        """The mechanism's sizes."""
        return self.core.mechanism.config

    def __call__(
        self,
        x_BTD: jax.Array,
        positions: jax.Array | None = None,
        *,
        causal: bool = True,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Applies attention to whole sequences, as in training.

        Args:
          x_BTD: activations [B, T, D].
          positions: [T] or [B, T] int32 positions for RoPE; None: 0 .. T - 1. Tokens are in order:
            causality follows their index.
          causal: False: every token sees all tokens.
          segment_ids: [B, T] int32; a token sees only tokens of its own segment.
        """
        self._check_shape(x_BTD, "B")
        return self.core(
            x_BTD,
            self._positions(x_BTD.shape[1], positions),
            causal=causal,
            window=self.window,
            softcap=self.softcap,
            segment_ids_BS=segment_ids,
        )

    def cache(
        self,
        batch: int,
        capacity: int,
        dtype: jnp.dtype = jnp.bfloat16,
        *,
        cache_dtype: str = "",
    ) -> KVCache:
        """Allocates an empty cache.

        Args:
          capacity: tokens per sequence, rounded up to a multiple of 128.
          cache_dtype: "int8" or "int4": all but 1/rms and decoupled RoPE keys is quantised, with a
            float32 scale per token and row; "": all in `dtype`. The weights keep their basis, so
            int4 loses more than in a model that `kvjax.load` reads.
        """
        shape = dict(batch=batch, capacity=capacity, dtype=layouts.check_dtype(dtype))
        bits = quantized.bits_of(cache_dtype)
        cache = cache_lib.allocate([self.config], **shape, bits=bits)
        return KVCache(cache.layers[0], cache.lengths)

    def prefill(
        self, x_BTD: jax.Array, cache: KVCache, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Attends within prompts, and fills a cache with them; tokens cached before are dropped.

        Args:
          x_BTD: activations of the prompts, padding at the end.
          lengths: [B] int32 prompt lengths, at most the capacity; None: T.

        Returns:
          The output [B, T, D] (undefined for padding), and the cache.
        """
        self._check_shape(x_BTD, len(cache.lengths))
        B, T, _ = x_BTD.shape
        if T > cache.capacity:
            raise ValueError(f"x has {T} tokens, the cache {cache.capacity}: allocate a larger one")
        positions = self._positions(T)
        lengths = jnp.full((B,), T) if lengths is None else lengths
        lengths = jnp.asarray(lengths, jnp.int32)
        mechanism = self.core.mechanism
        q_BTNH, raw = mechanism.project(x_BTD, positions)
        k_BTKH, v_BTKH = mechanism.keys_values(raw, positions)
        o_BTNH = softmax_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            causal=True,
            window=self.window,
            softcap=self.softcap,
            scale=mechanism.config.scale,
        )
        y_BTD = self.core.project_out(o_BTNH, x_BTD, positions)
        first_B = jnp.zeros((B,), jnp.int32)
        entry = mechanism.encode(raw, positions)
        arrays = cache_lib.append(cache.arrays, entry, first_B, lengths)
        return y_BTD, KVCache(arrays, lengths)

    def decode(
        self,
        x_BTD: jax.Array,
        cache: KVCache,
        counts: jax.Array | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Appends T new tokens per sequence to the cache, and attends to all cached tokens.

        Tokens beyond the capacity are dropped, without an error: allocate for the longest
        sequence. Donate the cache to the jitted function, which then updates it in place.

        Args:
          x_BTD: activations of the new tokens, padding at the end; usually T = 1.
          counts: [B] int32 number of real tokens among the T, 0 to T; None: T.
          implementation: "xla", "tpu", "gpu" or "reference"; None: chosen by device.

        Returns:
          The output [B, T, D] (undefined for padding), and the cache.
        """
        self._check_shape(x_BTD, len(cache.lengths))
        B, T, _ = x_BTD.shape
        counts = jnp.full((B,), T) if counts is None else counts
        counts = jnp.asarray(counts, jnp.int32)
        index_BT = cache.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        y_BTD, arrays = self.core.decode(
            x_BTD,
            self._positions(T, index_BT),
            cache.arrays,
            counts,
            rope_base=self.rope_base,
            window=self.window,
            softcap=self.softcap,
            implementation=implementation,
        )
        return y_BTD, KVCache(arrays, cache.lengths + counts)

    def _check_shape(self, x_BTD: jax.Array, batch: int | str) -> None:
        """Raises a ValueError unless the shape is [batch, T, D].

        Args:
          batch: sequences of the cache; "B": any number.
        """
        shape = x_BTD.shape
        fits = len(shape) == 3 and shape[2] == self.d_model and batch in ("B", shape[0])
        if not fits:
            raise ValueError(
                f"x has shape {list(shape)}: expected [B, T, D] = [{batch}, T, {self.d_model}]"
            )

    def _positions(self, T: int, index: jax.Array | None = None) -> rope.Positions:
        """Returns positions with RoPE's angles; None: 0 .. T - 1."""
        index_BT = jnp.arange(T, dtype=jnp.int32) if index is None else jnp.asarray(index)
        if index_BT.ndim == 1:
            index_BT = index_BT[None]
        if index_BT.shape[-1] != T:
            raise ValueError(f"positions {tuple(index_BT.shape)}: must be [T] or [B, T], T = {T}")
        return rope.positions(index_BT, self.config.rope_dim, self.rope_base)
