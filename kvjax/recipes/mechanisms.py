"""Attention sections of configs: `mechanism` takes any kind, the others name one."""

from dataclasses import asdict, fields

from kvjax.attention import MECHANISMS
from kvjax.foundation.errors import UserError

HEAD_DIM = 128


def mechanism(kind: str, num_heads: int, *, dim: int = HEAD_DIM, **keys) -> dict:
    """Returns the section of a kind of `attention.MECHANISMS`.

    Args:
      dim: channels of keys and values.
      keys: other keys of the mechanism's config.
    """
    cls = MECHANISMS[kind]
    dims = {"key_dim", "value_dim"} & {field.name for field in fields(cls)}
    config = cls(num_heads=num_heads, **dict.fromkeys(dims, dim) | keys)
    return dict(kind=kind) | asdict(config)


def grouped(num_heads: int, *, kv_heads: int, bases: int, rank: int, dim: int = HEAD_DIM) -> dict:
    """Any member of `attention/grouped.py`: N query heads, K KV heads, J bases, rank R, H = Hv."""
    shape = dict(num_kv_heads=kv_heads, num_bases=bases, rank=rank)
    return mechanism("grouped", num_heads, dim=dim, **shape) | dict(layer_ranks=())


def mha(num_heads: int, *, dim: int = HEAD_DIM) -> dict:
    return grouped(num_heads, kv_heads=num_heads, bases=num_heads, rank=0, dim=dim)


def gqa(num_heads: int, *, kv_heads: int, dim: int = HEAD_DIM) -> dict:
    return grouped(num_heads, kv_heads=kv_heads, bases=kv_heads, rank=0, dim=dim)


def mqa(num_heads: int, *, dim: int = HEAD_DIM) -> dict:
    return gqa(num_heads, kv_heads=1, dim=dim)


def lrkv(num_heads: int, *, rank: int, dim: int = HEAD_DIM) -> dict:
    return grouped(num_heads, kv_heads=num_heads, bases=1, rank=rank, dim=dim)


def thin_keys(
    num_heads: int, *, key_dim: int, kv_heads: int | None = None, dim: int = HEAD_DIM
) -> dict:
    """Keys and queries with fewer channels than values."""
    return gqa(num_heads, kv_heads=kv_heads or num_heads, dim=dim) | dict(key_dim=key_dim)


def projection_sharing(
    num_heads: int,
    *,
    tie: str,
    kv_heads: int | None = None,
    channels: int = 0,
    dim: int = HEAD_DIM,
) -> dict:
    """Projection sharing: tie="kv" is Q-K=V (Q-GQA, Q-MQA by kv_heads), "qk" Q=K-V, "qkv" Q=K=V.

    Args:
      channels: position channels of "+"; 0: without.
    """
    shape = gqa(num_heads, kv_heads=kv_heads or num_heads, dim=dim)
    return shape | dict(tie=tie, position_channels=channels)


