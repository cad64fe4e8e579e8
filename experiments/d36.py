"""Models of every mechanism at the LRKV paper's d36: width 2304, 18 heads, rank 64, latent 768."""

from collections.abc import Callable

from flax import nnx
import jax
import jax.numpy as jnp

from kvjax import cache as cache_lib, config as config_lib, recipes
from kvjax.kernels.decode_attention.api import decode_attention
from kvjax.model.config import TransformerConfig

HEADS = 18
_LRKV = recipes.lrkv(HEADS, rank=64)
NO_ROPE = "LRKV without RoPE"
MECHANISMS = {
    "MHA": recipes.mha(HEADS),
    "LRKV": _LRKV,
    "LRKV without QK-norm": _LRKV | dict(qk_norm="none"),
    "LRKV, RoPE on shared": _LRKV | dict(rope="shared"),
    NO_ROPE: _LRKV,
    "LRKV x GQA-6": recipes.grouped(HEADS, kv_heads=6, bases=1, rank=64),
    "GQA-6": recipes.gqa(HEADS, kv_heads=6),
    "MQA": recipes.mqa(HEADS),
    "Q-K=V": recipes.projection_sharing(HEADS, tie="kv"),
    "Q=K=V": recipes.projection_sharing(HEADS, tie="qkv"),
    "(Q=K-V)+": recipes.projection_sharing(HEADS, tie="qk", channels=50),
    "thin keys, 32": recipes.thin_keys(HEADS, key_dim=32),
    "MLA": recipes.mla(HEADS, latent=768),
    "MLA as the paper counts it": recipes.mla_paper(HEADS, latent=768),
}


def model(name: str, layers: int) -> TransformerConfig:
    """Returns d36 with a mechanism of `MECHANISMS` and `layers` layers."""
    config = recipes.pretrain("d36", scale="2p5b", attention=MECHANISMS[name])
    config.model.num_layers = layers
    if name == NO_ROPE:
        config.model.positions = "none"
    return config_lib.resolve(config).model


def abstract_attention(name: str, length: int, dtype: jnp.dtype) -> tuple[Callable, tuple]:
    """Returns a function of one query over a full cache of one layer, and its abstract arguments.

    The function takes (weights, query, cache) and the keyword `implementation`.
    """
    config = model(name, layers=1)
    (mechanism,), base = config.mechanisms, config.block.angles_base
    module = nnx.eval_shape(lambda: mechanism.build(config.block.d_model, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)
    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype), nnx.to_pure_dict(state))
    cache = cache_lib.abstract([mechanism], batch=1, capacity=length, dtype=dtype).layers[0]
    query = jax.ShapeDtypeStruct((1, 1, HEADS, mechanism.query_dim), dtype)

    def attend(weights, query, cache, implementation=None):
        inputs = nnx.merge(graph, weights).decode_inputs(query, base)
        first_B = jnp.full((1,), length - 1, jnp.int32)
        return decode_attention(inputs, cache, first_B, implementation=implementation)

    return attend, (weights, query, cache)
