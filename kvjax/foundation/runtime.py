"""Sets up the process before any work: allocator, compilation cache, logging, devices."""

import ctypes
import importlib.util
import logging
import os
import re
import sys
import time

from etils import epath

from kvjax.foundation import extras
from kvjax.foundation.errors import UserError
from kvjax.foundation.files import in_bucket, special
from kvjax.foundation.text import check_text

# Schemes of paths, what opens them, and the command that installs it.
BUCKETS = {
    "gs": ("gcsfs", extras.command("gcsfs")),
    "s3": ("s3fs", "pip install 'etils[epath-s3]'"),
}

_DESCRIPTORS = ("/dev/fd/", "/dev/stdin")  # as <(command) of a shell: its writer is there
_CPU_QUOTA = epath.Path("/sys/fs/cgroup/cpu.max")
_DEVICE_COUNT = r"--xla_force_host_platform_device_count=(\d+)"
_THREADS_PER_DEVICE = 16
_LONGEST_PATH = 3_800  # bytes: Linux's 4,096, without what a checkpoint's files add
_DEEPEST_PATH = 200  # folders, for pathlib makes each by a call in the call for the next


def path(key: str, text: epath.PathLike) -> epath.Path:
    """What a user gave as a path: `~` expanded, and absolute (libraries below insist on it).

    Args:
      key: for messages: the option or variable that holds it.

    Raises:
      UserError: a scheme that nothing here opens, or whose package is not installed; a `~name` of
        no user; a path that is too long; a pipe, a socket or a device.
    """
    found = _located(key, text)
    if (kind := special(found)) and not os.fspath(found).startswith(_DESCRIPTORS):
        raise UserError(f"{key} = {os.fspath(text)!r}: is {kind}; give a file or a folder")
    return found


def _located(key: str, text: epath.PathLike) -> epath.Path:
    """Returns the path that a user gave, whatever is there; see `path`."""
    text = os.fspath(text)
    check_text(key, text)
    scheme, separator, rest = text.partition("://")
    if not separator:
        expanded = os.path.expanduser(text)
        if expanded.startswith("~"):
            user = text.split("/")[0]
            raise UserError(f"{key} = {text!r}: there is no user {user}; by name, give ./{text}")
        found = epath.Path(os.path.abspath(expanded))
        if len(os.fsencode(found)) > _LONGEST_PATH or len(found.parts) > _DEEPEST_PATH:
            raise UserError(
                f"{key} = {text!r}: must be a path of at most {_LONGEST_PATH:,} bytes and "
                f"{_DEEPEST_PATH} folders"
            )
        return found
    if scheme not in BUCKETS:
        known = " or ".join(f"{name}://BUCKET/..." for name in BUCKETS)
        raise UserError(
            f"{key} = {text!r}: nothing here opens {scheme}://; give a local path, {known}"
        )
    package, command = BUCKETS[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{key} = {text!r}: {scheme}:// needs the package {package}: {command}, or give a "
            "local path"
        )
    if not rest.strip("/"):
        raise UserError(f"{key} = {text!r}: names no bucket: {scheme}://BUCKET/FOLDER")
    return epath.Path(text)


def cache_directory() -> epath.Path:
    """Where kvjax keeps what it can make again: $KVJAX_CACHE, or kvjax in the user's cache.

    Raises:
      UserError: a file is where the folder or one above it should be.
    """
    if cache := os.environ.get("KVJAX_CACHE"):
        return folder("KVJAX_CACHE", cache)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return folder("XDG_CACHE_HOME", os.path.join(base, "kvjax"))
    return folder("KVJAX_CACHE (not set)", "~/.cache/kvjax")


def folder(key: str, text: epath.PathLike) -> epath.Path:
    """The path (see `path`) of a folder that is there or can be made; a UserError for a file."""
    found = _located(key, text)
    if not in_bucket(found):
        there = next(p for p in (found, *found.parents) if os.path.lexists(p))
        if not there.is_dir():
            raise UserError(f"{key} = {str(text)!r}: must be a folder, and {there} is none")
    return found


def start(*, compilation_cache: bool = True) -> None:
    """Call once, before the first computation."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    keep_large_blocks()
    give_collectives_threads()
    import jax  # after the allocator is set

    quiet_libraries()
    if given := jax.config.jax_compilation_cache_dir:
        folder("JAX_COMPILATION_CACHE_DIR", given)
    elif compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def quiet_libraries() -> None:
    """Leaves of what libraries log only errors; kvjax prints what a user should know."""
    for name in ("absl", "jax", "orbax"):
        logging.getLogger(name).setLevel(logging.ERROR)


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


def give_collectives_threads() -> None:
    """Makes XLA's pool of CPU threads large enough for all collectives of several CPU devices.

    The devices of a process share one pool, of a thread for each. A device starts every collective
    whose operands are ready, in any order, and each blocks a thread until the others arrive: with
    all threads blocked nobody arrives, and XLA ends the process after 40 s. Seen within 2500 steps
    of a model of three layers on eight devices and two busy cores, and not with this.
    """
    forced = re.findall(_DEVICE_COUNT, os.environ.get("XLA_FLAGS", ""))
    devices = int(forced[-1]) if forced else int(os.environ.get("JAX_NUM_CPU_DEVICES", -1))
    if devices > 1:
        os.environ.setdefault("NPROC", str(_THREADS_PER_DEVICE * devices))


def workdir(text: epath.PathLike) -> epath.Path:
    """The folder of a run, as `path` makes it; a UserError where a file stands."""
    found = folder("--workdir", text)
    check_checkpoints("--workdir", found)
    return found


def check_checkpoints(key: str, path: epath.Path) -> None:
    """Raises a UserError for a folder in which TensorStore would not find its own files."""
    text = os.fspath(path)
    if "\\" in text:
        raise UserError(
            f"{key} = {text!r}: holds a backslash, which TensorStore takes for a slash: "
            "checkpoints would lie elsewhere; give a path without one (a link without one will do)"
        )


def seconds_since_launch() -> float:
    """Wall-clock seconds since this process was started, imports included."""
    import psutil

    return time.time() - psutil.Process().create_time()


def cores() -> int:
    """Processor cores that this process may use, by its affinity and its container's quota."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = _CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return found
    return found if quota == "max" else max(1, min(found, int(quota) // int(period)))


def blas_threads(count: int | None):
    """Returns a context in which BLAS uses that many threads; None: as many as it likes."""
    import threadpoolctl

    return threadpoolctl.threadpool_limits(count, "blas")


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
