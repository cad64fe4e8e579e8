"""Perplexity and moments with one layer in memory, against the whole model."""

import functools
import gc

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import Attention
from kvjax.convert import calibration, layerwise, model as model_lib, perplexity
from kvjax.layers import rope
from kvjax.model import decoder
from kvjax.model.loss import token_losses
from tests import quick
from tests.convert import comparison, workdirs


@pytest.mark.parametrize("name", workdirs.BLOCKS)
def test_perplexity(name):
    """Covers every kind of block, a small last batch, and another attention class."""
    source = workdirs.Made(workdirs.config(name, workdirs.grouped(2, 1, 3, **workdirs.PLAIN)))
    rows_BT = np.random.default_rng(3).integers(0, 257, (5, 12)).astype(np.int32)

    def nats():
        losses = nnx.jit(functools.partial(token_losses, compute=workdirs.F32))
        whole = model_lib.transformer(source)
        return np.asarray(losses(whole, rows_BT[:, :-1], rows_BT[:, 1:]), np.float64)

    expected = float(np.exp(nats().mean()))
    assert perplexity.perplexity(source, rows_BT) == pytest.approx(expected, rel=1e-5)

    class Twice(Attention):
        def project_out(self, *args):
            return 2 * super().project_out(*args)

    run = layerwise.LayerwisePass(source, rows_BT[:, :-1], attention=Twice)
    assert [seen for seen in run.layers()] == [[(), ()]] * workdirs.LAYERS
    groups = list(run.losses(rows_BT[:, 1:]))
    assert [len(group) for group in groups] == [4, 1]
    for path in source.weights:
        if path[-2:] in (("attention", "out"), ("attention", "out_bias")):
            source.weights[path] = 2 * source.weights[path]
    np.testing.assert_allclose(np.concatenate(groups), nats(), rtol=2e-5)


def test_a_pass_leaves_no_weights_in_memory():
    """Embedding and head go with the pass, without waiting for garbage collection."""
    source = workdirs.Made(workdirs.config("llama", workdirs.grouped(2, 2, **workdirs.PLAIN)))
    rows_BT = np.random.default_rng(3).integers(0, 257, (2, 12)).astype(np.int32)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    gc.disable()
    try:
        perplexity.perplexity(source, rows_BT)
        left = [array.shape for array in jax.live_arrays() if id(array) not in before]
    finally:
        gc.enable()
    assert not [shape for shape in left if workdirs.VOCABULARY in shape]


@pytest.mark.slow
def test_moments(imported):
    """Compares with the activations of the whole model."""
    source = model_lib.open(str(imported("qwen2")))
    rows = np.random.default_rng(0).integers(0, 38, (5, 11))
    model = model_lib.transformer(source)
    expected = []
    decoding = decoder.Decoder(model)
    x = decoding.embed(jnp.asarray(rows), np.arange(11)[None], workdirs.F32)
    c = source.transformer.block
    for layer, mechanism in zip(decoding.layers, source.transformer.mechanisms, strict=True):
        h = np.asarray(layer.attention_norm(x), np.float64).reshape(-1, c.d_model)
        h = np.concatenate([h, np.ones((len(h), 1))], axis=1)
        expected.append(h.T @ h / len(h))
        positions = rope.positions(np.arange(11)[None], mechanism.rope_dim, c.angles_base)
        x = layer(x, positions, causal=True, window=c.window, compute=workdirs.F32)
    for got, wanted in zip(calibration.moments(source, rows), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "name", quick.only(["gemma2"], ["mistral_window", "qwen2_some_windows", "gemma2"])
)
def test_sensitivities(name):
    """Compares with outputs under random errors, independent between tokens, layer by layer."""
    source, rng = model_lib.open(str(comparison.PUBLISHED / name)), np.random.default_rng(0)
    rows = rng.integers(0, 38, (2, 11))
    measured = []

    def observe(attention, h_BTD, positions, mask):
        q_BTNH, raw = attention.mechanism.project(h_BTD, positions)
        k_BSKH, v_BSKH = attention.mechanism.keys_values(raw, positions)
        G = q_BTNH.shape[2] // k_BSKH.shape[2]
        k_BSNH, v_BSNH = jnp.repeat(k_BSKH, G, axis=2), jnp.repeat(v_BSKH, G, axis=2)
        return [q_BTNH, k_BSNH, jnp.einsum("BSNH,NHD->BSND", v_BSNH, attention.out[...])]

    observed = layerwise.LayerwisePass(source, rows).layers(observe)
    for (mechanism, kind), ((q, k, v),) in zip(source.transformer.layers, observed, strict=True):
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        T = q.shape[1]
        visible = np.tri(T, dtype=bool) & ~np.tri(T, k=-(kind.window or T), dtype=bool)
        logits = np.einsum("BTNH,BSNH->BNTS", q, k) * mechanism.scale

        def outputs(logits, v, kind=kind, visible=visible):
            logits = kind.logit_factor * logits
            if kind.softcap:
                logits = kind.softcap * np.tanh(logits / kind.softcap)
            logits = np.where(visible, logits, -np.inf)
            p = np.exp(logits - logits.max(axis=-1, keepdims=True))
            return np.einsum("BNTS,BSND->BNTD", p / p.sum(axis=-1, keepdims=True), v)

        scale, exact = 1e-3, outputs(logits, v)
        energy_N = np.mean(np.sum(v**2, axis=-1), axis=(0, 1))
        key_change = value_change = 0.0
        for _ in range(300):
            errors = scale * rng.standard_normal(logits.shape)
            key_change += np.sum((outputs(logits + errors, v) - exact) ** 2)
            noise = rng.standard_normal(v.shape) / v.shape[-1] ** 0.5
            changed = v + scale * energy_N[:, None] ** 0.5 * noise
            value_change += np.sum((outputs(logits, changed) - exact) ** 2)
        measured.append(key_change / value_change)
    np.testing.assert_allclose(calibration.sensitivities(source, rows), measured, rtol=0.1)
