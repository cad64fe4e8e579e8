"""Image studies: patches, model inputs, and rows of the results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.labeller import Labeller
from experiments.studies import images, set_anomaly
from experiments.tasks import anomalies, images as images_lib
from kvjax.foundation.errors import UserError


def test_squares_are_read_by_rows_and_edges_are_cut():
    x = jnp.arange(2 * 6 * 9 * 3, dtype=jnp.float32).reshape(2, 6, 9, 3)
    found = images.squares(x, 3)
    assert found.shape == (2, 6, 27)
    np.testing.assert_array_equal(found[1, 4].reshape(3, 3, 3), x[1, 3:6, 3:6])
    cut = images.squares(x, 4)  # crops 1 row above and below, and half of the excess at the sides
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
    assert right > 0.9  # two of ten classes occur


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


def test_rates_are_numbers_each_once():
    assert images._rates("0.001,1e-3,0.0001") == (0.001, 0.0001)
    with pytest.raises(UserError, match="--rates=2: must be numbers between 0 and 1"):
        images._rates("2")


@pytest.mark.slow
def test_anomalies_are_found():
    features = anomalies.synthetic(0.3, classes=4, features=16, per_class=80)
    trainer = set_anomaly.Trainer(features, epochs=30)
    found = trainer.train("qkv", (16, 1, 2), "drawn", seed=0)
    assert found["right"] > 0.3  # chance is 0.1
    assert found["step"] in found["validation"] and len(found["validation"]) == 30
