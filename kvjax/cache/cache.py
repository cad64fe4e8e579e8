"""The KV cache: one set of arrays per layer, allocated once and written in place.

Every array is [B, *field.shape, S] with tokens along the last axis: on a TPU tokens lie on lanes
and no field is padded to 128 of them, and one sequence's append is a write in place. Layers are
separate arrays, since a stack of them costs copies of a whole layer at every step. Donate the
cache to the jitted step that returns it; then a step allocates nothing that grows with S.

Over several chips each array is split along S, and a chip's slots hold stripes of every sequence
(`kvjax.cache.stripes`): in place too, each chip what it holds.
"""

from collections.abc import Iterable
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from kvjax.cache import stripes
from kvjax.cache.field import HasCacheEntry
from kvjax.foundation.errors import UserError
from kvjax.foundation.rounding import round_up

LANES = 128  # capacities are multiples of this


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What is kept of B sequences, each with a length of its own.

    Attributes:
      layers: per layer, the arrays of its mechanism's entry by name.
      lengths: [B] int32, the tokens held of each sequence; what lies behind them must be finite,
        and counts for nothing.
    """

    layers: tuple[dict[str, jax.Array], ...]
    lengths: jax.Array

    @property
    def capacity(self) -> int:
        """S, the tokens a sequence can grow to."""
        return next(iter(self.layers[0].values())).shape[-1]


def abstract(
    mechanisms: Iterable[HasCacheEntry],
    *,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    chips: int = 1,
) -> Cache:
    """The cache as ShapeDtypeStructs.

    Args:
      mechanisms: one mechanism config per layer.
      capacity: tokens per sequence, rounded up to a multiple of 128 per chip.
      dtype: the compute dtype; fields that stay wide (1/rms) are float32 or wider.
      chips: that its tokens can be split over.
    """
    slots = round_up(capacity, LANES * chips)
    layers = tuple(
        {
            name: jax.ShapeDtypeStruct((batch, *field.shape, slots), field.dtype_in(dtype))
            for name, field in mechanism.entry().items()
        }
        for mechanism in mechanisms
    )
    return Cache(layers, jax.ShapeDtypeStruct((batch,), jnp.int32))


def allocate(
    mechanisms: Iterable[HasCacheEntry], *, batch: int, capacity: int, dtype: jnp.dtype
) -> Cache:
    """An empty cache; see `abstract`."""
    return empty(abstract(mechanisms, batch=batch, capacity=capacity, dtype=dtype))


def empty(shapes: Cache) -> Cache:
    """An empty cache of these shapes, where their shardings say; no chip ever holds more."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


def append(
    layer: dict[str, jax.Array],
    entry: dict[str, jax.Array],
    first_B: jax.Array,
    counts_B: jax.Array,
) -> dict[str, jax.Array]:
    """The layer with token t of sequence b in slot first_B[b] + t, for t < counts_B[b].

    What does not fit is dropped: no slot that holds a token is ever overwritten by another
    sequence's or a later token (`check_capacity` is where that becomes an error).

    Args:
      layer: arrays [B, *shape, S].
      entry: arrays [B, T, *shape] of the same names, T at most S.
    """
    if layer.keys() != entry.keys():
        raise ValueError(f"the cache has {sorted(layer)}, the entry {sorted(entry)}")
    if stripes.num_chips() == 1:
        none_B = jnp.zeros_like(first_B)
        return {name: _write(layer[name], entry[name], first_B, none_B, counts_B) for name in layer}
    specs = {name: stripes.spec(array) for name, array in layer.items()}
    split = dict(in_specs=(specs, P(), P(), P()), out_specs=specs, check_vma=False)
    return jax.shard_map(_append_held, **split)(layer, entry, first_B, counts_B)


def _append_held(layer: dict, entry: dict, first_B: jax.Array, counts_B: jax.Array) -> dict:
    """The part of `append` that is one chip's."""
    layer = dict(layer)
    for name, array in layer.items():
        held = stripes.local_stripes(array.shape[-1])
        T = entry[name].shape[1]
        # A piece is no longer than a stripe: a chip's tokens of it are one run, in its slots too.
        for start in range(0, T, held.size):
            piece = entry[name][:, start : start + held.size]
            begin_B = first_B + start
            end_B = begin_B + jnp.clip(counts_B - start, 0, piece.shape[1])
            slot_B, stop_B = held.num_held(begin_B), held.num_held(end_B)
            skip_B = held.position(slot_B) - begin_B  # tokens before it are other chips'
            until_B = skip_B + stop_B - slot_B
            layer[name] = _write(layer[name], piece, slot_B - skip_B, skip_B, until_B)
    return layer


def _write(array: jax.Array, entry: jax.Array, first_B, skip_B, until_B) -> jax.Array:
    """Tokens skip_B .. until_B - 1 to slots first_B + t, by whatever leaves the array in place.

    A loop of read-modify-writes of whole runs of 128 tokens. For a TPU it is unrolled: for a loop
    as such, a scatter or single columns, XLA prefers another layout there, and copies the whole
    cache to it and back. That happens in lowering: unrolled in Python, the branch for TPUs made
    tracing grow with the batch on every device. Elsewhere one token for each of several sequences
    is a scatter, which moves no more than it must.
    """
    entry = jnp.moveaxis(entry, 1, -1).astype(array.dtype)  # [B, *shape, T]
    T, S = entry.shape[-1], array.shape[-1]
    if T > S:
        raise ValueError(f"{T} tokens at once, and a capacity of {S}")
    window = min(round_up(T + LANES - 1, LANES), S)
    entry = jnp.pad(entry, [(0, 0)] * (entry.ndim - 1) + [(0, window - T)])

    def one(b, array, entry, first_B, skip_B, until_B):
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
        new = jnp.where(jnp.broadcast_to(keep, new.shape), new, old)
        return jax.lax.dynamic_update_slice(array, new, origin)

    def scatter(array, entry, first_B, skip_B, until_B):
        slot_B = jnp.where(until_B > skip_B, first_B, S)  # nothing has slot S: dropped
        here = array.at[jnp.arange(array.shape[0]), ..., slot_B]
        return here.set(entry[..., 0], mode="drop", unique_indices=True)

    def loop(array, *new, unroll=False):
        body = lambda b, array: one(b, array, *new)
        return jax.lax.fori_loop(0, entry.shape[0], body, array, unroll=unroll)

    arguments = (array, entry, first_B, skip_B, until_B)
    on_tpu = functools.partial(loop, unroll=True)
    elsewhere = scatter if T == 1 and array.shape[0] > 1 else loop
    return jax.lax.platform_dependent(*arguments, tpu=on_tpu, default=elsewhere)


def check_capacity(lengths: np.ndarray, counts: np.ndarray, capacity: int) -> None:
    """Raises a UserError if a sequence would outgrow the cache.

    Args:
      lengths, counts: [B] on the host: tokens held, and tokens to be appended.
    """
    after = np.asarray(lengths) + np.asarray(counts)
    if after.size and after.max() > capacity:
        b = int(after.argmax())
        raise UserError(
            f"sequence {b + 1} holds {int(np.asarray(lengths)[b])} tokens and "
            f"{int(after[b] - np.asarray(lengths)[b])} more are to come: {int(after[b])} exceed "
            f"the cache's capacity of {capacity}; allocate a larger cache or generate fewer tokens"
        )


def live_bytes(cache: Cache) -> int:
    """Bytes of the cache's arrays as they are (or would be, if abstract), lengths left out."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(cache.layers))
