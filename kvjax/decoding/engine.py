"""A model prepared for decoding: weights on their devices, and jitted programs."""

import functools

from flax import nnx
import jax

from kvjax import cache as cache_lib
from kvjax.cache import Cache
from kvjax.decoding import program, stored as stored_lib
from kvjax.foundation.configuration import one_of
from kvjax.foundation.errors import UserError, warn
from kvjax.kernels.decode_attention import api, sharded
from kvjax.model.config import TransformerConfig
from kvjax.model.decoder import Decoder, packs
from kvjax.model.transformer import Compute, Transformer


class Engine:
    """Weights and jitted programs that all batches share; it holds no state of a batch.

    Attributes:
      config, compute: the model's config, and the dtype and options of its computation.
      weights: weights of the `Decoder`, cast to the compute dtype.
      sharding: the replicated sharding on the devices of the weights.
      chips: number of chips that a cache is sharded over.
      compiled: `program.compiled` for this model: maps a function to its jitted program.
      prefill, decode_step, override_tokens: see `decoding.program`.
      stored: True if `prefill` and `decode_step` are `StoredProgram`s.
    """

    def __init__(
        self,
        model: Transformer,
        compute: Compute,
        *,
        implementation: str | None,
        mesh: jax.sharding.Mesh | None,
        stored: bool = False,
    ):
        """See `Generator`."""
        if implementation is not None:
            one_of("implementation", implementation, tuple(api.IMPLEMENTATIONS))
        if compute.cache_bits == 4:
            warn(
                "four bits per cached number cost quality: `python -m kvjax.evaluate` with and "
                "without --cache_dtype=int4 measures how much"
            )
        if not model.config.block.causal:
            raise UserError("config.model.causal = False: only a causal model can generate")
        self.config, self.compute = model.config, compute
        # Not jitted: XLA takes seconds to compile one program that slices hundreds of layers.
        packed = all(packs(w.sharding) for w in jax.tree.leaves(nnx.state(model)))
        graph, weights = nnx.split(Decoder(model, compute, packed=packed))
        self.weights = nnx.to_pure_dict(weights)
        self.sharding = _replicated_like(self.weights)
        if mesh is not None:
            self.sharding = program.replicated(mesh)
            self.weights = jax.device_put(self.weights, self.sharding)
        self.chips = program.num_chips(self.sharding)
        devices = self.sharding.device_set
        implementation = _for_devices(implementation, devices, self.chips, compute.cache_bits)
        multi_query = _multi_query(implementation)
        self.compiled = functools.partial(
            program.compiled, implementation=multi_query, graph=graph, sharding=self.sharding
        )
        self.prefill = self.compiled(program.prefill)
        self.decode_step = self.compiled(program.decode_step, implementation=implementation)
        self.override_tokens = jax.jit(program.override_tokens, out_shardings=self.sharding)
        self.stored = stored and self.chips == 1
        if self.stored:
            by = (model.config, compute, multi_query, implementation)
            self.prefill = stored_lib.StoredProgram(self.prefill, "prefill", *by)
            self.decode_step = stored_lib.StoredProgram(self.decode_step, "decode_step", *by)

    def put(self, tree):
        """Copies host arrays to every device."""
        return jax.device_put(tree, self.sharding)

    def cache(self, batch: int, capacity: int) -> Cache:
        """Returns an abstract cache: ShapeDtypeStructs with shardings."""
        cache = cache_lib.abstract(
            self.config.mechanisms,
            batch=batch,
            capacity=capacity,
            dtype=self.compute.dtype,
            bits=self.compute.cache_bits,
            chips=self.chips,
        )
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            cache,
            program.cache_shardings(cache, self.sharding),
        )


def start_loading(
    config: TransformerConfig, compute: Compute, *, implementation: str | None = None
) -> None:
    """Starts to load the stored programs of a model that is still being read onto one device.

    Arguments as of `Engine`.
    """
    devices = set(jax.local_devices()[:1])
    implementation = _for_devices(implementation, devices, 1, compute.cache_bits)
    stored_lib.start_loading(config, compute, _multi_query(implementation), implementation)


def _multi_query(implementation: str | None) -> str:
    """Returns the implementation of programs with several queries per sequence: no kernel."""
    return implementation if implementation == "reference" else "xla"


def _replicated_like(weights: dict) -> jax.sharding.Sharding:
    """Returns the replicated sharding on the devices of the weights."""
    sharding = jax.tree.leaves(weights)[0].sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding


def _for_devices(
    implementation: str | None, devices: set[jax.Device], chips: int, cache_bits: int | None
) -> str | None:
    """Returns an implementation that runs on these devices; raises a UserError for any other.

    XLA cannot partition a kernel, so replicated weights on several devices need plain XLA, unless
    every device reads its own part of the cache.

    Args:
      chips: number of chips that the cache is sharded over; each runs its own kernel.
    """
    device, count = next(iter(devices)), len(devices)
    if chips > 1 and implementation not in (None, *sharded.IMPLEMENTATIONS):
        raise UserError(
            f"implementation = {implementation!r}: reads a whole cache, but the cache is split "
            f"over {chips} chips: use one of {', '.join(sharded.IMPLEMENTATIONS)}, or leave it out"
        )
    if implementation is None:  # api chooses for the first device of the process
        other_kind = api.kernels_of(device) != api.kernels_of(jax.devices()[0])
        return "xla" if count > chips or other_kind else None
    if api.is_kernel(implementation):
        if not api.reads(implementation, cache_bits):
            raise UserError(
                f"implementation = {implementation!r}: reads no int{cache_bits} cache: use 'xla', "
                "or leave it out"
            )
        if count > chips or api.kernels_of(device) != implementation:
            raise UserError(
                f"implementation = {implementation!r}: runs on one {implementation.upper()}; the "
                f"model is on {count} x {device.device_kind}: use 'xla', or leave it out"
            )
    return implementation
