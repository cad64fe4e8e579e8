"""Selects the cases that `make test` runs, enough to see a test's claim fail; others are slow."""

from collections.abc import Iterable

import pytest

from kvjax.foundation import runtime

# Tests compile longer than they run. Without XLA's fusion emitters (which go through MLIR) a
# training step compiles in a quarter of the time; splitting a module into 32 parts for as many
# threads costs a tenth more than one part.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def cpu_devices(count: int, flags: str = XLA_FLAGS) -> dict[str, str]:
    """Returns the environment of a process with `count` CPU devices."""
    return dict(
        XLA_FLAGS=f"--xla_force_host_platform_device_count={count} {flags}",
        NPROC=str(16 * count),  # as `runtime.give_collectives_threads` sets it
    )


# One mechanism of tests/mechanisms.py per cache layout: grouped, residual, factored, tied, latent,
# rebuilt, latent with residuals; none of tensor_product (TPA).
READERS = ("gqa", "lrkv_gqa", "factored_joint", "lrkv_kv_tied", "mla", "mla_paper", "mla_lrkv")
# READERS, and mechanisms with unusual queries and keys.
KINDS = (*READERS, "thin_keys", "lrkv_shared_rope", "qk_tied_plus")

_MIN_SECONDS = 0.015  # of compile time to be cached; writing a program takes 0.008 (profiled)


def compilation_cache() -> dict:
    """Returns JAX's options for a compilation cache that also keeps quickly compiled programs."""
    return dict(
        jax_compilation_cache_dir=str(runtime.cache_directory() / "compiled"),
        jax_persistent_cache_min_compile_time_secs=_MIN_SECONDS,
        jax_persistent_cache_min_entry_size_bytes=-1,
    )


def only(quick: Iterable, among: Iterable) -> list:
    """Returns the cases for `pytest.mark.parametrize`, marked slow unless in `quick`.

    Args:
      quick: cases of `among`.
      among: all cases; a case with several arguments is a tuple.
    """
    quick, among = list(quick), list(among)
    assert quick and all(case in among for case in quick), (quick, among)
    return [case if case in quick else _slow(case) for case in among]


def every(step: int, among: Iterable, first: int = 0) -> list:
    """Returns the cases for `pytest.mark.parametrize`, marked slow except every `step`-th."""
    return [case if i % step == first else _slow(case) for i, case in enumerate(among)]


def _slow(case):
    if hasattr(case, "marks"):  # of pytest.param, which is a tuple too
        return pytest.param(*case.values, marks=(*case.marks, pytest.mark.slow), id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
