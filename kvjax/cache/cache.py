"""The KV cache: one set of arrays per layer, allocated once and updated in place.

Every array is [B, *field.shape, S]. Tokens are the last axis, because a TPU pads the last axis to
128 lanes: S is a multiple of 128, whereas a field may have fewer channels. Layers are separate
arrays, because updating a stack of layers copies a whole layer at every step. Donate the cache to
the jitted step that returns it; the step then allocates nothing that grows with S.

Fields may be quantised (`kvjax.cache.quantized`), with scales as further arrays. On several chips
arrays are sharded along S in stripes (`kvjax.cache.stripes`).
"""

from collections.abc import Iterable
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from kvjax.cache import quantized, stripes
from kvjax.cache.field import HasCacheEntry
from kvjax.foundation.errors import UserError
from kvjax.foundation.rounding import round_up

LANES = 128  # of a TPU's vector registers; capacities are multiples


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Cached tokens of B sequences of different lengths.

    Attributes:
      layers: per layer, the arrays [B, *field.shape, S] of the mechanism's entry, by name.
      lengths: [B] int32, cached tokens of each sequence. Later slots are masked by weights of 0,
        so their contents must be finite.
    """

    layers: tuple[dict[str, jax.Array], ...]
    lengths: jax.Array

    @property
    def capacity(self) -> int:
        """S, the number of tokens that the cache can hold per sequence."""
        return next(iter(self.layers[0].values())).shape[-1]


def abstract(
    mechanisms: Iterable[HasCacheEntry],
    *,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    bits: int | None = None,
    chips: int = 1,
) -> Cache:
    """Returns the cache as ShapeDtypeStructs.

    Args:
      mechanisms: one mechanism config per layer.
      capacity: tokens per sequence, rounded up to a multiple of 128·chips.
      dtype: the compute dtype; wide fields (1/rms) are at least float32.
      bits: 8 or 4 for quantised fields, see `quantized`; None: all in the compute dtype.
      chips: number of chips that tokens are sharded over.

    Raises:
      UserError: see `quantized.entry_of`.
    """
    slots = round_up(capacity, LANES * chips)
    layers = tuple(
        {
            name: jax.ShapeDtypeStruct((batch, *field.shape, slots), field.dtype_in(dtype))
            for name, field in quantized.entry_of(mechanism, bits).items()
        }
        for mechanism in mechanisms
    )
    return Cache(layers, jax.ShapeDtypeStruct((batch,), jnp.int32))


def allocate(
    mechanisms: Iterable[HasCacheEntry],
    *,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    bits: int | None = None,
) -> Cache:
    """Allocates an empty cache; see `abstract`."""
    return empty(abstract(mechanisms, batch=batch, capacity=capacity, dtype=dtype, bits=bits))


def empty(shapes: Cache) -> Cache:
    """Allocates zeros with the given shapes and shardings, each chip its own part."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


def append(
    layer: dict[str, jax.Array],
    entry: dict[str, jax.Array],
    first_B: jax.Array,
    counts_B: jax.Array,
) -> dict[str, jax.Array]:
    """Writes token t of sequence b to slot first_B[b] + t, for t < counts_B[b].

    Tokens beyond the capacity are dropped; `check_capacity` raises the error on the host.

    Args:
      layer: arrays [B, *shape, S].
      entry: arrays [B, T, *shape] of the mechanism's entry; T <= S. A quantised layer stores them
        quantised.

    Returns:
      The updated layer.
    """
    entry = quantized.quantize(entry, layer)
    if layer.keys() != entry.keys():
        raise ValueError(f"the cache has {sorted(layer)}, the entry {sorted(entry)}")
    if stripes.num_chips() == 1:
        zero_B = jnp.zeros_like(first_B)
        return {name: _write(layer[name], entry[name], first_B, zero_B, counts_B) for name in layer}
    specs = {name: stripes.spec(array) for name, array in layer.items()}
    sharded = jax.shard_map(
        _append_on_chip, in_specs=(specs, P(), P(), P()), out_specs=specs, check_vma=False
    )
    return sharded(layer, entry, first_B, counts_B)


def _append_on_chip(layer: dict, entry: dict, first_B: jax.Array, counts_B: jax.Array) -> dict:
    """Writes the tokens that belong to the current chip; arguments as in `append`."""
    layer = dict(layer)
    for name, array in layer.items():
        local = stripes.local_stripes(array.shape[-1])
        T = entry[name].shape[1]
        # A chunk is at most one stripe long, so that this chip's tokens in it are contiguous.
        for start in range(0, T, local.size):
            chunk = entry[name][:, start : start + local.size]
            begin_B = first_B + start
            end_B = begin_B + jnp.clip(counts_B - start, 0, chunk.shape[1])
            slot_B, stop_B = local.num_held(begin_B), local.num_held(end_B)
            skip_B = local.position(slot_B) - begin_B  # leading tokens that other chips hold
            until_B = skip_B + stop_B - slot_B
            layer[name] = _write(layer[name], chunk, slot_B - skip_B, skip_B, until_B)
    return layer


