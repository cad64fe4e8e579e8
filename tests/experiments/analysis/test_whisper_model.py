"""Whisper's decoder read layer by layer, against its own forward pass."""

import numpy as np
import pytest

from experiments.analysis import whisper_model
from experiments.conversion import whisper as whisper_lib
from kvjax.analysis.measures import activations, cut_keys, heads as heads_lib
from kvjax.foundation.errors import UserError
from tests.experiments.conversion import whisper_stand_in as stand_in
from tests.experiments.conversion.whisper_stand_in import LAYERS, T, V


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """2 layers, 3 heads of 4, 24 positions."""
    folder = tmp_path_factory.mktemp("whisper")
    stand_in.write(folder)
    return whisper_model.load(folder)


def _rows(length):
    return np.random.default_rng(1).integers(0, V, (2, length)).astype(np.int32)


@pytest.mark.slow
def test_layers_see_what_the_model_makes_of_a_text(model):
    rows_BT, params = _rows(9), model.whisper.params
    inputs = whisper_lib.attention_inputs(params, model.transformer.mechanisms, rows_BT)
    found = list(activations.layers(model, rows_BT))
    assert len(found) == LAYERS["decoder"]
    for layer, expected_BTD, w in zip(found, inputs, params["layers"], strict=True):
        np.testing.assert_allclose(layer.input_BTD, expected_BTD, rtol=0, atol=1e-5)
        of = w["attention"]["mechanism"]
        parts = dict(query=layer.query_BTNH, base_key=layer.key_BTKH, base_value=layer.value_BTKH)
        for name, x_BTNH in parts.items():
            made = np.einsum("BTD,DNH->BTNH", expected_BTD, of[name])
            made = made + np.asarray(of[f"{name}_bias"])
            np.testing.assert_allclose(x_BTNH, made, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(layer.plain_key_BTKH, layer.key_BTKH)
        assert layer.mask.causal and not layer.mask.window


@pytest.mark.slow
def test_frames_count_and_losses_are_those_of_the_model(model):
    rows_BT = _rows(12)
    expected = whisper_lib.losses(model.whisper.params, model.transformer.mechanisms, rows_BT)
    np.testing.assert_allclose(activations.losses(model, rows_BT), expected, rtol=0, atol=1e-4)
    runs = cut_keys.Runs(model, rows_BT[:, :-1], [None])
    for layer in range(LAYERS["decoder"]):
        runs.layer(layer, {}, slice(0, 0))
    np.testing.assert_allclose(runs.losses(rows_BT[:, 1:])[None], expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_heads_have_the_weights_of_each_layer(model):
    for heads, w in zip(heads_lib.layers(model), model.whisper.params["layers"], strict=True):
        of = w["attention"]["mechanism"]
        parts = dict(query=heads.query_DNH, base_key=heads.key_DKH, base_value=heads.value_DKH)
        for name, w_DNH in parts.items():
            np.testing.assert_allclose(w_DNH, of[name], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(heads.out_NHD, w["attention"]["out"])
        assert heads.rotated == slice(0, 0) and heads.scale == 0.5


@pytest.mark.slow
def test_parameters_are_read_as_they_are_listed(model):
    for path, (shape, dtype) in model.parameters().items():
        found = model.read(path)
        assert found.shape == shape and found.dtype == dtype
        if path[0] == "segments":
            np.testing.assert_array_equal(model.read(path, 1), found[1])


@pytest.mark.slow
def test_passages_open_as_rows_do_and_are_spread_over_the_book(model):
    prefix = list(model.whisper.prefix)
    found = whisper_model.passages(model.whisper, T, 3)
    books = ("Shakespeare", "King James Bible")
    assert list(found) == [f"{book} {i}" for book in books for i in (1, 2, 3)]
    assert all(len(row) == T and list(row[: len(prefix)]) == prefix for row in found.values())
    assert len({tuple(row) for row in found.values()}) == 6
    one = whisper_model.passages(model.whisper, T, 1)
    np.testing.assert_array_equal(one["Shakespeare"], found["Shakespeare 1"])
    with pytest.raises(UserError, match="fewer than 100000 passages of 22"):
        whisper_model.passages(model.whisper, T, 100_000)
