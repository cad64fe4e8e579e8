"""Multi-head low-rank attention (MLRA, arXiv 2603.02188, sections 3.2 to 3.4).

    o_n = G^-1/2 sum_g softmax(s q_n·[c_l W_gn^UK, r]) c_l W_gn^UV        l = (g, n·J // N)

Each head has G softmaxes, one per branch, and each branch has its own latents. (MLA sums the
branches' logits inside one softmax, so this is a different model.) G = 4, J = 1 is MLRA-4; G = 2,
J = 2 is MLRA-2. Cache: G·J latents of C channels, one rotated key of P: G·J·C + P elements.
Implemented as GLA with G·N heads whose branches share queries and output projection.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.gla import GLA, GLAConfig
from kvjax.attention.mechanism import MAX_DIM
from kvjax.cache.field import Field
from kvjax.foundation.configuration import between
from kvjax.layers.rope import Positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLRAConfig(GLAConfig):
    """Sizes N, G, J, C, P, H and Hv."""

    num_branches: int  # branches, G, each with a softmax per head
    num_latents: int  # latents of each branch, J; divides num_heads

    def __post_init__(self):
        super().__post_init__()
        between("config.attention.num_branches", self.num_branches, 1, MAX_DIM)

    @property
    def title(self) -> str:
        return f"MLRA-{self.num_branches}, latents {self.latent_dim}"

    @property
    def query_heads(self) -> int:
        return self.num_branches * self.num_heads

    def entry(self) -> dict[str, Field]:
        latents = (self.num_branches, self.num_latents, self.latent_dim)
        return super().entry() | {"latent": Field("G J C", latents)}

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "MLRA":
        return MLRA(self, d_model, rngs=rngs)


class MLRA(GLA):
    """GLA on queries repeated for each branch; outputs are summed over branches / sqrt(G)."""

    latents = "G J"

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        q_BTNH, raw = super().project(x_BTD, positions)
        return jnp.tile(q_BTNH, (1, 1, self.config.num_branches, 1)), raw

    def combine(self, o_BTNV: jax.Array, positions: Positions) -> jax.Array:
        del positions
        B, T, _, Hv = o_BTNV.shape
        o_BTGNV = o_BTNV.reshape(B, T, self.config.num_branches, -1, Hv)
        return jnp.sum(o_BTGNV, axis=2) * self.config.num_branches**-0.5
