"""The grouped family: MHA, GQA, MQA, LRKV, LRKV x GQA, thin keys, projection sharing and MFA.

    K_k = Base^K[j(k)] + R^K_k B^K_k        V_k = Base^V[j(k)] + R^V_k B^V_k        # LRKV eq. 2

N query heads read K KV heads, which share J bases and add residuals of rank R; R^K = X U^K are the
residual latents (B is stored transposed, [R, H]).

    J = K, R = 0       MHA (K = N), GQA, MQA (K = 1)
    J = 1, K = N       LRKV; J > 1: LRKV x GQA
    H < Hv             thin keys
    J = K = 1, R = 0   MFA (arXiv 2412.19255), with heads of 256 channels and low-rank queries

Cache: J·(H + Hv) + 2·K·R elements, and K float32 1/rms if keys with residuals are normed; J·H + K·R
elements if values are the keys.

Projection sharing (arXiv 2606.04032, eq. 2-4; `tie`): "kv" is Q-K=V, values are the keys before
norm and RoPE; "qk" is Q=K-V, queries are the keys; "qkv" is Q=K=V. `position_channels` is that
paper's "+", `alibi` is ALiBi (arXiv 2108.12409); see `position_bias.py` for both.
"""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax.attention import position_bias
from kvjax.attention.mechanism import (
    MAX_DIM,
    QK_NORMS,
    Mechanism,
    MechanismConfig,
    check_common,
    check_divides,
    check_residual,
    gain_of,
    head_norm,
    log_unprepared,
    normalise_and_rotate,
    require,
    times_gain,
    whole_norm,
)
from kvjax.attention.pca_init import pca_factors
from kvjax.cache.field import Field
from kvjax.foundation.configuration import between, one_of
from kvjax.kernels.decode_attention import cache_layouts
from kvjax.kernels.decode_attention.cache_layouts import DecodeFlops, DecodeInputs
from kvjax.kernels.decode_attention.cache_layouts.grouped import GroupedSizes
from kvjax.kernels.decode_attention.cache_layouts.layout import Sizes
from kvjax.kernels.decode_attention.cache_layouts.residual import ResidualSizes
from kvjax.kernels.decode_attention.cache_layouts.tied import TiedSizes
from kvjax.layers.norm import inverse_rms
from kvjax.layers.rope import Base, Positions, rotate
from kvjax.layers.weight import weight

