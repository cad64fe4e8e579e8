"""Checks of implementations on the device present: rows, tables and the exit status."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.decode_attention import reference, shapes
from kvjax.kernels.profile import __main__ as profile, agreement, measured


def _run(**changes):
    run = dict(mechanisms=("gqa",), points=((3, 64),), rounds=1, target=1e-3)
    run |= dict(model="d12", implementations=("xla",), device="cpu") | changes
    return measured.Run(**run)


@pytest.fixture
def implementation(monkeypatch):
    """A function that replaces the XLA implementation."""
    return lambda function: monkeypatch.setitem(agreement.IMPLEMENTATIONS, "xla", function)


@pytest.mark.slow
def test_a_correct_implementation_agrees():
    rows = agreement.check(_run(mechanisms=("mqa", "gqa_int4"), points=((3, 64), (1, 32))))
    assert [(r["mechanism"], r["batch"], r["length"]) for r in rows] == [
        (name, *point) for point in ((3, 64), (1, 32)) for name in ("mqa", "gqa_int4")
    ]
    for row in rows:
        assert row["agrees"] and row["same"] and 0 < row["error"] < 1e-5


def test_a_slightly_wrong_implementation_does_not_agree(implementation):
    implementation(lambda *arguments: 1.001 * reference.decode_attention(*arguments))
    (row,) = agreement.check(_run())
    assert row["same"] and not row["agrees"]
    assert row["error"] == pytest.approx(1e-3, rel=0.01)
    assert row["worst"] == pytest.approx(1e-3, rel=0.01)


def test_reading_beyond_a_sequences_end_does_not_agree(implementation):
    def whole(o, cache, first_B):
        return jnp.full_like(first_B, 63)

    implementation(lambda *a: reference.decode_attention(*a[:2], whole(*a)))
    (row,) = agreement.check(_run())
    assert row["worst"] > 1 and not row["agrees"]


def test_varying_bits_do_not_agree(implementation):
    calls = itertools.count()

    def noise():
        return np.float32(1e-7 * next(calls))

    def attend(*arguments):
        added = jax.pure_callback(noise, jax.ShapeDtypeStruct((), jnp.float32))
        return reference.decode_attention(*arguments) + added

    implementation(attend)
    (row,) = agreement.check(_run())
    assert row["worst"] < 1e-5 and not row["same"] and not row["agrees"]


def test_nan_does_not_agree(implementation):
    implementation(lambda *arguments: jnp.nan * reference.decode_attention(*arguments))
    (row,) = agreement.check(_run())
    assert not row["agrees"] and row["why"] == "FloatingPointError: its output is not finite"
    assert not agreement.all_agree([row, dict(worst=0.0, agrees=True)])


def test_without_runs_nothing_agrees():
    assert not agreement.all_agree([dict(why="refused")])
    assert agreement.all_agree([dict(why="refused"), dict(worst=0.0, agrees=True)])


def test_the_definition_agrees_with_itself(monkeypatch):
    monkeypatch.setattr(measured.Run, "dtype", jnp.dtype(jnp.bfloat16))
    (row,) = agreement.check(_run(implementations=("reference",)))
    assert row["agrees"] and row["error"] < 1e-6


def test_a_refusal_has_its_reason():
    rows = agreement.check(_run(implementations=("gpu", "xla")))
    assert rows[0]["why"].startswith("the GPU kernel takes base_key in bfloat16")
    assert rows[1]["agrees"]
    table = agreement.table(rows, _run())
    assert table.rows[0][4:] == ["-"] * 4 and table.rows[1][6:] == ["yes", "yes"]
    assert table.notes == [f"gqa gpu, 3 x 64: {rows[0]['why']}"]


def test_sequences_end_anywhere_and_garbage_follows():
    shape = shapes.SHAPES["d12"]["gqa"]
    _, cache, first_B = agreement.problem(shape, 3, 64, jnp.dtype(jnp.float32))
    assert first_B[0] == 63 and len(set(first_B.tolist())) == 3
    keys = np.abs(np.asarray(cache["base_key"]))
    for b, first in enumerate(first_B.tolist()):
        assert keys[b, ..., : first + 1].mean() < 1
        assert first == 63 or keys[b, ..., first + 1 :].mean() > 50


def test_exit_status_of_the_check(capsys, implementation):
    options = ["--check", "--model=d12", "--mechanisms=gqa", "--batch=2", "--length=64", "--json"]
    assert profile.main(options) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["agrees"]
    implementation(lambda *arguments: -reference.decode_attention(*arguments))
    assert profile.main(options) == 1
    assert "NO" in capsys.readouterr().err
