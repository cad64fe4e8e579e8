"""The jitted programs of decoding: prompts into the cache, then one step per token.

On one device, or on several with the cache's tokens split over them: a mesh with the axis "cache".
There every device has all weights and computes all of the model but attention, each its own part of
the cache. Weights are read whole on each: what is gained is memory and bandwidth for the cache.
"""

from collections.abc import Callable
import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, Sharding
import numpy as np

from kvjax import cache as cache_lib
from kvjax.cache import Cache, stripes
from kvjax.cache.cache import LANES
from kvjax.decoding import sampling as sampling_lib
from kvjax.decoding.sampling import Sampling
from kvjax.foundation.configuration import at_least
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig
from kvjax.model.decoder import Decoder
from kvjax.model.transformer import Compute, Transformer

IN_BFLOAT16 = Compute(dtype=jnp.dtype(jnp.bfloat16))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """How the tokens of a batch are drawn, and which end a sequence: arrays all, so that other
    values compile nothing."""

    parameters: sampling_lib.Parameters
    key: jax.Array
    streams_B: jax.Array  # uint32, see `sampling.keys`
    ends_V: jax.Array  # bool


def prefill(
    weights: dict, cache: Cache, tokens_BT: jax.Array, counts_B: jax.Array, *, graph, implementation
) -> Cache:
    """The cache with the first counts_B of T more tokens; 0 where a prompt has ended before."""
    decoder: Decoder = nnx.merge(graph, weights)
    return decoder(tokens_BT, cache, counts_B, implementation=implementation)[1]


def decode_step(
    weights: dict,
    cache: Cache,
    token_B: jax.Array,
    done_B: jax.Array,
    cancelled_B: jax.Array,
    choice: SamplingState,
    *,
    graph,
    implementation,
) -> tuple[Cache, jax.Array, jax.Array]:
    """The cache with token_B, the tokens that follow [B] int32, and whose sequences are done [B].

    Args:
      done_B: sequences that token_B ended; they grow no more, and what follows means nothing.
      cancelled_B: sequences that the host ended.
    """
    decoder: Decoder = nnx.merge(graph, weights)
    done_B = done_B | cancelled_B
    counts_B = jnp.where(done_B, 0, 1)
    x_B1D, cache = decoder(token_B[:, None], cache, counts_B, implementation=implementation)
    logits_BV = decoder.logits(x_B1D)[:, 0]
    keys_B = sampling_lib.keys(choice.key, choice.streams_B, cache.lengths)
    token_B = sampling_lib.sample(logits_BV, keys_B, choice.parameters)
    return cache, token_B, done_B | choice.ends_V[token_B]


def override_tokens(token_B: jax.Array, done_B: jax.Array, forced_B: jax.Array) -> tuple:
    """Tokens that were drawn, and whose sequences they ended, unless laid_B has another, >= 0."""
    is_forced_B = forced_B >= 0
    return jnp.where(is_forced_B, forced_B, token_B), done_B & ~is_forced_B


def compiled(function: Callable, *, graph, implementation: str | None, sharding: Sharding):
    """`prefill` or `decode_step`, jitted for devices with weights that lie as `whole` says.

    The cache is donated; where `whole` is of a mesh with the axis "cache", it is split over that.
    """
    ready = functools.partial(function, graph=graph, implementation=implementation)
    if num_chips(sharding) == 1:
        return jax.jit(ready, donate_argnums=1, out_shardings=sharding)

    def split(*arguments):
        with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
            out = ready(*arguments)
        is_cache = lambda x: isinstance(x, Cache)
        place = lambda x: cache_shardings(x, sharding) if is_cache(x) else sharding
        return jax.lax.with_sharding_constraint(out, jax.tree.map(place, out, is_leaf=is_cache))

    return jax.jit(split, donate_argnums=1)


