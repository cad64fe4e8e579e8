"""One attention layer with random weights: its outputs on whole rows and over a cache."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache
from kvjax.attention import (
    Attention,
    GLAConfig,
    GTAConfig,
    MLALRKVConfig,
    MLRAConfig,
    SharedKVConfig,
    TPAConfig,
)
from kvjax.layers import rope

B, T, D, N, H, P = 2, 6, 24, 4, 8, 4
BASE = 100.0
X = np.random.default_rng(0).standard_normal((B, T, D))
COMMON = dict(num_heads=N, key_dim=H, norm_epsilon=1e-2)
BOTH = COMMON | dict(value_dim=H)
LATENT = BOTH | dict(latent_dim=6, rope_key_dim=P)


def weights(randomise, config, seed=0):
    """Returns random weights of an `Attention`, none zero."""
    return randomise(lambda: Attention(config, D, rngs=nnx.Rngs(0)), seed=seed)[1]


def module(config, w):
    graph, _ = nnx.split(nnx.eval_shape(lambda: Attention(config, D, rngs=nnx.Rngs(0))))
    arrays = {k: _arrays(v) for k, v in w.items()}
    return nnx.merge(graph, arrays)


def _arrays(tree):
    return {k: _arrays(v) for k, v in tree.items()} if isinstance(tree, dict) else jnp.asarray(tree)


def positions(config, base=BASE, first=0):
    return rope.positions(first + np.arange(T, dtype=np.int32)[None], config.rope_dim, base)


def run(config, w, base=BASE, x=X, first=0):
    """Returns outputs [B, T, D] on whole rows."""
    graph, arrays = nnx.split(module(config, w))
    return np.asarray(_attend(graph, config, base, first, arrays, x))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _attend(graph, config, base, first, arrays, x_BTD):
    return nnx.merge(graph, arrays)(x_BTD, positions(config, base, first), causal=True)


def from_cache(config, w, base=BASE, x=X):
    """Returns outputs [B, T, D] by decoding the first half of the tokens, then the second, with the
    reference implementation."""
    graph, arrays = nnx.split(module(config, w))
    layer, parts = cache.allocate([config], batch=B, capacity=T, dtype=x.dtype).layers[0], []
    for first in (0, T // 2):
        half = x[:, first : first + T // 2]
        y, layer = _decode(graph, config, base, arrays, half, layer, np.full(B, first, np.int32))
        parts.append(y)
    return np.concatenate(parts, axis=1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(graph, config, base, arrays, x_BTD, layer, first_B):
    index_BT = first_B[:, None] + np.arange(x_BTD.shape[1], dtype=np.int32)[None]
    positions_BT = rope.positions(index_BT, config.rope_dim, base)
    counts_B = jnp.full_like(first_B, x_BTD.shape[1])
    options = dict(rope_base=base, implementation="reference")
    return nnx.merge(graph, arrays).decode(x_BTD, positions_BT, layer, counts_B, **options)


def changed(w, name, value):
    """Returns the weights with one weight of the mechanism replaced."""
    return w | dict(mechanism=w["mechanism"] | {name: value})


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def gla_config(J, **options):
    return GLAConfig(**LATENT, num_latents=J, **options)


def mla_lrkv_config(R, **options):
    return MLALRKVConfig(**LATENT, rank=R, **options)


def mlra_config(G, J, **options):
    return MLRAConfig(**LATENT, num_branches=G, num_latents=J, **options)


def gta_config(P, **options):
    return GTAConfig(**COMMON, num_kv_heads=2, rope_key_dim=P, **options)


def shared_kv_config(P, **options):
    return SharedKVConfig(**COMMON, num_kv_heads=2, rope_key_dim=P, **options)


def tpa_config(R, **options):
    options = dict(query_factors=0, qk_norm="none") | options
    return TPAConfig(**BOTH, key_rank=R, value_rank=R, **options)
