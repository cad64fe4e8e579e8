"""Output projections that are regressed on text."""

import dataclasses

import numpy as np
import pytest

from kvjax.convert import calibration, factored_layer, layer as layer_lib, model as model_lib
from kvjax.convert.methods import ConvertedLayer
from kvjax.convert.refit import RefittedModel
from tests.convert import comparison, workdirs


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Keeps a layer but for a factor on its output projection and bias."""

    factor: float
    rank = 1

    def mechanism(self, config, *, rope):
        return dataclasses.replace(config, out_bias=config.bias, logit_scale=0.0)

    def convert(self, layer, moment_EE):
        layer = layer_lib.drop_redundant_biases(layer)
        out_NHD, bias_D = self.factor * layer.out_NHD, layer.out_bias_D
        bias_D = None if bias_D is None else self.factor * bias_D
        layer = dataclasses.replace(layer, out_NHD=out_NHD, out_bias_D=bias_D)
        projections = dict(query=layer.query_ENH)
        projections |= dict(base_key=layer.key_EKH, base_value=layer.value_EKH)
        return ConvertedLayer(factored_layer.attention_weights(layer, projections), {})


@pytest.mark.parametrize("name", ["smollm3", "gemma2"])
def test_layers_may_differ(name):
    """Heads' outputs have each layer's own RoPE, window and soft cap: half of an output is lost."""
    source = model_lib.open(str(comparison.PUBLISHED / name))
    rows_BT = np.random.default_rng(0).integers(3, 38, (9, 24))
    moments, layers = calibration.moments(source, rows_BT), source.transformer.layers
    assert len({kind for _, kind in layers}) == 2 or source.transformer.block.attention_softcap
    model = RefittedModel(source, [Scaled(0.5)] * len(layers), moments, rows_BT)
    for i in range(len(layers)):
        model_lib.read_layer(model, i, "attention")
        assert model.outputs_lost[i] == pytest.approx((0.25, 0.0), abs=1e-5)


@pytest.mark.parametrize("factor", [0.5, 1.0])
@pytest.mark.parametrize("biases", [{}, dict(bias=True, out_bias=False)])
def test_outputs_are_regressed_where_that_helps(factor, biases):
    """A regression undoes a factor on the projection, and leaves exact weights as they are."""
    mechanism = workdirs.grouped(2, 2, **workdirs.PLAIN, **biases)
    source = workdirs.Made(workdirs.config("llama", mechanism))
    rows_BT = np.random.default_rng(0).integers(0, 257, (17, 24))
    moments = calibration.moments(source, rows_BT)
    model = RefittedModel(source, [Scaled(factor)] * workdirs.LAYERS, moments, rows_BT)
    for i in range(workdirs.LAYERS):
        found = model_lib.read_layer(model, i, "attention")
        before, after = model.outputs_lost[i]
        assert before == pytest.approx((1 - factor) ** 2, abs=1e-6)
        assert after < 1e-6
        if factor == 1:
            out = model_lib.read_layer(source, i, "attention")["out"]
            np.testing.assert_allclose(found["out"], out, atol=1e-6)


def test_layers_are_read_in_order_and_may_be_read_again():
    """A second pass gives the same weights; a layer out of order is no silent mistake."""
    source = workdirs.Made(workdirs.config("llama", workdirs.grouped(2, 2, **workdirs.PLAIN)))
    rows_BT = np.random.default_rng(0).integers(0, 257, (3, 24))
    moments = calibration.moments(source, rows_BT)
    model = RefittedModel(source, [Scaled(0.5)] * workdirs.LAYERS, moments, rows_BT)

    def read():
        return [model_lib.read_layer(model, i, "attention")["out"] for i in range(workdirs.LAYERS)]

    for first, second in zip(read(), read(), strict=True):
        np.testing.assert_array_equal(first, second)
    model_lib.read_layer(model, 0, "attention")
    with pytest.raises(ValueError, match="layer 2 is read, but layer 1 is next"):
        model_lib.read_layer(model, 2, "attention")
