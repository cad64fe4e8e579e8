"""Activations of attention on a text, against the whole model."""

import dataclasses
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.analysis.measures import activations
from kvjax.analysis.measures.activations import Mask
from kvjax.attention import Attention
from kvjax.convert import model as model_lib, perplexity
from kvjax.foundation.errors import UserError
from kvjax.layers import rope
from kvjax.model import decoder
from tests import quick
from tests.analysis import models
from tests.compiled import compiled
from tests.convert import workdirs
from tests.mechanisms import MECHANISMS

LENGTH = 11
ROWS_BT = np.random.default_rng(0).integers(0, 256, (5, LENGTH)).astype(np.int32)  # of two batches
BLOCKS = {name: dataclasses.replace(c, num_layers=2) for name, c in workdirs.BLOCKS.items()}
BIASED = workdirs.grouped(4, 1, 3, qk_norm="none", bias=True, latent_bias=True)


def _made(mechanism, block="nanochat", **keys):
    return workdirs.Made(workdirs.config(dataclasses.replace(BLOCKS[block], **keys), mechanism))


@pytest.fixture(params=["window", "learned", "not causal"])
def other(request):
    """Models of blocks other than the recipe's."""
    if request.param == "window":
        return _made(workdirs.grouped(2, 2), "llama", window=4)
    if request.param == "learned":
        return _made(BIASED, "gpt2")
    return _made(workdirs.grouped(4, 4), causal=False)


def _inputs(model):
    """Returns the inputs of attention in each layer of the whole model."""
    whole, c = decoder.Decoder(model_lib.transformer(model)), model.transformer.block
    index = np.arange(LENGTH)[None]

    def inputs(rows_BT):
        x, found = whole.embed(rows_BT, index, workdirs.F32), []
        for layer, mechanism in zip(whole.layers, model.transformer.mechanisms, strict=True):
            found.append(layer.attention_norm(x))
            kind = c.layer_kinds[len(found) - 1]
            positions = rope.positions(index, mechanism.rope_dim, kind.rope_base)
            x = layer(x, positions, causal=c.causal, **kind.attend, compute=workdirs.F32)
        return found

    return list(map(np.asarray, compiled(inputs, ROWS_BT)))


def _check(model):
    c, mechanisms = model.transformer.block, model.transformer.mechanisms
    expected = _inputs(model)
    found = list(activations.layers(model, ROWS_BT, activations.plain))
    for i, (layer, input_BTD) in enumerate(zip(found, expected, strict=True)):
        tolerance = dict(rtol=0, atol=1e-4 * np.abs(input_BTD).max())
        np.testing.assert_allclose(layer.input_BTD, input_BTD, **tolerance)
        module = nnx.eval_shape(lambda i=i: Attention(mechanisms[i], c.d_model, rngs=nnx.Rngs(0)))
        weights = model_lib.read_layer(model, i)["attention"]
        own = nnx.merge(nnx.split(module)[0], jax.tree.map(jnp.asarray, weights))
        kind = c.layer_kinds[i]
        positions = rope.positions(np.arange(LENGTH)[None], mechanisms[i].rope_dim, kind.rope_base)
        y_BTD = own(layer.input_BTD, positions, causal=c.causal, **kind.attend)
        p_NTT, o_TNH = activations.attention(layer, 4)
        np.testing.assert_allclose(p_NTT.sum(axis=-1), 1, atol=1e-12)
        np.testing.assert_array_equal(
            p_NTT > 0, np.broadcast_to(layer.mask.visible(LENGTH), p_NTT.shape)
        )
        o_1TNH = jnp.asarray(o_TNH[None], jnp.float32)
        y_TD = own.project_out(o_1TNH, layer.input_BTD[4:5], positions)[0]
        np.testing.assert_allclose(y_TD, y_BTD[4], rtol=0, atol=1e-5 * np.abs(y_TD).max())
        _check_plain(layer, rotates=kind.rope_base is not None)


