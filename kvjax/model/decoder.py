"""A Transformer over a cache, with unrolled layers: separate weights and cache arrays for each."""

import functools

from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as cache_lib
from kvjax.attention import Attention, canonical
from kvjax.attention.mechanism import MechanismConfig
from kvjax.cache import Cache
from kvjax.layers import rope
from kvjax.model import fused_step
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Compute, Transformer, compute_dtypes


class Decoder(Transformer):
    """Decodes with a Transformer's weights, cast once to `transformer.compute_dtypes`.

    For a quantised cache their basis is changed first (`attention.canonical`).

    The stacked layers that training scans over are unstacked here: slicing a stack inside the step
    would copy all weights at every step.
    """

    def __init__(self, model: Transformer, compute: Compute = Compute(), *, packed: bool = False):
        """Casts and unstacks the weights.

        Args:
          packed: replace the projections of each layer's input by one matrix
            (`Mechanism.pack`); see `packs`.
        """
        self.config = model.config
        self.compute = compute
        stored = model.segments
        graph, weights = nnx.split(model)
        weights = nnx.to_pure_dict(weights)
        dtypes = compute_dtypes(weights, compute.dtype)
        weights = jax.tree.map(lambda w, dtype: w.astype(dtype), weights, dtypes)
        model = nnx.merge(graph, weights)
        for name in ("embedding", "positions", "head", "embedding_norm", "final_norm"):
            setattr(self, name, getattr(model, name))
        self.layers = nnx.List([])
        groups = zip(model.config.layer_groups, model.segments, stored, strict=True)
        for (mechanism, length), group, stored_group in groups:
            graph, weights = nnx.split(group)
            stacks, tree = jax.tree.flatten(weights)
            layers = zip(*(_unstacked(stack, length) for stack in stacks), strict=True)
            for i, layer in enumerate(layers):
                block = nnx.merge(graph, jax.tree.unflatten(tree, layer))
                if compute.cache_bits is not None:
                    stack = nnx.to_pure_dict(nnx.state(stored_group.attention))
                    where = f"layer {len(self.layers)}"
                    _change_basis(block.attention, mechanism, stack, i, where)
                if packed:
                    block.attention.mechanism.pack()
                self.layers.append(block)

    def __call__(
        self,
        tokens_BT: jax.Array,
        cache: Cache,
        counts_B: jax.Array,
        *,
        implementation: str | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Decodes T new tokens per sequence.

        Args:
          tokens_BT: next tokens of every sequence, padding at the end.
          counts_B: number of real tokens, 0 to T. The caller checks that they fit the cache
            (`kvjax.cache.check_capacity`, on the host).
          implementation: see `kvjax.kernels.decode_attention.api`.

        Returns:
          Final activations [B, T, D] (undefined for padding), and the updated cache.
        """
        T = tokens_BT.shape[1]
        index_BT = cache.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        x_BTD = self.embed(tokens_BT, index_BT, self.compute)
        layers = []
        is_fused, partials_PBD = fused_step.takes(self.layers, x_BTD, implementation), None
        for block, (mechanism, kind), layer in zip(
            self.layers, self.config.layers, cache.layers, strict=True
        ):
            positions = rope.positions(index_BT, mechanism.rope_dim, kind.rope_base)
            options = kind._asdict() | dict(implementation=implementation)
            if is_fused:
                x_BD, partials_PBD, layer = fused_step.decode(
                    block, x_BTD[:, 0], partials_PBD, positions, layer, counts_B, **options
                )
                x_BTD = x_BD[:, None]
            else:
                x_BTD, layer = block.decode(x_BTD, positions, layer, counts_B, **options)
            layers.append(layer)
        if is_fused:
            x_BTD = fused_step.add(x_BTD[:, 0], partials_PBD)[:, None]
        return self.apply_final_norm(x_BTD), Cache(tuple(layers), cache.lengths + counts_B)


def _change_basis(
    attention: Attention, config: MechanismConfig, stacks: dict, i: int, where: str
) -> None:
    """Changes the basis of a layer's weights, by way of float64.

    Args:
      stacks: stored weights of all layers of the group, of which this is number `i`.
      where: the layer's name in a message.
    """
    attention.spreads_keys = True
    stacks = traverse_util.flatten_dict(stacks, sep="/")
    if any(isinstance(stack, jax.core.Tracer) for stack in stacks.values()):
        return  # shapes alone, which stay
    exact = {path: np.asarray(stack[i], np.float64) for path, stack in stacks.items()}
    for path, w in canonical.change_basis(config, exact, where).items():
        *modules, name = path.split("/")
        param = getattr(functools.reduce(getattr, modules, attention), name)
        old = param[...]
        param[...] = jax.device_put(w.astype(old.dtype), old.sharding)


def _unstacked(stack: jax.Array, length: int) -> list[jax.Array]:
    """Returns the layers of a stacked weight; on one CPU device they share its memory."""
    sharding = None if isinstance(stack, jax.core.Tracer) else stack.sharding
    on_one = isinstance(sharding, jax.sharding.SingleDeviceSharding)
    if on_one and stack.device.platform == "cpu":
        layers = np.asarray(stack)  # a view, so JAX will not donate the buffer
        return [jax.device_put(layers[i], sharding, may_alias=True) for i in range(length)]
    return [stack[i] for i in range(length)]


def packs(sharding: jax.sharding.Sharding) -> bool:
    """Returns True if a decoder whose weights have this sharding should pack its projections.

    False on a CPU, where unpacked weights are views (`_unstacked`) and packed ones would be copies;
    on a TPU, where packing has not been measured; and for sharded weights, since shards of a packed
    matrix would not hold whole heads.
    """
    platforms = {device.platform for device in sharding.device_set}
    return not platforms & {"cpu", "tpu"} and sharding.is_fully_replicated


def allocate(config: TransformerConfig, compute: Compute, *, batch: int, capacity: int) -> Cache:
    """Allocates an empty cache for a model; see `kvjax.cache.abstract`."""
    shape = dict(batch=batch, capacity=capacity, dtype=compute.dtype, bits=compute.cache_bits)
    return cache_lib.allocate(config.mechanisms, **shape)