def num_chips(sharding: Sharding) -> int:
    """How many chips a cache is split over; 1 where the sharding's mesh has no axis "cache"."""
    return sharding.mesh.shape.get(stripes.AXIS, 1) if isinstance(sharding, NamedSharding) else 1


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding that has a whole copy on every device of a mesh.

    Raises:
      ValueError: a mesh of several devices that are not along one axis "cache".
    """
    sharding = NamedSharding(mesh, P())
    if num_chips(sharding) != mesh.size:
        axes = ", ".join(f"{name} = {size}" for name, size in mesh.shape.items())
        raise ValueError(f"a mesh of {axes}: decoding takes one axis {stripes.AXIS!r}")
    return sharding


def cache_shardings(cache: Cache, sharding: Sharding) -> Cache:
    """Where the arrays of a cache lie, beside weights that lie as `whole` says."""
    if num_chips(sharding) == 1:
        return jax.tree.map(lambda x: sharding, cache)
    split = lambda x: NamedSharding(sharding.mesh, stripes.spec(x))  # [B, *shape, S]
    return Cache(jax.tree.map(split, cache.layers), sharding)


def max_capacity(config: TransformerConfig, chips: int) -> int | None:
    """Tokens per sequence that a cache split over so many chips may hold; None: any number.

    Every chip holds whole runs of 128, and no slot of any stands beyond the model's angles.
    """
    each = LANES * chips
    return None if config.angle_limit is None else config.angle_limit // each * each


def check_capacity(config: TransformerConfig, capacity: int, chips: int, *, key: str) -> None:
    """Raises a UserError for a cache that is larger; `key` is what the user calls its size."""
    limit = max_capacity(config, chips)
    if limit is not None and capacity > limit:
        each = f" in a cache split over {chips} chips" if chips > 1 else ""
        raise UserError(
            f"{key} = {capacity}: the model's positions have angles for {limit} tokens{each}; give "
            "at most that"
        )


def make_mesh(chips: int, devices: list[jax.Device]) -> Mesh:
    """The first `chips` devices as a mesh that splits caches.

    Raises:
      UserError: fewer devices than that; the message names those there.
    """
    at_least("chips", chips, 1)
    if chips > len(devices):
        names = ", ".join(map(str, devices))
        raise UserError(f"chips = {chips}: there are {len(devices)} ({names}); give at most that")
    return Mesh(np.array(devices[:chips]), (stripes.AXIS,), axis_types=(AxisType.Auto,))


def lowered_step(
    config: TransformerConfig,
    mesh: Mesh,
    *,
    batch: int,
    length: int,
    compute: Compute = IN_BFLOAT16,
    implementation: str | None = None,
) -> jax.stages.Lowered:
    """One step of decoding, lowered for devices that need not be there.

    Arguments: weights, cache (donated), tokens, flags, choice; see `decode_step`.

    Args:
      mesh: of one axis "cache", over which the cache is split; or of one device.
      length: tokens that each sequence's cache holds, rounded up to a multiple of 128 per chip.
      implementation: see `kvjax.kernels.decode_attention.api`; None: as the mesh's devices have it.

    Raises:
      UserError: a length beyond the angles of the model's positions.
      ValueError: see `on_every`.
    """
    sharding = replicated(mesh)
    check_capacity(config, length, num_chips(sharding), key="length")
    make = lambda: Decoder(Transformer(config, jax.random.key(0)), compute)
    graph, weights = nnx.split(nnx.eval_shape(make))
    shape = dict(batch=batch, capacity=length, dtype=compute.dtype, chips=num_chips(sharding))
    cache = cache_lib.abstract(config.mechanisms, **shape)
    place = lambda x, sharding=sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    flags_B = jax.ShapeDtypeStruct((batch,), jnp.bool)
    choice = SamplingState(
        jax.eval_shape(Sampling().parameters),
        jax.eval_shape(lambda: jax.random.key(0)),
        jax.ShapeDtypeStruct((batch,), jnp.uint32),
        jax.ShapeDtypeStruct((config.vocab_size,), jnp.bool),
    )
    step = compiled(decode_step, graph=graph, implementation=implementation, sharding=sharding)
    tokens_B = jax.ShapeDtypeStruct((batch,), jnp.int32)
    others = jax.tree.map(place, (tokens_B, flags_B, flags_B, choice))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return step.lower(
            jax.tree.map(place, nnx.to_pure_dict(weights)),
            jax.tree.map(place, cache, cache_shardings(cache, sharding)),
            *others,
        )
