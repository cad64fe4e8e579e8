"""Selects layers that this machine supports, and opens a box after testing that they hold."""

import json
import platform
import sys
import time

from kvjax.sandbox import layers as layers_lib, namespaces, self_test, webassembly
from kvjax.sandbox.box import Box, missing
from kvjax.sandbox.errors import SandboxError
from kvjax.sandbox.inside.seccomp import PROCESSORS
from kvjax.sandbox.layers import Layers
from kvjax.sandbox.limits import Limits
from kvjax.sandbox.process import Failure, Process


def open_box(policy: str = "auto", limits: Limits = Limits()) -> Box:
    """Opens a box whose layers have been tested.

    Args:
      policy: "linux": seccomp for system calls, and Landlock or namespaces or both for files;
        "wasm": CPython in WebAssembly; "auto": the first of these that works; "none": resource
        limits alone, which protect nothing; its layers are named "none".

    Raises:
      SandboxError: no policy works; the message has the kernel's error and a remedy per layer.
    """
    policies = {"linux": (linux,), "wasm": (wasm,), "auto": (linux, wasm), "none": (none,)}
    if policy not in policies:
        raise SandboxError(f"sandbox = {policy!r}: must be one of {', '.join(policies)}")
    errors = []
    for open_policy in policies[policy]:
        try:
            return open_policy(limits)
        except SandboxError as error:
            errors.append(f"{open_policy.__name__}: {error}")
    raise SandboxError("no sandbox works here, so nothing is run. " + ". ".join(errors))


def linux(limits: Limits) -> Box:
    """Opens a box with seccomp, and Landlock or namespaces or both."""
    if sys.platform != "linux":
        raise SandboxError(f"this is {sys.platform}")
    if platform.machine() not in PROCESSORS:
        raise SandboxError(f"{platform.machine()}: seccomp needs {' or '.join(PROCESSORS)}")
    held = _held(limits)
    without = [
        f"{name}: {missing(held, name)}" for name in ("seccomp", "landlock") if held[name] <= 0
    ]
    try:
        bubblewrap = namespaces.find(layers_lib.base_interpreter())
    except SandboxError as error:
        bubblewrap = None
        without.append(f"namespaces: {error}")
    if held["seccomp"] <= 0 or (held["landlock"] <= 0 and bubblewrap is None):
        raise SandboxError(
            f"{'; '.join(without)}. It needs seccomp (Linux 3.17) and either Landlock (Linux 5.13, "
            "in the kernel's list of security modules) or user namespaces with bubblewrap; a "
            "container's own filter may hide them"
        )
    layers = Layers(seccomp=True, landlock=held["landlock"] > 0, bubblewrap=bubblewrap)
    return _tested(layers, limits, without)


def wasm(limits: Limits) -> Box:
    """Opens a box with CPython in WebAssembly."""
    runtime = webassembly.find(layers_lib.base_interpreter())
    return _tested(Layers(wasm=runtime), limits)


def none(limits: Limits) -> Box:
    """Opens a box without protection: programs can do anything that this process can."""
    return _tested(Layers(), limits, breaches=False)


def _tested(layers: Layers, limits: Limits, without: tuple = (), breaches: bool = True) -> Box:
    """Opens a box and runs its self-test."""
    box = Box(layers, limits, tuple(without))
    self_test.check(box, breaches=breaches)
    return box


def _held(limits: Limits) -> dict[str, int]:
    """Returns each layer's version if a process can apply it to itself, or minus an errno."""
    layers, deadline = Layers(seccomp=True, landlock=True), time.monotonic() + limits.start_seconds
    process = None
    try:
        process = Process(layers.command(limits), layers_lib.ENVIRONMENT, "interpreter", 1 << 20)
        return json.loads(process.ask(json.dumps(layers.request("judge", limits)), deadline))
    except (Failure, OSError) as error:
        raise SandboxError(f"no interpreter starts: {error}") from error
    finally:
        if process:
            process.end()
