"""The one check of decode-attention kernels: a real shape against the definition in float64."""

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as gpu_interpreter
import jax.numpy as jnp
import numpy as np

from kvjax.kernels.decode_attention import reference
from kvjax.kernels.decode_attention import shapes
from kvjax.kernels.decode_attention.readings.reading import Sizes
from kvjax.kernels.profile.agreement import TOLERANCE


def definition(operands, cache, first_B) -> np.ndarray:
    """`reference.decode_attention` in float64."""
    with jax.enable_x64(True):
        wide = lambda x: np.asarray(x).astype(np.float64)
        operands, cache = jax.tree.map(wide, (operands, dict(cache)))
        return np.asarray(_exact(operands, cache, jnp.asarray(first_B)))


_exact = jax.jit(reference.decode_attention)


def problem(shape: Sizes, **sizes):
    """`shapes.problem`, drawn by one program."""
    return jax.jit(lambda: shapes.problem(shape, **sizes))()


def races() -> list:
    """What the interpreters that ran last found; they print, and raise nothing."""
    states = (tpu_interpreter.races, gpu_interpreter._races)
    return [state for state in states if state is not None and state.races_found]


def check(run, shape: Sizes, *, firsts, length: int, dtype) -> None:
    """Asserts that run(operands, cache, first_B) is the definition, to the dtype's rounding.

    And that an interpreter with `detect_races` found none: on a TPU of cores and copies, on a GPU
    of threads and copies, not of products (see `hopper`). Every tensor is random and none of it
    zero; slots behind a sequence's end hold garbage as large as any.
    """
    operands, cache = problem(shape, batch=len(firsts), length=length, dtype=dtype)
    first_B = np.asarray(firsts, np.int32)
    expected = definition(operands, cache, first_B)
    o = np.asarray(run(operands, cache, jnp.asarray(first_B)))
    assert not races()
    assert o.shape == expected.shape and o.dtype == np.float32
    tolerance = TOLERANCE[jnp.dtype(dtype).name]
    np.testing.assert_allclose(o, expected, rtol=0, atol=tolerance * np.abs(expected).max())
