"""Runs of a model with low-rank keys, against the model and against keys cut one by one."""

import jax.numpy as jnp
import numpy as np
import pytest
import threadpoolctl

from kvjax.analysis.measures import (
    activations,
    cut_keys,
    heads as heads_lib,
    key_subspaces,
    subspace_methods,
)
from kvjax.analysis.measures.cut_keys import Cut
from kvjax.analysis.measures.subspace_methods import AFTER, BEFORE
from kvjax.layers import rope as rope_lib
from tests import quick
from tests.analysis import models
from tests.convert import workdirs

MECHANISMS = {
    "rope shared": ("nanochat", workdirs.grouped(4, 1, 3, rope="shared")),
    "mla": ("nanochat", workdirs.mla()),
    "biases": ("llama", workdirs.grouped(2, 2, qk_norm="none", bias=True)),
    "by layer": ("nanochat", [workdirs.grouped(4, 2, 3), workdirs.factored(2, 1, 5, 4)]),
    "several kinds": ("llama", workdirs.grouped(2, 2, qk_norm="none")),
}
KEYS = {"by layer": dict(num_layers=2), "several kinds": models.SEVERAL_KINDS}


@pytest.mark.parametrize("name", quick.only(["several kinds"], MECHANISMS))
def test_runs_with_all_channels_are_the_model(name):
    """Keeps all channels, with any mechanism; fewer channels give other losses."""
    model = models.model(*MECHANISMS[name], **KEYS.get(name, dict(num_layers=1)))
    count = 5 if name == "biases" else 2  # rows of two batches
    rows_BT = np.random.default_rng(3).integers(0, 256, (count, 13)).astype(np.int32)
    runs = cut_keys.Runs(model, rows_BT[:, :-1], [None, "before", "after", "fewer"])
    layers = zip(heads_lib.layers(model), activations.layers(model, rows_BT[:, :-1]), strict=True)
    first = subspace_methods.places(rotates=model.transformer.block.angles_base is not None)[0]
    for i, (heads, layer) in enumerate(layers):
        rope, H = key_subspaces.rope_of(heads), layer.key_BTKH.shape[-1]
        before, after = (
            [subspace_methods.of_rows(layer, rope, where, [b]) for b in range(count)]
            for where in (first, AFTER)
        )
        cuts = dict(before=Cut(before, H, after_rope=False), after=Cut(after, H, after_rope=True))
        runs.layer(i, cuts | dict(fewer=Cut(before, 2, after_rope=False)), heads.rotated)
    expected = activations.losses(model, rows_BT)
    found = runs.losses(rows_BT[:, 1:][:, 5:])
    for one in (None, "before", "after"):
        np.testing.assert_allclose(found[one], expected[:, 5:], atol=2e-3)
    assert np.abs(found["fewer"] - expected[:, 5:]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("after_rope", [False, True])
def test_runs_are_those_of_keys_cut_one_by_one(after_rope):
    """Compares outputs of attention, each row with its own subspaces, with NumPy's."""
    model = models.model(num_layers=1, window=0)
    rows_BT = np.random.default_rng(3).integers(0, 256, (5, 12)).astype(np.int32)
    heads, layer = heads_lib.of_layer(model, 0), next(activations.layers(model, rows_BT))
    rope, where = key_subspaces.rope_of(heads), AFTER if after_rope else BEFORE
    subspaces = [subspace_methods.of_rows(layer, rope, where, [b]) for b in range(5)]
    model.weights["segments", 0, "mlp", "down"][:] = 0
    runs = cut_keys.Runs(model, rows_BT, [None, "cut"])
    inputs = np.concatenate(runs._x[None])
    runs.layer(0, dict(cut=Cut(subspaces, 3, after_rope=after_rope)), heads.rotated)
    for b in (0, 4):
        key_TKH = subspace_methods.cut_keys(layer, rope, b, where, subspaces[b], 3)
        cut = layer._replace(key_BTKH=key_TKH[None], query_BTNH=layer.query_BTNH[b : b + 1])
        cut = cut._replace(value_BTKH=layer.value_BTKH[b : b + 1])
        expected_TD = np.tensordot(activations.attention(cut, 0)[1], heads.out_NHD, 2)
        added_TD = np.concatenate(runs._x["cut"])[b] - inputs[b]
        np.testing.assert_allclose(added_TD, expected_TD, atol=1e-4 * np.abs(expected_TD).max())


def test_rows_with_the_same_subspaces_share_their_projectors(monkeypatch):
    """Computes each projector once, with one BLAS thread."""
    calls, threads = [], []

    def projectors(subspaces, rank):
        calls.append(subspaces)
        threads.append(
            {
                pool["num_threads"]
                for pool in threadpoolctl.threadpool_info()
                if pool["user_api"] == "blas"
            }
        )
        return np.tile(subspaces.write_JRC[0, 0, 0] * np.eye(4), (1, 1, 1))

    one, other = (
        key_subspaces.Subspaces(np.zeros((1, 4)), np.eye(4)[None], i * np.eye(4)[None])
        for i in (1, 2)
    )
    monkeypatch.setattr(key_subspaces.Subspaces, "projectors", projectors)
    centers, found = cut_keys._arrays(Cut([one, one, other, one], 4, after_rope=False))
    assert [id(subspaces) for subspaces in calls] == [id(one), id(other)] and set().union(
        *threads
    ) == {1}
    assert found[:, 0, 0, 0].tolist() == [1, 1, 2, 1] and centers.shape == (4, 1, 4)


def test_only_rotary_channels_are_rotated():
    key_BTKH = np.random.default_rng(0).normal(size=(1, 3, 2, 6)).astype(np.float32)
    rotary = rope_lib.rotary(np.arange(3)[None], 4, 100.0)
    assert cut_keys._rotate(key_BTKH, (1, 5), None) is key_BTKH
    assert cut_keys._rotate(key_BTKH, (3, 3), rotary) is key_BTKH
    found = cut_keys._rotate(jnp.asarray(key_BTKH), (1, 5), rotary)
    np.testing.assert_array_equal(found[..., 1:5], rope_lib.rotate(key_BTKH[..., 1:5], rotary))
    np.testing.assert_array_equal(found[..., [0, 5]], key_BTKH[..., [0, 5]])
