"""The loss in slices, against its formula: on several devices, and in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.distributed import sharding
from kvjax.distributed.sharding import MeshConfig
from kvjax.model import loss as loss_lib
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Compute, Transformer


def test_the_loss_of_several_devices_is_its_formula(x64):
    """Loss and gradients, computed in slices of each device's tokens."""
    mesh = sharding.make_mesh(MeshConfig(data=2, sequence=2), jax.devices())
    rng, (B, T, D, V), cap = np.random.default_rng(0), (4, 12, 6, 10), 2.0
    head, x = rng.normal(size=(D, V)), rng.normal(size=(B, T, D))
    targets, weights = rng.integers(0, V, (B, T)), rng.uniform(0.5, 1.5, (B, T))

    def nats(head, x):
        z = cap * jnp.tanh((x @ head) / cap)
        return jax.nn.logsumexp(z, axis=-1) - jnp.take_along_axis(z, targets[..., None], -1)[..., 0]

    def formula(head, x):
        return jnp.sum(nats(head, x) * weights) / 7

    def loss(head, x):
        return loss_lib._sum_of_nats(cap, 3, mesh, head, x, targets, weights) / 7

    sliced, expected = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(head, x) for f in (loss, formula)
    )

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)

    jax.tree.map(close, sliced, expected)
    compute = Compute(dtype=jnp.dtype(jnp.float64), mesh=mesh, loss_chunks=3)

    def losses(head, x):
        return loss_lib.losses_from_hidden(head, x, targets, cap, compute)

    close(jax.jit(losses)(head, x), nats(head, x))


@pytest.mark.slow
def test_the_loss_of_bfloat16_is_that_of_wide_logits(make_mechanism, randomise):
    """The loss agrees to the rounding of float32, gradients to the rounding of bfloat16."""
    block = BlockConfig(num_layers=3, d_model=16, mlp_dim=24)
    mechanisms = (make_mechanism("lrkv"),) * 3
    config = TransformerConfig(block=block, mechanisms=mechanisms, vocab_size=32)
    model, _ = randomise(lambda: Transformer(config, jax.random.key(0)), dtype=np.float32)
    tokens, targets = np.random.default_rng(0).integers(0, 32, (2, 2, 12), np.int32)
    compute = Compute(dtype=jnp.dtype(jnp.bfloat16), loss_chunks=3)
    x, head = jax.jit(lambda: (model(tokens, compute=compute), model.head_weight(compute)))()

    def exactly(head, x):
        cap = config.block.logit_softcap
        z = cap * jnp.tanh((x @ head) / cap)
        losses = (
            jax.nn.logsumexp(z, axis=-1) - jnp.take_along_axis(z, targets[..., None], -1)[..., 0]
        )
        return jnp.mean(losses)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (head, x))
        expected, gradients = jax.jit(jax.value_and_grad(exactly, argnums=(0, 1)))(*wide)
        expected, gradients = float(expected), jax.tree.map(np.asarray, gradients)

    def loss(head, x):
        return loss_lib._sum_of_nats(config.block.logit_softcap, 3, None, head, x, targets)

    total, (dhead, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(head, x)
    np.testing.assert_allclose(total / targets.size, expected, rtol=1e-6)
    for got, want in zip((dhead, dx), gradients, strict=True):
        assert got.dtype == jnp.bfloat16
        error = np.asarray(got, np.float64) / targets.size - want
        assert np.linalg.norm(error) < 2**-8 * np.linalg.norm(want)
