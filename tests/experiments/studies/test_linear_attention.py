"""Linear attention beside softmax: configs, cache bytes and rows of the result."""

import dataclasses

import numpy as np
import pytest

from experiments.studies import linear_attention
from experiments.studies.linear_attention import KINDS, TASKS
from experiments.tasks import text


def test_a_state_does_not_grow_and_a_cache_does():
    def cached_bytes(kind, tokens):
        return linear_attention.cached_bytes(KINDS[kind], TASKS["language"], tokens)

    for kind in KINDS:
        times = cached_bytes(kind, 65_536) / cached_bytes(kind, 1024)
        assert times == (1 if KINDS[kind].linear else 64)
    assert cached_bytes("linear_tied", 1024) == 4 * 4 * 4 * (16 * 16 + 16)  # layers, bytes, heads
    assert (
        cached_bytes("softmax", 1024)
        == 2 * cached_bytes("softmax_tied", 1024)
        == 1024 * 4 * 4 * 2 * 64
    )


def test_rows_of_text_and_what_follows_each_byte():
    batch = next(text.random_rows(np.random.default_rng(0), 3, 20))
    assert batch["x"].shape == batch["y"].shape == (3, 20)
    np.testing.assert_array_equal(batch["x"][:, 1:], batch["y"][:, :-1])
    assert bytes(batch["x"][0].astype(np.uint8)) in bytes(text.corpus("train"))
    held_out = text.held_out(5, 20)
    assert bytes(held_out["x"][-1].astype(np.uint8)) in bytes(text.corpus("validation"))
    assert len(text.corpus("validation")) < len(text.corpus("train")) / 10
    assert bytes(held_out["x"][2].astype(np.uint8)) not in bytes(text.corpus("train"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax_tied", "linear_tied_decay"])
def test_a_model_learns_bytes(kind, monkeypatch):
    short = dataclasses.replace(TASKS["language"], length=32, batch=8, steps=100, tested_on=64)
    monkeypatch.setitem(TASKS, "language", short)
    linear_attention._learner.cache_clear()
    found = linear_attention.train("language", kind, 0)
    linear_attention._learner.cache_clear()
    assert 3 < found["figure"] < 6  # 8 at the start
    assert found["curve"] == {100: found["figure"]}
