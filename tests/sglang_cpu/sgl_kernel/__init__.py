"""Stands in for SGLang's compiled kernels, which exist for CUDA only: anything can be imported from it, nothing can be called.

On a CPU without AMX, SGLang computes dense models with torch; it only wants to import the names.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.4.10"  # what SGLang 0.5.23 asks for at least


class Absent:
    """A kernel, or a name inside one, that is not here."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getattr__(self, name: str) -> "Absent":
        return lookup(self.path, name)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self.path} is a CUDA kernel; there is none for CPUs")


def lookup(path: str, name: str) -> Absent:
    """`path.name`; what Python itself asks for (`__file__` and the like) is really missing."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"{path} has no {name}")
    return Absent(f"{path}.{name}")


class Submodules(MetaPathFinder, Loader):
    """Makes `sgl_kernel.anything` importable."""

    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__
        module.__dict__["__getattr__"] = lambda name: lookup(path, name)


def __getattr__(name: str) -> Absent:
    return lookup(__name__, name)


sys.meta_path.append(Submodules())
