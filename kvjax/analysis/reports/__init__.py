"""Reports of `python -m kvjax.analysis`; each is imported when it is used."""

import importlib
import types

NAMES = ("diversity", "geometry", "projections", "logits", "compression", "behaviour")  # page order


def module(name: str) -> types.ModuleType:
    """Returns a report's module, which has functions `check` and `section`."""
    return importlib.import_module(f"{__name__}.{name}.report")
