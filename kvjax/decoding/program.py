"""The jitted programs of decoding: prefill, then one step per token.

They run on one device, or on a mesh with the single axis "cache", over which the cache's tokens are
sharded. There each device attends over its own tokens; weights and all other computation are
replicated. Sharding thus divides the memory and bandwidth of the cache, not of the weights.
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
from kvjax.model.decoder import Decoder, packs
from kvjax.model.transformer import Compute, Transformer

IN_BFLOAT16 = Compute(dtype=jnp.dtype(jnp.bfloat16))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """Sampling options and stop tokens of a batch, as arrays: other values do not recompile."""

    parameters: sampling_lib.Parameters
    key: jax.Array
    streams_B: jax.Array  # uint32 random stream of each sequence, see `sampling.keys`
    ends_V: jax.Array  # bool, true for tokens that end a sequence


def prefill(
    weights: dict, cache: Cache, tokens_BT: jax.Array, counts_B: jax.Array, *, graph, implementation
) -> Cache:
    """Appends the first `counts_B` tokens of each row (0 for a prompt that is already complete)."""
    decoder: Decoder = nnx.merge(graph, weights)
    return decoder(tokens_BT, cache, counts_B, implementation=implementation)[1]


def decode_step(
    weights: dict,
    cache: Cache,
    token_B: jax.Array,
    done_B: jax.Array,
    cancelled_B: jax.Array,
    sampling: SamplingState,
    *,
    graph,
    implementation,
) -> tuple[Cache, jax.Array, jax.Array]:
    """Appends `token_B` to the cache and samples the next token of each sequence.

    Args:
      done_B: true for sequences that a stop token ended; they append nothing, and their next token
        is arbitrary.
      cancelled_B: likewise for sequences that the host ended.

    Returns:
      The cache, the next tokens [B] int32, and [B] bool, true for sequences that have ended.
    """
    decoder: Decoder = nnx.merge(graph, weights)
    done_B = done_B | cancelled_B
    counts_B = jnp.where(done_B, 0, 1)
    x_B1D, cache = decoder(token_B[:, None], cache, counts_B, implementation=implementation)
    logits_BV = decoder.logits(x_B1D)[:, 0]
    # `lengths` already counts the appended token, so it is the position of the sampled one.
    keys_B = sampling_lib.keys(sampling.key, sampling.streams_B, cache.lengths)
    token_B = sampling_lib.sample(logits_BV, keys_B, sampling.parameters)
    return cache, token_B, done_B | sampling.ends_V[token_B]


def override_tokens(token_B: jax.Array, done_B: jax.Array, forced_B: jax.Array) -> tuple:
    """Replaces sampled tokens by `forced_B` where that is >= 0; a forced token ends no sequence."""
    is_forced_B = forced_B >= 0
    return jnp.where(is_forced_B, forced_B, token_B), done_B & ~is_forced_B


def compiled(function: Callable, *, graph, implementation: str | None, sharding: Sharding):
    """Jits a function of (weights, cache, ...), such as `decode_step`, with the cache donated.

    Args:
      sharding: of the weights, which are replicated; on a mesh with the axis "cache", the cache is
        sharded over it.
    """
    function = functools.partial(function, graph=graph, implementation=implementation)
    if num_chips(sharding) == 1:
        return jax.jit(function, donate_argnums=1, out_shardings=sharding)

    def is_cache(x):
        return isinstance(x, Cache)

    def constrained(*arguments):
        # Attention takes the number of chips from the abstract mesh that it is traced in.
        with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
            out = function(*arguments)
        shardings = jax.tree.map(
            lambda x: cache_shardings(x, sharding) if is_cache(x) else sharding,
            out,
            is_leaf=is_cache,
        )
        return jax.lax.with_sharding_constraint(out, shardings)

    return jax.jit(constrained, donate_argnums=1)


def num_chips(sharding: Sharding) -> int:
    """Returns the number of chips that share a cache; 1 without a mesh axis "cache"."""
    return sharding.mesh.shape.get(stripes.AXIS, 1) if isinstance(sharding, NamedSharding) else 1


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the replicated sharding on a mesh for decoding.

    Raises:
      ValueError: the mesh has several devices that are not along one axis "cache".
    """
    sharding = NamedSharding(mesh, P())
    if num_chips(sharding) != mesh.size:
        axes = ", ".join(f"{name} = {size}" for name, size in mesh.shape.items())
        raise ValueError(f"a mesh of {axes}: decoding needs one axis {stripes.AXIS!r}")
    return sharding


