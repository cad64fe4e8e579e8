"""Parameters, cache bytes and FLOPs against formulas written here, and against XLA."""

import dataclasses
import functools
import math
import types

from flax import nnx
import jax
import jax.numpy as jnp
import pytest

from experiments.d36 import HEADS, MECHANISMS as D36, model as d36_model
from kvjax import cache as cache_lib, config as config_lib, recipes
from kvjax.cache.field import Field
from kvjax.costs import formulas
from kvjax.foundation.checkout import CONFIGS
from kvjax.foundation.command_line import load_config
from kvjax.hardware import datasheets
from kvjax.kernels.decode_attention import xla
from kvjax.kernels.decode_attention.cache_layouts.tiles import TILE_KV
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.decoder import Decoder
from kvjax.model.loss import mean_loss
from kvjax.model.transformer import Compute, Transformer
from tests import quick
from tests.mechanisms import FIRST

H, V = 128, 65_536
SCALES = {"128m": 12, "2p5b": 36, "6p3b": 50}
# KV heads of GQA, rank of LRKV, latent and RoPE key of MLA, by scale.
GROUPS = {"128m": 3, "2p5b": 6, "6p3b": 5}
RANK, P = 64, 64
LATENT = {"128m": 256, "2p5b": 768, "6p3b": 1024}
MECHANISMS = ("mha", "gqa", "mqa", "lrkv", "mla", "mla_paper")


def _attention(mechanism, scale, N):
    return dict(
        mha=lambda: recipes.mha(N),
        gqa=lambda: recipes.gqa(N, kv_heads=GROUPS[scale]),
        mqa=lambda: recipes.mqa(N),
        lrkv=lambda: recipes.lrkv(N, rank=RANK),
        lrkv_no_norm=lambda: recipes.lrkv(N, rank=RANK) | dict(qk_norm="none"),
        mla=lambda: recipes.mla(N, latent=LATENT[scale]),
        mla_paper=lambda: recipes.mla_paper(N, latent=LATENT[scale]),
    )[mechanism]()


