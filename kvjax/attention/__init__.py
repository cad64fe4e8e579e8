"""The attention family: a KV cache is a shared base plus a low-rank residual per head, and rivals.

`attention.py` is the module every model uses; the others are its mechanisms, one file each, listed
in `MECHANISMS`. What a new one must have is in `mechanism.py`.
"""

from kvjax.attention.attention import Attention
from kvjax.attention.factored import FactoredConfig
from kvjax.attention.gla import GroupedLatentConfig
from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.gta import TiedLatentConfig
from kvjax.attention.mfa_kr import ReusedKeysConfig
from kvjax.attention.mla import LatentConfig
from kvjax.attention.mla_lrkv import ResidualLatentConfig
from kvjax.attention.mla_paper import RebuiltLatentConfig
from kvjax.attention.mlra import BranchedLatentConfig
from kvjax.attention.shared_kv import SharedKVConfig
from kvjax.attention.tpa import TensorProductConfig

MECHANISMS = {
    "grouped": GroupedConfig,  # MHA, GQA, MQA, LRKV, LRKV x GQA, thin keys, Q-K=V, MFA
    "factored": FactoredConfig,  # keys, values or both of low rank
    "mla": LatentConfig,
    "mla_lrkv": ResidualLatentConfig,  # residuals of heads beside the latent
    "mla_paper": RebuiltLatentConfig,
    "gla": GroupedLatentConfig,
    "mlra": BranchedLatentConfig,
    "gta": TiedLatentConfig,
    "shared_kv": SharedKVConfig,
    "mfa_kr": ReusedKeysConfig,
    "tpa": TensorProductConfig,
}

__all__ = [
    "MECHANISMS",
    "Attention",
    "BranchedLatentConfig",
    "FactoredConfig",
    "GroupedConfig",
    "GroupedLatentConfig",
    "LatentConfig",
    "RebuiltLatentConfig",
    "ResidualLatentConfig",
    "ReusedKeysConfig",
    "SharedKVConfig",
    "TensorProductConfig",
    "TiedLatentConfig",
]
