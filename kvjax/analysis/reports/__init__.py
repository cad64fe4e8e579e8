"""The reports: a folder each, imported when it is asked for.

`report` of a folder has `section(model, request) -> page.section.Section`. It may have
`check(model, request)`, which raises a `UserError` where the model has nothing for it, before any
work starts: such a report is left out unless it was asked for by name. Where that is more than fits
in one file, what is measured stands in `measurements`, the numbers that are shown in `results`, and
long tables in `tables`.
"""

import importlib
import importlib.util
import types

NAMES = ("diversity", "geometry", "projections", "logits", "compression", "behaviour")


def available() -> tuple[str, ...]:
    """The names of the reports, in the order of the page."""
    return tuple(name for name in NAMES if importlib.util.find_spec(f"{__name__}.{name}.report"))


def module(name: str) -> types.ModuleType:
    """A report, by its name."""
    return importlib.import_module(f"{__name__}.{name}.report")
