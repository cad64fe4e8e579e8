"""Effective ranks of residuals, and the ranks allocated from them."""

import json
import types

import numpy as np
import pytest

from experiments.studies import rank_allocation
from kvjax.analysis.measures import spectrum
from kvjax.convert import model as model_lib
from kvjax.foundation.errors import UserError


def test_effective_ranks_are_those_of_the_products(monkeypatch):
    D, K, R, H = 12, 3, 4, 6
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape)

    layers = [
        dict(
            latent_key=draw(D, K, R),
            latent_value=draw(D, K, R),
            expand_key=draw(K, R, H),
            expand_value=draw(K, R, H),
        )
        for _ in range(2)
    ]
    monkeypatch.setattr(model_lib, "read_layer", lambda _, i, __: dict(mechanism=layers[i]))
    mechanisms = [types.SimpleNamespace(rank=R)] * 2
    model = types.SimpleNamespace(
        transformer=types.SimpleNamespace(mechanisms=mechanisms), name="a run"
    )
    found = rank_allocation.effective_ranks(model)
    assert found.shape == (2, 2, K)
    product = layers[1]["latent_value"][:, 2] @ layers[1]["expand_value"][2]
    singular = np.linalg.svd(product, compute_uv=False)
    assert found[1, 1, 2] == pytest.approx(spectrum.effective_rank(singular**2), rel=1e-10)
    mechanisms[1] = types.SimpleNamespace(rank=0)
    with pytest.raises(UserError, match="layer 1 of a run has no residuals"):
        rank_allocation.effective_ranks(model)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([1, 1, 1, 1], [16, 16, 16, 16]),
        ([1, 2, 3, 2], [8, 16, 24, 16]),
        ([0.01, 1, 1, 1], [1, 21, 21, 21]),
        ([10, 1, 1, 1], [32, 11, 11, 10]),
        ([10, 0.1, 0.1, 0.1], [32, 11, 11, 10]),
    ],
)
def test_ranks_are_in_proportion_with_the_given_total(ranks, expected):
    found = rank_allocation.allocation(np.array(ranks, float), 64, 32)
    assert sorted(found) == sorted(expected) and found[0] == expected[0] and sum(found) == 64


def test_the_total_of_ranks_is_exact():
    assert rank_allocation.allocation(np.array([10, 0.1, 0.1, 0.1]), 5, 32) == [2, 1, 1, 1]


def test_rows_are_of_layers_with_the_range_of_heads():
    ranks_SLPK = np.ones((3, 2, 2, 4))
    ranks_SLPK[:, 1] = 3
    ranks_SLPK[range(3), 1, :, [0, 2, 3]] = 5  # a head of each seed, never the same
    ranks_SLPK[0, 0] = 1.5
    found = rank_allocation.summary(ranks_SLPK, 8, 16)
    first, second = found["rows"]
    assert first["effective_rank"] == pytest.approx(3.5 / 3) and second["effective_rank"] == 3.5
    assert (second["least_head"], second["most_head"]) == (3, 5)
    assert [first["rank"], second["rank"]] == [4, 12]


def test_a_run_must_be_finished(tmp_path):
    run = tmp_path / "lrkv_uniform_seed1_steps128"
    with pytest.raises(UserError, match="has no lrkv_uniform_seed1_steps128; `python -m"):
        rank_allocation.workdir(tmp_path, 1)
    run.mkdir()
    for step, said in ((64, "has an unfinished lrkv_uniform_seed1"), (128, "")):
        record = dict(step=step, tokens=step, validation_bpb=2.0)
        (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        if said:
            with pytest.raises(UserError, match=said):
                rank_allocation.workdir(tmp_path, 1)
    with pytest.raises(UserError, match="an unfinished lrkv_uniform_seed1"):  # without its weights
        rank_allocation.workdir(tmp_path, 1)
    saved = run / "checkpoints" / "128"
    saved.mkdir(parents=True)
    (saved / "_CHECKPOINT_METADATA").write_text("{}")
    assert rank_allocation.workdir(tmp_path, 1) == run
