"""What other authors' mechanisms cost: bytes by published formulas, FLOPs against XLA's count."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import pytest

from kvjax import cache as cache_lib, config as config_lib
from kvjax.costs import formulas
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.kernels.decode_attention.cache_layouts.tiles import TILE_KV
from kvjax.model.decoder import Decoder
from kvjax.model.transformer import Transformer

BF16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
N, D, H, P = 18, 2304, 128, 64


def _model(name, layers):
    model = config_lib.resolve(load_config(CONFIGS / f"rivals.py:{name}_2p5b")).model
    block = dataclasses.replace(model.block, num_layers=layers)
    return dataclasses.replace(model, block=block, mechanisms=model.mechanisms[:layers])


# FLOPs per cached token and layer, as their authors' equations have them (2 per multiply-add), of
# a dense query; keys that are rotated when they are read cost more, and are not here.
PER_KEY = dict(
    gla_narrow=2 * N * (2 * 384 + P),
    mlra2_narrow=2 * N * 2 * (2 * 192 + P),
    mlra4_narrow=2 * N * 4 * (2 * 192 + P),
    mla_lrkv_wide=2 * N * (2 * 768 + P) + 4 * N * 48,
    mla_lrkv_narrow=2 * N * (2 * 192 + P) + 4 * N * 16,
    gta_narrow=4 * N * H,
    mfa_narrow=4 * 10 * 416,
    mfa_wide=4 * 20 * 256,
    shared_kv_narrow=4 * 10 * 416,
    tpa_narrow=2 * N * 3 * H + 2 * N * 3 + N * 3 + 2 * N * 3 * H,
    tpa_wide=2 * N * 9 * H + 2 * N * 9 + N * 9 + 2 * N * 9 * H,
)


@pytest.mark.parametrize("name", PER_KEY)
def test_flops_per_cached_token(name):
    (mechanism,) = _model(name, 1).mechanisms
    assert mechanism.decode_flops(10_000.0).per_key == PER_KEY[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PER_KEY, "mfa_kr_wide", "tpa_kv_only_wide"])
def test_decode_step_flops_against_xla(name):
    """A whole step of two layers, weights and attention, on a cache of one tile."""
    config, B, S = dataclasses.replace(_model(name, 2), vocab_size=512), 1, TILE_KV
    graph, state = nnx.split(
        nnx.eval_shape(lambda: Decoder(Transformer(config, jax.random.key(0))))
    )
    cache = cache_lib.abstract(config.mechanisms, batch=B, capacity=S, dtype=FLOAT32)

    def integers(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    def step(weights, tokens, cache, counts):
        decoder = nnx.merge(graph, weights)
        x, cache = decoder(tokens, cache, counts)
        return decoder.logits(x), cache

    arguments = (nnx.to_pure_dict(state), integers(B, 1), cache, integers(B))
    counted = jax.jit(step).lower(*arguments).compile().cost_analysis()["flops"]
    cost = formulas.decode_cost(config, length=S, batch=B, dtype=FLOAT32)
    assert 0.98 < counted / cost.flops_per_token < 1.02


@pytest.mark.parametrize(
    "name, chips, elements",
    [  # per layer on the fullest of several chips, by heads
        ("gla_narrow", 2, 384 + P),
        ("mlra2_narrow", 2, 2 * 192 + P),
        ("mlra4_narrow", 2, 4 * 192 + P),  # every head has all four
        ("gta_narrow", 6, H + P),
        ("mla_lrkv_wide", 6, 768 + P + 2 * 3 * 48),
        ("mfa_narrow", 10, 2 * 416),
        ("shared_kv_narrow", 2, 416),
        ("tpa_narrow", 9, 6 * 2 + 6 * H),  # factors by channel are read by all heads
    ],
)
def test_bytes_on_several_chips_by_heads(name, chips, elements):
    per_chip = formulas.chip_cache_bytes_per_token(_model(name, 1), BF16, chips=chips, by="heads")
    assert per_chip == 2 * elements