def cache_shardings(cache: Cache, sharding: Sharding) -> Cache:
    """Returns a tree of shardings: fields split over chips along tokens, lengths replicated.

    Args:
      sharding: of the weights, see `compiled`.
    """
    if num_chips(sharding) == 1:
        return jax.tree.map(lambda x: sharding, cache)
    fields = jax.tree.map(
        lambda x: NamedSharding(sharding.mesh, stripes.spec(x)),  # [B, *shape, S]
        cache.layers,
    )
    return Cache(fields, sharding)


def max_capacity(config: TransformerConfig, chips: int) -> int | None:
    """Returns the largest capacity of a cache in tokens per sequence; None without a limit.

    Each chip holds a multiple of 128 tokens, and every slot needs an angle of RoPE.
    """
    step = LANES * chips
    return None if config.angle_limit is None else config.angle_limit // step * step


def check_capacity(config: TransformerConfig, capacity: int, chips: int, *, key: str) -> None:
    """Raises a UserError for a capacity above `max_capacity`; `key` names the option."""
    limit = max_capacity(config, chips)
    if limit is not None and capacity > limit:
        each = f" in a cache split over {chips} chips" if chips > 1 else ""
        raise UserError(
            f"{key} = {capacity}: the model's positions have angles for {limit} tokens{each}; give "
            "at most that"
        )


def make_mesh(chips: int, devices: list[jax.Device]) -> Mesh:
    """Returns a mesh of the first `chips` devices along the axis "cache".

    Raises:
      UserError: there are fewer devices.
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
    """Lowers `decode_step` from shapes alone, for devices that may be absent.

    Args:
      mesh: one device, or the axis "cache", over which the cache is sharded.
      length: capacity per sequence in tokens, rounded up to a multiple of 128 per chip.
      implementation: see `kvjax.kernels.decode_attention.api`; None: the default of the mesh's
        devices.

    Raises:
      UserError: the length exceeds `max_capacity`.
      ValueError: see `replicated`.
    """
    sharding = replicated(mesh)
    chips = num_chips(sharding)
    check_capacity(config, length, chips, key="length")

    def make() -> Decoder:
        return Decoder(Transformer(config, jax.random.key(0)), compute, packed=packs(sharding))

    graph, weights = nnx.split(nnx.eval_shape(make))
    cache = cache_lib.abstract(
        config.mechanisms,
        batch=batch,
        capacity=length,
        dtype=compute.dtype,
        bits=compute.cache_bits,
        chips=chips,
    )
    token_B = jax.ShapeDtypeStruct((batch,), jnp.int32)
    flag_B = jax.ShapeDtypeStruct((batch,), jnp.bool)
    sampling = SamplingState(
        jax.eval_shape(Sampling().parameters),
        jax.eval_shape(lambda: jax.random.key(0)),
        jax.ShapeDtypeStruct((batch,), jnp.uint32),
        jax.ShapeDtypeStruct((config.vocab_size,), jnp.bool),
    )

    def place(x, sharding=sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    step = compiled(decode_step, graph=graph, implementation=implementation, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return step.lower(
            jax.tree.map(place, nnx.to_pure_dict(weights)),
            jax.tree.map(place, cache, cache_shardings(cache, sharding)),
            *jax.tree.map(place, (token_B, flag_B, flag_B, sampling)),
        )
