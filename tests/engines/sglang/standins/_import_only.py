"""Modules that satisfy imports: any name can be imported from them, nothing in them does any work."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar


class Nothing:
    """What any capitalised name is: it can be called, subclassed with any keywords, and looked into."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class HollowModule(ModuleType):
    """A package in which every submodule exists. Called like a decorator, it returns the function as it was."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = find(self.__name__, name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function


def find(package: str, name: str) -> Any:
    """A class for names that look like one, a module for all others."""
    if name[:1].isupper() or name == "constexpr":
        return type(name, (Nothing,), {})
    return importlib.import_module(f"{package}.{name}")


class HollowFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds whatever is asked for below one package."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return HollowModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def hollow_out(package: str) -> Callable[[str], Any]:
    """Make everything below ``package`` importable; returns the package's own ``__getattr__``."""
    sys.meta_path.insert(0, HollowFinder(package))

    def getattribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(package, name)

    return getattribute
