"""The source of a locked interpreter as one text, since it cannot import this package."""

import functools
import importlib.util

_PACKAGE = "kvjax.sandbox.inside"
_EVERYWHERE = ("values", "channel", "candidate", "judge")
_LOCKED_BY_THE_KERNEL = ("system_calls", "limits", "landlock", "seccomp", "lock")
_LOAD = """
import sys, types
def load(name, text=""):
    module = sys.modules[name] = types.ModuleType(name)
    outer, _, short = name.rpartition(".")
    if outer:
        setattr(sys.modules[outer], short, module)
    exec(compile(text, name, "exec"), module.__dict__)
for name in ("kvjax", "kvjax.sandbox", {package!r}):
    load(name)
for name, text in {texts!r}.items():
    load({package!r} + "." + name, text)
sys.modules[{package!r} + ".{entry}"].main()
"""


def text_of(name: str) -> str:
    """Returns the source of a module of `inside`."""
    module = f"{_PACKAGE}.{name}"
    return importlib.util.find_spec(module).loader.get_source(module)


@functools.cache
def interpreter(*, locks_itself: bool) -> str:
    """Returns the source of a candidate or judge, with the code that locks it if `locks_itself`."""
    locking = _LOCKED_BY_THE_KERNEL if locks_itself else ()
    return _program((*_EVERYWHERE, *locking, "start"))


@functools.cache
def host() -> str:
    """Returns the source of the program that runs a guest in WebAssembly."""
    return _program(("limits", "host"))


def _program(names: tuple[str, ...]) -> str:
    """Returns a text for `python -c` that loads the modules and runs `main` of the last."""
    texts = {name: text_of(name) for name in names}
    return _LOAD.format(package=_PACKAGE, texts=texts, entry=names[-1])
