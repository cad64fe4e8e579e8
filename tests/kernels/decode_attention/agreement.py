"""The one check of decode-attention kernels: a real shape against the definition in float64."""

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as gpu_interpreter
import jax.numpy as jnp
import numpy as np

from kvjax.cache.stripes import Stripes
from kvjax.kernels.decode_attention import reference, shapes
from kvjax.kernels.decode_attention.cache_layouts.layout import Sizes
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


def over_chips(attend_with_lse, *, chips: int, size: int, slots: int):
    """Returns a function of whole arrays that attends to every chip's stripes, and merges.

    Args:
      size: tokens of a stripe; slots: of a chip.
    """

    def run(operands, cache, first_B):
        results = []
        for chip in range(chips):
            held = Stripes(size, chips, chip)
            here = np.asarray(held.position(np.arange(slots)))
            part = {name: np.asarray(array)[..., here] for name, array in cache.items()}
            o, log_sum_exp = attend_with_lse(operands, part, first_B, held)
            results.append((np.asarray(o, np.float64), np.asarray(log_sum_exp, np.float64)))
            seen = np.asarray(first_B) >= size * chip
            assert np.array_equal(np.isfinite(results[-1][1]).all(axis=(1, 2)), seen)
            assert np.all(np.isneginf(results[-1][1][~seen]))
        outputs, log_sum_exps = map(np.stack, zip(*results, strict=True))
        shares = np.exp(log_sum_exps - log_sum_exps.max(axis=0))[..., None]
        return (np.sum(outputs * shares, axis=0) / shares.sum(axis=0)).astype(np.float32)

    return run


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
