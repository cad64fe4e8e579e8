"""Imports a module of another repository, with stand-ins for packages that attention does not need.

Imports neither JAX nor PyTorch.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
import types


class _Anything(type):
    """Attributes of `StandIn` are `StandIn`."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class StandIn(metaclass=_Anything):
    """A class to inherit from, a function, a decorator or a logger that does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if args else self

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer that serves packages and all their modules as stand-ins.

    It takes effect as the first entry of `sys.meta_path`.

    Args:
      packages: top-level names, installed or not.
      objects: for each module, objects by name that replace a `StandIn`.
    """

    def __init__(self, packages: tuple[str, ...], objects: dict[str, dict[str, object]]):
        self.packages, self.objects = packages, objects
        self.served: set[str] = set()  # modules that were imported

    def find_spec(self, name: str, path=None, target=None):
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        self.served.add(module.__name__)
        module.__getattr__ = _attribute
        vars(module).update(self.objects.get(module.__name__, {}))


def load(file: pathlib.Path) -> types.ModuleType:
    """Imports the module that a file defines, whatever its name."""
    name = "authors_" + "".join(c if c.isalnum() else "_" for c in file.stem)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _attribute(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn
