"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1).

    k_n = [c W_n^UK, r]        v_n = c W_n^UV        c = norm(x W^D),  r = Rot(norm(x W^KR))

with queries [q_n, Rot(q_n^R)]. Cache: one latent c of C channels and one rotated key r of P for all
heads, C + P elements. Decoding absorbs W^UK into the query and W^UV into the output; that
is exact, because only r is rotated. Variants: several latents (`gla.py`), low-rank residuals per
head (`mla_lrkv.py`), no RoPE key (`mla_paper.py`).
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention.mechanism import (
    Mechanism,
    MechanismConfig,
    check_common,
    head_norm,
    latent_norm,
    log_unprepared,
    normalise_and_rotate,
    scaled_latent,
)
from kvjax.cache.field import Field
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.latent import LatentSizes
from kvjax.layers.rope import Base, Positions
from kvjax.layers.weight import linear, weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig(MechanismConfig):
    """Sizes N, C, P, H and Hv."""

    latent_dim: int  # channels of the latent, C
    rope_key_dim: int  # channels of the rotated key that all heads share, P
    key_dim: int  # channels of a key that come from the latent, H
    value_dim: int  # channels of a value, Hv
    qk_norm: str = "rms"  # norm of query and RoPE key
    norm_latent: bool = True  # norm of the latent; False: keys and values are linear in the input
    qk_bias: bool = False  # biases of queries and of the RoPE key

    def __post_init__(self):
        check_common(self, "latent_dim", "rope_key_dim", "value_dim", has_latent=self.norm_latent)

    @property
    def title(self) -> str:
        return f"MLA, latent {self.latent_dim}"

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rope_key_dim

    def entry(self) -> dict[str, Field]:
        return {
            "latent": Field("C", (self.latent_dim,)),
            "rope_key": Field("P", (self.rope_key_dim,), keeps=True),
        }

    @property
    def absorbed(self) -> tuple[str, ...]:
        return ("up_key", "up_value")

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        del rope_base  # the cached key is already rotated
        shape = dict(N=self.query_heads, C=self.latent_dim, P=self.rope_key_dim, Hv=self.value_dim)
        return LatentSizes(**shape, absorbed_channels=self.key_dim).flops()

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "MLA":
        return MLA(self, d_model, rngs=rngs)


