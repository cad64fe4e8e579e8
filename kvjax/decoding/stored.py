"""Compiled programs kept on disk: a later process neither traces nor lowers them.

XLA loads an executable without Python's lock, so a thread does it while the process imports modules
and reads weights: `start_early` those that the last process used, `start_loading` those of a model.

JAX's compilation cache saves the compilation alone. Its key is the lowered program, and tracing and
lowering a model of 30 layers takes seconds. Here the key is what determines the program: kvjax's
source code, the model's config, shapes, versions, flags and the machine.
"""

from collections.abc import Callable, Iterable
from concurrent import futures
import contextlib
import hashlib
import logging
import os
import pathlib
import pickle
import platform
import tempfile

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from kvjax.foundation import runtime
from kvjax.foundation.checkout import package_digest

PROGRAMS = ("prefill", "decode_step")  # functions, in the order in which they run
LIMIT = 64  # files kept, of a few MB each; the least recently used are removed


class StoredProgram:
    """A jitted function on one device that keeps its executables on disk.

    Files are read and written by `pickle` in the user's own cache directory, beside JAX's compiled
    programs; loading one runs code, so files or a folder that others may write to are not loaded. A
    file that cannot be read or written costs a compilation, never an error.
    """

    def __init__(self, jitted: Callable, name: str, *determined_by: object):
        """Creates a program that is compiled or loaded at its first call.

        Args:
          name: of the function.
          determined_by: everything beside kvjax's code and the shapes of arguments that the
            program depends on, with a `repr` that says all of it.
        """
        self._jitted, self._key = jitted, _key(name, determined_by)
        self._programs: dict[tuple, Callable] = {}

    def __call__(self, weights, cache, *rest):
        return self.load(weights, cache, *rest)(weights, cache, *rest)

    def load(self, weights, cache, *rest) -> Callable:
        """Returns the executable for these arguments' shapes, loaded or else compiled."""
        # Weights never change; shapes of the others determine the program.
        shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves((cache, rest)))
        if shapes not in self._programs:
            self._programs[shapes] = self._load_or_compile((weights, cache, *rest))
        return self._programs[shapes]

    def _load_or_compile(self, arguments: tuple) -> Callable:
        leaves, tree = jax.tree.flatten(arguments)
        shapes = [(x.shape, str(x.dtype), str(x.sharding)) for x in leaves]
        path = _folder() / f"{_prefix(self._key)}-{_digest(shapes, str(tree))}.bin"
        try:
            loading = _loading.pop(path, None)
            program = loading.result() if loading else _read(path, list(leaves[0].devices()))
            os.utime(path)
            return program
        except Exception as error:  # not there, cut off, or refused by another version of XLA
            logging.getLogger(__name__).debug("%s is compiled: %r", path.name, error)
            program = _compile(self._jitted, arguments)
        _write(path, program)
        return program


_loading: dict[pathlib.Path, futures.Future] = {}


def start_early() -> None:
    """Starts to load the latest executable of each function, before the model is known.

    Called while modules are imported. If this process wants others, a core worked for nothing;
    what is wrong with folders and devices is said later, by whoever needs them.
    """
    with contextlib.suppress(Exception):
        runtime.start()
        files = _by_age(_folder().glob(f"*-{_environment()}-*.bin"))
        latest = {file.name.partition("-")[0]: file for file in files}
        _start([latest[name] for name in PROGRAMS if name in latest])


def start_loading(*determined_by: object) -> None:
    """Starts to load each function's latest executable for a model.

    Sizes are not known yet: those of the latest process are probably wanted again.

    Args:
      determined_by: as of `StoredProgram`.
    """
    with contextlib.suppress(OSError):  # no such folder, or another process has removed a file
        patterns = [f"{_prefix(_key(name, determined_by))}-*.bin" for name in PROGRAMS]
        latest = [_by_age(_folder().glob(pattern))[-1:] for pattern in patterns]
        _start([file for files in latest for file in files])


def _start(paths: list[pathlib.Path]) -> None:
    """Starts to load executables in one thread, in this order."""
    thread = futures.ThreadPoolExecutor(1)
    for path in paths:
        if path not in _loading:
            _loading[path] = thread.submit(_read, path, jax.local_devices()[:1])
    thread.shutdown(wait=False)


def _by_age(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime)


def _read(path: pathlib.Path, devices: list[jax.Device]) -> Callable:
    """Loads an executable; a PermissionError if anyone else could have written it."""
    for place in (path.parent, path):
        status = place.stat()
        if status.st_mode & 0o022 or status.st_uid != getattr(os, "getuid", lambda: 0)():
            raise PermissionError(f"{place}: others may write to it, or own it")
    content = pickle.loads(path.read_bytes())
    return serialize_executable.deserialize_and_load(*content, execution_devices=devices)


def _key(name: str, determined_by: Iterable[object]) -> tuple[str, ...]:
    return (name, *map(repr, determined_by))


def _prefix(key: tuple[str, ...]) -> str:
    """Returns the part of a file's name that depends on all but the shapes.

    It starts with the function's name and the environment's digest, see `start_early`.
    """
    return f"{key[0]}-{_environment()}-{_digest(key)}"


def _compile(jitted: Callable, arguments: tuple):
    """Compiles without JAX's compilation cache: on a CPU, XLA does not serialize again what it has
    read from there ("Function ... not found").
    """
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        return jitted.lower(*arguments).compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _write(path: pathlib.Path, program) -> None:
    """Stores an executable; without space or a serializer for the device, nothing happens."""
    try:
        content = pickle.dumps(serialize_executable.serialize(program))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
        for old in _by_age(path.parent.glob("*.bin"))[:-LIMIT]:
            old.unlink(missing_ok=True)
    except Exception:
        return


def _folder() -> pathlib.Path:
    return pathlib.Path(runtime.cache_directory()) / "programs"


def _environment() -> str:
    """Returns a digest of the code, versions, flags and hardware that programs depend on."""
    client = jax.devices()[0].client
    flags = {key: os.environ[key] for key in sorted(os.environ) if key.startswith(_FLAGS)}
    options = sorted((key, repr(value)) for key, value in jax.config.values.items())
    devices = [(d.platform, d.device_kind) for d in jax.devices()]
    machine = (platform.machine(), platform.processor(), _cpu_features())
    versions = package_digest(), jax.__version__, client.platform_version
    return _digest(versions, flags, options, devices, machine)


_FLAGS = ("JAX_", "XLA_", "LIBTPU_", "CUDA_")


def _cpu_features() -> str:
    """Returns the CPU's features, which XLA compiles for."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
