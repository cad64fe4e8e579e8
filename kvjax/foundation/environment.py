"""Environment variables of JAX and XLA: a bad value ends a command with one line and status 2.

JAX raises for some when it is imported, before any command runs, and for others when it first
computes. XLA ends the process for a flag that it does not know.
"""

import contextlib
import os
import re
import sys
import traceback
import warnings

from kvjax.foundation.errors import UserError, first_line
from kvjax.foundation.files import special

_OF_JAX, _BACKENDS = "/jax/_src/", "/jax/_src/xla_bridge.py"
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\S*)")
_EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}  # by platform
_MOST_DEVICES = 4096
_FATAL = re.compile(r"^[EF]\d{4} .*?\] (.*)$", re.MULTILINE)  # a line of XLA's log


def refused(error: BaseException) -> str | None:
    """Returns a message for an exception by which JAX refuses the environment; None for others."""
    text = first_line(error)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, ValueError) and any(_OF_JAX in file for file in files):
        for name, value in sorted(os.environ.items()):
            called = re.escape(name.removeprefix("JAX_"))
            if name.startswith("JAX_") and re.search(rf"\bjax[_.]{called}\b", text, re.IGNORECASE):
                return f"{name} = {value!r}: JAX does not take it ({text}); mend it or unset it"
    if "Unable to initialize backend" in text or any(file.endswith(_BACKENDS) for file in files):
        names = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
        chosen = " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
        said = f"{chosen or 'JAX'}: {text if str(error) else 'there is no such device'}"
        extras = sorted({extra for kind, extra in _EXTRAS.items() if kind in chosen.lower()})
        plugins = [f"pip install 'kvjax[{extra}]' installs what runs on it; " for extra in extras]
        return f"{said}. {''.join(plugins)}JAX_PLATFORMS=cpu runs on the CPU"
    return None


def watch_imports() -> None:
    """From here on an exception of `refused` that nothing catches ends the process, status 2."""
    usual = sys.excepthook

    def hook(kind, error, trace):
        reason = refused(error)
        if reason is None:
            usual(kind, error, trace)
            return
        with contextlib.suppress(OSError, ValueError):
            print(f"kvjax: {reason}", file=sys.stderr, flush=True)
        os._exit(2)

    sys.excepthook = hook


def check() -> None:
    """Raises a UserError for numbers of CPU devices that cannot be, and for XLA_FLAGS.

    XLA reads its flags in a child process, since it ends the process that has a wrong one.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if kind := special(flags):  # XLA reads what does not begin with "-" as a file
        raise UserError(f"XLA_FLAGS = {flags!r} is {kind}: give flags, or a file of flags")
    asked = os.environ.get("JAX_NUM_CPU_DEVICES", "-1")
    counts = {"JAX_NUM_CPU_DEVICES": [] if asked == "-1" else [asked]}  # -1: JAX's own default
    counts["XLA_FLAGS: --xla_force_host_platform_device_count"] = _DEVICE_COUNT.findall(flags)
    for name, values in counts.items():
        for value in values:
            if not re.fullmatch("[0-9]{1,9}", value) or not 1 <= int(value) <= _MOST_DEVICES:
                raise UserError(f"{name} = {value!r}: must be from 1 to {_MOST_DEVICES:,}")
    if flags and hasattr(os, "fork") and (said := _what_xla_says()):
        raise UserError(f"XLA_FLAGS = {flags!r}: {said}; mend it or unset it")


def _what_xla_says() -> str:
    """Returns the line of XLA's log that ends a process with these XLA_FLAGS; "" if they pass."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, of what a fork may not do
        child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        try:
            from jaxlib import xla_client

            xla_client.CompileOptions()  # reads the flags
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, errors="replace") as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return ""
    found = _FATAL.search(said)
    return first_line(found[1] if found else said)
