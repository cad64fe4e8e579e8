"""Converts MHA and GQA with RoPE to MLA without a norm; `latent_fit` has the maths."""

import dataclasses

import numpy as np

from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.mla import MLAConfig
from kvjax.convert import factored_layer, latent_fit, layer as layer_lib
from kvjax.convert.factors import balance_scales, einsum
from kvjax.convert.latent_fit import AttentionStatistics
from kvjax.convert.layer import Layer
from kvjax.convert.methods import ConvertedLayer
from kvjax.foundation.errors import UserError
from kvjax.layers import rope as rope_lib
from kvjax.layers.rope import Base

SWEEPS = 12
# Factor on `AttentionStatistics.key_weight_N`, which assumes that errors of different tokens are
# independent. Errors of low-rank keys add up instead, since all lie in the dropped directions. At
# half of its cache, SmolLM2-135M has perplexity 43.5, 39.8, 37.3 and 38.8 with factors 1, 3, 10 and
# 30, from 32.6 before (4,096 tokens, one run, a prototype: experiments/LOG.md).
KEY_WEIGHT = 10.0


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """MLA: one latent and one RoPE key for all heads, in the layout that DeepSeek's engines cache.

    Attributes:
      rank: channels of the latent, even.
      rope_dim: channels of the RoPE key, even; 0: as many as a head's key has. It rotates with
        frequencies base^(-2i / rope_dim), as in every model with MLA.
      key_weight: see `KEY_WEIGHT`.
      statistics: the layer's statistics; None before calibration.
    """

    rank: int
    rope_dim: int = 0
    key_weight: float = KEY_WEIGHT
    sweeps: int = SWEEPS
    statistics: AttentionStatistics | None = dataclasses.field(default=None, compare=False)

    objective = "outputs"
    changes_values = True

    @property
    def title(self) -> str:
        key = f"RoPE key {self.rope_dim or 'of a head'}"
        return f"latent {self.rank}, {key}, key weight {self.key_weight:g}"

    def mechanism(self, config: GroupedConfig, *, rope: Base | None) -> MLAConfig:
        if not rope:
            raise UserError(
                "--method=mla: needs a model with RoPE in every layer; without it, "
                "--method=thin_keys --mode=joint caches latents that all heads share"
            )
        if config.qk_norm != "none":
            raise UserError(
                f"--method=mla: config.attention.qk_norm = {config.qk_norm!r}: must be 'none', "
                "since MLA's keys are linear in the input; --method=thin_keys and lrkv take it"
            )
        channels = self.rope_dim or config.key_dim
        if not 2 <= channels <= config.key_dim or channels % 2:
            raise UserError(
                f"rope_dim = {channels}: must be even, and at most the {config.key_dim} channels "
                "of a head"
            )
        most = self.max_rank(config)
        if not 2 <= self.rank <= most or self.rank % 2:
            raise UserError(
                f"rank = {self.rank}: must be even, and at most {most}, the channels of all heads' "
                "keys and values"
            )
        return MLAConfig(
            num_heads=config.num_heads,
            latent_dim=self.rank,
            rope_key_dim=channels,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            qk_norm="none",
            norm_latent=False,
            bias=config.bias,
            qk_bias=config.bias,
            norm_epsilon=config.norm_epsilon,
        )

    def max_rank(self, config: GroupedConfig) -> int:
        return config.num_kv_heads * (config.key_dim + config.value_dim)

    def convert(self, layer: Layer, moment_EE: np.ndarray) -> ConvertedLayer:
        layer = layer_lib.drop_redundant_biases(layer)
        fit, head_dim = self.fit(layer, moment_EE), layer.key_EKH.shape[-1]
        channels = fit.rope_key_EP.shape[1]
        # Logits are divided by the root of all channels of MLA's query.
        query_ENH = layer.query_ENH * (1 + channels / head_dim) ** 0.5
        rope_query_ENP = einsum("ENH,NHP->ENP", query_ENH, fit.rope_query_NHP)
        sides = layer.weights_of(fit.rope_key_EP), layer.weights_of(rope_query_ENP)
        pairs = (x.reshape(-1, 2, channels // 2) for x in sides)
        scale_P = np.tile(balance_scales(*pairs, ((0, 1), (0, 1))), 2)  # one scale for a pair
        groups = layer.query_ENH.shape[1] // layer.key_EKH.shape[1]
        up_value_CNV = np.repeat(fit.up_value_CKV, groups, axis=1)
        inner = dict(
            down=layer.weights_of(fit.latent_EC), up_key=fit.up_key_CNH, up_value=up_value_CNV
        )
        projections = {
            "query": query_ENH,
            "rope_query": rope_query_ENP / scale_P,
            "rope_key": fit.rope_key_EP * scale_P,
        }
        if layer.has_biases:
            # The latent's bias adds one number to all logits of a query, which changes no
            # probability, and one vector to all values, which passes into the output bias.
            constant_NV = einsum("C,CNV->NV", fit.latent_EC[-1], up_value_CNV)
            out_bias_D = layer.out_bias_D + einsum("NV,NVD->D", constant_NV, layer.out_NHD)
            layer = dataclasses.replace(layer, out_bias_D=out_bias_D)
        weights = factored_layer.attention_weights(layer, projections, **inner)
        return ConvertedLayer(weights, fit.errors)

    def fit(self, layer: Layer, moment_EE: np.ndarray) -> latent_fit.LatentFit:
        """Fits MLA's maps to a layer."""
        layer = layer_lib.drop_redundant_biases(layer)
        head_dim = layer.key_EKH.shape[-1]
        widths = head_dim, self.rope_dim or head_dim
        # Logits are divided by sqrt(head_dim).
        key_weight_N = self.statistics.key_weight_N * (self.key_weight / head_dim)
        return latent_fit.fit(
            layer,
            moment_EE,
            self.statistics._replace(key_weight_N=key_weight_N),
            tuple(rope_lib.frequencies(width, layer.rope) for width in widths),
            self.rank,
            sweeps=self.sweeps,
        )
