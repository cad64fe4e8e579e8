"""Fields of a cache entry: names, axes and sizes of what a mechanism stores per token."""

import dataclasses
from typing import Protocol

import jax.numpy as jnp

from kvjax.layers.weight import HEAD_AXES, check_letters


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of a cache entry, with its axes and its shape per token: Field("J H", (1, 128)).

    An axis N, K or J counts heads: query head n of N reads index n·heads // N. A field without a
    head axis is read by every head. An axis of length 1 may be written "1".
    """

    axes: str
    shape: tuple[int, ...]
    wide: bool = False  # at least float32, whatever the compute dtype
    keeps: bool = False  # in the compute dtype, also in a quantised cache
    dtype: jnp.dtype | None = None  # the same for every compute dtype

    def __post_init__(self):
        names = self.axes.split()
        check_letters(self.axes, (name for name in names if name != "1"))
        if len(names) != len(self.shape):
            raise ValueError(f"Field({self.axes!r}, {self.shape}): one size for each axis")

    @property
    def head_axis(self) -> int | None:
        """Index of the axis that counts heads, or None."""
        return next((i for i, name in enumerate(self.axes.split()) if name in HEAD_AXES), None)

    @property
    def heads(self) -> int | None:
        """Number of heads in the field, or None."""
        return None if self.head_axis is None else self.shape[self.head_axis]

    def dtype_in(self, compute: jnp.dtype) -> jnp.dtype:
        """Returns the field's dtype in a model that computes in `compute`."""
        if self.dtype is not None:
            return self.dtype
        return jnp.promote_types(compute, jnp.float32) if self.wide else jnp.dtype(compute)


class HasCacheEntry(Protocol):
    """The part of a mechanism's config that a cache depends on."""

    @property
    def title(self) -> str:
        """The mechanism's name in messages."""

    def entry(self) -> dict[str, Field]:
        """Returns the fields stored per token and layer."""
