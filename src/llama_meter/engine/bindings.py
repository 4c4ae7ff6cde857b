"""llama-cpp-python's ctypes bindings, ggml's libraries beside them, and what a folder of libraries says of itself.

Of ggml: structs, types and functions, with the signatures of its headers.
"""

import ctypes
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


# ---------------------------------------------------------------- ggml

LIBRARIES = ("llama", "ggml", "ggml-base", "ggml-cpu", "ggml-metal", "ggml-cuda", "ggml-blas", "ggml-vulkan")
TYPES = {  # ggml.h, enum ggml_type
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "BF16": 30},
    **{"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40},
    **{"IQ3_XXS": 18, "IQ4_NL": 20, "IQ3_S": 21, "IQ4_XS": 23},  # smaller ones take minutes to make a matrix of
}
OBJECT_SIZE = 32  # bytes of ggml.c's struct ggml_object on a 64-bit machine

_pointer, _text, _size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_int, _int64, _bool = ctypes.c_int, ctypes.c_int64, ctypes.c_bool


class Tensor(ctypes.Structure):
    """ggml.h, struct ggml_tensor."""


Tensor._fields_ = (
    ("type", _int),
    ("buffer", _pointer),
    ("ne", _int64 * 4),
    ("nb", _size * 4),
    ("op", _int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", _pointer),
    ("view_offs", _size),
    ("data", _pointer),
    ("name", ctypes.c_char * 64),
    ("extra", _pointer),
    ("padding", ctypes.c_char * 8),
)


class InitParams(ctypes.Structure):
    """ggml.h, struct ggml_init_params."""

    _fields_ = (("mem_size", _size), ("mem_buffer", _pointer), ("no_alloc", _bool))


SIGNATURES: dict[str, tuple[Any, ...]] = {  # result, then arguments
    "ggml_commit": (_text,),
    "ggml_version": (_text,),
    # tensors
    "ggml_init": (_pointer, InitParams),
    "ggml_free": (None, _pointer),
    "ggml_tensor_overhead": (_size,),
    "ggml_row_size": (_size, _int, _int64),
    "ggml_quantize_chunk": (_size, _int, _pointer, _pointer, _int64, _int64, _int64, _pointer),
    "ggml_new_tensor_2d": (_pointer, _pointer, _int, _int64, _int64),
    # graphs
    "ggml_mul_mat": (_pointer, _pointer, _pointer, _pointer),
    "ggml_new_graph": (_pointer, _pointer),
    "ggml_build_forward_expand": (None, _pointer, _pointer),
    # backends
    "ggml_backend_init_best": (_pointer,),
    "ggml_backend_init_by_type": (_pointer, _int, _text),
    "ggml_backend_free": (None, _pointer),
    "ggml_backend_graph_compute": (_int, _pointer, _pointer),
    "ggml_backend_get_device": (_pointer, _pointer),
    "ggml_backend_alloc_ctx_tensors": (_pointer, _pointer, _pointer),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_pointer, _pointer, _pointer),
    "ggml_backend_buffer_free": (None, _pointer),
    "ggml_backend_buft_name": (_text, _pointer),
    "ggml_backend_tensor_get": (None, _pointer, _pointer, _size, _size),
    "ggml_backend_tensor_set": (None, _pointer, _pointer, _size, _size),
    "ggml_backend_dev_count": (_size,),
    "ggml_backend_dev_get": (_pointer, _size),
    "ggml_backend_dev_by_type": (_pointer, _int),
    "ggml_backend_dev_init": (_pointer, _pointer, _text),
    "ggml_backend_dev_name": (_text, _pointer),
    "ggml_backend_dev_description": (_text, _pointer),
    "ggml_backend_dev_type": (_int, _pointer),
    "ggml_backend_dev_memory": (None, _pointer, _pointer, _pointer),
    "ggml_backend_dev_supports_op": (_bool, _pointer, _pointer),
    "ggml_backend_dev_backend_reg": (_pointer, _pointer),
    "ggml_backend_reg_get_proc_address": (_pointer, _pointer, _text),
}


class Library(ctypes.CDLL):
    """A shared library whose functions get the signatures above when they are first named; pointers are integers."""

    def __getattr__(self, name: str) -> Any:
        function = super().__getattr__(name)
        if name in SIGNATURES:
            function.restype, *function.argtypes = SIGNATURES[name]
        return function


def library_files() -> list[Path]:
    """The loaded engine's shared libraries, as llama-cpp-python selects them by name."""
    folder = Path(llama._base_path)
    files = [
        next(folder.glob(f"lib{name}.so"), None) or next(folder.glob(f"lib{name}.dylib"), None) for name in LIBRARIES
    ]
    return [path for path in files if path]


def ggml(name: str) -> Library:
    """One of ggml's libraries of the loaded engine, e.g. `ggml-base`."""
    return Library(str(next(path for path in library_files() if path.stem == f"lib{name}")))
