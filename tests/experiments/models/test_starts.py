"""Standard deviations of the initial weights of the studies' models."""

import dataclasses

import pytest

from experiments.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from experiments.models.labeller import Labeller
from experiments.models.linear import LinearConfig
from experiments.models.recurrent import RecurrentConfig, RecurrentTransformer
from kvjax.attention import GroupedConfig
from kvjax.model.config import TransformerConfig
from tests.model import starts

MHA = GroupedConfig(num_heads=4, num_kv_heads=4, num_bases=4, rank=0, key_dim=8, value_dim=8)


def _encoder_decoder(key):
    block = dataclasses.replace(starts.BLOCK, embedding_norm=False)
    mechanisms = dict(encoder=MHA, decoder=MHA, cross=MHA)
    return EncoderDecoder(EncoderDecoderConfig(block=block, **mechanisms, vocab_size=5), key)


def _recurrent(key):
    block = dataclasses.replace(starts.BLOCK, positions="none")
    attention = LinearConfig(num_heads=2, key_dim=8, value_dim=8)
    return RecurrentTransformer(
        RecurrentConfig(block=block, attention=attention, vocab_size=5), key
    )


def _labeller(key):
    block = dataclasses.replace(starts.BLOCK, positions="learned", max_positions=7)
    config = TransformerConfig(block=block, mechanisms=(MHA, MHA), vocab_size=5)
    return Labeller(config, key, features=3, whole=True)


@pytest.mark.parametrize("make", [_encoder_decoder, _recurrent, _labeller])
def test_weights_start_as_the_config_says(make, monkeypatch):
    starts.check(make, monkeypatch)
