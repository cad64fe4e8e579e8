"""Attention mechanisms. Most caches are a shared base plus a low-rank residual per head:

    K_k = base^K[j(k)] + r^K_k B^K_k        V_k = base^V[j(k)] + r^V_k B^V_k

Query head n uses KV head k(n) = n·K // N, and KV head k uses base j(k) = k·J // K.

    mechanism                    J bases         K KV heads  R rank  cached per token and layer
    MHA                          N               N           0       2·N·H
    GQA                          K               K           0       2·K·H
    MQA                          1               1           0       2·H
    LRKV                         1               N           R       2·(H + N·R) (*)
    LRKV x GQA                   J               K           R       2·(J·H + K·R) (*)
    thin keys, H < Hv            K               K           0       K·(H + Hv)
    factored (keys of low rank)  J latents       K           R       J·R + K·Hv (*)
    Q-K=V, Q-GQA, Q-MQA          K               K           0       K·H (value: the raw key)
    Q=K-V; Q=K=V                 N               N           0       2·N·H; N·H (query = key)
    MLA                          latent C, RoPE key P                C + P
    LRKV over MLA                latent C, RoPE key P        R       C + P + 2·N·R
    GLA; MLRA of G branches      J latents C, RoPE key P             J·C + P; G·J·C + P
    GTA                                          K                   K·H + P (key: part of value, P)
    shared KV; MFA-KR                            K                   K·H
    MFA                          1               1           0       2·H (low-rank queries)
    TPA                          ranks R, R' of keys and values      (R + R')·N + R·H + R'·Hv

(*) plus one float32 1/rms per token and KV head if keys are normed. The "+" of projection sharing
(a temperature and a bias per key position) adds nothing to the cache. LRKV with `rope="shared"`
(RoPE on the base alone) or without RoPE is cheaper to decode, but a different model.

`attention.py` is the module that every model uses, `mechanism.py` the interface of a mechanism;
each mechanism is one file, registered in `MECHANISMS`.
"""

from kvjax.attention.attention import Attention
from kvjax.attention.factored import FactoredConfig
from kvjax.attention.gla import GLAConfig
from kvjax.attention.grouped import GroupedConfig
from kvjax.attention.gta import GTAConfig
from kvjax.attention.mechanism import MechanismConfig
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
    "mla_lrkv": MLALRKVConfig,  # LRKV residuals over MLA's latent
    "mla_paper": PaperMLAConfig,  # no RoPE key
    "gla": GLAConfig,
    "mlra": MLRAConfig,
    "gta": GTAConfig,
    "shared_kv": SharedKVConfig,
    "mfa_kr": MFAKRConfig,
    "tpa": TPAConfig,
}


def kind_of(mechanism: MechanismConfig) -> str:
    """Returns a mechanism's key of `MECHANISMS`: its config.attention.kind."""
    return next(kind for kind, cls in MECHANISMS.items() if cls is type(mechanism))


def family(mechanism: MechanismConfig) -> str:
    """Returns a mechanism's key of `foundation.theme.COLORS`; "" for one that is not listed."""
    if isinstance(mechanism, GroupedConfig):
        return mechanism.family
    return next((name for name, kind in MECHANISMS.items() if type(mechanism) is kind), "")
