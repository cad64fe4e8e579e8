"""Small mechanisms by name, and random weights for them, none of which is zero."""

import math

from flax import nnx
import jax
import numpy as np

from kvjax.attention import (
    FactoredConfig,
    GLAConfig,
    GroupedConfig,
    GTAConfig,
    MFAKRConfig,
    MLAConfig,
    MLALRKVConfig,
    MLRAConfig,
    PaperMLAConfig,
    SharedKVConfig,
    TPAConfig,
)
from kvjax.layers.weight import Axes
from tests import quick

MECHANISMS = {
    "mha": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0)),
    "gqa": (GroupedConfig, dict(num_kv_heads=2, num_bases=2, rank=0)),
    "mqa": (GroupedConfig, dict(num_kv_heads=1, num_bases=1, rank=0)),
    "lrkv": (GroupedConfig, dict(num_kv_heads=4, num_bases=1, rank=3)),
    "lrkv_gqa": (GroupedConfig, dict(num_heads=8, num_kv_heads=4, num_bases=2, rank=3)),
    "lrkv_latent_bias": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=1, rank=3, bias=True, latent_bias=True, out_bias=False),
    ),
    "thin_keys": (GroupedConfig, dict(num_kv_heads=2, num_bases=2, rank=0, key_dim=4)),
    "lrkv_wide_keys": (GroupedConfig, dict(num_kv_heads=4, num_bases=1, rank=3, value_dim=6)),
    "lrkv_shared_rope": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=1, rank=3, value_dim=6, rope="shared"),
    ),
    "kv_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0, tie="kv")),
    "kv_tied_gqa": (GroupedConfig, dict(num_kv_heads=2, num_bases=2, rank=0, tie="kv")),
    "lrkv_kv_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=1, rank=3, tie="kv")),
    "qk_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0, tie="qk", value_dim=6)),
    "qkv_tied": (GroupedConfig, dict(num_kv_heads=4, num_bases=4, rank=0, tie="qkv")),
    "qk_tied_plus": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=4, rank=0, tie="qk", position_channels=6),
    ),
    "qkv_tied_plus": (
        GroupedConfig,
        dict(num_kv_heads=4, num_bases=4, rank=0, tie="qkv", position_channels=6),
    ),
    "factored": (FactoredConfig, dict(num_kv_heads=4, num_latents=4, key_rank=3, value_rank=0)),
    "factored_joint": (
        FactoredConfig,
        dict(num_heads=8, num_kv_heads=4, num_latents=1, key_rank=5, value_rank=3, value_dim=6),
    ),
    "factored_values": (
        FactoredConfig,
        dict(num_kv_heads=2, num_latents=2, key_rank=0, value_rank=3),
    ),
    "mla": (MLAConfig, dict(latent_dim=10, rope_key_dim=4, value_dim=6)),
    "mla_lrkv": (
        MLALRKVConfig,
        dict(latent_dim=6, rope_key_dim=4, value_dim=6, rank=3),
    ),
    "mla_paper": (PaperMLAConfig, dict(latent_dim=10)),
    "mfa": (
        GroupedConfig,
        dict(num_kv_heads=1, num_bases=1, rank=0, query_rank=5, output_gate=True),
    ),
    "gla": (
        GLAConfig,
        dict(num_latents=2, latent_dim=6, rope_key_dim=4, value_dim=6, query_rank=5),
    ),
    "mlra": (
        MLRAConfig,
        dict(num_branches=2, num_latents=2, latent_dim=6, rope_key_dim=4, latent_scale=True),
    ),
    "gta": (GTAConfig, dict(num_kv_heads=2, rope_key_dim=4)),
    "shared_kv": (SharedKVConfig, dict(num_kv_heads=2, rope_key_dim=4)),
    "mfa_kr": (MFAKRConfig, dict(num_kv_heads=2)),
    "tpa": (
        TPAConfig,
        dict(query_factors=3, key_rank=2, value_rank=3, value_dim=6),
    ),
}
# LRKV, quick.KINDS, and the first mechanism of every other config class.
_CLASSES = {MECHANISMS[name][0] for name in quick.KINDS}
FIRST = {cls: name for name, (cls, _) in reversed(MECHANISMS.items())}
ALL_KINDS = ("lrkv", *quick.KINDS, *(n for cls, n in FIRST.items() if cls not in _CLASSES))
FAMILIES = ("mha", "gqa", "mqa", "lrkv", "mla", "mla_paper")


def random_values(state, seed=0, dtype=np.float64):
    """Returns random values for every variable of an nnx.State, none of them zero, as a pure dict.

    Recipes initialise output projections with zeros, with which any test of outputs passes.
    Matrices are N(0, 1/in); vectors (gains, biases) lie in [0.5, 1.5].
    """
    rng = np.random.default_rng(seed)

    def draw(variable):
        axes, shape = Axes.parse(variable.axes), variable.shape
        if not axes.is_matrix and "V" not in axes.names and "T" not in axes.names:
            return rng.uniform(0.5, 1.5, shape).astype(dtype)
        first = len(shape) - len(axes.reduction) - len(axes.output)
        fan_in = math.prod(shape[first : first + len(axes.reduction)])
        return (rng.standard_normal(shape) / math.sqrt(fan_in)).astype(dtype)

    def is_variable(v):
        return isinstance(v, nnx.Variable)

    values = nnx.to_pure_dict(jax.tree.map(draw, state, is_leaf=is_variable))
    assert all(np.all(leaf != 0) for leaf in jax.tree.leaves(values))
    return values
