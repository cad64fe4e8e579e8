"""Checks a decode-attention kernel on a real shape against the definition in float64."""

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as gpu_interpreter
import jax.numpy as jnp
import numpy as np

from kvjax.cache.stripes import Stripes
from kvjax.kernels.decode_attention import reference, shapes
from kvjax.kernels.decode_attention.cache_layouts.layout import Sizes
from kvjax.kernels.profile.agreement import TOLERANCE


def definition(inputs, cache, first_B) -> np.ndarray:
    """Returns `reference.decode_attention` in float64."""
    with jax.enable_x64(True):
        inputs, cache = jax.tree.map(
            lambda x: x if x.dtype == jnp.uint8 else np.asarray(x).astype(np.float64),
            (inputs, dict(cache)),
        )
        return np.asarray(_exact(inputs, cache, jnp.asarray(first_B)))


_exact = jax.jit(reference.decode_attention)


def problem(shape: Sizes, **sizes):
    """Returns `shapes.problem`, drawn by one program."""
    return jax.jit(lambda: shapes.problem(shape, **sizes))()


def over_chips(attend_with_lse, *, chips: int, size: int, slots: int):
    """Returns a function of whole arrays that attends to each chip's stripes, then merges.

    Args:
      size: tokens of a stripe.
      slots: slots of a chip.
    """

    def run(inputs, cache, first_B):
        results = []
        for chip in range(chips):
            stripes = Stripes(size, chips, chip)
            positions = np.asarray(stripes.position(np.arange(slots)))
            chip_cache = {name: np.asarray(array)[..., positions] for name, array in cache.items()}
            o, log_sum_exp = attend_with_lse(inputs, chip_cache, first_B, stripes)
            results.append((np.asarray(o, np.float64), np.asarray(log_sum_exp, np.float64)))
            seen = np.asarray(first_B) >= size * chip
            assert np.array_equal(np.isfinite(results[-1][1]).all(axis=(1, 2)), seen)
            assert np.all(np.isneginf(results[-1][1][~seen]))
        outputs, log_sum_exps = map(np.stack, zip(*results, strict=True))
        shares = np.exp(log_sum_exps - log_sum_exps.max(axis=0))[..., None]
        return (np.sum(outputs * shares, axis=0) / shares.sum(axis=0)).astype(np.float32)

    return run


def races() -> list:
    """Returns the races that the last interpreters found (and only printed)."""
    states = (tpu_interpreter.races, gpu_interpreter._races)
    return [state for state in states if state is not None and state.races_found]


def check(run, shape: Sizes, *, firsts, length: int, dtype, behind: float | None = None) -> None:
    """Asserts that run(inputs, cache, first_B) equals the definition, to the dtype's rounding.

    Also asserts that an interpreter with `detect_races` found no race: on a TPU between cores and
    copies, on a GPU between threads and copies, but not products (see `hopper`). All tensors are
    random, without zeros; slots beyond a sequence's end hold random entries too, or `behind`.
    """
    inputs, cache = problem(shape, batch=len(firsts), length=length, dtype=dtype)
    first_B = np.asarray(firsts, np.int32)
    expected = definition(inputs, cache, first_B)
    if behind is not None:
        is_beyond = np.arange(length) > first_B[:, None]
        for name, x in cache.items():
            garbage = np.asarray(127 if x.dtype == jnp.int8 else behind, x.dtype)
            cache[name] = np.where(is_beyond[:, *(None,) * (x.ndim - 2)], garbage, x)
    o = np.asarray(run(inputs, cache, jnp.asarray(first_B)))
    assert not races()
    assert o.shape == expected.shape and o.dtype == np.float32
    tolerance = TOLERANCE[jnp.dtype(dtype).name]
    np.testing.assert_allclose(o, expected, rtol=0, atol=tolerance * np.abs(expected).max())
