"""Registers, spills and shared memory of decode attention's kernels, compiled for an absent GPU.

ptxas reports registers and spills; the program states its shared memory. Nothing runs.
"""

from collections.abc import Callable, Iterator
import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from unittest import mock

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp

from kvjax.foundation.errors import UserError
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
            target = topology.gpu_device(device)
            # Triton's passes and PTX.
            options = {"xla_dump_to": directory, "xla_dump_emitter_re": ".*"}
            program = topology.compile_for(target, attend, *arguments, compiler_options=options)
        folder = pathlib.Path(directory)
        kernels = {
            report.stem.rpartition("_")[0]: _mosaic_kernel(report)
            for report in sorted(folder.glob("*.ptxas"))
        }
        if triton := list(folder.glob("*.decode_attention.triton-to-llvm.txt")):
            kernels["decode_attention"] = _triton_kernel(triton[0])
    return kernels, program


def _mosaic_kernel(ptxas: pathlib.Path) -> tuple[dict, str]:
    """Returns a kernel's figures and PTX, from the files beside the compiler's report."""
    requested = ptxas.with_suffix(".resources.txt").read_text()
    shared = re.search(r"smem_scratch_bytes=(\d+)", requested)[1]
    return _figures(ptxas.read_text(), int(shared)), ptxas.with_suffix(".ptx").read_text()


def _triton_kernel(passes: pathlib.Path) -> tuple[dict, str]:
    """Returns the figures and PTX of decode attention's kernel, whose PTX is assembled once more.

    Raises:
      UserError: `ptxas` is not installed.
    """
    shared = re.findall(r"ttg.shared = (\d+)", passes.read_text())[-1]
    entry = ".entry decode_attention("
    file = next(file for file in passes.parent.glob("*.ptx") if entry in file.read_text())
    ptx = file.read_text()
    target = re.search(r"\.target (\w+)", ptx)[1]
    command = [_ptxas(), "-v", "-arch", target, str(file), "-o", os.devnull]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return _figures(report, int(shared)), ptx


def _ptxas() -> str:
    spec = importlib.util.find_spec("nvidia")
    packaged = [f"{place}/cu13/bin" for place in (spec.submodule_search_locations if spec else ())]
    program = shutil.which("ptxas", path=os.pathsep.join([*packaged, os.environ["PATH"]]))
    if program is None:
        raise UserError("ptxas is not installed: it is in the extra aot (nvidia-cuda-nvcc)")
    return program


def _figures(report: str, shared: int) -> dict:
    return {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spill_bytes": int(re.search(r"(\d+) bytes spill stores", report)[1]),
        "shared_bytes": shared,
    }


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