TIES = ("none", "kv", "qk", "qkv")
ROPES = ("full", "shared")
_PLAIN_NORMS = ("rms_whole", "rms_offset")  # not for residuals and ties
_QK_NORMS = (*QK_NORMS, *_PLAIN_NORMS)
RESIDUAL_INITS = ("linear", "zeros", "pca")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConfig(MechanismConfig):
    """Sizes N, K, J, R, H and Hv, and the family's variants."""

    num_kv_heads: int  # KV heads, K; divides num_heads
    num_bases: int  # bases, J; divides num_kv_heads
    rank: int  # rank of the residuals, R; 0: no residuals
    key_dim: int  # channels of a key, H
    value_dim: int  # channels of a value, Hv
    # Norm of queries and keys (base + residual): "rms", "rms_gain", "none"; without residuals and
    # ties also "rms_whole", of all heads' channels together, with gains, and "rms_offset", with
    # gains 1 + the weight.
    qk_norm: str = "rms"
    bias: bool = False  # on queries, bases and the output
    out_bias: bool = True  # with bias: on the output too
    latent_bias: bool = False  # with bias: on the latents of residuals too
    # Initial B: "linear" like every matrix; "zeros" (the model starts as MQA); "pca": base, U and B
    # are the best approximation of K independent random heads.
    residual_init: str = "linear"
    # In a model with RoPE: "full" rotates base + residual. "shared" rotates the base alone and
    # scores the residual with the unrotated query, a different model that is cheaper to decode.
    rope: str = "full"
    tie: str = "none"  # "kv": Q-K=V; "qk": Q=K-V; "qkv": Q=K=V; "none"
    position_channels: int = 0  # m of "+" in projection sharing, even; 0: none
    alibi: bool = False  # linear biases on logits, one slope per head
    logit_scale: float = 0.0  # factor on logits; 0: 1/sqrt(key_dim)

    def __post_init__(self):
        check_common(self, "num_kv_heads", "num_bases", "value_dim", qk_norms=_QK_NORMS)
        plain = self.qk_norm not in _PLAIN_NORMS or (not self.rank and self.tie == "none")
        require(plain, "qk_norm", repr(self.qk_norm), "needs rank 0 and tie 'none'")
        check_divides(self, "num_kv_heads", "num_heads")
        check_divides(self, "num_bases", "num_kv_heads")
        check_residual(self, "MQA", RESIDUAL_INITS)
        between("config.attention.logit_scale", self.logit_scale, 1e-6, 1e3, zero="1/sqrt(key_dim)")
        one_of("config.attention.rope", self.rope, ROPES)
        one_of("config.attention.tie", self.tie, TIES)
        channels = self.position_channels
        between("config.attention.position_channels", channels, 0, MAX_DIM)
        halves = "must be even: half are for the row, half for the column"
        require(channels % 2 == 0, "position_channels", channels, halves)
        exclusive = "must be False if position_channels is not 0"
        require(not (channels and self.alibi), "alibi", self.alibi, exclusive)
        self._check_ties()

    def _check_ties(self) -> None:
        if self.tie == "none":
            return
        tie = repr(self.tie)
        if self.ties_values:
            allowed = f"needs value_dim = {self.value_dim} equal to key_dim = {self.key_dim}"
            require(self.key_dim == self.value_dim, "tie", tie, allowed)
        if self.ties_queries:
            allowed = (
                f"needs num_kv_heads = {self.num_kv_heads} and num_bases = {self.num_bases} "
                f"equal to num_heads = {self.num_heads}, and rank 0"
            )
            require(self.num_bases == self.num_heads and not self.rank, "tie", tie, allowed)
            allowed = f"must be 0 if queries are the keys (tie = {tie})"
            require(not self.query_rank, "query_rank", self.query_rank, allowed)
        require(self.rope == "full", "rope", repr(self.rope), "must be 'full' if keys are tied")

    @property
    def title(self) -> str:
        tied = {"none": "", "kv": "Q-K=V", "qk": "Q=K-V", "qkv": "Q=K=V"}[self.tie]
        if tied:
            tied = f"({tied})+, " if self.position_channels else f"{tied}, "
        thin = f", keys of {self.key_dim}" if self.key_dim < self.value_dim else ""
        low = f", queries of rank {self.query_rank}" if self.query_rank else ""
        return tied + self._head_sharing + thin + low

    @property
    def _head_sharing(self) -> str:
        """Name of the way in which heads share keys and values."""
        bases, heads = self.num_bases, self.num_kv_heads
        if self.rank:
            over = f" over {bases} bases" if bases > 1 else ""
            grouped = f", {heads} KV heads" if heads < self.num_heads else ""
            return f"LRKV{over}{grouped}, rank {self.rank}"
        if bases == self.num_heads:
            return "MHA"
        if bases == 1:
            return "MFA" if self.query_rank else "MQA"
        return f"GQA, {bases} KV heads"

    @property
    def family(self) -> str:
        """Name of the variant, as `foundation.theme` colours it."""
        bases, heads = self.num_bases, self.num_heads
        if self.tie != "none":
            return f"{self.tie}_tied"
        if self.key_dim < self.value_dim:
            return "thin_keys"
        if self.rank:
            return "lrkv" if bases == 1 and self.num_kv_heads == heads else "lrkv_gqa"
        if bases == heads:
            return "mha"
        if self.query_rank:
            return "mfa"
        return "mqa" if bases == 1 else "gqa"

    @property
    def ties_values(self) -> bool:
        return self.tie in ("kv", "qkv")

    @property
    def ties_queries(self) -> bool:
        return self.tie in ("qk", "qkv")

    @property
    def splits_rope(self) -> bool:
        """True if the base is rotated and the residual is not (rope="shared")."""
        return bool(self.rank) and self.rope == "shared"

    @property
    def query_dim(self) -> int:
        copies = 2 if self.splits_rope else 1  # rotated for the base, unrotated for the residual
        return copies * self.key_dim + position_bias.channels(self)

    @property
    def rotated_channels(self) -> slice:
        return slice(0, self.key_dim)  # then the residual's unrotated query, or position channels

    @property
    def key_heads(self) -> int:
        return self.num_kv_heads if self.rank else self.num_bases

    @property
    def scale(self) -> float:
        return self.logit_scale or self.key_dim**-0.5

    def entry(self) -> dict[str, Field]:
        fields = {"base_key": Field("J H", (self.num_bases, self.key_dim))}
        if not self.ties_values:
            fields["base_value"] = Field("J H", (self.num_bases, self.value_dim))
        if self.rank:  # LRKV eq. 5: 2(H + N·R) elements per token
            residual = Field("K R", (self.num_kv_heads, self.rank))
            fields["residual_key"] = residual
            if not self.ties_values:  # tied: decoding norms keys as it reads them
                fields["residual_value"] = residual
                if self.qk_norm != "none":
                    fields["key_scale"] = Field("K 1", (self.num_kv_heads, 1), wide=True)
        return fields

    @property
    def needs_angles(self) -> bool:
        return self.position_channels > 0

    @property
    def absorbed(self) -> tuple[str, ...]:
        return ("expand_key", "expand_value") if self.rank else ()

    def decode_flops(self, rope_base: Base | None) -> DecodeFlops:
        flops = self._sizes(rope_base).flops()
        norm = 0
        if self.rank and self.qk_norm != "none" and not self.ties_values:
            # Expands the new token's keys for their 1/rms.
            norm = self.num_kv_heads * self.key_dim * (2 * self.rank + 3)
        bias = 2 * self.num_heads if self.alibi else self.position_channels
        return DecodeFlops(flops.per_query + norm, flops.per_key + bias)

    def _sizes(self, rope_base: Base | None) -> Sizes:
        """Returns the sizes of the cache layout that decoding uses."""
        shape = dict(N=self.num_heads, K=self.num_kv_heads, H=self.key_dim)
        normed = self.qk_norm != "none"
        if self.ties_values:
            gain = self.qk_norm == "rms_gain"
            residual = dict(J=self.num_bases, R=self.rank, rope_base=rope_base)
            return TiedSizes(**shape, **residual, normed=normed, gain=gain)
        shape |= dict(Hv=self.value_dim)
        if not self.rank:
            return GroupedSizes(**shape)
        rope_base = None if self.splits_rope else rope_base
        residual = dict(J=self.num_bases, R=self.rank, rope_base=rope_base)
        return ResidualSizes(**shape, **residual, scaled=normed)

    def build(self, d_model: int, *, rngs: nnx.Rngs) -> "Grouped":
        return Grouped(self, d_model, rngs=rngs)


