"""llama-cpp-python's ctypes bindings without the rest of the package.

The package also imports Jinja, DiskCache and hundreds of typed dictionaries: half of what a worker imports, and every
row starts a worker.
"""

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING

PACKAGE, BINDINGS = "llama_cpp", "llama_cpp.llama_cpp"


def _bindings() -> ModuleType:
    """The bindings' module. The package itself stays unloaded, so that it can still be imported normally."""
    spec = find_spec(PACKAGE)
    if PACKAGE in sys.modules or spec is None:
        return import_module(BINDINGS)
    sys.modules[PACKAGE] = module_from_spec(spec)
    try:
        return import_module(BINDINGS)
    finally:
        del sys.modules[PACKAGE]


if TYPE_CHECKING:
    import llama_cpp.llama_cpp as llama
else:
    llama = _bindings()

__all__ = ["llama"]
