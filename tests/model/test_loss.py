"""The loss in slices, against its formula: on several devices, in bfloat16, compiled for a TPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.distributed import sharding
from kvjax.distributed.sharding import MeshConfig
from kvjax.hardware import topology
from kvjax.model import loss as loss_lib
from kvjax.model.config import BlockConfig, TransformerConfig
from kvjax.model.transformer import Compute, Transformer


@pytest.mark.parametrize("cap", [2.0, pytest.param(0.0, marks=pytest.mark.slow), 50.0])
def test_the_loss_of_several_devices_is_its_formula(x64, cap):
    """Loss and gradients, computed in slices of each device's tokens; logits of up to 1,000."""
    mesh = sharding.make_mesh(MeshConfig(data=2, sequence=2), jax.devices())
    rng, (B, T, D, V) = np.random.default_rng(0), (4, 12, 6, 10)
    head, x = rng.normal(size=(D, V)), rng.normal(size=(B, T, D))
    x[0, :3] *= 0.0 if cap == 2 else 200.0
    targets, weights = rng.integers(0, V, (B, T)), rng.uniform(0.5, 1.5, (B, T))

    def nats(head, x):
        z = cap * jnp.tanh((x @ head) / cap) if cap else x @ head
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


@pytest.mark.parametrize("cap", [0.0, 15.0, 40.0, 60.0])
def test_logits_at_the_end_of_a_soft_cap_vanish_in_no_sum(cap):
    """All logits are equal and as low as they get, in float32: the loss is log V."""
    head, x = -jnp.ones((6, 10)), jnp.full((1, 4, 6), 1e4)
    loss, gradients = jax.value_and_grad(
        lambda head, x: loss_lib._sum_of_nats(cap, 2, None, head, x, jnp.zeros((1, 4), int)),
        argnums=(0, 1),
    )(head, x)
    np.testing.assert_allclose(loss, 4 * np.log(10), rtol=1e-4)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in gradients)


def test_slices_hold_so_many_logits():
    """A slice's logits have a limit, whatever the vocabulary; slices divide a device's tokens."""
    for tokens, vocab, at_least, n in (
        (65_536, 65_536, 8, 32),  # 2,048 tokens a slice: 256 MiB of bfloat16
        (65_536, 262_144, 8, 128),
        (8_192, 2_048, 8, 8),
        (36, 10, 5, 6),
        (2 * 9_973, 65_536, 8, 2),  # no divisor from 10 to 19
        (3, 10, 8, 3),
    ):
        assert loss_lib.num_slices(tokens, vocab, at_least) == n


@pytest.mark.aot
def test_the_loss_of_a_tpu_holds_one_slice_of_logits():
    """65,536 tokens of width 768, V = 65,536: the head's gradient, a slice in bfloat16, no more.

    By the compiler's estimate its 32 slices take 5.7 million cycles each, of which the matrix unit
    needs 4.7; eight slices, differentiated by JAX, took 9.3 million for as many tokens.
    """
    N, D, V = 65_536, 768, 65_536
    device = topology.tpu_devices("v5e:2x2")[0]
    bf16 = jnp.bfloat16
    arguments = (
        jax.ShapeDtypeStruct((D, V), bf16),
        jax.ShapeDtypeStruct((32, N // 32, D), bf16),
        jax.ShapeDtypeStruct((32, N // 32), jnp.int32),
    )

    def loss(head, x, targets):
        return loss_lib._sum_of_nats(15.0, 8, None, head, x, targets)

    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    compiled = topology.compile_for(device, function, *arguments)
    cycles = re.findall(r'"estimated_cycles":"(\d+)"', compiled.as_text())
    assert sum(map(int, cycles)) < 7.6e6, "a slice, and the head's gradient cast: 1.7 million"
    memory = compiled.memory_analysis()
    results = 2 * (D * V + N * D)  # a TPU's analysis counts them among the temporaries too
    held = 4 * D * V + 2 * loss_lib.SLICE
    assert memory.output_size_in_bytes == pytest.approx(results, rel=1e-4)
    assert memory.temp_size_in_bytes - results == pytest.approx(held, rel=2e-3)