class Grouped(Mechanism):
    """Projections to queries, bases and residual latents, and the residuals' factors B."""

    packable = ("base_key", "latent_key", "base_value", "latent_value", "query", "query_down")

    def __init__(
        self, config: GroupedConfig, d_model: int, *, rngs: nnx.Rngs, query_width: int = 0
    ):
        """Creates the weights.

        Args:
          query_width: width of the queries' input in cross attention; 0: d_model.
        """
        self.config = c = config
        query_width = query_width or d_model
        sizes = dict(
            D=d_model, N=c.num_heads, K=c.num_kv_heads, J=c.num_bases, R=c.rank, H=c.key_dim
        )
        value_sizes = sizes | dict(H=c.value_dim)

        def bias(axes, sizes):
            return weight(axes, rngs, init="zeros", **sizes) if c.bias else None

        if not c.ties_queries:
            self.query = self.query_weight("N H", query_width, rngs=rngs, **sizes)
            self.query_bias = bias("N H", sizes)
        self.base_key = weight("D -> J H", rngs, **sizes)  # LRKV eq. 1: W_shared
        self.base_key_bias = bias("J H", sizes)
        if not c.ties_values:
            self.base_value = weight("D -> J H", rngs, **value_sizes)
            self.base_value_bias = bias("J H", value_sizes)
        if c.qk_norm == "rms_whole":
            self.query_norm = whole_norm(c, c.num_heads, "N", rngs=rngs)
            self.key_norm = whole_norm(c, c.num_bases, "J", rngs=rngs)
        else:
            self.query_norm = head_norm(c, c.key_dim, rngs=rngs)
            self.key_norm = head_norm(c, c.key_dim, rngs=rngs)
        if c.position_channels:
            # "+" averages w over m channels, so w = 1 leaves the term w·A of the logits unchanged.
            self.position_map = weight("C", rngs, init="ones", C=c.position_channels)
        # Drawn last, so that models of equal seed share all other weights.
        if c.rank:
            init = "zeros" if c.residual_init == "zeros" else "linear"
            self.latent_key = weight("D -> K R", rngs, **sizes)  # LRKV eq. 1: U
            self.latent_key_bias = bias("K R", sizes) if c.latent_bias else None
            if not c.ties_values:
                self.latent_value = weight("D -> K R", rngs, **sizes)
                self.latent_value_bias = bias("K R", sizes) if c.latent_bias else None
            self.expand_key = weight("K: R -> H", rngs, init=init, **sizes)  # B, transposed
            if not c.ties_values:
                self.expand_value = weight("K: R -> H", rngs, init=init, **value_sizes)
        self.add_query_latent(query_width, rngs=rngs)
        if c.rank and c.residual_init == "pca":
            allowed = f"must be at most config.model.d_model = {d_model} with residual_init = 'pca'"
            require(c.rank <= d_model, "rank", c.rank, allowed)
            for kind in ("key",) if c.ties_values else ("key", "value"):
                heads_DKH = weight("D -> K H", rngs, **(sizes if kind == "key" else value_sizes))
                base, latent, expand = pca_factors(heads_DKH[...], c.num_bases, c.rank)
                getattr(self, f"base_{kind}")[...] = base
                getattr(self, f"latent_{kind}")[...] = latent
                getattr(self, f"expand_{kind}")[...] = expand

    def project(self, x_BTD: jax.Array, positions: Positions) -> tuple[jax.Array, dict]:
        raw = self.raw(x_BTD)
        return self.queries(x_BTD, raw, positions), raw

    def raw(self, x_BTD: jax.Array) -> dict[str, jax.Array]:
        """Projects [B, T, D] to bases [B, T, J, H] and residual latents [B, T, K, R]."""
        c = self.config
        raw = {"base_key": self.product(x_BTD, "base_key")}
        if not c.ties_values:
            raw["base_value"] = self.product(x_BTD, "base_value")
        if c.rank:
            raw["residual_key"] = self.product(x_BTD, "latent_key")
            if not c.ties_values:
                raw["residual_value"] = self.product(x_BTD, "latent_value")
        return raw

    def queries(self, x_BTD: jax.Array, raw: dict, positions: Positions) -> jax.Array:
        """Returns queries [B, T, N, query_dim]; tied queries are the keys in `raw`."""
        c = self.config
        if c.ties_queries:
            q_BTNH = raw["base_key"]
        else:
            q_BTNH = self.product(self.query_input(x_BTD), "query")
        if not c.splits_rope:
            q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, positions.rotary)
        else:
            q_BTNH = normalise_and_rotate(q_BTNH, self.query_norm, None)
            rotated = q_BTNH if positions.rotary is None else rotate(q_BTNH, positions.rotary)
            q_BTNH = jnp.concatenate([rotated, q_BTNH], axis=-1)
        return position_bias.queries_with_channels(c, q_BTNH, self._position_map())

    def keys_values(self, raw: dict, positions: Positions) -> tuple[jax.Array, jax.Array]:
        c = self.config
        unnormed_BTKH = self._unnormed_keys(raw)
        if c.ties_values:
            v_BTKH = unnormed_BTKH
        elif c.rank:
            v_BTKH = _add_residual(raw["base_value"], raw["residual_value"], self.expand_value)
        else:
            v_BTKH = raw["base_value"]
        if c.splits_rope:
            k_BTKH = self._split_keys(raw, unnormed_BTKH, positions)
        else:
            k_BTKH = normalise_and_rotate(unnormed_BTKH, self.key_norm, positions.rotary)
        return position_bias.keys_with_channels(c, k_BTKH, positions), v_BTKH

    def encode(self, raw: dict, positions: Positions) -> dict[str, jax.Array]:
        """Returns the bases and residual latents of LRKV eq. 5; with rank 0, keys and values.

        With residuals, the cached base is rotated and multiplied by the norm's gain, and 1/rms of
        the key (base + residual) is a separate field, one number per token and KV head. With tied
        values the entry holds keys before norm and rotation.
        """
        c = self.config
        if c.ties_values:
            return dict(raw)
        if not c.rank:
            k_BTJH = normalise_and_rotate(raw["base_key"], self.key_norm, positions.rotary)
            return {"base_key": k_BTJH, "base_value": raw["base_value"]}
        entry = dict(raw)
        if self.key_norm is not None:
            entry["key_scale"] = inverse_rms(self._unnormed_keys(raw), c.norm_epsilon)
            entry["base_key"] = times_gain(entry["base_key"], gain_of(self.key_norm))
        if positions.rotary is not None:
            entry["base_key"] = rotate(entry["base_key"], positions.rotary)
        return entry

    def decode_inputs(self, q_BTNH: jax.Array, rope_base: Base | None) -> DecodeInputs:
        c = self.config
        q_BTNH, bias = position_bias.split_queries(c, q_BTNH, self._position_map())
        shared = dict(bias=bias, scale=c.scale)
        gain = gain_of(self.key_norm)
        if c.ties_values:
            return cache_layouts.TiedInputs(
                query=q_BTNH,
                expand_key=self.expand_key[...] if c.rank else None,
                gain=gain,
                norm_epsilon=None if self.key_norm is None else c.norm_epsilon,
                rope_base=rope_base,
                **shared,
            )
        if not c.rank:
            return cache_layouts.GroupedInputs(query=q_BTNH, **shared)
        base_query, residual_query = q_BTNH, q_BTNH
        if c.splits_rope:
            base_query, residual_query = jnp.split(q_BTNH, 2, axis=-1)
        return cache_layouts.ResidualInputs(
            query=base_query,
            residual_query=residual_query,
            expand_key=times_gain(self.expand_key[...], gain),
            expand_value=self.expand_value[...],
            rope_base=None if c.splits_rope else rope_base,
            **shared,
        )

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
        """Takes one token per sequence of MHA, GQA, MQA, or LRKV under RoPE, in bfloat16 on a GPU.

        See `Mechanism.prepare`.
        """
        c, inputs = self.config, self.gpu_inputs(x_BTD, layer, rope_base, **options)
        if inputs is None:
            return None
        from kvjax.kernels.decode_attention.gpu import prepare  # when called, see `api`

        plain = c.qk_norm in ("none", "rms") and c.tie == "none"
        plain = plain and not c.query_rank and not c.bias
        if not self.packed_columns:
            reason = "takes projections that are packed into one matrix"
        elif not plain:
            reason = "takes no tied projections, low-rank queries, gains of QK-norm or biases"
        else:
            reason = prepare.refusal(inputs, layer, x_BTD.dtype)
        if reason:
            log_unprepared(reason)
            return None
        return prepare.into_cache(
            inputs,
            layer,
            self.packed[...],
            x_BTD[:, 0],
            positions,
            counts_B,
            expand_KRH=self.expand_key[...] if c.rank else None,
            epsilon=None if self.key_norm is None else c.norm_epsilon,
            first=tuple((name, first) for name, first, _ in self.packed_columns),
            decode_inputs=functools.partial(self.decode_inputs, rope_base=rope_base),
        )

    def _unnormed_keys(self, raw: dict) -> jax.Array:
        """Returns keys before norm and rotation, [B, T, K, H] ([B, T, J, H] with rank 0)."""
        if not self.config.rank:
            return raw["base_key"]
        return _add_residual(raw["base_key"], raw["residual_key"], self.expand_key)

    def _split_keys(self, raw: dict, unnormed_BTKH: jax.Array, positions: Positions) -> jax.Array:
        """Returns [B, T, K, 2H]: rotated base and unrotated residual, each over the key's rms."""
        B, T, K, H = unnormed_BTKH.shape
        J = self.config.num_bases
        base_BTJ1H = raw["base_key"][:, :, :, None]
        base_BTKH = jnp.broadcast_to(base_BTJ1H, (B, T, J, K // J, H)).reshape(B, T, K, H)
        keys = [base_BTKH, _expand(raw["residual_key"], self.expand_key)]
        if self.key_norm is not None:
            scale_BTK1 = inverse_rms(unnormed_BTKH, self.config.norm_epsilon)
            keys = [(x.astype(scale_BTK1.dtype) * scale_BTK1).astype(x.dtype) for x in keys]
            keys = [times_gain(x, gain_of(self.key_norm)) for x in keys]
        if positions.rotary is not None:
            keys[0] = rotate(keys[0], positions.rotary)
        return jnp.concatenate(keys, axis=-1)

    def _position_map(self) -> jax.Array | None:
        return self.position_map[...] if self.config.position_channels else None


def _expand(latent_BTKR: jax.Array, expand_KRH: nnx.Param) -> jax.Array:
    """Expands residual latents to [B, T, K, H]."""
    return jnp.einsum("BTKR,KRH->BTKH", latent_BTKR, expand_KRH[...])


def _add_residual(base_BTJH: jax.Array, latent_BTKR: jax.Array, expand_KRH: nnx.Param) -> jax.Array:
    """Returns each KV head's base plus its low-rank residual, [B, T, K, H] (LRKV eq. 2)."""
    residual_BTKH = _expand(latent_BTKR, expand_KRH)
    B, T, K, H = residual_BTKH.shape
    J = base_BTJH.shape[2]
    residual_BTJkH = residual_BTKH.reshape(B, T, J, K // J, H)
    base_BTJkH = jnp.broadcast_to(base_BTJH[:, :, :, None], residual_BTJkH.shape)
    return (base_BTJkH + residual_BTJkH).reshape(B, T, K, H)
