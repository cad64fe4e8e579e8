"""The process before any work: allocator, compilation cache, logging, devices."""

import ctypes
import logging
import os
import sys
import time

from etils import epath


def cache_directory() -> epath.Path:
    """Where kvjax keeps what it can make again: $KVJAX_CACHE, or kvjax in the user's cache."""
    if cache := os.environ.get("KVJAX_CACHE"):
        return epath.Path(cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return epath.Path(base).expanduser() / "kvjax"


def start(*, compilation_cache: bool = True) -> None:
    """Call once, before the first computation."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    keep_large_blocks()
    import jax  # after the allocator is set

    for name in ("absl", "jax", "orbax"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if compilation_cache and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def keep_large_blocks() -> None:
    """Makes glibc reuse large blocks instead of mapping them anew.

    XLA on CPU allocates a step's temporaries at every step; mapped afresh, each page of them
    faults again (1.2 to 1.4x on the tiny configs).
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)
    mallopt(M_ARENA_MAX, 1)


def absolute(path: epath.Path) -> epath.Path:
    """A local path made absolute (libraries below insist on it); others as they are."""
    return path if "://" in str(path) else epath.Path(os.path.abspath(os.path.expanduser(path)))


def seconds_since_launch() -> float:
    """Wall-clock seconds since this process was started, imports included."""
    import psutil

    return time.time() - psutil.Process().create_time()


def memory_per_device() -> int:
    """Bytes the first device can hold; on CPU, what the machine or its cgroup has available."""
    import jax
    import psutil

    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return int(device.memory_stats()["bytes_limit"])
    available = psutil.virtual_memory().available
    try:
        limit = epath.Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    total = available if limit == "max" else min(available, int(limit))
    return total // jax.local_device_count()
