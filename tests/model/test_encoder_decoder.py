"""An encoder-decoder from its caches is what it is in full, with sources of any lengths."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as cache_lib
from kvjax.attention import GroupedConfig
from kvjax.attention.diagonal import DiagonalConfig
from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig
from kvjax.model.encoder_decoder import EncoderDecoder
from kvjax.model.encoder_decoder import EncoderDecoderConfig
from kvjax.model.encoder_decoder import greedy
from tests import quick

B, S, T, V = 3, 7, 5, 11
LENGTHS = jnp.asarray([7, 1, 4], jnp.int32)
BLOCK = dict(num_layers=2, d_model=16, mlp_dim=24, embedding_norm=False)


def _grouped(kv_heads, bases, rank=0, tie="none"):
    heads = dict(num_heads=4, num_kv_heads=kv_heads, num_bases=bases)
    return GroupedConfig(**heads, rank=rank, key_dim=8, value_dim=8, tie=tie)


MHA, LRKV, TIED = _grouped(4, 4), _grouped(4, 1, rank=3), _grouped(4, 4, tie="qkv")
KINDS = {"lrkv": (MHA, LRKV, LRKV), "mha": (MHA, MHA, MHA), "tied": (TIED, TIED, LRKV)}


def _config(kind, **block):
    encoder, decoder, cross = KINDS[kind]
    mechanisms = dict(encoder=encoder, decoder=decoder, cross=cross)
    return EncoderDecoderConfig(block=BlockConfig(**BLOCK | block), **mechanisms, vocab_size=V)


@pytest.fixture
def make(x64, randomise):
    return lambda config: randomise(lambda: EncoderDecoder(config, jax.random.key(0)))[0]


def _tokens():
    rng = np.random.default_rng(0)
    return rng.integers(0, V, (B, S), np.int32), rng.integers(0, V, (B, T), np.int32)


@pytest.mark.parametrize("kind", quick.only(["lrkv"], KINDS))
@pytest.mark.parametrize("positions", quick.only(["rope"], ["rope", "none"]))
def test_from_its_caches_it_is_what_it_is_in_full(make, kind, positions):
    """A first piece of three tokens, then one by one."""
    model = make(_config(kind, positions=positions))
    source, target = _tokens()
    full = jax.jit(lambda *a: model(*a))(source, LENGTHS, target)
    assert np.ptp(full) > 1
    decode = jax.jit(lambda *a: model.decode(*a))
    caches = jax.jit(lambda s: model.remember(s, LENGTHS, T))(source)
    found, caches = decode(target[:, :3], caches, jnp.full(B, 3, jnp.int32))
    pieces = [found]
    for t in range(3, T):
        found, caches = decode(target[:, t : t + 1], caches, jnp.ones(B, jnp.int32))
        pieces.append(found)
    np.testing.assert_allclose(np.concatenate(pieces, 1), full, rtol=1e-10, atol=1e-10)
    assert caches.target.lengths.tolist() == [T] * B and caches.source.lengths.tolist() == [7, 1, 4]


@pytest.mark.slow
def test_what_lies_behind_a_source_changes_nothing(make):
    model = make(_config("lrkv"))
    source, target = _tokens()
    other = np.where(np.arange(S)[None] < LENGTHS[:, None], source, (source + 3) % V)
    full = jax.jit(lambda *a: model(*a))
    expected = full(source, LENGTHS, target)
    np.testing.assert_allclose(full(other, LENGTHS, target), expected, rtol=1e-11, atol=1e-11)
    short = full(source[2:, :4], LENGTHS[2:], target[2:])  # alone, without padding
    np.testing.assert_allclose(short, expected[2:], rtol=1e-10, atol=1e-10)
    changed = source.copy()
    changed[2, 3] = (changed[2, 3] + 1) % V
    apart = np.abs(full(changed, LENGTHS, target) - expected).max(axis=(1, 2))
    assert apart[2] > 1e-3 and not apart[:2].any()  # the source is read, each its own


def test_a_source_is_read_to_both_sides(make):
    model = make(_config("lrkv"))
    source, _ = _tokens()
    changed = source.copy()
    changed[0, 6] = (changed[0, 6] + 1) % V
    encode = jax.jit(lambda s: model.encode(s, LENGTHS))
    assert np.abs(encode(changed) - encode(source))[0].max(axis=-1).min() > 1e-6


@pytest.mark.slow
def test_greedy_is_the_likeliest_token_after_token(make):
    model = make(_config("lrkv"))
    source, _ = _tokens()
    found = jax.jit(lambda s: greedy(model, model.remember(s, LENGTHS, T), 0, T))(source)
    said = np.concatenate([np.zeros((B, 1), np.int32), found[:, :-1]], axis=1)
    z = model(source, LENGTHS, said)
    np.testing.assert_array_equal(found, np.argmax(z, axis=-1))


def test_the_source_is_kept_once_in_as_many_bytes_as_lrkv_says(make):
    model = make(_config("lrkv"))
    caches = jax.eval_shape(lambda s: model.remember(s, LENGTHS, T), _tokens()[0])
    elements = 2 * (8 + 4 * 3) + 4  # 2(H + N·R), and N 1/rms
    per_token = cache_lib.live_bytes(caches.source) / (B * caches.source.capacity)
    assert per_token == 2 * 8 * elements  # two layers of float64


def test_cross_attention_that_cannot_be():
    with pytest.raises(UserError, match="tie = 'qkv': must be 'none' or 'kv' in cross-attention"):
        EncoderDecoderConfig(
            block=BlockConfig(**BLOCK), encoder=MHA, decoder=MHA, cross=TIED, vocab_size=V
        )


def test_a_mean_over_the_row_has_no_place_here():
    meant = DiagonalConfig(**dataclasses.asdict(TIED))
    with pytest.raises(UserError, match="encoder = DiagonalConfig: depends on whole rows"):
        EncoderDecoderConfig(
            block=BlockConfig(**BLOCK), encoder=meant, decoder=MHA, cross=MHA, vocab_size=V
        )


def test_alibi_needs_order():
    """Slopes favour what comes later: under a causal mask alone that is what is near."""
    sloped = dataclasses.replace(MHA, alibi=True)
    common = dict(cross=MHA, vocab_size=V)
    for encoder, decoder, positions in ((sloped, MHA, "none"), (MHA, sloped, "rope")):
        block = BlockConfig(**BLOCK, positions=positions)
        with pytest.raises(UserError, match="alibi = True: needs causal attention without other"):
            EncoderDecoderConfig(block=block, encoder=encoder, decoder=decoder, **common)
    block = BlockConfig(**BLOCK, positions="none")
    EncoderDecoderConfig(block=block, encoder=MHA, decoder=sloped, **common)


@pytest.mark.slow
def test_it_starts_as_the_recipe_says():
    """Projections into the residual stream are 0: the first logits are."""
    model = EncoderDecoder(_config("lrkv"), jax.random.key(0))
    weights = nnx.to_pure_dict(nnx.state(model))
    assert not np.any(weights["decoder"][0]["cross"]["out"])
    assert np.any(weights["decoder"][1]["cross"]["mechanism"]["expand_key"])
    source, target = _tokens()
    assert not np.any(model(source, LENGTHS, target))


@pytest.mark.parametrize(
    "keys, message",
    [
        (dict(positions="learned", max_positions=8), "positions = 'learned': must be one of"),
        (dict(tied_head=True), "tied_head = True: must be False in an encoder-decoder"),
        (dict(window=3), "window = 3: must be 0 in an encoder-decoder"),
        (dict(causal=False), "causal = False: must be True in an encoder-decoder"),
        (dict(embedding_norm=True), "embedding_norm = True: must be False"),
    ],
)
def test_keys_without_meaning(keys, message):
    with pytest.raises(UserError, match=message):
        _config("lrkv", **keys)


@pytest.mark.slow
def test_no_more_tokens_than_there_is_room_for():
    model = EncoderDecoder(_config("lrkv"), jax.random.key(0))
    caches = jax.eval_shape(lambda s: model.remember(s, LENGTHS, T), _tokens()[0])
    with pytest.raises(ValueError, match="steps = 129: the caches have room for 128"):
        greedy(model, caches, 0, 129)
