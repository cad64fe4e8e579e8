"""The attention family: a KV cache is a shared base plus a low-rank residual per head, and rivals.

`attention.py` is the module every model uses; the others are its mechanisms, one file each, listed
in `MECHANISMS`. What a new one must have is in `mechanism.py`.
"""

from kvjax.attention.attention import Attention
from kvjax.attention.factored import FactoredConfig
from kvjax.attention.gla import GLAConfig
from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.gta import GTAConfig
from kvjax.attention.mfa_kr import MFAKRConfig
from kvjax.attention.mla import MLAConfig
from kvjax.attention.mla_lrkv import MLALRKVConfig
from kvjax.attention.mla_paper import PaperMLAConfig
from kvjax.attention.mlra import MLRAConfig
from kvjax.attention.shared_kv import SharedKVConfig
from kvjax.attention.tpa import TPAConfig

MECHANISMS = {
    "grouped": GroupedConfig,  # MHA, GQA, MQA, LRKV, LRKV x GQA, thin keys, Q-K=V, MFA
    "factored": FactoredConfig,  # keys, values or both of low rank
    "mla": MLAConfig,
    "mla_lrkv": MLALRKVConfig,  # residuals of heads beside the latent
    "mla_paper": PaperMLAConfig,
    "gla": GLAConfig,
    "mlra": MLRAConfig,
    "gta": GTAConfig,
    "shared_kv": SharedKVConfig,
    "mfa_kr": MFAKRConfig,
    "tpa": TPAConfig,
}

__all__ = [
    "MECHANISMS",
    "Attention",
    "FactoredConfig",
    "GLAConfig",
    "GTAConfig",
    "GroupedConfig",
    "MFAKRConfig",
    "MLAConfig",
    "MLALRKVConfig",
    "MLRAConfig",
    "PaperMLAConfig",
    "SharedKVConfig",
    "TPAConfig",
]
