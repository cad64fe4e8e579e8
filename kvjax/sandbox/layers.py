"""Layers between a program and the machine, and the command that starts an interpreter behind."""

from collections.abc import Mapping
import dataclasses
import os
import sys

from kvjax.sandbox import namespaces, sources, webassembly
from kvjax.sandbox.limits import Limits

# Sets are ordered alike each time.
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
# Neither the folder it is in, nor packages; nothing is written beside what is imported.
OPTIONS = ("-P", "-s", "-S", "-B", "-c")


def base_interpreter() -> str:
    """The interpreter that a virtual environment was made of."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@dataclasses.dataclass(frozen=True)
class Layers:
    """What is put around both interpreters; resource limits always are.

    Attributes:
      seccomp: only the system calls of a running interpreter.
      landlock: reads only what it imports.
      bubblewrap: namespaces and a root of its own.
      wasm: CPython in WebAssembly instead of this machine's; without the layers above.
    """

    seccomp: bool = False
    landlock: bool = False
    bubblewrap: namespaces.Bubblewrap | None = None
    wasm: webassembly.Runtime | None = None

    def command(self, limits: Limits) -> list[str]:
        """Starts an interpreter that waits for its first request."""
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
        """The first request: how it locks itself, and as what it goes on."""
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

    def of_the_kernel(self) -> tuple[str, ...]:
        """Those that an interpreter puts around itself, by the names in its report."""
        asked = {"landlock": self.landlock, "seccomp": self.seccomp}
        return tuple(name for name, wanted in asked.items() if wanted)

    def names(self, held: Mapping[str, int]) -> tuple[str, ...]:
        """What results say of them, with the versions that hold."""
        found = ["rlimits"]
        found += ["seccomp"] if held.get("seccomp", 0) > 0 else []
        found += [f"landlock {version}"] if (version := held.get("landlock", 0)) > 0 else []
        found += [f"namespaces ({self.bubblewrap.version})"] if self.bubblewrap else []
        found += [f"wasm ({self.wasm.version})"] if self.wasm else []
        return tuple(found) if len(found) > 1 else ("none",)
