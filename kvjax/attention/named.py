"""Mechanisms by name: functions from sizes to the frozen config of a mechanism.

    Attention(lrkv(num_heads=18, rank=64), d_model=2304, rngs=rngs)

`head_dim` is the number of channels of a head's key and value. Keys that all mechanisms have
(`qk_norm`, `query_rank`, `output_gate`, ...) are changed with `dataclasses.replace`.
"""

import dataclasses

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
from kvjax.foundation.errors import UserError

HEAD_DIM = 128
ROPE_DIM = 64  # channels of a decoupled RoPE key


def grouped(
    num_heads: int, *, kv_heads: int, bases: int, rank: int, head_dim: int = HEAD_DIM
) -> GroupedConfig:
    """Returns LRKV x GQA: K KV heads that share J bases and add residuals of rank R.

    Args:
      kv_heads: KV heads K, dividing num_heads.
      bases: full-rank keys and values J, dividing kv_heads; each is shared by kv_heads / bases.
      rank: rank R of the residual of each KV head; 0: none.
    """
    return GroupedConfig(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        num_bases=bases,
        rank=rank,
        key_dim=head_dim,
        value_dim=head_dim,
    )


def mha(num_heads: int, *, head_dim: int = HEAD_DIM) -> GroupedConfig:
    """Returns multi-head attention: a key and a value per head."""
    return gqa(num_heads, kv_heads=num_heads, head_dim=head_dim)


def gqa(num_heads: int, *, kv_heads: int, head_dim: int = HEAD_DIM) -> GroupedConfig:
    """Returns grouped-query attention: a key and a value per group of heads."""
    return grouped(num_heads, kv_heads=kv_heads, bases=kv_heads, rank=0, head_dim=head_dim)


def mqa(num_heads: int, *, head_dim: int = HEAD_DIM) -> GroupedConfig:
    """Returns multi-query attention: one key and one value for all heads."""
    return gqa(num_heads, kv_heads=1, head_dim=head_dim)


def lrkv(num_heads: int, *, rank: int, head_dim: int = HEAD_DIM) -> GroupedConfig:
    """Returns LRKV (arXiv 2601.11471): one key and value, and a residual of `rank` per head."""
    return grouped(num_heads, kv_heads=num_heads, bases=1, rank=rank, head_dim=head_dim)


def thin_keys(
    num_heads: int, *, key_dim: int, kv_heads: int | None = None, head_dim: int = HEAD_DIM
) -> GroupedConfig:
    """Returns thin keys (arXiv 2603.04427): keys and queries with fewer channels than values.

    Args:
      kv_heads: KV heads; None: num_heads.
      head_dim: channels of values.
    """
    wide = gqa(num_heads, kv_heads=kv_heads or num_heads, head_dim=head_dim)
    return dataclasses.replace(wide, key_dim=key_dim)


def projection_sharing(
    num_heads: int,
    *,
    tie: str,
    kv_heads: int | None = None,
    channels: int = 0,
    head_dim: int = HEAD_DIM,
) -> GroupedConfig:
    """Returns projection sharing (arXiv 2606.04032).

    Args:
      tie: "kv" is Q-K=V (with fewer kv_heads: Q-GQA, Q-MQA), "qk" is Q=K-V, "qkv" is Q=K=V.
      channels: position channels of "+"; 0: no "+".
    """
    separate = gqa(num_heads, kv_heads=kv_heads or num_heads, head_dim=head_dim)
    return dataclasses.replace(separate, tie=tie, position_channels=channels)


def mla(
    num_heads: int, *, latent: int, rope_dim: int = ROPE_DIM, head_dim: int = HEAD_DIM
) -> MLAConfig:
    """Returns MLA (DeepSeek-V2, arXiv 2405.04434): a shared latent, and one shared RoPE key.

    Args:
      latent: channels of the latent, C.
      rope_dim: channels of the RoPE key, P.
    """
    return MLAConfig(
        num_heads=num_heads,
        latent_dim=latent,
        rope_key_dim=rope_dim,
        key_dim=head_dim,
        value_dim=head_dim,
    )


def mla_lrkv(
    num_heads: int,
    *,
    latent: int,
    rank: int,
    rope_dim: int = ROPE_DIM,
    head_dim: int = HEAD_DIM,
) -> MLALRKVConfig:
    """Returns LRKV over MLA: a latent that all heads share, and residuals of `rank` per head."""
    return MLALRKVConfig(
        num_heads=num_heads,
        latent_dim=latent,
        rope_key_dim=rope_dim,
        rank=rank,
        key_dim=head_dim,
        value_dim=head_dim,
    )


