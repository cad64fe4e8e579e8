"""Standard deviations of the initial weights, as the config gives them."""

import dataclasses

from flax import nnx
import jax
import numpy as np

from kvjax.attention import GroupedConfig
from kvjax.model.config import TransformerConfig
from kvjax.model.transformer import Transformer
from tests.model import starts

MHA = GroupedConfig(num_heads=4, num_kv_heads=4, num_bases=4, rank=0, key_dim=8, value_dim=8)


def _config(**block):
    block = dataclasses.replace(starts.BLOCK, positions="learned", max_positions=7, **block)
    return TransformerConfig(block=block, mechanisms=(MHA, MHA), vocab_size=5)


def test_weights_start_as_the_config_says(monkeypatch):
    starts.check(lambda key: Transformer(_config(), key), monkeypatch)


def test_output_projections_and_the_head_start_at_zero():
    model = Transformer(_config(zero_outputs=True), jax.random.key(0))
    weights = nnx.to_pure_dict(nnx.state(model))
    (layers,) = weights["segments"].values()
    for zeros in (weights["head"], layers["attention"]["out"], layers["mlp"]["down"]):
        assert not np.any(zeros)