def _config(mechanism, scale):
    attention = _attention(mechanism, scale, SCALES[scale] // 2)
    return config_lib.resolve(recipes.pretrain("x", scale=scale, attention=attention)).model


def _key_value_parameters(mechanism, scale, D, N):
    """Parameters of one layer that make keys and values."""
    C = LATENT[scale]
    return dict(
        mha=2 * D * N * H,
        gqa=2 * D * GROUPS[scale] * H,
        mqa=2 * D * H,
        lrkv=2 * (D * H + N * RANK * (D + H)),  # LRKV eq. 7
        mla=D * C + 2 * C * N * H + D * P,
        mla_paper=D * C + 2 * C * N * H,
    )[mechanism]


def _parts(mechanism, scale):
    L = SCALES[scale]
    D, N = 64 * L, L // 2
    rope_query = D * N * P if mechanism == "mla" else 0
    attention = 2 * D * N * H + rope_query + _key_value_parameters(mechanism, scale, D, N)
    parts = dict(embedding=V * D, attention=L * attention, mlp=L * 8 * D * D, norm=0, head=V * D)
    return parts | {"total": sum(parts.values())}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_parameters(mechanism, scale):
    config, expected = _config(mechanism, scale), _parts(mechanism, scale)
    assert formulas.parameters(config) == expected
    shapes = nnx.state(nnx.eval_shape(lambda: Transformer(config, jax.random.key(0))))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == expected["total"]


@pytest.mark.parametrize(
    "mechanism, scale, size",
    [  # bytes per layer and token in bfloat16
        ("mha", "2p5b", 9216),
        ("gqa", "2p5b", 2 * 2 * 6 * 128),
        ("mqa", "2p5b", 2 * 2 * 128),
        ("lrkv", "2p5b", 5120 + 4 * 18),  # LRKV eq. 5 and 1/rms
        ("lrkv_no_norm", "2p5b", 5120),
        ("mla", "2p5b", 2 * 832),
        ("mla_paper", "2p5b", 2 * 768),
        ("mha", "128m", 3072),
        ("lrkv", "128m", 2 * 2 * (128 + 6 * 64) + 4 * 6),
        ("mla", "128m", 2 * 320),
    ],
)
def test_cache_bytes(mechanism, scale, size):
    config = _config(mechanism, scale)
    per_layer = formulas.cache_bytes_per_token(config, jnp.dtype(jnp.bfloat16)) / SCALES[scale]
    assert per_layer == size


BF16 = jnp.dtype(jnp.bfloat16)


def _layers(name, layers):
    """Layers of d36, or of a rival at its size."""
    if name in D36:
        return d36_model(name, layers=layers)
    model = config_lib.resolve(load_config(CONFIGS / f"rivals.py:{name}_2p5b")).model
    block = dataclasses.replace(model.block, num_layers=layers)
    return dataclasses.replace(model, block=block, mechanisms=model.mechanisms[:layers])


@pytest.mark.parametrize(
    "name, chips, elements",
    [
        ("MHA", 9, 2 * 2 * H),
        ("MHA", 8, 3 * 2 * H),  # 18 heads on 8 chips
        ("MHA", 36, 2 * H),
        ("GQA-6", 2, 3 * 2 * H),
        ("GQA-6", 4, 2 * 2 * H),  # heads 4 to 8 read KV heads 1 and 2
        ("GQA-6", 18, 2 * H),
        ("MQA", 8, 2 * H),
        ("LRKV", 2, 2 * (H + 9 * 64) + 2 * 9),  # 9 of 18 latents and 1/rms, which takes 4 bytes
        ("MLA", 8, 768 + P),
        ("gla_narrow", 2, 384 + P),
        ("mlra2_narrow", 2, 2 * 192 + P),
        ("mlra4_narrow", 2, 4 * 192 + P),  # every head reads all four branches
        ("gta_narrow", 6, H + P),
        ("mla_lrkv_wide", 6, 768 + P + 2 * 3 * 48),
        ("mfa_narrow", 10, 2 * 416),
        ("shared_kv_narrow", 2, 416),
        ("tpa_narrow", 9, 6 * 2 + 6 * H),  # factors by channel are read by all heads
    ],
)
def test_cache_of_the_fullest_chip(name, chips, elements):
    """Per layer, in bfloat16, with heads sharded over the chips; by tokens all chips are equal."""
    config = _layers(name, 1)
    per_chip = functools.partial(formulas.chip_cache_bytes, config, BF16, chips=chips)
    assert per_chip(by="heads") == 2 * elements
    assert per_chip(by="tokens") == formulas.cache_bytes_per_token(config, BF16) / chips
    with pytest.raises(ValueError, match="by = 'layers': must be 'tokens' or 'heads'"):
        per_chip(by="layers")


def test_factors_are_read_by_all_heads():
    """Two query heads of four have half of the heads' factors, and all 3 x 8 of the channels'.

    A layer of one head, here without a cache, adds nothing to a chip that has none of its heads.
    """
    entry = dict(heads=Field("R N", (3, 4)), channels=Field("R H", (3, 8)))
    four = types.SimpleNamespace(num_heads=4, entry=lambda: entry, title="four heads")
    one = types.SimpleNamespace(num_heads=1, entry=dict, title="one head")
    kind = types.SimpleNamespace(window=0)
    config = types.SimpleNamespace(mechanisms=[four, one], layers=[(four, kind), (one, kind)])
    per_chip = formulas.chip_cache_bytes(config, BF16, chips=2, by="heads")
    assert per_chip == 2 * (3 * 2 + 3 * 8)


def test_by_tokens_is_what_a_chip_holds():
    config = d36_model("LRKV", layers=2)
    shape = dict(batch=3, capacity=1000, dtype=BF16, chips=8)
    cache = cache_lib.abstract(config.mechanisms, **shape)
    per_token = formulas.chip_cache_bytes(config, BF16, chips=8, by="tokens")
    assert cache_lib.live_bytes(cache) / 8 == 3 * 1024 * per_token


def test_key_scale_is_float32_whatever_the_cache_is():
    config = _config("lrkv", "2p5b")
    sizes = [formulas.cache_bytes_per_token(config, jnp.dtype(d)) for d in ("bfloat16", "float32")]
    assert sizes == [36 * 5192, 36 * (2 * 5120 + 72)]


@pytest.mark.parametrize(
    "mechanism, percent", [("lrkv", -5.7), ("mqa", -13.0), ("gqa", -9.2), ("mla_paper", -6.9)]
)
def test_training_flops_against_mha(mechanism, percent):
    flops = [
        formulas.training_flops_per_token(_config(m, "2p5b"), 2048) for m in ("mha", mechanism)
    ]
    assert round(100 * (flops[1] / flops[0] - 1), 1) == percent


def test_training_flops_of_mha_by_formula():
    """6 per matrix weight and token (PaLM, nanochat), 12·N·H·T for logits and weighted values."""
    for scale, L in SCALES.items():
        D, T = 64 * L, 2048
        matrices = L * 12 * D * D + V * D
        expected = 6 * matrices + L * 12 * D * T
        assert formulas.training_flops_per_token(_config("mha", scale), T) == expected
        half = 6 * matrices + L * 6 * D * T
        assert formulas.causal_share(_config("mha", scale), T) == pytest.approx(half / expected)


TRAINED = (*MECHANISMS, "thin_keys", "kv_tied", "qk_tied_plus", "lrkv_shared_rope")
TRAINED += ("mfa", *(name for name in FIRST.values() if name not in MECHANISMS))


@pytest.mark.parametrize(
    ("name", "tied_head"),
    quick.only(
        [("lrkv", False)],
        [*((name, False) for name in TRAINED), ("mha", True)],
    ),
)
def test_training_flops_against_xla(make_mechanism, name, tied_head):
    """Within 2 %: XLA also counts norms, softmax, tanh and sums, and no layer twice.

    Layers are unrolled and the loss is one slice, since XLA counts a loop's body once.
    """
    B, T = 1, 64
    wide = dict(latent_dim=48, rope_key_dim=16, key_dim=32, value_dim=32, rank=16)
    known = {f.name for f in dataclasses.fields(make_mechanism(name))}
    keys = {k: v for k, v in wide.items() if k in known and (k != "rank" or "lrkv" in name)}
    block = BlockConfig(num_layers=2, d_model=512, mlp_dim=2048, tied_head=tied_head)
    config = TransformerConfig(
        block=block, mechanisms=(make_mechanism(name, **keys),) * 2, vocab_size=512
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, jax.random.key(0))))
    weights, tokens = nnx.to_pure_dict(state), jax.ShapeDtypeStruct((B, T), jnp.int32)
    compute = Compute(unroll=True, loss_chunks=1)

    def loss(w, t):
        return mean_loss(nnx.merge(graph, w), t, t, compute=compute)

    compiled = jax.jit(jax.grad(loss)).lower(weights, tokens).compile()
    counted = compiled.cost_analysis()["flops"]
    ours = B * T * formulas.training_flops_per_token(config, T)
    assert 0.98 < counted / ours < 1.02


