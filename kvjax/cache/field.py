"""What a cache keeps of one token: a mechanism's entry is a dict of these, by name."""

import dataclasses
from typing import Protocol

import jax.numpy as jnp

from kvjax.layers.weight import HEAD_AXES, check_letters


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of a cache entry: Field("J H", (1, 128)), its axes and shape per token.

    An axis of N, K or J counts heads: query head n reads n·heads // N of it. A field without one is
    read whole by every head. An axis of one element may be "1".
    """

    axes: str
    shape: tuple[int, ...]
    wide: bool = False  # float32 or wider, whatever the compute dtype

    def __post_init__(self):
        names = self.axes.split()
        check_letters(self.axes, (name for name in names if name != "1"))
        if len(names) != len(self.shape):
            raise ValueError(f"Field({self.axes!r}, {self.shape}): one size for each axis")

    @property
    def head_axis(self) -> int | None:
        """Which axis counts heads, if one does."""
        found = (i for i, name in enumerate(self.axes.split()) if name in HEAD_AXES)
        return next(found, None)

    @property
    def heads(self) -> int | None:
        """How many heads it has of its own, or None."""
        return None if self.head_axis is None else self.shape[self.head_axis]

    def dtype_in(self, compute: jnp.dtype) -> jnp.dtype:
        """Its dtype in a model that computes in `compute`."""
        return jnp.promote_types(compute, jnp.float32) if self.wide else jnp.dtype(compute)


class HasCacheEntry(Protocol):
    """What a cache can be made for: of a mechanism's config it needs to know nothing else."""

    def entry(self) -> dict[str, Field]:
        """What the cache keeps per token and layer."""
