"""A Transformer over a cache: layers unrolled, each with weights and cache arrays of its own."""

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax import cache as cache_lib
from kvjax.cache import Cache
from kvjax.layers import rope
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute, Transformer, compute_dtypes


class Decoder(Transformer):
    """Made once from a Transformer, with weights in the dtypes of `transformer.compute_dtypes`.

    Stacks that training scans over are taken apart here: a slice of a stack at every step would
    copy all weights at every step.
    """

    def __init__(self, model: Transformer, compute: Compute = Compute()):
        self.config = model.config
        self.compute = compute
        graph, weights = nnx.split(model)
        weights = nnx.to_pure_dict(weights)
        cast = lambda w, dtype: w.astype(dtype)
        model = nnx.merge(
            graph, jax.tree.map(cast, weights, compute_dtypes(weights, compute.dtype))
        )
        for name in ("embedding", "positions", "head", "embedding_norm", "final_norm"):
            setattr(self, name, getattr(model, name))
        self.layers = nnx.List([])
        for (_, length), segment in zip(model.config.layer_groups, model.segments, strict=True):
            graph, weights = nnx.split(segment)
            for i in range(length):
                self.layers.append(nnx.merge(graph, jax.tree.map(lambda w, i=i: w[i], weights)))

    def __call__(
        self,
        tokens_BT: jax.Array,
        cache: Cache,
        counts_B: jax.Array,
        *,
        implementation: str | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Final activations [B, T, D] of new tokens, and the cache that holds them too.

        Args:
          tokens_BT: the next tokens of every sequence, padding at the end.
          counts_B: how many of them are real, 0 to T; activations of padding mean nothing. They
            must fit: `kvjax.cache.check_capacity` is for the caller, on the host.
          implementation: see `kvjax.kernels.decode_attention.api`.
        """
        c = self.config.block
        T = tokens_BT.shape[1]
        index_BT = cache.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        x_BTD = self.embed(tokens_BT, index_BT, self.compute)
        options = dict(rope_base=c.angles_base, window=c.window, implementation=implementation)
        layers = []
        for block, mechanism, layer in zip(
            self.layers, self.config.mechanisms, cache.layers, strict=True
        ):
            positions = rope.positions(index_BT, mechanism.rope_dim, c.angles_base)
            x_BTD, layer = block.decode(x_BTD, positions, layer, counts_B, **options)
            layers.append(layer)
        return self.apply_final_norm(x_BTD), Cache(tuple(layers), cache.lengths + counts_B)


def allocate(config: TransformerConfig, compute: Compute, *, batch: int, capacity: int) -> Cache:
    """An empty cache for a model; see `kvjax.cache.abstract`."""
    shape = dict(batch=batch, capacity=capacity, dtype=compute.dtype)
    return cache_lib.allocate(config.mechanisms, **shape)
