"""Registers, spills and shared memory of decode attention's kernels, compiled for an absent GPU.

ptxas reports registers and spills; the program states its shared memory. Nothing runs.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import pathlib
import re
import tempfile
from unittest import mock

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp

from kvjax.hardware import topology
from kvjax.kernels.decode_attention import shapes
from kvjax.kernels.decode_attention.cache_layouts.layout import Sizes
from kvjax.kernels.decode_attention.gpu import attention as gpu


def resources(shape: Sizes, *, batch: int, length: int, device: str = "h200") -> dict:
    """Returns "registers" and "spill_bytes" of a thread, "shared_bytes" of a program (CTA).

    They are those of the kernel that reads the cache.

    Raises:
      NotImplementedError: the kernel does not support this shape.
      UserError: JAX's CUDA plugin is not installed.
    """
    kernels, _ = compiled(shape, batch=batch, length=length, device=device)
    return kernels["decode_attention"][0]


def compiled(
    shape: Sizes, *, batch: int, length: int, device: str = "h200"
) -> tuple[dict[str, tuple[dict, str]], jax.stages.Compiled]:
    """Returns figures, as in `resources`, and PTX of each kernel by its name, and the program."""
    inputs, cache = shapes.abstract(shape, batch=batch, length=length, dtype=jnp.bfloat16)
    arguments = inputs, cache, jax.ShapeDtypeStruct((batch,), jnp.int32)
    return compiled_kernels(gpu.decode_attention, *arguments, device=device)


def compiled_kernels(
    function: Callable, *arguments, device: str = "h200", **options
) -> tuple[dict[str, tuple[dict, str]], jax.stages.Compiled]:
    """Compiles any function; returns its kernels and the program, as `compiled` does.

    Args:
      options: of `jax.jit`.
    """
    # A new function, which is traced in every call.
    attend = jax.jit(lambda *arguments: function(*arguments), **options)
    with tempfile.TemporaryDirectory() as directory:
        dump = {"MOSAIC_GPU_DUMP_TO": directory, "MOSAIC_GPU_DUMP_PTX": "1"}
        with mock.patch.dict(os.environ, dump), without_compilation_cache():
            program = topology.compile_for(topology.gpu_device(device), attend, *arguments)
        reports = sorted(pathlib.Path(directory).glob("*.ptxas"))
        kernels = {report.stem.rpartition("_")[0]: _kernel(report) for report in reports}
    return kernels, program


def _kernel(ptxas: pathlib.Path) -> tuple[dict, str]:
    """Returns a kernel's figures and PTX, from the files beside the compiler's report."""
    report, ptx = ptxas.read_text(), ptxas.with_suffix(".ptx").read_text()
    requested = ptxas.with_suffix(".resources.txt").read_text()
    figures = {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spill_bytes": int(re.search(r"(\d+) bytes spill stores", report)[1]),
        "shared_bytes": int(re.search(r"smem_scratch_bytes=(\d+)", requested)[1]),
    }
    return figures, ptx


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Disables JAX's persistent compilation cache.

    Programs from it leave no compiler's report, and a CPU's cannot be serialised.
    """
    enabled = jax.config.jax_enable_compilation_cache

    def enable(on: bool):
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()  # JAX reads the option once

    enable(False)
    try:
        yield
    finally:
        enable(enabled)
