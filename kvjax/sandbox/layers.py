"""Layers of protection around an interpreter, and the command that starts it behind them."""

from collections.abc import Mapping
import dataclasses
import os
import sys

from kvjax.sandbox import namespaces, sources, webassembly
from kvjax.sandbox.limits import Limits

ENVIRONMENT = {"PYTHONHASHSEED": "0"}  # a fixed order of sets
# No imports from the current folder or from packages; no .pyc files.
OPTIONS = ("-P", "-s", "-S", "-B", "-c")


def base_interpreter() -> str:
    """Returns the interpreter that the virtual environment is based on."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers around both interpreters; resource limits always apply."""

    seccomp: bool = False  # allows only the system calls of a running interpreter
    landlock: bool = False  # allows reading only the interpreter's imports
    bubblewrap: namespaces.Bubblewrap | None = None  # namespaces with a separate root
    wasm: webassembly.Runtime | None = None  # replaces this machine's CPython, without other layers

    def command(self, limits: Limits) -> list[str]:
        """Returns the command of an interpreter that waits for its first request."""
        interpreter = base_interpreter()
        if self.wasm:
            guest = ["python", *OPTIONS, sources.interpreter(locks_itself=False)]
            host = [interpreter, *OPTIONS, sources.host()]
            return [*host, self.wasm.request(guest, ENVIRONMENT, limits)]
        command = [interpreter, *OPTIONS, sources.interpreter(locks_itself=True)]
        if self.bubblewrap:
            return self.bubblewrap.command(interpreter, ENVIRONMENT) + command
        return command

    def request(self, role: str, limits: Limits) -> dict:
        """Returns the first request: how the interpreter locks itself, and its role."""
        if self.wasm:
            return dict(role=role, lock=None)
        lock = dict(
            use_landlock=self.landlock,
            use_seccomp=self.seccomp,
            parent=None if self.bubblewrap else os.getpid(),
            memory_bytes=limits.memory_bytes,
            cpu_seconds=limits.cpu_seconds,
            processes=1,
        )
        return dict(role=role, lock=lock)

    def kernel_layers(self) -> tuple[str, ...]:
        """Returns the layers that an interpreter applies to itself, by name in its report."""
        return tuple(name for name in ("landlock", "seccomp") if getattr(self, name))

    def names(self, held: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the names of the layers for results, with versions."""
        names = ["rlimits"]
        names += ["seccomp"] if held.get("seccomp", 0) > 0 else []
        names += [f"landlock {version}"] if (version := held.get("landlock", 0)) > 0 else []
        names += [f"namespaces ({self.bubblewrap.version})"] if self.bubblewrap else []
        names += [f"wasm ({self.wasm.version})"] if self.wasm else []
        return tuple(names) if len(names) > 1 else ("none",)
