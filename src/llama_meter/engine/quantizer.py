"""llama.cpp's own quantizer, called in this process. It can abort, so give it a process of its own.

It does not know recipes: types are numbers.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_meter.engine.bindings import llama
from llama_meter.engine.session import EngineError

BUFFER = 1 << 28  # bytes of one tensor's rows in memory at a time; llama.cpp's own default is 8 GiB
LONGEST = 127  # bytes of a key in llama_model_kv_override
_keep_alive: list[Any] = []


def quantize(
    source: Path,
    out: Path,
    file_type: int,
    patterns: Sequence[tuple[str, int]] = (),
    metadata: Mapping[str, int] | None = None,
    n_threads: int = 0,
) -> None:
    """Write `out`: `source` as llama_ftype `file_type`, logging one line per tensor.

    `patterns`: (regular expression, ggml type) pairs; the first one that matches a tensor's name decides. They apply
    only to a quantized file type. `metadata` goes into the file. `n_threads` 0 means all.
    Raises EngineError when llama.cpp refuses, or the build does not match the binding.
    """
    llama.llama_backend_init()
    params = llama.llama_model_quantize_default_params()
    check_layout(params)
    params.nthread, params.ftype, params.max_buf_size = n_threads, file_type, BUFFER
    if patterns:
        params.tt_overrides = _overrides(patterns)
    if metadata:
        params.kv_overrides = _metadata(metadata)
    if llama.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise EngineError("llama.cpp refused to quantize (its log says why)")


def check_layout(params: "llama.llama_model_quantize_params") -> None:
    """EngineError unless llama.h's defaults are where the binding expects them, including the last field."""
    defaults = (params.nthread, params.ftype, params.quantize_output_tensor, params.max_buf_size)
    flags = (params.allow_requantize, params.only_copy, params.pure, params.keep_split, params.dry_run)
    pointers = (params.imatrix, params.kv_overrides, params.tt_overrides, params.prune_layers)
    if defaults != (0, 7, True, 8 << 30) or any(flags) or any(pointers):
        raise EngineError("this build's quantizer takes other parameters than the binding knows")


def _overrides(patterns: Sequence[tuple[str, int]]) -> Any:
    entries = [llama.llama_model_tensor_override(pattern.encode(), dtype) for pattern, dtype in patterns]
    return _array(llama.llama_model_tensor_override, [*entries, llama.llama_model_tensor_override()])


def _metadata(values: Mapping[str, int]) -> Any:
    entries = []
    for key, value in values.items():
        tag, held = llama.LLAMA_KV_OVERRIDE_TYPE_INT, llama.llama_model_kv_override_value(val_i64=value)
        entries.append(llama.llama_model_kv_override(tag, key.encode()[:LONGEST], held))
    return _array(llama.llama_model_kv_override, [*entries, llama.llama_model_kv_override()])


def _array(kind: Any, entries: list[Any]) -> Any:
    """A pointer to a C array. The array keeps the entries' texts alive; `_keep_alive` keeps the array."""
    array = (kind * len(entries))(*entries)
    _keep_alive.append((array, entries))
    return ctypes.cast(array, ctypes.POINTER(kind))
