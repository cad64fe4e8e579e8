"""Deviations that every model's weights start with, as its config says."""

import dataclasses

from flax import nnx, traverse_util
import jax
import numpy as np

from experiments.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from experiments.models.labeller import Labeller
from experiments.models.linear import LinearConfig
from experiments.models.recurrent import RecurrentConfig, RecurrentTransformer
from kvjax.attention import GroupedConfig
from kvjax.layers.weight import Axes, axes_of
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Transformer

BLOCK = BlockConfig(num_layers=2, d_model=16, mlp_dim=24, bias=True, norm_gain=True, norm_bias=True)


def _makers(block):
    """Functions of a key that make each of the models."""
    mha = GroupedConfig(num_heads=4, num_kv_heads=4, num_bases=4, rank=0, key_dim=8, value_dim=8)
    size = dict(vocab_size=5)
    learned = dataclasses.replace(block, positions="learned", max_positions=7)
    transformer = TransformerConfig(block=learned, mechanisms=(mha, mha), **size)
    fixed = dataclasses.replace(block, embedding_norm=False)
    several = dict(encoder=mha, decoder=mha, cross=mha)
    encoder_decoder = EncoderDecoderConfig(block=fixed, **several, **size)
    heads = LinearConfig(num_heads=2, key_dim=8, value_dim=8)
    bare = dataclasses.replace(block, positions="none")
    recurrent = RecurrentConfig(block=bare, attention=heads, **size)
    return (
        lambda key: Transformer(transformer, key),
        lambda key: EncoderDecoder(encoder_decoder, key),
        lambda key: RecurrentTransformer(recurrent, key),
        lambda key: Labeller(transformer, key, features=3, whole=True),
    )


def test_weights_start_as_the_config_says(monkeypatch):
    """Matrices, tables and vectors each with their own; each weight is drawn from its own key.

    What adds to the residual stream, and the head, starts as 0 if not told otherwise.
    """
    keys = []

    def normal(key, std, shape, dtype):
        if not isinstance(key, jax.core.Tracer):  # of one layer of many
            keys.append(tuple(jax.random.key_data(key).tolist()))
        return np.full(shape, std, dtype)

    monkeypatch.setattr("kvjax.layers.weight._normal", normal)
    starts = dict(matrix_std=0.5, embedding_std=3.0, zero_outputs=False)
    for make in _makers(dataclasses.replace(BLOCK, **starts)):
        keys.clear()
        state = nnx.state(make(jax.random.key(0)))
        assert len(set(keys)) == len(keys) > 1
        axes = traverse_util.flatten_dict(axes_of(state))
        for path, value in traverse_util.flatten_dict(nnx.to_pure_dict(state)).items():
            if Axes.parse(axes[path]).is_matrix:
                expected = 0.5
            elif path[-1] in ("embedding", "positions", "row"):
                expected = 3.0
            else:
                expected = 1 if path[-1] == "gain" else 0
            assert np.all(value == expected), path
    weights = nnx.to_pure_dict(nnx.state(_makers(BLOCK)[0](jax.random.key(0))))
    (layers,) = weights["segments"].values()
    for zeros in (weights["head"], layers["attention"]["out"], layers["mlp"]["down"]):
        assert not np.any(zeros)