@pytest.mark.parametrize("name", quick.only(["LRKV x GQA-6", "MLA", "Q-K=V", "(Q=K-V)+"], D36))
def test_decode_attention_flops_against_xla(name):
    """One tile, since XLA counts a loop's body once; it also counts 4 per logit of softmax."""
    config, B, S = d36_model(name, layers=1), 2, TILE_KV
    (mechanism,), base = config.mechanisms, config.block.angles_base
    graph, state = nnx.split(nnx.eval_shape(lambda: mechanism.build(2304, rngs=nnx.Rngs(0))))
    cache = cache_lib.abstract([mechanism], batch=B, capacity=S, dtype=jnp.dtype(jnp.float32))

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    first_B = jax.ShapeDtypeStruct((B,), jnp.int32)
    N, H = mechanism.num_heads, mechanism.query_dim

    def attend(weights, query, layer, first_B):
        inputs = nnx.merge(graph, weights).decode_inputs(query, base)
        return xla.attend_in_tiles(inputs, layer, first_B, S)

    arguments = (nnx.to_pure_dict(state), shape(B, 1, N, H), cache.layers[0], first_B)
    counted = jax.jit(attend).lower(*arguments).compile().cost_analysis()["flops"]
    once, each = mechanism.decode_flops(base)
    if "key_scale" in cache.layers[0]:  # of the new key, counted with the projections here
        once -= mechanism.num_kv_heads * mechanism.key_dim * (2 * mechanism.rank + 3)
    assert 0.98 < counted / (B * (once + S * each + 4 * N * S)) < 1.02


