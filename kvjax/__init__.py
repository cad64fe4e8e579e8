"""Attention with a small KV cache: Transformers trained, and decoded from that cache, in JAX.

Names of `__all__` are imported when they are first used; `import kvjax` imports no JAX.
"""

import importlib
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvjax.attention.named import (
        factored as factored,
        gla as gla,
        gqa as gqa,
        grouped as grouped,
        gta as gta,
        lrkv as lrkv,
        mfa as mfa,
        mfa_kr as mfa_kr,
        mha as mha,
        mla as mla,
        mla_lrkv as mla_lrkv,
        mla_paper as mla_paper,
        mlra as mlra,
        mqa as mqa,
        projection_sharing as projection_sharing,
        shared_kv as shared_kv,
        thin_keys as thin_keys,
        tpa as tpa,
    )
    from kvjax.foundation.errors import UserError as UserError
    from kvjax.library.attention import Attention as Attention
    from kvjax.library.decode import decode_attention as decode_attention
    from kvjax.library.kv_cache import KVCache as KVCache
    from kvjax.library.layouts import LAYOUTS as LAYOUTS, describe_layout as describe_layout
    from kvjax.library.model import (
        Model as Model,
        convert_model as convert_model,
        evaluate_model as evaluate_model,
        load as load,
        train as train,
    )
    from kvjax.workdir.trackers import Tracker as Tracker

_NAMED = (
    *("mha", "gqa", "mqa", "lrkv", "grouped", "thin_keys", "projection_sharing", "factored"),
    *("mla", "mla_lrkv", "mla_paper", "gla", "mlra", "gta", "shared_kv", "mfa", "mfa_kr", "tpa"),
)
_HOMES = {  # public name: module, and its name there
    **{name: ("kvjax.attention.named", name) for name in _NAMED},
    "Attention": ("kvjax.library.attention", "Attention"),
    "KVCache": ("kvjax.library.kv_cache", "KVCache"),
    "LAYOUTS": ("kvjax.library.layouts", "LAYOUTS"),
    "Model": ("kvjax.library.model", "Model"),
    "Tracker": ("kvjax.workdir.trackers", "Tracker"),
    "UserError": ("kvjax.foundation.errors", "UserError"),
    "convert_model": ("kvjax.library.model", "convert_model"),
    "decode_attention": ("kvjax.library.decode", "decode_attention"),
    "describe_layout": ("kvjax.library.layouts", "describe_layout"),
    "evaluate_model": ("kvjax.library.model", "evaluate_model"),
    "load": ("kvjax.library.model", "load"),
    "train": ("kvjax.library.model", "train"),
}
__all__ = [
    "LAYOUTS",
    "Attention",
    "KVCache",
    "Model",
    "Tracker",
    "UserError",
    "__version__",
    "convert_model",
    "decode_attention",
    "describe_layout",
    "evaluate_model",
    "factored",
    "gla",
    "gqa",
    "grouped",
    "gta",
    "load",
    "lrkv",
    "mfa",
    "mfa_kr",
    "mha",
    "mla",
    "mla_lrkv",
    "mla_paper",
    "mlra",
    "mqa",
    "projection_sharing",
    "shared_kv",
    "thin_keys",
    "tpa",
    "train",
]


if not TYPE_CHECKING:  # where it would allow any name

    def __getattr__(name: str):
        if name not in _HOMES:
            raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
        home, there = _HOMES[name]
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            from kvjax.foundation import extras

            if reason := extras.missing(error):
                raise ModuleNotFoundError(reason, name=error.name) from error
            raise
        value = globals()[name] = getattr(module, there)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _start_early(words: list[str]) -> None:
    """Starts to load the programs of a command that decodes, before most modules are imported.

    Args:
      words: one is the command's name or module.
    """
    decodes = {"generate", "chat", "kvjax.generate", "kvjax.chat"} & {*words}
    if decodes and any(argument.startswith("--workdir") for argument in sys.argv):
        importlib.import_module("kvjax.decoding.stored").start_early()


if sys.argv[:1] == ["-m"]:  # `python -m kvjax.main` is on its way: Ctrl-C while it imports
    from kvjax.foundation import environment, interrupted

    interrupted.quietly()
    environment.watch_imports()
    _start_early(sys.orig_argv)
