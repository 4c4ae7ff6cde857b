"""llama-cpp-python's ctypes bindings, and what a folder of libraries says of itself in its `engine.toml`."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from llama_meter import disk

PACKAGE, BINDINGS = "llama_cpp", "llama_cpp.llama_cpp"
NOTE = "engine.toml"  # `data/upstream/engines.toml` says what its fields mean


def _bindings() -> ModuleType:
    """The bindings' module, without the code of the package around it.

    The package imports everything else it has: Jinja, DiskCache, hundreds of typed dictionaries. That takes 0.6 s of a
    CPU where the bindings take 0.1 s, and every row starts a worker. Python cannot import a module without its package,
    so an empty package of that name stands in until the bindings are imported.
    A build of another release has bindings of its own beside its libraries.
    """
    chosen = os.environ.get("LLAMA_CPP_LIB_PATH", "")
    if chosen and (Path(chosen) / PACKAGE / "llama_cpp.py").exists():
        sys.path.insert(0, chosen)
    spec = find_spec(PACKAGE)
    if PACKAGE in sys.modules or spec is None:
        return import_module(BINDINGS)
    sys.modules[PACKAGE] = module_from_spec(spec)
    try:
        return import_module(BINDINGS)
    finally:
        del sys.modules[PACKAGE]


def described(folder: Path) -> dict[str, Any]:
    """The content of a folder's `engine.toml`; empty without one. StudyError for what is no TOML."""
    return disk.toml(folder / NOTE) if (folder / NOTE).exists() else {}


class _WhenUsed:
    """The names of the bindings, which are imported, and map the engine's libraries, when one of them is first used.

    Commands and pages import modules that measure, and measure in other processes.
    """

    def __getattr__(self, name: str) -> Any:  # asked only for a name that is not there yet
        if vars(self):
            raise AttributeError(f"these bindings have no {name}")
        bindings = _bindings()
        vars(self).update(vars(bindings))
        return getattr(bindings, name)


if TYPE_CHECKING:
    import llama_cpp.llama_cpp as llama
else:
    llama = _WhenUsed()
