"""Encoders of projection sharing's small tasks (sections 3.1 and 3.2), one per variant."""

import argparse

from experiments.models.diagonal import DiagonalConfig
from experiments.tasks import learner
from kvjax.attention import GroupedConfig
from kvjax.foundation import lists
from kvjax.foundation.errors import UserError
from kvjax.model.config import TransformerConfig

VARIANTS = {  # name: (tied projections, "+": position-dependent map on the logits)
    "qkv": ("none", False),
    "qk_tied": ("qk", False),
    "qk_tied_plus": ("qk", True),
    "kv_tied": ("kv", False),
    "qkv_tied": ("qkv", False),
    "qkv_tied_plus": ("qkv", True),
}
CALLED = {
    "qkv": "QKV",
    "qk_tied": "Q=K-V",
    "qk_tied_plus": "(Q=K-V)+",
    "kv_tied": "Q-K=V",
    "qkv_tied": "Q=K=V",
    "qkv_tied_plus": "(Q=K=V)+",
}


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
    """Returns the config of a bidirectional encoder with biases and without a logit cap.

    Args:
      variant: a key of `VARIANTS`.
      channels: channels of the position-dependent map of "+" variants, the paper's m.
      labels: number of labels.
      diagonal_norm: see `experiments.models.diagonal`.
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
    """Parses the options --widths, --layers, --heads and `more` as lists of integers, in place.

    Raises:
      UserError: not integers, too large, or a number of heads that does not divide a width.
    """
    for key in (*_MOST, *more):
        most = _MOST.get(key, 4096)
        setattr(options, key, lists.integers(f"--{key}", getattr(options, key), at_most=most))
    for width in options.widths:
        for count in options.heads:
            if width % count:
                raise UserError(f"--heads: {count} must divide --widths {width}")


def flops(tokens: int, length: int, width: int, layers: int, mlp_dim: int) -> float:
    """Returns approximate training FLOPs: 6 per token and weight, plus attention's products."""
    weights = layers * (4 * width**2 + 2 * width * mlp_dim)
    return 6.0 * tokens * (weights + layers * 2 * length * width)
