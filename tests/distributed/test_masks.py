"""Targets that do not count: one division for a whole step, on any devices and in any parts."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.model import parameters
from kvjax.model.loss import mean_loss
from kvjax.model.transformer import Compute, Transformer
from kvjax.training import program
from tests.distributed import small_step
from tests.distributed.small_step import Step

STEPS = 3
# As runs are compiled: without XLA's fusion emitters, which tests leave out, fusions of the same
# numbers depend on what else is in a program, down to a factor that is known or not.
AS_RUNS = dict(
    xla_backend_optimization_level=3,
    xla_llvm_disable_expensive_passes=False,
    xla_backend_extra_options="",
)


def _rows(steps=STEPS, share=0.3):
    """Rows of which that share of tokens does not count; in some parts of a batch none does."""
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


def _nats(config, params, rows):
    """[B, T] of a batch by NumPy's own formula, of the model's logits in float64."""
    graph = parameters.graph(config)
    compute = Compute(dtype=jnp.dtype(jnp.float64))

    @jax.jit
    def logits(params, tokens):
        model = nnx.merge(graph, params)
        return model.logits(model(tokens, compute=compute), compute=compute)

    tokens = np.where(rows < 0, ~rows, rows)
    z_BTV = np.asarray(logits(params, tokens[:, :-1]))
    z_BTV = z_BTV - z_BTV.max(axis=-1, keepdims=True)
    log_p = z_BTV - np.log(np.exp(z_BTV).sum(axis=-1, keepdims=True))
    return -np.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]


def _loss(config, dtype):
    """A function of parameters and rows, and maybe weights and scale: the mean loss."""
    graph = parameters.graph(config)
    compute = Compute(dtype=jnp.dtype(dtype), loss_chunks=2)

    def loss(params, rows, weights_BT=None, scale=None):
        tokens, targets, _ = program.next_tokens(program.split_loss_mask(rows)[0], compute)
        weighted = dict(weights_BT=weights_BT, scale=scale)
        return mean_loss(nnx.merge(graph, params), tokens, targets, **weighted, compute=compute)

    return loss


def test_the_loss_is_the_mean_over_what_counts(x64, config, params):
    """And over all targets where all count; evaluation sums both."""
    (rows,) = _rows(1)
    nats, counts = _nats(config, params, rows), rows[:, 1:] >= 0
    assert 0.3 < counts.mean() < 0.8
    step = Step(config, params, small_step.mesh("one"), jnp.float64, masked=True)
    assert step(rows)[0] == pytest.approx(nats[counts].mean(), rel=1e-12)
    plain = jax.jit(_loss(config, jnp.float64))(params, rows)
    assert plain == pytest.approx(nats.mean(), rel=1e-12)
    sizes = np.random.default_rng(2).integers(0, 4, small_step.V)
    graph = parameters.graph(config)
    options = dict(graph=graph, compute=Compute(dtype=jnp.dtype(jnp.float64)), masked=True)
    evaluate = jax.jit(functools.partial(program.eval_step, **options))
    found = evaluate(params, rows, jnp.asarray(sizes))
    size = sizes[np.where(rows < 0, ~rows, rows)[:, 1:]]
    expected = [
        total
        for which in (counts, np.ones_like(counts))
        for total in (nats[which & (size > 0)].sum(), size[which].sum(), (which & (size > 0)).sum())
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert expected[0] != expected[3]


CASES = [("one", 3, 6), ("fsdp8", 1, 8), ("fsdp4_sequence2", 2, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name, parts, B", CASES)
def test_a_mask_of_ones_gives_the_bits_of_none(config, params, mesh_name, parts, B):
    """Also where a part has no power of two of targets: 2 x 7 of them."""
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
    """Rows have few targets that count or many, and one has none: means of parts would differ."""
    rows = _rows()
    one, one_metrics = _train(config, params, "one", jnp.float64, rows, masked=True)
    other, metrics = _train(config, params, mesh_name, jnp.float64, rows, masked=True, parts=parts)
    np.testing.assert_allclose(metrics, one_metrics, rtol=1e-10)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    jax.tree.map(close, other["params"], one["params"])


@pytest.mark.slow
def test_a_step_in_which_nothing_counts_moves_nothing(config, params):
    step = Step(config, params, small_step.mesh("one"), jnp.float32, masked=True)
    loss, norm = step(~small_step.rows(1)[0])
    assert (loss, norm) == (0.0, 0.0)