# FLOPs per cached token and layer, as their authors' equations have them (2 per multiply-add), of
# a dense query; keys that are rotated when they are read cost more, and are not here.
PER_KEY = dict(
    gla_narrow=2 * HEADS * (2 * 384 + P),
    mlra2_narrow=2 * HEADS * 2 * (2 * 192 + P),
    mlra4_narrow=2 * HEADS * 4 * (2 * 192 + P),
    mla_lrkv_wide=2 * HEADS * (2 * 768 + P) + 4 * HEADS * 48,
    mla_lrkv_narrow=2 * HEADS * (2 * 192 + P) + 4 * HEADS * 16,
    gta_narrow=4 * HEADS * H,
    mfa_narrow=4 * 10 * 416,
    mfa_wide=4 * 20 * 256,
    shared_kv_narrow=4 * 10 * 416,
    tpa_narrow=2 * HEADS * 3 * H + 2 * HEADS * 3 + HEADS * 3 + 2 * HEADS * 3 * H,
    tpa_wide=2 * HEADS * 9 * H + 2 * HEADS * 9 + HEADS * 9 + 2 * HEADS * 9 * H,
)


@pytest.mark.parametrize("name", PER_KEY)
def test_flops_per_cached_token(name):
    (mechanism,) = _layers(name, 1).mechanisms
    assert mechanism.decode_flops(10_000.0).per_key == PER_KEY[name]


STEPS = ("MHA", "LRKV", "LRKV, RoPE on shared", "MLA", "Q-K=V")
STEPS += (*PER_KEY, "mfa_kr_wide", "tpa_kv_only_wide")


