"""Imports a report by name."""

import importlib
import types

NAMES = ("diversity", "geometry", "projections", "logits", "compression", "behaviour")  # page order


def module(name: str) -> types.ModuleType:
    """Returns a report's module, with `check` and `section`."""
    return importlib.import_module(f"{__name__}.{name}.report")
