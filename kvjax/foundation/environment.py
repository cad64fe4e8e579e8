"""Turns JAX's errors about environment variables, and missing packages, into user errors.

JAX raises some of them at import, before a command runs, and others at the first computation.
"""

import contextlib
import gc
import os
import re
import sys
import traceback

from kvjax.foundation import extras
from kvjax.foundation.errors import first_line

_JAX_SOURCE, _BACKENDS = "/jax/_src/", "/jax/_src/xla_bridge.py"
_EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}  # extra by name of the platform


def refused(error: BaseException) -> str | None:
    """Returns the message if JAX raised this error because of the environment, else None."""
    text = first_line(error)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, ValueError) and any(_JAX_SOURCE in file for file in files):
        for name, value in sorted(os.environ.items()):
            key = re.escape(name.removeprefix("JAX_"))
            if name.startswith("JAX_") and re.search(rf"\bjax[_.]{key}\b", text, re.IGNORECASE):
                return f"{name} = {value!r}: JAX refuses it ({text}); correct or unset it"
    if "Unable to initialize backend" in text or any(file.endswith(_BACKENDS) for file in files):
        names = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
        chosen = " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
        problem = f"{chosen or 'JAX'}: {text if str(error) else 'there is no such device'}"
        needed = sorted({extra for kind, extra in _EXTRAS.items() if kind in chosen.lower()})
        plugins = [f"pip install 'kvjax[{extra}]' installs its plugin; " for extra in needed]
        return f"{problem}. {''.join(plugins)}JAX_PLATFORMS=cpu runs on the CPU"
    return None


def watch_imports() -> None:
    """Makes uncaught errors of the environment end the process with one line and status 2.

    Also disables garbage collection until `command_line.run`, which shortens imports by a fifth.
    """
    gc.disable()
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
