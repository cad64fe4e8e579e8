"""Imports a report by name."""

import importlib
import importlib.util
import types

NAMES = ("diversity", "geometry", "projections", "logits", "compression", "behaviour")


def available() -> tuple[str, ...]:
    """Returns the names of the reports, in the order of the page."""
    return tuple(name for name in NAMES if importlib.util.find_spec(f"{__name__}.{name}.report"))


def module(name: str) -> types.ModuleType:
    """A report, by its name."""
    return importlib.import_module(f"{__name__}.{name}.report")
