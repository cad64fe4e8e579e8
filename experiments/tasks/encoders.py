"""Encoders of projection sharing's small tasks (sections 3.1 and 3.2), one per variant."""

import argparse

from experiments.models.diagonal import DiagonalConfig
from experiments.tasks import learner
from kvjax.attention import GroupedConfig
from kvjax.foundation import command_line, lists
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
    """Returns the config of a bidirectional encoder.

    Args:
      variant: a key of `VARIANTS`.
      channels: channels of the position-dependent map of "+" variants, the paper's m.
      labels: number of labels.
      diagonal_norm: see `experiments.models.diagonal`.
      block: keys of `BlockConfig`, with mlp_dim.
    """
    tie, plus = VARIANTS[variant]
    make = DiagonalConfig if diagonal_norm else GroupedConfig
    attention = dict(bias=True, tie=tie, position_channels=channels * plus)
    shape = (labels, width, layers, heads)
    return learner.classic(*shape, make=make, attention=attention, causal=False, **block)


_SIZES = {  # text of each option, and its maximum
    "widths": ("model widths", 4096),
    "layers": ("numbers of layers", 64),
    "heads": ("numbers of heads", 64),
    "lengths": ("numbers per row", 4096),
    "patches": ("sides of a patch, in pixels", 4096),
}


def add_sizes(parser: command_line.Parser, **defaults: str) -> None:
    """Adds lists of sizes, such as widths="32,64"; `read_sizes` parses them."""
    for key, default in defaults.items():
        parser.add_argument(f"--{key}", default=default, help=f"{_SIZES[key][0]} ({default})")


def read_sizes(options: argparse.Namespace, *more: str) -> None:
    """Parses the options --widths, --layers, --heads and `more` as lists of integers, in place.

    Raises:
      UserError: not integers, too large, or a number of heads that does not divide a width.
    """
    for key in ("widths", "layers", "heads", *more):
        sizes = lists.integers(f"--{key}", getattr(options, key), at_most=_SIZES[key][1])
        setattr(options, key, sizes)
    for width in options.widths:
        for count in options.heads:
            if width % count:
                raise UserError(f"--heads: {count} must divide --widths {width}")
