"""Standard deviations of the initial weights of any model with a `BlockConfig`."""

from flax import nnx, traverse_util
import jax
import numpy as np

from kvjax.layers.weight import Axes, axes_of
from kvjax.model.config import BlockConfig

BLOCK = BlockConfig(
    num_layers=2,
    d_model=16,
    mlp_dim=24,
    bias=True,
    norm_gain=True,
    norm_bias=True,
    matrix_std=0.5,
    embedding_std=3.0,
    zero_outputs=False,
)


def check(make, monkeypatch) -> None:
    """Asserts the initial standard deviations of a model of BLOCK, and distinct random keys.

    Args:
      make: a function of a key.
    """
    keys = []

    def normal(key, std, shape, dtype):
        if not isinstance(key, jax.core.Tracer):  # keys under vmap over layers are tracers
            keys.append(tuple(jax.random.key_data(key).tolist()))
        return np.full(shape, std, dtype)

    monkeypatch.setattr("kvjax.layers.weight._normal", normal)
    state = nnx.state(make(jax.random.key(0)))
    assert len(set(keys)) == len(keys) > 1
    axes = traverse_util.flatten_dict(axes_of(state))
    for path, value in traverse_util.flatten_dict(nnx.to_pure_dict(state)).items():
        if Axes.parse(axes[path]).is_matrix:
            expected = 0.5
        elif path[-1] in ("embedding", "positions", "row"):
            expected = 3.0
        else:
            expected = 1 if path[-1] == "gain" else 0
        assert np.all(value == expected), path
