"""One latent for all heads, which is key and value: absorbed MLA."""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from kvjax.kernels.decode_attention.readings import tiles
from kvjax.kernels.decode_attention.readings.reading import Cache
from kvjax.kernels.decode_attention.readings.reading import DecodeFlops
from kvjax.kernels.decode_attention.readings.reading import Reading
from kvjax.kernels.decode_attention.readings.reading import reading
from kvjax.kernels.decode_attention.readings.reading import static


@reading
class LatentReading(Reading):
    """key = [latent, rope_key], value = latent up_value (DeepSeek-V2, section 2.1).

    cache: latent [B, C, S], rope_key [B, P, S].
    """

    query: jax.Array  # [B, T, N, C]: the content query times up_key
    rope_query: jax.Array  # [B, T, N, P]
    up_value: jax.Array  # [C, N, Hv]
    scale: float = static()

    def expand(self, cache: Cache) -> tuple[jax.Array, jax.Array, jax.Array]:
        query = jnp.concatenate([self.query, self.rope_query], axis=-1)
        k = jnp.concatenate([cache["latent"], cache["rope_key"]], axis=-1)[:, :, None]
        return query, k, jnp.einsum("BSC,CNV->BSNV", cache["latent"], self.up_value)

    def tiles(self) -> "LatentTiles":
        return LatentTiles(self)


class LatentTiles:
    """Latents weighed as they lie; the sum becomes values."""

    expands = False

    def __init__(self, o: LatentReading):
        self.o = o
        self.q_BNTC, self.q_BNTP = (jnp.moveaxis(q, 2, 1) for q in (o.query, o.rope_query))

    def widths(self, cache: Cache) -> tuple[int, ...]:
        return (cache["latent"].shape[1],)

    def logits(self, tile: Cache, start: jax.Array) -> jax.Array:
        del start
        content = tiles.dot(self.q_BNTC, tile["latent"][:, None])
        return content + tiles.dot(self.q_BNTP, tile["rope_key"][:, None])

    def weigh(self, p_BNTs: jax.Array, tile: Cache) -> tuple[jax.Array, ...]:
        return (tiles.weigh(p_BNTs, tile["latent"][:, None]),)

    def finish(self, outputs: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.einsum("BNTC,CNV->BNTV", outputs[0], self.o.up_value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """N query heads on a latent of C channels and a rotated key of P, values of Hv channels."""

    N: int
    C: int
    P: int = 64
    Hv: int = 128

    def reading(self, draw: Callable[..., jax.Array], B: int) -> LatentReading:
        return LatentReading(
            query=draw(B, 1, self.N, self.C),
            rope_query=draw(B, 1, self.N, self.P),
            up_value=draw(self.C, self.N, self.Hv) / self.C**0.5,
            scale=(self.C + self.P) ** -0.5,
        )

    def fields(self) -> dict[str, tuple[int, ...]]:
        return dict(latent=(self.C,), rope_key=(self.P,))

    def flops(self) -> DecodeFlops:
        N, C = self.N, self.C
        return DecodeFlops(2 * N * C * self.Hv, 2 * N * (2 * C + self.P))
