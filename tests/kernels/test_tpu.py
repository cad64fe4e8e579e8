"""The TPU kernel, interpreted with races detected and memory poisoned, and compiled for TPUs."""

import dataclasses

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.decode_memory import on
from kvjax import topology
from kvjax.kernels.decode_attention import operands as operands_lib
from kvjax.kernels.decode_attention import reference
from kvjax.kernels.decode_attention import tpu
from kvjax.kernels.decode_attention.api import decode_attention

INTERPRET = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)


def _problem(*, B=1, N=4, J=1, R=16, S=256, dtype=jnp.float32, rope_base=1e4, scaled=True):
    """Operands and a cache, none of it zero, H = Hv = 128."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    query, H = draw(B, 1, N, 128), 128
    operands = operands_lib.Residual(
        query=query,
        residual_query=query if rope_base else draw(B, 1, N, H),
        expand_key=draw(N, R, H) / 4,
        expand_value=draw(N, R, H) / 4,
        scale=H**-0.5,
        rope_base=rope_base,
    )
    cache = dict(
        base_key=draw(B, J, H, S),
        base_value=draw(B, J, H, S),
        residual_key=draw(B, N, R, S),
        residual_value=draw(B, N, R, S),
    )
    if scaled:
        cache["key_scale"] = jnp.asarray(rng.uniform(0.5, 1.5, (B, N, 1, S)), jnp.float32)
    return operands, cache


def _definition(operands, cache, first_B):
    """The reference in float64."""
    wide = lambda tree: jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32), np.float64), tree)
    with jax.enable_x64(True):
        as_jax = lambda tree: jax.tree.map(jnp.asarray, wide(tree))
        return np.asarray(
            reference.decode_attention(as_jax(operands), as_jax(cache), jnp.asarray(first_B))
        )


@pytest.mark.parametrize(
    "options, firsts",
    [
        (dict(B=3), (255, 127, 128)),  # the last slot, the ends of a block
        (dict(J=2, scaled=False), (200,)),
        (dict(rope_base=None, B=2), (0, 255)),
        pytest.param(dict(R=64, N=6, S=1152, B=2), (1151, 700), marks=pytest.mark.slow),  # d12
    ],
)
def test_equals_the_definition_in_float32(options, firsts):
    operands, cache = _problem(**options)
    first_B = np.asarray(firsts, np.int32)
    expected = _definition(operands, cache, first_B)
    block = 128 if cache["base_key"].shape[-1] == 256 else 384
    o = tpu.decode_attention(
        operands, cache, jnp.asarray(first_B), block=block, interpret=INTERPRET
    )
    assert o.shape == expected.shape
    np.testing.assert_allclose(o, expected, atol=1e-5 * np.abs(expected).max())


def test_bfloat16_is_within_two_units_in_the_last_place():
    operands, cache = _problem(dtype=jnp.bfloat16, R=64)
    first_B = np.asarray([250], np.int32)
    expected = _definition(operands, cache, first_B)
    o = tpu.decode_attention(operands, cache, jnp.asarray(first_B), block=128, interpret=INTERPRET)
    np.testing.assert_allclose(o, expected, atol=2 * 2.0**-8 * np.abs(expected).max())


def test_slots_behind_a_sequence_are_not_read():
    """A sequence of one block reads one: the rest may be anything, NaN included."""
    operands, cache = _problem(scaled=False)
    first_B = jnp.asarray([100], jnp.int32)
    poisoned = {name: array.at[..., 128:].set(jnp.nan) for name, array in cache.items()}
    run = lambda cache: tpu.decode_attention(
        operands, cache, first_B, block=128, interpret=INTERPRET
    )
    np.testing.assert_array_equal(run(poisoned), run(cache))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda o, c: (o, {k: v[..., :100] for k, v in c.items()}), "S = 100"),
        (lambda o, c: (dataclasses.replace(o, expand_key=o.expand_key[:, :3]), c), "R = 3"),
        (lambda o, c: (dataclasses.replace(o, expand_key=o.expand_key[:2]), c), "4 heads on 2"),
        (lambda o, c: (operands_lib.Grouped(query=o.query, scale=1.0), c), "not Grouped's"),
    ],
)
def test_what_it_does_not_take_is_named_with_the_fallback(change, message):
    operands, cache = change(*_problem())
    with pytest.raises(NotImplementedError, match=f"{message}.*'xla'"):
        decode_attention(operands, cache, jnp.zeros((1,), jnp.int32), implementation="tpu")


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("S", [4224, 32_768])
@pytest.mark.parametrize("rope_base", [1e4, None])
def test_compiles_at_d36_without_a_copy_of_the_latents(name, S, rope_base):
    shape = dict(N=18, R=64, S=S, dtype=jnp.bfloat16, rope_base=rope_base)
    operands, cache = jax.eval_shape(lambda: _problem(**shape))
    first_B = jax.ShapeDtypeStruct((1,), jnp.int32)
    arguments = on(topology.tpu_devices(name)[0], (operands, cache, first_B))
    mesh = jax.tree.leaves(arguments)[0].sharding.mesh
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(tpu.decode_attention).lower(*arguments).compile()
    text = compiled.as_text()
    assert f"bf16[1,18,64,{S}]" in text
    copies = [line for line in text.splitlines() if "copy" in line and f"18,64,{S}]" in line]
    assert not [line for line in copies if " copy(" in line or "copy-start(" in line]
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 2e6 + 0.02 * sum(x.size * x.dtype.itemsize for x in cache.values())
