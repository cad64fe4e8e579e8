"""Loss masks: a step divides by all targets that count, over all devices and microbatches."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.model import parameters
from kvjax.model.loss import token_losses
from kvjax.model.transformer import Compute, Transformer
from kvjax.training import program
from tests.distributed import small_step
from tests.distributed.small_step import Step

STEPS = 3
# XLA options of real runs. Tests compile without fusion emitters; two programs may then fuse the
# same computation differently.
AS_RUNS = dict(
    xla_backend_optimization_level=3,
    xla_llvm_disable_expensive_passes=False,
    xla_backend_extra_options="",
)


def _rows(steps=STEPS, share=0.3):
    """Returns rows with a share of masked tokens; some microbatches have no target."""
    rows = small_step.rows(steps)
    rng = np.random.default_rng(1)
    rows = np.where(rng.random(rows.shape) < share, ~rows, rows)
    rows[:, 1] = np.where(rows[:, 1] < 0, rows[:, 1], ~rows[:, 1])
    return rows


def _train(config, params, mesh_name, dtype, rows, **options):
    step = Step(config, params, small_step.mesh(mesh_name), dtype, **options)
    metrics = np.array([step(batch) for batch in rows])
    return jax.device_get(step.state), metrics


@pytest.fixture
def params(config, randomise):
    return randomise(lambda: Transformer(config, jax.random.key(0)))[1]


def test_the_loss_is_the_mean_over_targets_that_count(x64, config, params):
    (rows,) = _rows(1)
    tokens, counts = program.split_loss_mask(rows)
    model = nnx.merge(parameters.graph(config), jax.tree.map(jnp.asarray, params))
    compute = Compute(dtype=jnp.dtype(jnp.float64))
    nats = jax.jit(lambda t: token_losses(model, t[:, :-1], t[:, 1:], compute=compute))(tokens)
    step = Step(config, params, small_step.mesh("one"), jnp.float64, masked=True)
    assert step(rows)[0] == pytest.approx(np.asarray(nats)[counts[:, 1:]].mean(), rel=1e-12)


CASES = [("one", 3, 6), ("fsdp8", 1, 8), ("fsdp4_sequence2", 2, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name, parts, B", CASES)
def test_a_mask_of_ones_gives_the_bits_of_none(config, params, mesh_name, parts, B):
    """One case has microbatches of 2 x 7 targets, not a power of two."""
    rows = small_step.rows(STEPS)[:, :B]
    rows = rows[..., :8] if mesh_name == "one" else rows
    options = (config, params, mesh_name, jnp.float32, rows)
    keys = dict(parts=parts, compiler_options=AS_RUNS)
    plain, plain_metrics = _train(*options, **keys)
    masked, masked_metrics = _train(*options, **keys, masked=True)
    np.testing.assert_array_equal(masked_metrics, plain_metrics)
    jax.tree.map(np.testing.assert_array_equal, masked, plain)


CUTS = [
    ("fsdp8", 1),
    ("one", 4),
    ("fsdp4_sequence2", 2),
    ("data2_fsdp4", 1),
    ("fsdp4_tensor2", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name, parts", CUTS)
def test_devices_and_parts_agree_with_masks(x64, config, params, mesh_name, parts):
    """Rows differ in their number of targets, so a mean of row means would be another loss."""
    rows = _rows()
    one, one_metrics = _train(config, params, "one", jnp.float64, rows, masked=True)
    other, metrics = _train(config, params, mesh_name, jnp.float64, rows, masked=True, parts=parts)
    np.testing.assert_allclose(metrics, one_metrics, rtol=1e-10)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    jax.tree.map(close, other["params"], one["params"])


@pytest.mark.slow
def test_a_step_without_targets_has_zero_loss_and_gradient(config, params):
    step = Step(config, params, small_step.mesh("one"), jnp.float32, masked=True)
    loss, norm = step(~small_step.rows(1)[0])
    assert (loss, norm) == (0.0, 0.0)
