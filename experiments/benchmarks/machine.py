"""Rates and memory of this machine, for comparison with benchmarks' figures."""

from collections.abc import Callable
import shutil
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import psutil

from kvjax.foundation import runtime
from kvjax.foundation.errors import UserError


def seconds(run: Callable[[], jax.Array], repeats: int = 1) -> list[float]:
    """Returns the wall-clock seconds of each call, until its result is ready."""
    elapsed = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        elapsed.append(time.perf_counter() - start)
    return elapsed


def matmul_rate(dtype: jnp.dtype, size: int | None = None, repeats: int = 10) -> float:
    """Returns the FLOP/s of a [size, size] product of random numbers, the median over repeats.

    Args:
      size: by default large enough to hide the call's overhead: 2048 on CPU, else 8192.
    """
    if size is None:
        size = 2048 if jax.default_backend() == "cpu" else 8192
    # Random numbers: a GPU multiplies zeros faster.
    a = jax.random.normal(jax.random.key(0), (size, size), dtype)
    multiply = jax.jit(lambda a: a @ a)
    multiply(a).block_until_ready()
    return 2 * size**3 / statistics.median(seconds(lambda: multiply(a), repeats))


def read_rate(dtype: jnp.dtype, gigabytes: float = 1.0, repeats: int = 9) -> float:
    """Returns the bytes/s of reading an array larger than any cache (a matrix times a vector)."""
    columns = 4096
    rows = int(gigabytes * 1e9) // (columns * dtype.itemsize)
    a, x = jnp.ones((rows, columns), dtype), jnp.ones((columns,), dtype)
    multiply = jax.jit(lambda a, x: a @ x)
    multiply(a, x).block_until_ready()
    return a.nbytes / statistics.median(seconds(lambda: multiply(a, x), repeats))


def check_room(options: str, size: int, *, memory: int, disk: int) -> None:
    """Raises a UserError unless copies of a state fit free memory and disk.

    Args:
      options: text of the options that determine the state's size.
      size: bytes of the state.
      memory, disk: number of copies in each.
    """
    free_disk = shutil.disk_usage(tempfile.gettempdir()).free
    needs = {
        "in memory": (memory, psutil.virtual_memory().available),
        "on disk": (disk, free_disk),
    }
    for location, (copies, available) in needs.items():
        subject = f"a state of {size / 1e9:,.1f} GB, {copies} x {location},"
        check_fits(options, subject, copies * size, available)


def check_fits(options: str, subject: str, needed: float, available: float | None = None) -> None:
    """Raises a UserError if more bytes are needed than available (None: a device's memory)."""
    available = runtime.memory_per_device() if available is None else available
    if needed > available:
        raise UserError(
            f"{options}: {subject} needs {needed / 1e9:,.1f} GB of {available / 1e9:,.1f} GB: "
            "give less"
        )