def mla(num_heads: int, *, latent: int, rope_dim: int = HEAD_DIM // 2, dim: int = HEAD_DIM) -> dict:
    """DeepSeek-V2's MLA: a shared latent, and one shared RoPE key of rope_dim channels."""
    return mechanism("mla", num_heads, dim=dim, latent_dim=latent, rope_key_dim=rope_dim)


def mla_lrkv(
    num_heads: int,
    *,
    latent: int,
    rank: int,
    rope_dim: int = HEAD_DIM // 2,
    dim: int = HEAD_DIM,
) -> dict:
    """LRKV over MLA: a latent shared by all heads, and residuals of `rank` per head."""
    shape = dict(latent_dim=latent, rope_key_dim=rope_dim, rank=rank)
    return mechanism("mla_lrkv", num_heads, dim=dim, **shape)


def mla_paper(num_heads: int, *, latent: int, dim: int = HEAD_DIM) -> dict:
    """MLA as the LRKV paper counts it: no RoPE key; keys are rebuilt from the latent."""
    return mechanism("mla_paper", num_heads, dim=dim, latent_dim=latent)


def factored(
    num_heads: int,
    *,
    kv_heads: int,
    latents: int,
    key_rank: int,
    value_rank: int = 0,
    dim: int = HEAD_DIM,
) -> dict:
    """Low-rank keys from J latents, without a base; low-rank values too if value_rank > 0."""
    shape = dict(num_kv_heads=kv_heads, num_latents=latents)
    shape |= dict(key_rank=key_rank, value_rank=value_rank)
    return mechanism("factored", num_heads, dim=dim, **shape) | dict(layer_ranks=())


def without_qk_norm(attention: dict, *, bias: bool = False) -> dict:
    """Removes QK-norm from a section, as in most published models; optionally adds biases."""
    return attention | dict(qk_norm="none", bias=bias)


# -- other authors' mechanisms ---------------------------------------------------------------------


def mfa(num_heads: int, *, query_rank: int, kv_heads: int = 1, dim: int = 256) -> dict:
    """Multi-matrix factorization attention: few wide KV heads and low-rank queries."""
    return gqa(num_heads, kv_heads=kv_heads, dim=dim) | dict(query_rank=query_rank)


def mfa_kr(num_heads: int, *, query_rank: int, kv_heads: int = 1, dim: int = 256) -> dict:
    """MFA with keys reused as values."""
    shape = dict(num_kv_heads=kv_heads, query_rank=query_rank)
    return mechanism("mfa_kr", num_heads, dim=dim, **shape)


def gla(
    num_heads: int,
    *,
    latents: int,
    latent: int,
    rope_dim: int = HEAD_DIM // 2,
    query_rank: int = 0,
    dim: int = HEAD_DIM,
) -> dict:
    """Grouped latent attention: several latents, and one RoPE key of rope_dim channels."""
    shape = dict(num_latents=latents, latent_dim=latent)
    shape |= dict(rope_key_dim=rope_dim, query_rank=query_rank)
    return mechanism("gla", num_heads, dim=dim, **shape)


def mlra(
    num_heads: int,
    *,
    branches: int,
    latent: int,
    rope_dim: int = HEAD_DIM // 2,
    query_rank: int = 0,
    dim: int = HEAD_DIM,
) -> dict:
    """Multi-head low-rank attention over four latents; 2 branches are MLRA-2, 4 are MLRA-4."""
    if branches not in (1, 2, 4):
        raise UserError(f"branches = {branches}: must be 1, 2 or 4 (they share four latents)")
    shape = dict(num_branches=branches, num_latents=4 // branches, latent_dim=latent)
    shape |= dict(rope_key_dim=rope_dim, query_rank=query_rank)
    return mechanism("mlra", num_heads, dim=dim, **shape)


def gta(num_heads: int, *, kv_heads: int, dim: int = HEAD_DIM, rope_dim: int | None = None) -> dict:
    """Grouped-tied attention; by default half of a key's channels are rotated."""
    rope_dim = dim // 2 if rope_dim is None else rope_dim
    shape = dict(num_kv_heads=kv_heads, rope_key_dim=rope_dim)
    return mechanism("gta", num_heads, dim=dim, **shape)


def shared_kv(
    num_heads: int,
    *,
    kv_heads: int,
    dim: int = 256,
    rope_dim: int = HEAD_DIM // 2,
    query_rank: int = 0,
) -> dict:
    """Shared KV: one vector is key and value; its last rope_dim channels are rotated."""
    shape = dict(num_kv_heads=kv_heads, rope_key_dim=rope_dim, query_rank=query_rank)
    return mechanism("shared_kv", num_heads, dim=dim, **shape)


def tpa(
    num_heads: int,
    *,
    key_rank: int,
    value_rank: int,
    query_factors: int = 6,
    dim: int = HEAD_DIM,
) -> dict:
    """Tensor product attention; query_factors = 0 is "KV-only"."""
    shape = dict(key_rank=key_rank, value_rank=value_rank, query_factors=query_factors)
    return mechanism("tpa", num_heads, dim=dim, **shape)
