"""The KV cache of one attention layer, as the library's functions pass it around."""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp

from kvjax import cache as cache_lib
from kvjax.cache import quantized
from kvjax.cache.cache import LANES
from kvjax.foundation.rounding import round_up
from kvjax.library import layouts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Cached tokens of B sequences in one attention layer. A pytree: jit, scan and donate it.

    Attributes:
      arrays: the layout's arrays by name. Their storage order may change between versions: fill a
        cache with `append` or by `kvjax.Attention`, and read it with `kvjax.decode_attention`.
      lengths: [B] int32, number of cached tokens of each sequence.
    """

    arrays: dict[str, jax.Array]
    lengths: jax.Array

    @classmethod
    def allocate(
        cls,
        layout: str,
        *,
        batch: int,
        capacity: int,
        dtype=jnp.bfloat16,
        cache_dtype: str = "",
        **sizes: int,
    ) -> "KVCache":
        """Allocates an empty cache of a layout.

        Args:
          layout: a name of `kvjax.LAYOUTS`.
          capacity: tokens per sequence, rounded up to a multiple of 128.
          cache_dtype: "int8" or "int4", see `kvjax.Attention.cache`; "": all in `dtype`.
          sizes: the layout's sizes by letter, as K=8, H=128; Hv is H, and Rv is R by default.
        """
        fields = layouts.abstract_fields(
            layout,
            batch=batch,
            capacity=round_up(capacity, LANES),
            dtype=dtype,
            cache_dtype=cache_dtype,
            sizes=sizes,
        )
        arrays = {name: jnp.zeros(x.shape, x.dtype) for name, x in fields.items()}
        return cls(arrays, jnp.zeros((batch,), jnp.int32))

    def append(self, entry: Mapping[str, jax.Array], counts: jax.Array | None = None) -> "KVCache":
        """Appends T tokens to every sequence; tokens beyond the capacity are dropped.

        Args:
          entry: the new tokens, [B, T, ...] for each array of the cache.
          counts: [B] int32 number of real tokens among the T, 0 to T; None: T.

        Raises:
          ValueError: a missing name, or another shape than the cache's.
        """
        entry = {name: jnp.asarray(x) for name, x in entry.items()}
        held = quantized.dequantized_shapes(self.arrays)
        if entry.keys() != held.keys():
            raise ValueError(f"entry has {sorted(entry)}: must have {sorted(held)}")
        B, T = len(self.lengths), next(iter(entry.values())).shape[1]
        for name, x in entry.items():
            shape = held[name].shape[1:-1]
            if x.shape != (B, T, *shape):
                expected = ["B", "T", *shape]
                raise ValueError(
                    f"entry[{name!r}] has shape {list(x.shape)}: expected "
                    f"[{', '.join(map(str, expected))}] with B = {B}, T = {T}"
                )
        counts = jnp.full((B,), T) if counts is None else counts
        counts = jnp.asarray(counts, jnp.int32)
        arrays = cache_lib.append(self.arrays, entry, self.lengths, counts)
        return KVCache(arrays, self.lengths + counts)

    @property
    def capacity(self) -> int:
        """Largest number of tokens of a sequence."""
        return next(iter(self.arrays.values())).shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; they do not depend on the lengths."""
        return sum(x.size * x.dtype.itemsize for x in self.arrays.values())
