"""Encoder-decoder: decoding from caches equals the full pass, with sources of any lengths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, greedy
from kvjax import cache as cache_lib
from kvjax.attention import GroupedConfig
from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig
from tests import quick

B, S, T, V = 3, 7, 6, 11
ROOM = 128  # the minimum capacity of a cache
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
def test_decoding_equals_the_full_pass(make, kind, positions):
    """Pieces of up to three tokens, and token by token what it says itself.

    On whole rows, tokens beyond a source's end have no effect; sources are read in both directions.
    """
    model = make(_config(kind, positions=positions, logit_softcap=2.0, norm_epsilon=1e-3))
    full, decode = (jax.jit(lambda *a, f=f: f(*a)) for f in (model, model.decode))
    source, target = _tokens()
    caches = jax.jit(lambda source: model.remember(source, LENGTHS, T))(source)
    pieces, ended = [], caches
    for piece, counts in zip(np.split(target, 2, axis=1), ([3, 2, 3], [3, 3, 3]), strict=True):
        z, ended = decode(piece, ended, jnp.asarray(counts, jnp.int32))
        pieces.append(z)
    found, expected = np.concatenate(pieces, axis=1), full(source, LENGTHS, target)

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)

    close(found[::2], expected[::2])
    assert np.ptp(expected) > 1
    shorter = np.delete(target, 2, axis=1)  # the second sequence's target
    close(found[1, 3:], full(source, LENGTHS, np.pad(shorter, ((0, 0), (0, 1))))[1, 2:5])
    assert ended.target.lengths.tolist() == [6, 5, 6]
    assert ended.source.lengths.tolist() == [7, 1, 4]

    made = jax.jit(lambda caches: greedy(model, caches, 4, ROOM))(caches)
    assert made.shape == (B, ROOM)
    said = np.concatenate([np.full((B, 1), 4, np.int32), made[:, : T - 1]], axis=1)
    np.testing.assert_array_equal(made[:, :T], np.argmax(full(source, LENGTHS, said), axis=-1))

    behind = np.arange(S)[None] >= LENGTHS[:, None]
    close(full(np.where(behind, (source + 3) % V, source), LENGTHS, target), expected)
    changed = source.copy()
    changed[2, 3] = (changed[2, 3] + 1) % V
    apart = np.abs(full(changed, LENGTHS, target) - expected).max(axis=(1, 2))
    assert apart[2] > 1e-3 and not apart[:2].any()  # each sequence reads its own source


def test_the_source_is_cached_once_in_lrkvs_bytes(make):
    model = make(_config("lrkv"))
    caches = jax.eval_shape(lambda s: model.remember(s, LENGTHS, T), _tokens()[0])
    elements = 2 * (8 + 4 * 3) + 4  # 2(H + N·R), and N 1/rms
    per_token = cache_lib.live_bytes(caches.source) / (B * caches.source.capacity)
    assert per_token == 2 * 8 * elements  # two layers of float64
    with pytest.raises(ValueError, match="steps = 129: the caches have room for 128"):
        greedy(model, caches, 0, ROOM + 1)


def test_what_cannot_be():
    with pytest.raises(UserError, match="tie = 'qkv': must be 'none' or 'kv' in cross-attention"):
        dataclasses.replace(_config("mha"), cross=TIED)
    for key, value, needed in (
        ("positions", "learned", "one of 'rope', 'none'"),
        ("window", 3, "0 in an encoder-decoder"),
        ("causal", False, "True in an encoder-decoder"),
        ("tied_head", True, "False in an encoder-decoder"),
        ("embedding_norm", True, "False in an encoder-decoder"),
        ("norm_after", True, "False in an encoder-decoder"),
        ("dropout", 0.5, "0.0 in an encoder-decoder"),
    ):
        with pytest.raises(UserError, match=f"config.model.{key} = '?{value}'?: must be {needed}"):
            _config("lrkv", **{key: value})
