"""Projection sharing's tasks: compared cells, and the two remedies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.diagonal import DiagonalConfig
from experiments.models.labeller import Labeller
from experiments.studies import diagonal, sequence_tasks
from experiments.studies.finished_runs import FinishedRuns
from experiments.tasks import encoders


def _finished(tmp_path, runs):
    """Returns finished runs from (cell, {seed: accuracy})."""
    kept = FinishedRuns(tmp_path / "none.json", {}, {}, mix=False, fresh=True)
    for cell, seeds in runs:
        for seed, right in seeds.items():
            kept.put(cell.name, seed, cell.identity, {}, {}, right=right, seconds=1.0)
    return kept


def test_only_cells_of_all_variants_are_compared(tmp_path):
    def make_cell(variant, length):
        return sequence_tasks.cell("reverse", variant, 32, 2, 2, length)

    runs = [(make_cell(variant, 16), {0: 0.5, 1: 0.7}) for variant in encoders.VARIANTS]
    half = [(make_cell(variant, 128), {0: 0.2}) for variant in encoders.VARIANTS]
    more = (make_cell("qkv", 16), {2: 0.9, 3: 0.9, 4: 0.9})  # seeds that the others lack
    kept = _finished(tmp_path, [*runs, more, *half, (make_cell("kv_tied", 64), {0: 0.1, 1: 0.1})])
    common = sequence_tasks.in_common(kept)
    assert {cell.name for cell in common} == {cell.name for cell, _ in runs}
    for row in sequence_tasks.rows(common, kept):
        right, seeds = (0.78, 5) if row["variant"] == "qkv" else (0.6, 2)
        now = row["tasks"]["reverse"]
        assert now["right"] == pytest.approx(right)
        assert now["length"] == [16] and now["seeds"] == seeds


def test_the_temperature_falls_to_one():
    steps = sequence_tasks.RECIPE.steps
    found = [diagonal.temperature(step) for step in range(steps)]
    assert found[0] == 4 and found[steps // 2 :] == [1.0] * (steps - steps // 2)
    assert np.all(np.diff(found) <= 0) and found[steps // 4] == pytest.approx(2.5)


def test_changes_by_remedies_are_taken_seed_by_seed(tmp_path):
    def make_cell(remedy):
        return diagonal.cell("reverse", "qkv_tied", remedy, 64)

    runs = (make_cell("none"), {0: 0.5, 1: 0.7}), (make_cell("annealed"), {0: 0.6, 1: 0.8, 2: 0.1})
    rows = {row["remedy"]: row for row in diagonal.rows(_finished(tmp_path, runs))}
    assert rows["annealed"]["change"] == pytest.approx(0.1)
    assert rows["annealed"]["change_half_interval"] == pytest.approx(0, abs=1e-9)
    assert rows["none"]["change"] is None and rows["none"]["seeds_in_common"] == 0
    assert rows["annealed"]["seeds"] == 3 and rows["annealed"]["seeds_in_common"] == 2


@pytest.mark.slow
def test_remedies_reach_the_model():
    """The option selects the normalised diagonal, and a temperature reaches attention."""
    config = sequence_tasks.transformer("qk_tied", 8, 1, 1, diagonal_norm=True)
    assert all(isinstance(mechanism, DiagonalConfig) for mechanism in config.mechanisms)
    model = Labeller(config, jax.random.key(0), features=10)
    x_BTF = jax.nn.one_hot(np.arange(6)[None], 10)
    z, hot = model(x_BTF), model(x_BTF, temperature=jnp.asarray(2.0))
    assert np.abs(z - hot).max() > 1e-4


@pytest.mark.slow
def test_remedies_change_the_loss(monkeypatch):
    """Remedies change the loss at equal weights; a temperature of 1 does not."""
    monkeypatch.setattr(sequence_tasks, "TRAINED_ON", 512)
    monkeypatch.setattr(sequence_tasks, "TESTED_ON", 500)
    recipe = sequence_tasks.learner.Recipe(steps=6, learning_rate=1e-3, decay="none")
    monkeypatch.setattr(sequence_tasks, "RECIPE", recipe)
    sequence_tasks.learner_of.cache_clear()
    losses = {
        remedy: diagonal.cell("sort", "qk_tied", remedy, 8).train(0)["loss"]
        for remedy in diagonal.REMEDIES
    }
    config = sequence_tasks.transformer("qk_tied", 32, 2, 2)
    one = sequence_tasks.train("sort", config, 8, 0, temperature=lambda step: 1.0)["loss"]
    sequence_tasks.learner_of.cache_clear()
    assert len(set(losses.values())) == 3
    assert one == pytest.approx(losses["none"], rel=1e-5)
