"""Image studies: patches, model inputs, and rows of the results."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.labeller import Labeller
from experiments.studies import images, set_anomaly
from experiments.tasks import anomalies, encoders, images as images_lib
from kvjax.foundation.errors import UserError


def test_squares_are_read_by_rows_and_edges_are_cut():
    x = jnp.arange(2 * 6 * 9 * 3, dtype=jnp.float32).reshape(2, 6, 9, 3)
    found = images.squares(x, 3)
    assert found.shape == (2, 6, 27)
    np.testing.assert_array_equal(found[1, 4].reshape(3, 3, 3), x[1, 3:6, 3:6])
    cut = images.squares(x, 4)  # 1 row above and below, and half of what is over at the sides
    assert cut.shape == (2, 2, 48)
    np.testing.assert_array_equal(cut[0, 1].reshape(4, 4, 3), x[0, 1:5, 4:8])


def _images(count):
    """Returns images bright in the upper or the lower half."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, count).astype(np.int32)
    x = rng.integers(0, 100, (count, 28, 28, 1)).astype(np.uint8)
    x[y == 0, :14] += 100
    x[y == 1, 14:] += 100
    return x, y


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qkv", "qkv_tied_plus"])
def test_a_model_learns_where_images_are_bright(variant):
    found = images_lib.Images(_images(1280), _images(200), {})
    trainer = images.Trainer("mnist", found, epochs=10)
    assert trainer.steps == 100
    right = trainer.train(variant, (16, 1, 2), 14, 1e-2, seed=0)["right"]
    assert right > 0.9  # of ten classes two are there


def test_variants_differ_in_what_is_tied_and_in_nothing_else():
    tied = {}
    for variant, (tie, plus) in encoders.VARIANTS.items():
        config = images.transformer(variant, (64, 2, 2), 16, 10, images.Fixed())
        mechanism = config.mechanisms[0]
        assert (mechanism.tie, mechanism.position_channels) == (tie, 50 * plus)
        assert config.block.max_positions == 17 and not config.block.causal
        tied[variant] = config.block
    assert len(set(tied.values())) == 1


def test_the_published_transformer_of_tiny_imagenet():
    """224 pixels in patches of 16, width 768, 12 layers: the 86M parameters of ViT-B/16."""
    fixed = images._FIXED["tiny_imagenet"]
    config = images.transformer("qkv", (768, 12, 12), (224 // 16) ** 2, 200, fixed)

    def make():
        return Labeller(config, jax.random.key(0), features=768, hidden=False, whole=True)

    sizes = [x.size for x in jax.tree.leaves(jax.eval_shape(lambda: jax.tree.leaves(_state(make))))]
    # ViT-B/16 has 85.80M without its head of classes.
    assert sum(sizes) - 200 * 769 == 85_798_656


def _state(make):
    from flax import nnx

    return nnx.to_pure_dict(nnx.state(make()))


def _kept(runs):
    return types.SimpleNamespace(runs=runs)


def test_rates_are_numbers_each_once():
    assert images._rates("0.001,1e-3,0.0001") == (0.001, 0.0001)
    with pytest.raises(UserError, match="--rates=2: must be numbers between 0 and 1"):
        images._rates("2")


def test_rows_are_means_over_cells_of_seeds_that_all_have():
    trainer = types.SimpleNamespace(
        **dict(images=types.SimpleNamespace(files={}), epochs=1, side=28, steps=1),
        **dict(fixed=images.Fixed(), train=lambda *_: {}),
    )
    cells = [
        images.cell("mnist", trainer, variant, (width, 2, 2), 7, 1e-3)
        for width in (16, 32)
        for variant in ("qkv", "kv_tied")
    ]
    right = {"qkv": (0.9, 0.8), "kv_tied": (0.8, 0.8)}
    runs = {
        c.name: {seed: dict(right=right[c.asked["variant"]][seed]) for seed in (0, 1)}
        for c in cells
    }
    runs[cells[0].name][2] = dict(right=0.0)  # of one width only
    for c in cells:
        for run in runs[c.name].values():
            run["identity"] = c.identity
    qkv, kv_tied = images.rows("mnist", cells, _kept(runs))
    assert qkv["seeds"] == 2 and qkv["right"] == pytest.approx(0.85) and qkv["from_qkv"] is None
    assert kv_tied["from_qkv"] == pytest.approx(-0.05) and kv_tied["published"] == 0.976
    assert images._cells(kv_tied)[0] == "Q-K=V" and "97.6" in images._cells(kv_tied)


@pytest.mark.slow
def test_anomalies_are_found_and_the_places_compared():
    features = anomalies.synthetic(0.3, classes=4, features=16, each=80)
    trainer = set_anomaly.Trainer(features, epochs=30)
    found = trainer.train("qkv", (16, 1, 2), "drawn", seed=0)
    assert found["right"] > 0.3  # chance is 0.1
    assert found["step"] in found["validation"] and len(found["validation"]) == 30
    cells = [set_anomaly.cell(trainer, "qkv", (16, 1, 2), place) for place in anomalies.PLACES]
    runs = {cells[0].name: {0: dict(right=0.5), 1: dict(right=0.6)}}
    runs[cells[1].name] = {0: dict(right=0.6), 1: dict(right=0.8)}
    for cell in cells:
        for run in runs[cell.name].values():
            run["identity"] = cell.identity
    (row,) = set_anomaly.rows(cells, _kept(runs))
    assert row["places"]["last"]["right"] == pytest.approx(0.7)
    assert row["drawn_less_last"]["points"] == pytest.approx(-0.15)
    assert "-15.00" in set_anomaly._cells(row)[3] and row["published"] == 0.942
