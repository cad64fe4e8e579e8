"""The model of shared memory (`hopper`) flags races, and nothing else."""

import functools
import re

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests import quick
from tests.kernels.decode_attention import agreement, hopper

_TILE = (64, 64)


def _run(steps, interpret, threads=1):
    """Runs a kernel of these steps on two tiles of shared memory, a and b, and an accumulator."""

    def kernel(x, o, a, b, full):
        def body(acc):
            value = jnp.ones(_TILE, jnp.bfloat16)

            def read(wait):
                return plgpu.wgmma_accumulator_load(acc, wait_n=wait)

            do = {
                "store": lambda: a.__setitem__(..., value),
                "load": lambda: o.__setitem__(0, a[...].astype(jnp.float32)),
                "copy": lambda: plgpu.copy_gmem_to_smem(x, a, full.at[0]),
                "copy again": lambda: plgpu.copy_gmem_to_smem(x, a, full.at[1]),
                "copy half": lambda: plgpu.copy_gmem_to_smem(
                    x.at[pl.ds(0, 32)], a.at[pl.ds(0, 32)], full.at[0]
                ),
                "load other half": lambda: o.__setitem__(
                    (0, pl.ds(32, 32)), a[pl.ds(32, 32)].astype(jnp.float32)
                ),
                "copy out": lambda: plgpu.copy_smem_to_gmem(a, x),
                "arrive": lambda: plgpu.barrier_wait(full.at[0]),
                "arrive again": lambda: plgpu.barrier_wait(full.at[1]),
                "product": lambda: plgpu.wgmma(acc, a, a),
                "product of b": lambda: plgpu.wgmma(acc, b, b),
                "commit": plgpu.commit_smem,
                "wait": lambda: plgpu.wgmma_wait(0),
                "wait for all but one": lambda: plgpu.wgmma_wait(1),
                "read": lambda: o.__setitem__(1, read(None)),
                "wait and read": lambda: o.__setitem__(1, read(0)),
            }
            for step in steps:
                do[step]()

        pl.run_scoped(body, plgpu.ACC(_TILE, jnp.float32))

    tile = plgpu.SMEM(_TILE, jnp.bfloat16)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((2, *_TILE), jnp.float32),
        scratch_types=(tile, tile, plgpu.Barrier(num_barriers=2)),
        num_threads=threads,
        thread_name="warpgroup",
        interpret=interpret,
    )
    return np.asarray(run(jnp.ones(_TILE, jnp.bfloat16)))


_modelled = functools.partial(
    _run, interpret=hopper.InterpretGPUParams(uninitialized_memory="zero")
)


@pytest.mark.parametrize(
    "steps, missing",
    quick.every(
        4,
        [
            ("store, [commit], product, wait", "no commit_smem after the store"),
            ("store, [commit], copy, arrive", "no commit_smem after the store"),
            ("load, [commit], copy, arrive", "no commit_smem after the load"),
            ("product, [wait], store", "no wgmma_wait after the product"),
            ("product, [wait], commit, copy, arrive", "no wgmma_wait after the product"),
            ("product, wait, [commit], copy, arrive", "no commit_smem after the load"),
            ("product, commit, wait, [commit], copy, arrive", "no commit_smem after the load"),
            ("copy, [arrive], load", "no barrier_wait after the copy"),
            ("copy, [arrive], store", "no barrier_wait after the copy"),
            ("copy, [arrive], product, wait", "no barrier_wait after the copy"),
            ("copy, [arrive], copy again, arrive again", "no barrier_wait after the copy"),
            ("product, product of b, [wait for all but one], store, wait", "no wgmma_wait"),
            ("product of b, product, wait for all but one, [wait], store", "no wgmma_wait"),
            ("product, [wait], read", "no wgmma_wait before the accumulator"),
        ],
    ),
)
def test_only_unordered_accesses_are_flagged(steps, missing):
    _modelled(re.sub(r"[\[\]]", "", steps).split(", "))
    with pytest.raises(Exception, match=f"Hazard: {missing}.*test_hopper.py"):
        _modelled(re.sub(r"\[.*?\], ", "", steps).split(", "))


def test_other_parts_of_a_tile_are_other_memory():
    _modelled(["load other half", "copy half", "load other half", "arrive", "load"])


def test_results_of_modelled_steps():
    o = _modelled(["store", "commit", "product", "wait and read", "load"])
    np.testing.assert_array_equal(o, np.stack([np.ones(_TILE), np.full(_TILE, 64)]))


@pytest.mark.parametrize("steps, threads", [(["copy out"], 1), (["store", "commit"], 2)])
def test_what_is_not_modelled_is_refused(steps, threads):
    with pytest.raises(Exception, match="copies out of shared memory|one warpgroup"):
        _modelled(steps, threads=threads)


@pytest.mark.parametrize("steps", [["store", "product", "wait"], ["product", "commit", "copy"]])
def test_the_interpreter_alone_sees_no_product(steps):
    """If this fails, the model is no longer needed."""
    _run(steps, plgpu.InterpretGPUParams(detect_races=True))
    assert not agreement.races()