def mla_paper(num_heads: int, *, latent: int, head_dim: int = HEAD_DIM) -> PaperMLAConfig:
    """Returns MLA as the LRKV paper counts it: no RoPE key; keys are rebuilt from the latent."""
    return PaperMLAConfig(
        num_heads=num_heads, latent_dim=latent, key_dim=head_dim, value_dim=head_dim
    )


def factored(
    num_heads: int,
    *,
    kv_heads: int,
    latents: int,
    key_rank: int,
    value_rank: int = 0,
    head_dim: int = HEAD_DIM,
) -> FactoredConfig:
    """Returns keys expanded from low-rank latents, without a base; values too if value_rank > 0."""
    return FactoredConfig(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        num_latents=latents,
        key_rank=key_rank,
        value_rank=value_rank,
        key_dim=head_dim,
        value_dim=head_dim,
    )


def mfa(
    num_heads: int, *, query_rank: int, kv_heads: int = 1, head_dim: int = 256
) -> GroupedConfig:
    """Returns multi-matrix factorization attention (arXiv 2412.19255): wide KV heads, low-rank
    queries.
    """
    wide = gqa(num_heads, kv_heads=kv_heads, head_dim=head_dim)
    return dataclasses.replace(wide, query_rank=query_rank)


def mfa_kr(
    num_heads: int, *, query_rank: int, kv_heads: int = 1, head_dim: int = 256
) -> MFAKRConfig:
    """Returns MFA with keys reused as values (arXiv 2412.19255)."""
    return MFAKRConfig(
        num_heads=num_heads, num_kv_heads=kv_heads, key_dim=head_dim, query_rank=query_rank
    )


def gla(
    num_heads: int,
    *,
    latents: int,
    latent: int,
    rope_dim: int = ROPE_DIM,
    query_rank: int = 0,
    head_dim: int = HEAD_DIM,
) -> GLAConfig:
    """Returns grouped latent attention (arXiv 2505.21487): J latents and one RoPE key.

    Args:
      latents: number of latents J, dividing num_heads.
      latent: channels of each latent.
    """
    return GLAConfig(
        num_heads=num_heads,
        num_latents=latents,
        latent_dim=latent,
        rope_key_dim=rope_dim,
        query_rank=query_rank,
        key_dim=head_dim,
        value_dim=head_dim,
    )


def mlra(
    num_heads: int,
    *,
    branches: int,
    latent: int,
    rope_dim: int = ROPE_DIM,
    query_rank: int = 0,
    head_dim: int = HEAD_DIM,
) -> MLRAConfig:
    """Returns multi-head low-rank attention (arXiv 2603.02188) over four latents.

    Args:
      branches: softmaxes per head: 2 is MLRA-2, 4 is MLRA-4.
    """
    if branches not in (1, 2, 4):
        raise UserError(f"branches = {branches}: must be 1, 2 or 4 (they share four latents)")
    return MLRAConfig(
        num_heads=num_heads,
        num_branches=branches,
        num_latents=4 // branches,
        latent_dim=latent,
        rope_key_dim=rope_dim,
        query_rank=query_rank,
        key_dim=head_dim,
        value_dim=head_dim,
    )


def gta(
    num_heads: int, *, kv_heads: int, rope_dim: int | None = None, head_dim: int = HEAD_DIM
) -> GTAConfig:
    """Returns grouped-tied attention (arXiv 2505.21487).

    Args:
      rope_dim: channels of a key that are rotated; None: half of them.
    """
    return GTAConfig(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        key_dim=head_dim,
        rope_key_dim=head_dim // 2 if rope_dim is None else rope_dim,
    )


def shared_kv(
    num_heads: int,
    *,
    kv_heads: int,
    rope_dim: int = ROPE_DIM,
    query_rank: int = 0,
    head_dim: int = 256,
) -> SharedKVConfig:
    """Returns shared KV: one vector is key and value; its last rope_dim channels are rotated."""
    return SharedKVConfig(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        key_dim=head_dim,
        rope_key_dim=rope_dim,
        query_rank=query_rank,
    )


def tpa(
    num_heads: int,
    *,
    key_rank: int,
    value_rank: int,
    query_factors: int = 6,
    head_dim: int = HEAD_DIM,
) -> TPAConfig:
    """Returns tensor product attention (arXiv 2501.06425); query_factors = 0 is "KV-only"."""
    return TPAConfig(
        num_heads=num_heads,
        key_rank=key_rank,
        value_rank=value_rank,
        query_factors=query_factors,
        key_dim=head_dim,
        value_dim=head_dim,
    )
