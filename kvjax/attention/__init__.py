"""The attention family: a KV cache is a shared base plus a low-rank residual per head.

`attention.py` is the module every model uses; `grouped.py`, `factored.py` and `mla.py` are its
mechanisms, listed in `MECHANISMS`. What a new one must have is in `mechanism.py`.
"""

from kvjax.attention.attention import Attention
from kvjax.attention.factored import FactoredConfig
from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.mla import LatentConfig
from kvjax.attention.mla import RebuiltLatentConfig

MECHANISMS = {
    "grouped": GroupedConfig,  # MHA, GQA, MQA, LRKV, LRKV x GQA
    "factored": FactoredConfig,  # keys, values or both of low rank
    "mla": LatentConfig,
    "mla_paper": RebuiltLatentConfig,
}

__all__ = [
    "MECHANISMS",
    "Attention",
    "FactoredConfig",
    "GroupedConfig",
    "LatentConfig",
    "RebuiltLatentConfig",
]
