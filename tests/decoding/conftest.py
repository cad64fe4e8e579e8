"""Fixtures of small models that generate."""

import functools

import jax
import numpy as np
import pytest

from kvjax.decoding import program
from kvjax.decoding.generator import Generator
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Transformer
from tests.decoding.prompts import L, V


@functools.cache
def _model(randomise, make_mechanism, name, **block):
    block = BlockConfig(num_layers=L, d_model=16, mlp_dim=24, **block)
    config = TransformerConfig(block=block, mechanisms=(make_mechanism(name),) * L, vocab_size=V)
    return randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)[0]


@pytest.fixture
def make_model(randomise, make_mechanism):
    """A function from a mechanism's name and block options to a Transformer, no weight zero."""
    return functools.partial(_model, randomise, make_mechanism)


@pytest.fixture
def generator(randomise, make_mechanism):
    return _cached_generator(randomise, make_mechanism)


@functools.cache
def _cached_generator(randomise, make_mechanism):
    return Generator(_model(randomise, make_mechanism, "lrkv"), chunk=5)


@pytest.fixture
def on_chips(make_model):
    """A function from a mechanism's name, a number of chips and options to a Generator."""

    def build(name, chips, **options):
        mesh = program.make_mesh(chips, jax.devices())
        return Generator(make_model(name), chunk=150, mesh=mesh, **options)

    return build
