"""Process set-up before any work (allocator, compilation cache, logging), and users' paths."""

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
from kvjax.foundation.files import in_bucket, is_special
from kvjax.foundation.text import check_text

# By scheme of a path: the package that opens it, and the command that installs the package.
BUCKETS = {
    "gs": ("gcsfs", extras.command("gcsfs")),
    "s3": ("s3fs", "pip install 'etils[epath-s3]'"),
}

_DESCRIPTORS = ("/dev/fd/", "/dev/stdin")  # pipes with a writer, such as a shell's <(command)
_CPU_QUOTA = epath.Path("/sys/fs/cgroup/cpu.max")
_DEVICE_COUNT = r"--xla_force_host_platform_device_count=(\d+)"
_THREADS_PER_DEVICE = 16


def path(key: str, text: epath.PathLike) -> epath.Path:
    """Returns a user's path, absolute (libraries require it) and with `~` expanded.

    Args:
      key: the option or variable that holds it, for messages.

    Raises:
      UserError: an unsupported scheme, one whose package is not installed, a pipe or a device.
    """
    absolute = _absolute(key, text)
    if is_special(absolute) and not os.fspath(absolute).startswith(_DESCRIPTORS):
        raise UserError(f"{key} = {os.fspath(text)!r}: must be a file or folder, not a pipe")
    return absolute


_LONGEST_NAME = 255  # bytes, on ext4, XFS, APFS and NFS


def _absolute(key: str, text: epath.PathLike) -> epath.Path:
    """Returns a user's path like `path`, but also of pipes and devices."""
    text = os.fspath(text)
    check_text(key, text)
    scheme, separator, rest = text.partition("://")
    if not separator:
        absolute = epath.Path(os.path.abspath(os.path.expanduser(text)))
        longest = max(len(os.fsencode(part)) for part in absolute.parts)
        if longest > _LONGEST_NAME:
            raise UserError(
                f"{key} = {text[:40]!r}...: has a name of {longest:,} bytes; file systems take "
                f"{_LONGEST_NAME}"
            )
        return absolute
    if scheme == "hf":
        raise UserError(
            f"{key} = {text!r}: hf:// is for published models and most texts (docs/hub.md); give a "
            "local path"
        )
    if scheme not in BUCKETS:
        known = " or ".join(f"{name}://BUCKET/..." for name in BUCKETS)
        raise UserError(
            f"{key} = {text!r}: {scheme}:// is not supported; give a local path, {known}"
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
    """Returns the folder of reproducible files: $KVJAX_CACHE, or kvjax in the user's cache.

    Raises:
      UserError: the path, or a part of it, is a file.
    """
    if cache := os.environ.get("KVJAX_CACHE"):
        return folder("KVJAX_CACHE", cache)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return folder("XDG_CACHE_HOME", os.path.join(base, "kvjax"))
    return folder("KVJAX_CACHE (not set)", "~/.cache/kvjax")


def folder(key: str, text: epath.PathLike) -> epath.Path:
    """Returns the path (see `path`) of a folder that exists or can be created.

    Raises:
      UserError: the path, or a part of it, is a file.
    """
    absolute = _absolute(key, text)
    if not in_bucket(absolute):
        existing = next(p for p in (absolute, *absolute.parents) if os.path.lexists(p))
        if not existing.is_dir():
            raise UserError(f"{key} = {str(text)!r}: must be a folder, and {existing} is a file")
    return absolute


def start(*, compilation_cache: bool = True) -> None:
    """Configures the process; call once, before the first computation."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    keep_large_blocks()
    give_collectives_threads()
    import jax  # after the allocator is configured

    quiet_libraries()
    if directory := jax.config.jax_compilation_cache_dir:
        folder("JAX_COMPILATION_CACHE_DIR", directory)
    elif compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def quiet_libraries() -> None:
    """Sets libraries' logging to errors only."""
    for name in ("absl", "jax", "orbax"):
        logging.getLogger(name).setLevel(logging.ERROR)


def keep_large_blocks() -> None:
    """Makes glibc reuse large blocks instead of mapping them anew.

    XLA on CPU allocates a step's temporaries at every step; freshly mapped pages fault on first use
    (reuse is 1.2 to 1.4x faster on the tiny configs).
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
    """Enlarges XLA's CPU thread pool to fit the collectives of several CPU devices.

    A process's devices share one pool with one thread each. A device starts every collective whose
    operands are ready, in any order, and each blocks a thread until the other devices arrive: if
    all threads are blocked, no device arrives, and XLA aborts after 40 s. Observed within 2500
    steps of a three-layer model on eight devices and two busy cores, and not with this setting.
    """
    forced = re.findall(_DEVICE_COUNT, os.environ.get("XLA_FLAGS", ""))
    devices = int(forced[-1]) if forced else int(os.environ.get("JAX_NUM_CPU_DEVICES", -1))
    if devices > 1:
        os.environ.setdefault("NPROC", str(_THREADS_PER_DEVICE * devices))


def workdir(text: epath.PathLike) -> epath.Path:
    """Returns a run's folder, see `folder`."""
    absolute = folder("--workdir", text)
    check_checkpoints("--workdir", absolute)
    return absolute


def check_checkpoints(key: str, path: epath.Path) -> None:
    """Raises a UserError for a path in which TensorStore would not find its own files."""
    text = os.fspath(path)
    if "\\" in text:
        raise UserError(
            f"{key} = {text!r}: has a backslash, which TensorStore reads as a slash: "
            "checkpoints would be lost; give a path without one (or a link)"
        )


def seconds_since_launch() -> float:
    """Returns the wall-clock seconds since this process started, imports included."""
    import psutil

    return time.time() - psutil.Process().create_time()


def cores() -> int:
    """Returns the cores that this process may use, by its affinity and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = _CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


def blas_threads(count: int | None):
    """Returns a context in which BLAS uses `count` threads; None: its default."""
    import threadpoolctl

    return threadpoolctl.threadpool_limits(count, "blas")


def memory_per_device() -> int:
    """Returns the bytes that the first device holds; on CPU, the available memory per device."""
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