def _write(array: jax.Array, entry: jax.Array, first_B, skip_B, until_B) -> jax.Array:
    """Writes tokens t in [skip_B, until_B) to slots first_B + t, in place.

    A loop over sequences reads, modifies and writes whole blocks of 128 tokens. On TPUs the loop is
    unrolled: for a rolled loop, a scatter or single columns, XLA chooses another layout and copies
    the whole cache to it and back. For bytes it does so for several writes in any form, so that a
    kernel writes them (`tpu_write`). The loops unroll during lowering; a Python loop would also
    make tracing slower on all platforms. On other platforms, one token for each of several
    sequences is a scatter, which moves the fewest bytes.
    """
    entry = jnp.moveaxis(entry, 1, -1).astype(array.dtype)  # [B, *shape, T]
    T, S = entry.shape[-1], array.shape[-1]
    if T > S:
        raise ValueError(f"{T} tokens at once exceed the capacity of {S}")
    window = min(round_up(T + LANES - 1, LANES), S)
    entry = jnp.pad(entry, [(0, 0)] * (entry.ndim - 1) + [(0, window - T)])

    def updated(b, array, entry, first_B, skip_B, until_B):
        """Returns blocks [1, *shape, window] of sequence b with its new tokens; their origin."""
        first = first_B[b]
        start = jnp.minimum((first + skip_B[b]) // LANES * LANES, S - window)
        origin = [jnp.asarray(i, start.dtype) for i in (b, *(0,) * (array.ndim - 2), start)]
        old = jax.lax.dynamic_slice(array, origin, (1, *array.shape[1:-1], window))
        token = start + jnp.arange(window) - first
        new = jax.lax.dynamic_slice_in_dim(entry, b, 1, axis=0)
        if T == 1:
            new = jnp.broadcast_to(new[..., :1], old.shape)
        else:
            new = jnp.roll(new, first - start, axis=-1)
        keep = (token >= skip_B[b]) & (token < until_B[b])
        return jnp.where(jnp.broadcast_to(keep, new.shape), new, old), origin

    def scatter(array, entry, first_B, skip_B, until_B):
        slot_B = jnp.where(until_B > skip_B, first_B, S)  # slot S is out of bounds: dropped
        column = array.at[jnp.arange(array.shape[0]), ..., slot_B]
        return column.set(entry[..., 0], mode="drop", unique_indices=True)

    def loop(array, *new, unroll=False):
        def body(b, array):
            return jax.lax.dynamic_update_slice(array, *updated(b, array, *new))

        return jax.lax.fori_loop(0, entry.shape[0], body, array, unroll=unroll)

    def by_kernel(array, *new):
        from kvjax.cache import tpu_write  # Pallas takes a quarter of all import time

        def body(_, b):
            blocks, origin = updated(b, array, *new)
            return None, (blocks[0], origin[-1])

        _, (blocks, start_B) = jax.lax.scan(body, None, jnp.arange(entry.shape[0]), unroll=True)
        return tpu_write.write_blocks(array, blocks, start_B)

    arguments = (array, entry, first_B, skip_B, until_B)
    on_tpu = by_kernel if array.dtype.itemsize == 1 else functools.partial(loop, unroll=True)
    elsewhere = scatter if T == 1 and array.shape[0] > 1 else loop
    return jax.lax.platform_dependent(*arguments, tpu=on_tpu, default=elsewhere)


def check_capacity(lengths: np.ndarray, counts: np.ndarray, capacity: int) -> None:
    """Raises a UserError if a sequence would outgrow the cache.

    Args:
      lengths, counts: [B] on the host: cached tokens, and tokens to append.
    """
    after = np.asarray(lengths) + np.asarray(counts)
    if after.size and after.max() > capacity:
        b = int(after.argmax())
        raise UserError(
            f"sequence {b + 1} holds {int(np.asarray(lengths)[b])} tokens and "
            f"{int(after[b] - np.asarray(lengths)[b])} more follow: {int(after[b])} exceed the "
            f"cache's capacity of {capacity}; allocate a larger cache or generate fewer tokens"
        )


def live_bytes(cache: Cache) -> int:
    """Returns the bytes of the cache's (real or abstract) arrays, without lengths."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(cache.layers))
