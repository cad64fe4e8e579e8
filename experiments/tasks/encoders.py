"""Encoders of projection sharing's small tasks (sections 3.1 and 3.2): what a variant ties."""

import argparse

from experiments.tasks import learner
from kvjax.attention import GroupedConfig
from kvjax.attention.diagonal import DiagonalConfig
from kvjax.foundation import lists
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig

VARIANTS = {  # by name: what is tied, and whether it is a "+"
    "qkv": ("none", False),
    "qk_tied": ("qk", False),
    "qk_tied_plus": ("qk", True),
    "kv_tied": ("kv", False),
    "qkv_tied": ("qkv", False),
    "qkv_tied_plus": ("qkv", True),
}
CALLED = dict(
    **dict(qkv="QKV", qk_tied="Q=K-V", qk_tied_plus="(Q=K-V)+"),
    **dict(kv_tied="Q-K=V", qkv_tied="Q=K=V", qkv_tied_plus="(Q=K=V)+"),
)


def transformer(
    variant: str,
    channels: int,
    width: int,
    layers: int,
    heads: int,
    *,
    labels: int,
    diagonal_norm: bool = False,
    **block,
) -> TransformerConfig:
    """Sees both ways, with biases and nothing capped.

    Args:
      variant: of `VARIANTS`.
      channels: of the position-dependent map that a "+" adds, the paper's m.
      labels: that there are.
      diagonal_norm: see `kvjax.attention.diagonal`.
      block: keys of `BlockConfig`, with mlp_dim.
    """
    tie, plus = VARIANTS[variant]
    dims = dict(key_dim=width // heads, value_dim=width // heads, qk_norm="none", bias=True)
    counts = dict(num_heads=heads, num_kv_heads=heads, num_bases=heads, rank=0)
    make = DiagonalConfig if diagonal_norm else GroupedConfig
    mechanism = make(**counts, **dims, tie=tie, position_channels=channels * plus)
    config = learner.classic_block(layers, width, causal=False, **block)
    return TransformerConfig(block=config, mechanisms=(mechanism,) * layers, vocab_size=labels)


_MOST = dict(widths=4096, layers=64, heads=64)


def read_sizes(options: argparse.Namespace, *more: str) -> None:
    """Makes numbers of --widths, --layers, --heads and other options that are lists of them.

    Raises:
      UserError: they are none, or too large, or a number of heads divides a width not.
    """
    for key in (*_MOST, *more):
        most = _MOST.get(key, 4096)
        setattr(options, key, lists.integers(f"--{key}", getattr(options, key), at_most=most))
    for width in options.widths:
        for count in options.heads:
            if width % count:
                raise UserError(f"--heads: {count} must divide --widths {width}")


def flops(tokens: int, length: int, width: int, layers: int, mlp_dim: int) -> float:
    """Approximate FLOPs of training: by weights, and by products of queries, keys and values."""
    weights = layers * (4 * width**2 + 2 * width * mlp_dim)
    return 6.0 * tokens * (weights + layers * 2 * length * width)
