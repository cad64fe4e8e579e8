"""Converts MHA and GQA to GQA with fewer KV heads; a baseline."""

import dataclasses

import numpy as np

from kvjax.attention.grouped import GroupedConfig
from kvjax.convert import factored_layer
from kvjax.convert.layer import Layer
from kvjax.convert.methods import ConvertedLayer, shared_keys
from kvjax.foundation.errors import UserError
from kvjax.layers.rope import Base


@dataclasses.dataclass(frozen=True)
class PooledHeads:
    """GQA with fewer KV heads, each the mean of several (Ainslie et al., arXiv 2305.13245).

    Attributes:
      rank: new number of KV heads, a divisor of the old one.
    """

    rank: int

    objective = "weights"
    changes_values = True

    @property
    def title(self) -> str:
        return f"{self.rank} KV heads"

    def mechanism(self, config: GroupedConfig, *, rope: Base | None) -> GroupedConfig:
        del rope
        heads = config.num_kv_heads
        if self.rank < 1 or heads % self.rank:
            raise UserError(f"rank = {self.rank}: must divide the {heads} KV heads")
        keys = shared_keys(config) | dict(num_kv_heads=self.rank, num_bases=self.rank)
        return GroupedConfig(**keys, rank=0, out_bias=config.out_bias)

    def max_rank(self, config: GroupedConfig) -> int:
        return config.num_kv_heads

    def convert(self, layer: Layer, moment_EE: np.ndarray) -> ConvertedLayer:
        del moment_EE

        def pooled(w_EKH):
            groups = w_EKH.reshape(len(w_EKH), self.rank, -1, w_EKH.shape[-1])
            mean_EKH = groups.mean(axis=2)
            lost = np.sum((groups - mean_EKH[:, :, None]) ** 2) / (np.sum(groups**2) or 1.0)
            return mean_EKH, float(lost)

        key_EKH, key_error = pooled(layer.key_EKH)
        value_EKH, value_error = pooled(layer.value_EKH)
        projections = dict(query=layer.query_ENH, base_key=key_EKH, base_value=value_EKH)
        weights = factored_layer.attention_weights(layer, projections)
        return ConvertedLayer(weights, dict(key=key_error, value=value_error))
