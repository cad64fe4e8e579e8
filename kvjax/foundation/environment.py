"""Checks JAX's and XLA's environment variables, and reports packages that are not installed.

JAX raises for some at import, before a command runs, and for others at the first computation. XLA
aborts the process for an unknown flag.
"""

import contextlib
import os
import re
import sys
import traceback
import warnings

from kvjax.foundation import extras
from kvjax.foundation.errors import UserError, first_line

_OF_JAX, _BACKENDS = "/jax/_src/", "/jax/_src/xla_bridge.py"
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\S*)")
_EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}  # by platform
_MOST_DEVICES = 4096
_FATAL = re.compile(r"^[EF]\d{4} .*?\] (.*)$", re.MULTILINE)  # a line of XLA's log


def refused(error: BaseException) -> str | None:
    """Returns the message if JAX raised this error because of the environment, else None."""
    text = first_line(error)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, ValueError) and any(_OF_JAX in file for file in files):
        for name, value in sorted(os.environ.items()):
            called = re.escape(name.removeprefix("JAX_"))
            if name.startswith("JAX_") and re.search(rf"\bjax[_.]{called}\b", text, re.IGNORECASE):
                return f"{name} = {value!r}: JAX refuses it ({text}); correct or unset it"
    if "Unable to initialize backend" in text or any(file.endswith(_BACKENDS) for file in files):
        names = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
        chosen = " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
        problem = f"{chosen or 'JAX'}: {text if str(error) else 'there is no such device'}"
        extras = sorted({extra for kind, extra in _EXTRAS.items() if kind in chosen.lower()})
        plugins = [f"pip install 'kvjax[{extra}]' installs its plugin; " for extra in extras]
        return f"{problem}. {''.join(plugins)}JAX_PLATFORMS=cpu runs on the CPU"
    return None


def watch_imports() -> None:
    """Makes uncaught errors of the environment end the process with one line and status 2."""
    usual = sys.excepthook

    def hook(kind, error, trace):
        reason = refused(error)
        if reason is None and isinstance(error, ModuleNotFoundError):
            reason = extras.missing(error)
        if reason is None:
            usual(kind, error, trace)
            return
        with contextlib.suppress(OSError, ValueError):
            print(f"kvjax: {reason}", file=sys.stderr, flush=True)
        os._exit(2)

    sys.excepthook = hook


def check() -> None:
    """Raises a UserError for impossible numbers of CPU devices, and for bad XLA_FLAGS.

    XLA aborts the process on a bad flag, so a child process tries them first.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    devices = os.environ.get("JAX_NUM_CPU_DEVICES", "-1")
    counts = {
        "JAX_NUM_CPU_DEVICES": [] if devices == "-1" else [devices],  # -1: JAX's own default
        "XLA_FLAGS: --xla_force_host_platform_device_count": _DEVICE_COUNT.findall(flags),
    }
    for name, values in counts.items():
        for value in values:
            if not re.fullmatch("[0-9]{1,9}", value) or not 1 <= int(value) <= _MOST_DEVICES:
                raise UserError(f"{name} = {value!r}: must be from 1 to {_MOST_DEVICES:,}")
    if flags and hasattr(os, "fork") and (message := _xla_error()):
        raise UserError(f"XLA_FLAGS = {flags!r}: {message}; correct or unset it")


def _xla_error() -> str:
    """Returns the log line with which XLA refuses XLA_FLAGS; "" if it accepts them."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of forks
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
        log = file.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return ""
    match = _FATAL.search(log)
    return first_line(match[1] if match else log)