def _check_plain(layer, *, rotates):
    """Checks that RoPE changes the logits of different tokens only."""
    G = layer.query_BTNH.shape[2] // layer.key_BTKH.shape[2]

    def logits(q, k):
        return np.einsum("BTNH,BSNH->BNTS", q, np.repeat(k, G, axis=2))

    with_BNTT = logits(layer.query_BTNH, layer.key_BTKH)
    without_BNTT = logits(layer.plain_query_BTNH, layer.plain_key_BTKH)
    same = np.eye(LENGTH, dtype=bool)
    size = np.abs(with_BNTT).max()
    np.testing.assert_allclose(with_BNTT[..., same], without_BNTT[..., same], atol=1e-5 * size)
    differ = np.abs(with_BNTT - without_BNTT)[..., ~same].max() > 1e-2 * size
    assert differ == rotates


@pytest.mark.parametrize(
    "mechanism_name",
    quick.only(("mla_paper",), MECHANISMS),
)
def test_layers_are_those_of_the_model(make_mechanism, mechanism_name):
    _check(_made(make_mechanism(mechanism_name)))


@pytest.mark.slow
def test_layers_of_other_blocks(other):
    _check(other)


def test_layers_of_several_kinds():
    """With a window and a base of its own, with scaled logits, and without RoPE; all capped."""
    _check(models.model(**models.SEVERAL_KINDS))


def test_masks():
    visible_TT = Mask(window=2).visible(4)
    np.testing.assert_array_equal(
        visible_TT, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    )
    np.testing.assert_array_equal(Mask().visible(3), np.tri(3))
    assert Mask(causal=False).visible(3).all()


def test_losses_are_those_of_the_next_tokens(monkeypatch):
    """Runs all layers of a synthetic pass whose loss in nats is the next token's id."""
    run = []

    class FakePass:
        def __init__(self, model, rows_BT, attention):
            run.append((model, rows_BT.tolist(), attention))

        def layers(self):
            for layer in range(3):
                run.append(layer)
                yield layer

        def losses(self, targets_BT):
            return iter([np.float32(targets_BT[:1]), np.float32(targets_BT[1:])])

    monkeypatch.setattr(activations.layerwise, "LayerwisePass", FakePass)
    model = types.SimpleNamespace(name="made")
    rows_BT = np.array([[5, 0, 1], [6, 2, 4]])
    np.testing.assert_array_equal(activations.losses(model, rows_BT), [[0, 1], [2, 4]])
    assert run == [(model, [[5, 0], [6, 2]], Attention), 0, 1, 2]
    assert activations.perplexity(model, rows_BT) == pytest.approx(np.exp(7 / 4))
    with pytest.raises(UserError, match="losses of made on the text are not finite: check its"):
        activations.perplexity(model, np.full((2, 3), np.inf))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lrkv_by_layer", "mistral_lrkv", "gpt2_lrkv"])
def test_perplexity_with_plain_attention_is_the_models(name):
    block, mechanism, _ = workdirs.MODELS[name]
    model = workdirs.Made(workdirs.config(block, mechanism))
    expected = perplexity.perplexity(model, ROWS_BT)
    assert activations.perplexity(model, ROWS_BT) == expected
    assert activations.perplexity(model, ROWS_BT, activations.plain) == pytest.approx(
        expected, 1e-5
    )


@pytest.mark.slow
def test_attention_is_changed_in_all_layers():
    """Replaces attention by each token's own value."""
    model = _made(workdirs.grouped(4, 4))

    def alone(q, k, v, scale, mask, softcap):
        return v

    plain, changed = (list(activations.layers(model, ROWS_BT, a)) for a in (None, alone))
    np.testing.assert_array_equal(plain[0].input_BTD, changed[0].input_BTD)
    assert np.abs(plain[1].input_BTD - changed[1].input_BTD).max() > 0.1
    one_BT = ROWS_BT[:, :2]  # the only input token attends to itself with any attention
    assert activations.perplexity(model, one_BT) == pytest.approx(
        activations.perplexity(model, one_BT, alone), 1e-5
    )
    assert activations.perplexity(model, ROWS_BT, alone) != pytest.approx(
        activations.perplexity(model, ROWS_BT), 1e-3
    )


@pytest.mark.slow
def test_values_that_are_not_finite_are_refused():
    model = _made(workdirs.grouped(4, 2))
    model.weights[("segments", 0, "attention", "mechanism", "base_value")][1, :, 1] = np.inf
    with pytest.raises(UserError, match=r"layer 1 of made: values .* not finite, of heads \[1\]"):
        list(activations.layers(model, ROWS_BT))
    with pytest.raises(UserError, match="losses of made on the text are not finite"):
        activations.perplexity(model, ROWS_BT)
