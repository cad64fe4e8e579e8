"""Conversion of Whisper's decoder: curves, resumed stages, failures."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.conversion import (
    curves,
    records,
    tables,
    whisper as whisper_lib,
    whisper_converted,
)
from kvjax.convert.methods import LowRankKV, ThinKeys
from kvjax.foundation import record_lines

pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.slow
def test_moments_are_those_of_the_inputs(subject):
    whisper = subject.whisper
    rows_RT = subject.training_RT[:20]
    found = whisper_converted.moments(whisper.params, subject.mechanisms, rows_RT)
    inputs_of = jax.jit(whisper_lib.attention_inputs, static_argnums=1)
    inputs = inputs_of(whisper.params, subject.mechanisms, rows_RT)
    for moment_EE, x_BTD in zip(found, inputs, strict=True):
        x_SE = np.concatenate([x_BTD, np.ones_like(x_BTD[..., :1])], -1).reshape(rows_RT.size, -1)
        np.testing.assert_allclose(moment_EE, x_SE.T @ x_SE / rows_RT.size, rtol=1e-4, atol=1e-4)
        assert np.linalg.eigvalsh(moment_EE)[0] > -1e-12  # LRKV takes its root


FULL = [
    (ThinKeys(rank=4),),
    (ThinKeys(rank=12, mode="joint"),),
    (LowRankKV(rank=4),),
    curves.latents_per_head(4, "outputs"),
    curves.latents_per_head(4, "weights"),
    (curves.joint_latents(12, "outputs"),),
]


@pytest.mark.slow
@pytest.mark.parametrize(["methods"], [(m,) for m in FULL], ids=str)
def test_full_rank_is_the_original(subject, methods):
    measured = subject.measure(methods)
    assert measured.perplexity == pytest.approx(subject.measure(()).perplexity, rel=1e-4)
    assert all(lost < 1e-9 for errors in measured.errors for lost in errors.values())


@pytest.mark.slow
def test_methods_in_turn_make_both_thin(subject):
    params, mechanisms, errors = subject.converted(curves.latents_per_head(2, "outputs"))
    assert curves.cached(mechanisms) == 2 * 3 * (2 + 2) and len(errors) == 2
    assert curves.cached(subject.mechanisms) == 2 * 3 * (4 + 4)
    assert set(errors[0]) == {"key", "value"} and all(0 < x < 1 for x in errors[0].values())
    keys_alone, _, _ = subject.converted(curves.latents_per_head(2, "outputs")[:1])
    for both, one in zip(params["layers"], keys_alone["layers"], strict=True):
        inner, expected = both["attention"]["mechanism"], one["attention"]["mechanism"]

        def logits(w, key):
            return np.einsum("DNR,ENR->NDE", w["query"], w[key])

        np.testing.assert_allclose(
            logits(inner, "base_key"), logits(expected, "base_key"), rtol=1e-3, atol=1e-4
        )


def test_rows_are_spread():
    rows_RT = np.arange(10)[:, None]
    assert whisper_converted.spread(rows_RT, 3)[:, 0].tolist() == [0, 3, 6]
    assert len(whisper_converted.spread(rows_RT, 99)) == 10


# -- stages ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_of_whisper_are_measured_once(run, subject, monkeypatch):
    options = ("--stage=whisper_ranks", "--whisper=folder")
    status, out, err = run(*options, "--plan")
    assert status == 0 and not out and "whisper_ranks: 28 of 28 results to make, about" in err
    assert not records.file().exists()
    status, _, err = run(*options, "--only=whisper/before/[lo]*")
    assert status == 0 and "4 of 4 results to make" in err
    found = records.in_folder("whisper/before")
    names = ("lrkv_outputs", "lrkv_outputs_not_aligned", "lrkv_weights", "original")
    assert tuple(found) == tuple(f"whisper/before/{name}" for name in names)
    original, curve = found["whisper/before/original"], found["whisper/before/lrkv_outputs"]
    assert original["perplexity"] == subject.measure(()).perplexity and original["share"] == 1
    assert (
        curve["settings"] == dataclasses.asdict(subject.sizes)
        and curve["made_by"]["packages"]["jax"]
    )
    assert [point["rank"] for point in curve["points"]] == [0, 2]
    assert [point["cached"] for point in curve["points"]] == [2 * 8, 2 * 20]
    assert curve["points"][1]["perplexity"] == subject.measure((LowRankKV(rank=2),)).perplexity

    made = []
    monkeypatch.setattr(subject, "measure", lambda methods: made.append(methods))
    monkeypatch.setattr(curves, "point", lambda *_: {})
    record_lines.put(records.file(), "whisper/before/lrkv_weights", None)
    status, _, err = run(*options, "--only=whisper/before/[lo]*")
    assert status == 0 and "1 of 4 results to make" in err
    assert [[method.objective for method in methods] for methods in made] == [["weights"]] * 2


@pytest.mark.slow
def test_other_settings_are_refused(run, subject, monkeypatch):
    options = ("--stage=whisper_ranks", "--whisper=folder", "--only=*/original")
    assert run(*options)[0] == 0
    monkeypatch.setattr(subject, "sizes", dataclasses.replace(subject.sizes, validation_rows=9))
    status, _, err = run(*options)
    assert status == 2
    assert "conversion.jsonl: was made with validation_rows = 3 (now 9); give the same, or" in err


@pytest.mark.slow
def test_a_failure_is_written_down_and_tried_again(run, subject, monkeypatch):
    options = ("--stage=whisper_ranks", "--whisper=folder", "--only=*/original")

    def fail(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(subject, "measure", fail)
        status, _, err = run(*options)
    assert status == 1 and "1 of 1 failed" in err
    assert records.failed() == {"whisper/before/original": "MemoryError: no room"}
    assert records.read("whisper/before/original") is None
    assert any("no room" in str(table.rows) for table in tables.report())
    assert run(*options)[0] == 0 and not records.failed()
