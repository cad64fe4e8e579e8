"""The attention family: a KV cache is a shared base plus a low-rank residual per head.

`attention.py` is the module every model uses; `grouped.py` and `mla.py` are its mechanisms, listed
in `MECHANISMS`. What a new one must have is in `mechanism.py`.
"""

from kvjax.attention.attention import Attention
from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.mla import LatentConfig
from kvjax.attention.mla import RebuiltLatentConfig

MECHANISMS = {
    "grouped": GroupedConfig,  # MHA, GQA, MQA, LRKV, LRKV x GQA
    "mla": LatentConfig,
    "mla_paper": RebuiltLatentConfig,
}

__all__ = ["MECHANISMS", "Attention", "GroupedConfig", "LatentConfig", "RebuiltLatentConfig"]