class MLA(Mechanism):
    """Content keys and values from a normed latent, position from one shared key."""

    # RoPE's between others: `prepare_latent` reads 32 channels beyond them on both sides.
    packable = ("down", "rope_key", "rope_query", "query", "query_down")
    latents = ""  # axes over several latents: "J" in GLA, "G J" in MLRA

    def __init__(self, config: MLAConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = c = config
        dims = c.entry()["latent"].shape
        counts = dict(zip(self.latents.split(), dims[:-1], strict=True))
        sizes = dict(D=d_model, C=c.latent_dim, H=c.key_dim, P=c.rope_key_dim, **counts)
        up_sizes = sizes | dict(N=c.num_heads // counts.get("J", 1))  # heads that read one latent
        sizes |= dict(N=c.num_heads)
        axes = f"{self.latents} C".strip()
        up = f"{self.latents}: C -> N H".removeprefix(": ")
        self.query = self.query_weight("N H", d_model, rngs=rngs, **sizes)
        self.down = weight(f"D -> {axes}", rngs, **sizes)
        self.up_key = weight(up, rngs, **up_sizes)
        self.up_value = weight(up, rngs, **up_sizes | dict(H=c.value_dim))
        self.rope_query = self.query_weight("N P", d_model, rngs=rngs, **sizes)
        self.rope_key = weight("D -> P", rngs, **sizes)
        self.latent_norm = latent_norm(c, dims, axes, rngs=rngs) if c.norm_latent else None
        self.query_norm = head_norm(c, c.key_dim, rngs=rngs)
        self.rope_query_norm = head_norm(c, c.rope_key_dim, rngs=rngs)
        self.rope_key_norm = head_norm(c, c.rope_key_dim, rngs=rngs)
        biased = dict(rngs=rngs, init="zeros", **sizes)
        self.query_bias = weight("N H", **biased) if c.qk_bias else None
        self.rope_query_bias = weight("N P", **biased) if c.qk_bias else None
        self.rope_key_bias = weight("P", **biased) if c.qk_bias else None
        self.add_query_latent(d_model, rngs=rngs)

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        query_input = self.query_input(x_BTD)
        q_BTNH = self.product(query_input, "query")
        q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, None)
        q_BTNP = self.product(query_input, "rope_query")
        q_BTNP = normalise_and_rotate(q_BTNP, self.rope_query_norm, positions.rotary)
        k_BT1P = self.product(x_BTD, "rope_key")[:, :, None]
        latent_BTC = self.product(x_BTD, "down")
        if self.latent_norm is not None:
            latent_BTC = scaled_latent(self.config, self.latent_norm(latent_BTC), x_BTD.shape[-1])
        raw = {
            "latent": latent_BTC,
            "rope_key": normalise_and_rotate(k_BT1P, self.rope_key_norm, positions.rotary)[:, :, 0],
        }
        return jnp.concatenate([q_BTNH, q_BTNP], axis=-1), raw

    def prepare(
        self,
        x_BTD: jax.Array,
        positions: Positions,
        layer: dict[str, jax.Array],
        counts_B: jax.Array,
        *,
        rope_base: Base | None,
        **options,
    ) -> tuple[DecodeInputs, dict[str, jax.Array]] | None:
        """Takes one token per sequence of plain MLA, in bfloat16 on a GPU; see `Mechanism.prepare`.

        Not of subclasses, which have other latents or queries.
        """
        if type(self) is not MLA:
            return None
        c, inputs = self.config, self.gpu_inputs(x_BTD, layer, rope_base, **options)
        if inputs is None:
            return None
        from kvjax.kernels.decode_attention.gpu import prepare_latent  # when called, see `api`

        sizes = prepare_latent.Sizes(
            N=c.num_heads,
            H=c.key_dim,
            C=c.latent_dim,
            columns=prepare_latent.columns(inputs, layer),
            latent_epsilon=None if self.latent_norm is None else c.norm_epsilon,
            epsilon=None if self.query_norm is None else c.norm_epsilon,
            first=tuple((name, first) for name, first, _ in self.packed_columns),
        )
        plain = c.qk_norm in ("none", "rms") and not (c.query_rank or c.qk_bias or c.latent_scale)
        if not self.packed_columns:
            reason = "takes projections that are packed into one matrix"
        elif not plain:
            reason = "takes no low-rank queries, gains of norms, biases or scaled latents"
        else:
            reason = prepare_latent.refusal(sizes, layer, x_BTD.dtype)
        if reason:
            log_unprepared(reason)
            return None
        new = (layer, self.packed[...], x_BTD[:, 0], positions, counts_B)
        options = dict(up_key_CNH=self.up_key[...], decode_inputs=self._latent_inputs)
        return prepare_latent.into_cache(*new, sizes=sizes, **options)

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        k_BTNH, v_BTNH = self.expand_latent(raw)
        k_BT1P = raw["rope_key"][:, :, None]
        k_BTNP = jnp.broadcast_to(k_BT1P, k_BTNH.shape[:3] + k_BT1P.shape[3:])
        return jnp.concatenate([k_BTNH, k_BTNP], axis=-1), v_BTNH

    def expand_latent(self, raw: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the content channels of keys [B, T, N, H], and values [B, T, N, Hv]."""
        return linear(raw["latent"], self.up_key[...]), linear(raw["latent"], self.up_value[...])

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        """Absorbs up_key into the content query (DeepSeek-V2, section 2.1)."""
        del rope_base  # the cached key is already rotated
        q_BTNH, q_BTNP = jnp.split(q_BTNH, [self.config.key_dim], axis=-1)
        wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
        q_BTNC = jnp.einsum("BTNH,CNH->BTNC", q_BTNH, self.up_key[...], preferred_element_type=wide)
        return self._latent_inputs(q_BTNC, q_BTNP)

    def _latent_inputs(self, q_BTNC: jax.Array, q_BTNP: jax.Array) -> DecodeInputs:
        up_value = self.up_value[...][None]
        options = dict(rope_query=q_BTNP, up_value=up_value, scale=self.config.scale)
        return cache_layouts.LatentInputs(query=q_BTNC, **options)
