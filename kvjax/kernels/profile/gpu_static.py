"""Registers, spills and shared memory of the decode-attention kernel, compiled for an absent GPU.

Registers and spills are those that ptxas reports, shared memory is what a block asks for. Nothing
runs.
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
    """dict(registers, spill_bytes, shared_bytes): of a thread, of a thread, of a block.

    Raises:
      NotImplementedError: the kernel does not take this shape.
      UserError: JAX's CUDA plugin is not installed.
    """
    return compiled(shape, batch=batch, length=length, device=device)[0]


def compiled(
    shape: Sizes, *, batch: int, length: int, device: str = "h200"
) -> tuple[dict, jax.stages.Compiled, str]:
    """See `resources`; the program that they are of, and the kernel's PTX."""
    inputs, cache = shapes.abstract(shape, batch=batch, length=length, dtype=jnp.bfloat16)
    arguments = inputs, cache, jax.ShapeDtypeStruct((batch,), jnp.int32)
    attend = jax.jit(lambda *arguments: gpu.decode_attention(*arguments))
    with tempfile.TemporaryDirectory() as directory:
        dump = dict(MOSAIC_GPU_DUMP_TO=directory, MOSAIC_GPU_DUMP_PTX="1")
        with mock.patch.dict(os.environ, dump), _compiled_anew():
            program = topology.compile_for(topology.gpu_device(device), attend, *arguments)
        (ptxas,) = pathlib.Path(directory).glob("*.ptxas")
        (asked,) = pathlib.Path(directory).glob("*.resources.txt")
        (ptx,) = pathlib.Path(directory).glob("*.ptx")
        report, asked, ptx = (path.read_text() for path in (ptxas, asked, ptx))
    number = lambda pattern, text: int(re.search(pattern, text)[1])
    found = dict(
        registers=number(r"Used (\d+) registers", report),
        spill_bytes=number(r"(\d+) bytes spill stores", report),
        shared_bytes=number(r"smem_scratch_bytes=(\d+)", asked),
    )
    return found, program, ptx


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """Without JAX's persistent compilation cache: a program from it leaves no report."""
    enabled = jax.config.jax_enable_compilation_cache

    def enable(whether: bool):
        jax.config.update("jax_enable_compilation_cache", whether)
        compilation_cache.reset_cache()  # JAX decides once whether it uses it

    enable(False)
    try:
        yield
    finally:
        enable(enabled)
