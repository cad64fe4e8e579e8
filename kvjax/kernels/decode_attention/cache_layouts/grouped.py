"""Keys and values cached in the form that attention reads: MHA, GQA, MQA, thin keys, Q=K-V."""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.cache_layouts import tiles
from kvjax.kernels.decode_attention.cache_layouts.layout import (
    Bias,
    Cache,
    DecodeFlops,
    DecodeInputs,
    Tiles,
    pytree,
    static,
)


@pytree
class GroupedInputs(DecodeInputs):
    """cache: base_key [B, K, H, S], base_value [B, K, Hv, S]."""

    query: jax.Array  # [B, T, N, H]
    bias: Bias | None = None
    # The queries as the GPU kernel reads them, if `gpu.prepare` has written them.
    prepared: jax.Array | None = None
    scale: float = static()

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.query, cache["base_key"], cache["base_value"]

    def tiles(self) -> "_Tiles":
        return _Tiles(self)


class _Tiles(Tiles):
    large_logits = False

    def __init__(self, inputs: GroupedInputs):
        self.q_BNTH = jnp.moveaxis(inputs.query, 2, 1)

    def widths(self, cache: Cache) -> tuple[int, ...]:
        return (cache["base_value"].shape[2],)

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        del start
        return tiles.dot(self.q_BNTH, tile["base_key"])

    def weighted_sums(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        return (tiles.weighted_sum(p_BNTs, tile["base_value"]),)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        return outputs[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSizes:
    """N query heads on K KV heads, key dim H, value dim Hv."""

    N: int
    K: int
    H: int = 128
    Hv: int = 128

    def example(self, draw: Callable[..., jax.Array], B: int) -> GroupedInputs:
        return GroupedInputs(query=draw(B, 1, self.N, self.H), scale=self.H**-0.5)

    def fields(self) -> dict[str, tuple[int, ...]]:
        return dict(base_key=(self.K, self.H), base_value=(self.K, self.Hv))

    def flops(self) -> DecodeFlops:
        return DecodeFlops(0, 2 * self.N * (self.H + self.Hv))
