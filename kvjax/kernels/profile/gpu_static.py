"""Registers, spills and shared memory of the decode-attention kernel, compiled for an absent GPU.

ptxas reports registers and spills; the program states its shared memory. Nothing runs.
"""

from collections.abc import Iterator
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

    Raises:
      NotImplementedError: the kernel does not support this shape.
      UserError: JAX's CUDA plugin is not installed.
    """
    return compiled(shape, batch=batch, length=length, device=device)[0]


def compiled(
    shape: Sizes, *, batch: int, length: int, device: str = "h200"
) -> tuple[dict, jax.stages.Compiled, str]:
    """Returns `resources`, the compiled program, and the kernel's PTX."""
    inputs, cache = shapes.abstract(shape, batch=batch, length=length, dtype=jnp.bfloat16)
    arguments = inputs, cache, jax.ShapeDtypeStruct((batch,), jnp.int32)
    # A new function, which is traced in every call.
    attend = jax.jit(lambda *arguments: gpu.decode_attention(*arguments))
    with tempfile.TemporaryDirectory() as directory:
        dump = {"MOSAIC_GPU_DUMP_TO": directory, "MOSAIC_GPU_DUMP_PTX": "1"}
        with mock.patch.dict(os.environ, dump), without_compilation_cache():
            program = topology.compile_for(topology.gpu_device(device), attend, *arguments)
        (ptxas,) = pathlib.Path(directory).glob("*.ptxas")
        (requested,) = pathlib.Path(directory).glob("*.resources.txt")
        (ptx,) = pathlib.Path(directory).glob("*.ptx")
        report, requested, ptx = (path.read_text() for path in (ptxas, requested, ptx))
    figures = {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spill_bytes": int(re.search(r"(\d+) bytes spill stores", report)[1]),
        "shared_bytes": int(re.search(r"smem_scratch_bytes=(\d+)", requested)[1]),
    }
    return figures, program, ptx


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