@pytest.mark.parametrize("name", quick.only(["Q-K=V"], STEPS))
def test_decode_step_flops_against_xla(name):
    """A whole step of two layers, weights and attention, on a cache of one tile."""
    config, B, S = _layers(name, 2), 1, TILE_KV
    config = dataclasses.replace(config, vocab_size=512)

    def model():
        return Decoder(Transformer(config, jax.random.key(0)))

    graph, state = nnx.split(nnx.eval_shape(model))
    cache = cache_lib.abstract(config.mechanisms, batch=B, capacity=S, dtype=jnp.dtype(jnp.float32))

    def integers(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    def step(weights, tokens, cache, counts):
        decoder = nnx.merge(graph, weights)
        x, cache = decoder(tokens, cache, counts)
        return decoder.logits(x), cache

    arguments = (nnx.to_pure_dict(state), integers(B, 1), cache, integers(B))
    counted = jax.jit(step).lower(*arguments).compile().cost_analysis()["flops"]
    cost = formulas.decode_cost(config, length=S, batch=B, dtype=jnp.dtype(jnp.float32))
    assert 0.98 < counted / cost.flops_per_token < 1.02


def _decode(mechanism, scale, **shape):
    shape = dict(length=4096, batch=1, dtype=BF16) | shape
    return formulas.decode_cost(_config(mechanism, scale), **shape)


@pytest.mark.parametrize("scale", SCALES)
def test_decode_flops_by_formula(scale):
    """Per token: 2 per weight, and 2·N·(H + Hv) per layer for each of S keys."""
    L, S = SCALES[scale], 4096
    D, N, C = 64 * L, L // 2, LATENT[scale]
    other = L * (2 * D * D + 8 * D * D) + V * D  # query, out, MLP, head
    weights = dict(
        mha=other + L * 2 * D * D,
        gqa=other + L * 2 * D * GROUPS[scale] * H,
        lrkv=other + L * 2 * D * (H + N * RANK),  # B is absorbed
        mla=other + L * (D * N * P + D * P + D * C),  # and the up-projections
        mla_paper=other + L * D * C,
    )
    for mechanism, count in weights.items():
        assert _decode(mechanism, scale).weight_flops_per_token == 2 * count, mechanism
    attention = dict(
        mha=S * 4 * N * H,
        gqa=S * 4 * N * H,
        mqa=S * 4 * N * H,
        # q W_up once, then C + P for a logit and C for the weighted latent (DeepSeek-V2)
        mla=2 * N * C * 2 * H + S * 2 * N * (2 * C + P),
    )
    for mechanism, flops in attention.items():
        assert _decode(mechanism, scale).attention_flops_per_token == L * flops, mechanism


def test_decode_attention_is_what_the_mechanisms_say(make_mechanism):
    """Layer by layer: ranks may differ, and rank 0 absorbs nothing."""
    plain, residual = make_mechanism("lrkv", rank=0), make_mechanism("lrkv", rank=3)
    block = BlockConfig(num_layers=3, d_model=16, mlp_dim=32)
    mixed = TransformerConfig(block=block, mechanisms=(plain, residual, residual), vocab_size=64)
    shape = dict(length=10, batch=1, dtype=BF16)
    cost = formulas.decode_cost(mixed, **shape)
    once, each = residual.decode_flops(block.rope_base)
    keys = plain.decode_flops(block.rope_base).per_key
    assert cost.attention_flops_per_token == round(10 * keys + 2 * (once + 10 * each))
    N, h, D = 4, 8, 16
    layers = 3 * (2 * D * N * h + 2 * D * h + 2 * D * 32) + 2 * (2 * D * N * 3)
    assert cost.weight_flops_per_token == 2 * (layers + 64 * D)
    everything = layers + 64 * D + 2 * 2 * N * 3 * h  # with B, which is read all the same
    assert cost.weight_bytes == 2 * (everything + D)


@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_decode_reads_rows_of_tables(make_mechanism, tied_head, positions):
    """A table costs a row per sequence; an embedding that is also the head is read whole."""
    D, V, B = 16, 64, 5
    block = BlockConfig(
        num_layers=1, d_model=D, mlp_dim=32, tied_head=tied_head, positions=positions
    )
    config = TransformerConfig(block=block, mechanisms=(make_mechanism("mha"),), vocab_size=V)
    cost = formulas.decode_cost(config, length=7, batch=B, dtype=jnp.dtype(jnp.float32))
    matrices = 4 * D * 32 + 2 * D * 32 + V * D
    rows = (not tied_head) + (positions == "learned")
    assert cost.weight_bytes == 4 * (matrices + B * D * rows)
    assert cost.weight_flops_per_token == 2 * matrices
    assert cost.cache_bytes == B * 7 * 4 * 2 * 32


def test_decode_totals_per_step_and_token():
    cost = formulas.DecodeCost(
        batch=4,
        length=10,
        weight_flops_per_token=70,
        attention_flops_per_token=30,
        weight_bytes=100,
        cache_bytes=60,
    )
    assert (cost.flops_per_token, cost.bytes, cost.bytes_per_token) == (100, 160, 40)
    assert cost.intensity == 2.5
    chip = dict(name="x", hbm_bytes=1, source="")
    assert cost.seconds(datasheets.Device(bandwidth=16, bf16_flops=400, **chip)) == 10  # bytes
    assert cost.seconds(datasheets.Device(bandwidth=160, bf16_flops=40, **chip)) == 10  # FLOPs


def test_largest_batch():
    """Weights and caches in nine tenths of memory: one more would not fit."""
    config, shape = _config("gqa", "2p5b"), dict(length=8192, dtype=BF16)
    weights = 2 * _parts("gqa", "2p5b")["total"]
    each = 8192 * 36 * 2 * 2 * 6 * 128
    assert formulas.weight_bytes(config, BF16) == weights
    for name, count in (("h200", 134), ("v5e", 10)):
        device = datasheets.get(name)
        assert formulas.largest_batch(config, device=device, **shape) == count
        assert weights + count * each <= 0.9 * device.hbm_bytes < weights + (count + 1) * each
    small = datasheets.Device(name="x", hbm_bytes=weights, bandwidth=1, bf16_flops=1, source="")
    assert formulas.largest_batch(config, device=small, **shape) == 0
