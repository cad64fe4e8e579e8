"""A model made ready to decode: its weights where they are needed, and the two jitted programs."""

from collections.abc import Callable
import functools

from flax import nnx
import jax

from kvjax import cache as cache_lib
from kvjax.cache import Cache
from kvjax.decoding import program
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError
from kvjax.kernels.decode_attention import api, sharded
from kvjax.model.config import TransformerConfig
from kvjax.model.decoder import Decoder
from kvjax.model.transformer import Compute, Transformer


class Engine:
    """What batches run on; it keeps nothing of them.

    Attributes:
      config, compute: the model's, and how it is computed.
      weights: in the dtype it computes in.
      sharding: that has a whole copy wherever there are weights.
      chips: that a cache is split over.
      compiled: jits a function as `program.compiled` does, for these weights.
      prefill, decode_step, overrule: see `decoding.program`.
    """

    config: TransformerConfig
    compute: Compute
    weights: dict
    sharding: jax.sharding.Sharding
    chips: int
    compiled: Callable
    prefill: Callable
    decode_step: Callable
    override_tokens: Callable

    def __init__(
        self,
        model: Transformer,
        compute: Compute,
        *,
        implementation: str | None,
        mesh: jax.sharding.Mesh | None,
    ):
        """See `Generator`."""
        if implementation is not None:
            one_of("implementation", implementation, tuple(api.IMPLEMENTATIONS))
        if not model.config.block.causal:
            raise UserError("config.model.causal = False: only a causal model can generate")
        self.config, self.compute = model.config, compute
        model_graph, params = nnx.split(model)
        make = lambda params: Decoder(nnx.merge(model_graph, params), compute)
        graph, _ = nnx.split(nnx.eval_shape(make, params))
        # Slice by slice: XLA takes seconds to compile one program of hundreds of slices.
        self.weights = nnx.to_pure_dict(nnx.state(make(params)))
        self.sharding = _everywhere(self.weights)
        if mesh is not None:
            self.sharding = program.replicated(mesh)
            self.weights = jax.device_put(self.weights, self.sharding)
        self.chips = program.num_chips(self.sharding)
        implementation = _for_devices(implementation, self.sharding.device_set, self.chips)
        reading = implementation if implementation == "reference" else "xla"  # kernels: 1 query
        # Whatever reads several tokens of each sequence at once.
        self.compiled = functools.partial(
            program.compiled, implementation=reading, graph=graph, sharding=self.sharding
        )
        self.prefill = self.compiled(program.prefill)
        self.decode_step = self.compiled(program.decode_step, implementation=implementation)
        self.override_tokens = jax.jit(program.override_tokens, out_shardings=self.sharding)

    def put(self, tree):
        """Arrays of the host, whole on every device."""
        return jax.device_put(tree, self.sharding)

    def cache(self, batch: int, capacity: int) -> Cache:
        """A cache as ShapeDtypeStructs, with shardings."""
        shape = dict(batch=batch, capacity=capacity, dtype=self.compute.dtype, chips=self.chips)
        cache = cache_lib.abstract(self.config.mechanisms, **shape)
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(place, cache, program.cache_shardings(cache, self.sharding))


def _everywhere(weights: dict) -> jax.sharding.Sharding:
    """The sharding that has a whole copy wherever there are weights."""
    sharding = jax.tree.leaves(weights)[0].sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding


def _for_devices(implementation: str | None, devices: set[jax.Device], chips: int) -> str | None:
    """The implementation for these devices; XLA does not divide a kernel between several.

    Args:
      chips: that the cache is split over; of those each runs a kernel of its own.
    """
    device, count = next(iter(devices)), len(devices)
    if chips > 1 and implementation not in (None, *sharded.IMPLEMENTATIONS):
        raise UserError(
            f"implementation = {implementation!r}: reads a whole cache, and this one is split over "
            f"{chips} chips: use one of {', '.join(sharded.IMPLEMENTATIONS)}, or leave it out"
        )
    if implementation is None:  # the default looks at the first device that JAX has
        elsewhere = api.kernels_of(device) != api.kernels_of(jax.devices()[0])
        return "xla" if count > chips or elsewhere else None
    if api.is_kernel(implementation):
        if count > chips or api.kernels_of(device) != implementation:
            raise UserError(
                f"implementation = {implementation!r}: runs on one {implementation.upper()}; the "
                f"model is on {count} x {device.device_kind}: use 'xla', or leave it out"
            )
    return implementation
