"""One device and eight compute the same numbers, and so do microbatches."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.distributed import sharding
from kvjax.model import parameters
from kvjax.model.transformer import Transformer
from tests import quick
from tests.distributed import small_step
from tests.distributed.small_step import MESHES, Step
from tests.mechanisms import MECHANISMS

SEVERAL = tuple(MESHES)[1:]
SPLIT = "data2_sequence2_tensor2"
STEPS = 8  # queries and keys first change in the fourth

# Head dims that the devices divide, for weights that are sharded along them.
DIMS = {
    "lrkv_wide_keys": dict(key_dim=16, value_dim=8),
    "lrkv_shared_rope": dict(key_dim=16, value_dim=8),
    "mla": dict(value_dim=8),
    "mla_lrkv": dict(value_dim=8),
    "lrkv_kv_tied": {},
    "lrkv_latent_bias": dict(rank=2),  # with rank 3 a unit of the MLP is never above 0
    "factored_joint": dict(value_dim=8),
}


def _train(config, params, mesh_name, dtype, *, steps=STEPS, **options):
    step = Step(config, params, small_step.mesh(mesh_name), dtype, **options)
    metrics = np.array([step(rows) for rows in small_step.rows(steps)])
    return jax.device_get(step.state), metrics


def _meshes(name, i):
    """Returns meshes for a mechanism: for LRKV those of several axes, for others one, in turn.

    Mechanisms with branches, outputs rotated back by position, products of factors, or residuals
    beside a latent use the mesh that shards tokens and heads.
    """
    if name in ("mlra", "shared_kv", "tpa", "mla_lrkv"):
        return (SPLIT,)
    return SEVERAL[2:5] if name == "lrkv" else (SEVERAL[i % len(SEVERAL)],)


@pytest.mark.slow
@pytest.mark.parametrize("name, meshes", [(n, _meshes(n, i)) for i, n in enumerate(MECHANISMS)])
def test_eight_devices_train_as_one_in_float64(x64, make_mechanism, randomise, name, meshes):
    config = small_step.model(make_mechanism(name, qk_norm="rms_gain", **DIMS.get(name, {})))
    _, params = randomise(lambda: Transformer(config, jax.random.key(0)))
    one, one_metrics = _train(config, params, "one", jnp.float64)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(one["params"]), strict=True):
        assert np.all(before != after)  # every weight moved
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    for mesh_name in meshes:
        other, metrics = _train(config, params, mesh_name, jnp.float64)
        np.testing.assert_allclose(metrics, one_metrics, rtol=1e-10, err_msg=mesh_name)
        jax.tree.map(close, other["params"], one["params"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, meshes", [(n, _meshes(n, i)) for i, n in enumerate(("lrkv", *quick.READERS))]
)
def test_eight_devices_train_as_one_in_float32(make_mechanism, randomise, name, meshes):
    config = small_step.model(make_mechanism(name, **DIMS.get(name, {})))
    _, params = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)
    one, one_metrics = _train(config, params, "one", jnp.float32)
    for mesh_name in dict.fromkeys((meshes[0], *meshes[-2:])):
        other, metrics = _train(config, params, mesh_name, jnp.float32)
        np.testing.assert_allclose(metrics[:, 0], one_metrics[:, 0], rtol=1e-5, err_msg=mesh_name)
        # Muon amplifies rounding: it scales even the gradient's smallest directions to full length.
        for x, y in zip(*map(jax.tree.leaves, (other["params"], one["params"])), strict=True):
            assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y), mesh_name


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name", ["one", "fsdp8", "fsdp4_sequence2"])
def test_parts_of_a_batch_add_up(x64, config, randomise, mesh_name):
    _, params = randomise(lambda: Transformer(config, jax.random.key(0)))
    one, _ = _train(config, params, "one", jnp.float64, steps=3)
    parts = 1 if mesh_name == "fsdp8" else 4 if mesh_name == "one" else 2
    options = dict(remat="full", parts=parts)
    other, _ = _train(config, params, mesh_name, jnp.float64, steps=3, **options)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    jax.tree.map(close, other["params"], one["params"])


@pytest.mark.slow
def test_initial_parameters_do_not_depend_on_the_mesh(config):
    def init(key):
        return nnx.to_pure_dict(nnx.state(Transformer(config, key)))

    weights = parameters.abstract(config)
    results = []
    for name in ("one", "fsdp8", "fsdp4_tensor2"):
        shardings = sharding.parameter_shardings(small_step.mesh(name), *weights)
        params = jax.jit(init, out_shardings=shardings)(jax.random.key(3))
        results.append(jax.device_get(params))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)
    assert np.ptp(results[0]["embedding"]) > 1
