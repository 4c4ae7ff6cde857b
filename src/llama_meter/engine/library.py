"""The loaded build of llama.cpp: its description of itself, its log, and its quantizer.

`LLAMA_CPP_LIB_PATH` (our `--engine DIR`) chooses the build; it must be set before the engine is first used, which
is why every measurement has its own process.
"""

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_meter import children
from llama_meter.disk import plain
from llama_meter.engine.bindings import described, ggml, library_files, llama

GPU_TYPES = (1, 2)  # ggml-backend.h, enum ggml_backend_dev_type: a GPU with its own memory, and one in the host's
# llama-context.cpp, sched_reserve: "graph (pp bs=512, tg bs=1): nodes = 9 / 8, splits = 2 / 2, …", or one for both
GRAPH = re.compile(rb"\bgraph(?: \(pp [^)]*\))?: nodes = [^,]*, splits = (\d+)(?: / (\d+))?,")
COMPILER = re.compile(rb"(GCC): \([^)\0]{0,80}\) (\d+)\.|(clang) version (\d+)\.")  # as ELF files name theirs
IDENTITIES = {
    "llama": "llama_version",
    "ggml": "ggml_version",
    "commit": "ggml_commit",
}  # functions, where a release has them
REFUSAL = re.compile(rb"error loading model[^:\n]*: ([^\n]{1,200})")  # llama.cpp, llama_model_load
# llama-model.cpp, llama-kv-cache.cpp, llama-context.cpp: "CPU_Mapped model buffer size = 5.16 MiB"; a split file has a
# line a part, a model with a window two caches
BUFFER = re.compile(rb"(\S+) +(model|KV|RS|output|compute) buffer size = +([\d.]+) MiB")
BEGIN = re.compile(rb"constructing llama_context|loading model tensors")
# ggml-metal-context.m, ggml_metal_synchronize: llama_decode returns 0 all the same, and only the next call fails
GPU_FAILED = re.compile(rb"(command buffer \d+ failed with status \d+)|^error: ([^\n]{1,200})")
# llama-context.cpp: "flash_attn = enabled", or later "Flash Attention enabled" or "… was auto, set to enabled"
FLASH = re.compile(rb"(?:flash_attn += |Flash Attention (?:was auto, set to )?)(enabled|disabled)")
BUFFER_BYTES = 1 << 28  # of one tensor's rows while it is quantized; llama.cpp's own default is 8 GiB
LONGEST = 127  # bytes of a key in llama_model_kv_override
_splits: list[tuple[int, int]] = []
_flash: list[bool] = []
_refusals: list[str] = []
_buffers: dict[tuple[str, str], float] = {}  # MiB by device and kind: the most over this process's contexts
_added: dict[tuple[str, str], float] = {}  # the same of the model or context that is being made
gpu_failures: list[str] = []  # what a GPU's driver said of calls that it did not complete
_keep_alive: list[Any] = []


def describe() -> dict[str, Any]:
    """Identity of the loaded engine: versions, commit, the flags it was built with, and one hash over its libraries.

    `environment`: settings of this process that change how it computes, where there are any. `pinned`: whether the
    libraries come from the locked sdist, as installed or as a build of `engine.builds`; of other libraries nothing but
    the hash is sure. `compiler`: "GCC 12", "" where the libraries do not name it.
    """
    from importlib.metadata import version  # slow to import, and measuring workers do not need it

    from llama_meter.engine import builds  # the same

    digest, compilers = hashlib.sha256(), set[str]()
    for path in library_files():
        content = path.read_bytes()
        digest.update(content)
        compilers |= {b" ".join(filter(None, groups)).decode() for groups in COMPILER.findall(content)}
    folder, base, build = Path(llama._base_path).resolve(), ggml("ggml-base"), _build_words()
    texts = {name: _text(llama if name == "llama" else base, function) for name, function in IDENTITIES.items()}
    return {
        "binding": f"llama-cpp-python {build.get('release') or version('llama-cpp-python')}",
        **{name: value for name, value in texts.items() if value},
        "build": llama.llama_print_system_info().decode().strip(" |"),
        "gpu_offload": bool(llama.llama_supports_gpu_offload()),
        "sha256": digest.hexdigest(),
        "libraries": [path.stem for path in library_files()],
        "compiler": ", ".join(sorted(compilers)),
        "pinned": builds.is_pinned(folder),
    } | _as_set({name: value for name, value in build.items() if name != "ggml"})


def _text(library: Any, name: str) -> str:
    """What a library says of itself; "" where its release has no such function."""
    function = getattr(library, name, None)
    return function().decode() if function else ""


def gpus() -> list[dict[str, Any]]:
    """GPUs that the loaded engine can use, each with ggml's `name`, its `chip` and `memory_bytes`."""
    base, registry = ggml("ggml-base"), ggml("ggml")
    devices = []
    for index in range(registry.ggml_backend_dev_count()):
        device = registry.ggml_backend_dev_get(index)
        if base.ggml_backend_dev_type(device) in GPU_TYPES:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            name, chip = base.ggml_backend_dev_name(device), base.ggml_backend_dev_description(device)
            devices.append({"name": name.decode(), "chip": chip.decode(), "memory_bytes": total.value})
    return devices


def _build_words() -> dict[str, Any]:
    """The build's own `engine.toml`: `description`, and `corrects`, codes of `limits.DEFECTS`; empty without one."""
    return described(Path(llama._base_path))


def _as_set(words: dict[str, Any]) -> dict[str, Any]:
    """A build's words, with the settings that are in force in place of those that it asks for."""
    wanted, here = words.get("environment", []), children.settings(os.environ)
    here += [setting for setting in wanted if not children.settings(dict([setting.split("=", 1)]))]
    return words | {"environment": here} if here and sorted(here) != sorted(wanted) else words


def window() -> int:
    """The attention window that this build applies to PLaMo 2, in tokens; 0, as in the released engine, for none."""
    return int(_build_words().get("window", 0))


def corrects() -> tuple[str, ...]:
    """What this build corrects or adds, as codes of its `engine.toml`; empty for the released engine."""
    return tuple(_build_words().get("corrects", ()))


def capture_log(lines: list[str]) -> None:
    """Send llama.cpp's log to `lines` instead of stderr (an assertion still reaches stderr: it bypasses the log)."""
    _log_to(lambda text: lines.append(text.decode(errors="replace")))


def log_to_stderr() -> None:
    """Print llama.cpp's log as it comes; llama-cpp-python silences it otherwise."""

    def write(text: bytes) -> None:
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()

    _log_to(write)


def splits() -> tuple[int, int] | None:
    """Parts of the graphs of a prompt and of a step, the most over this process's contexts; None before the first.

    A part runs on one backend without a break. A model on the CPU is one part. With all layers on a GPU it is two: the
    CPU looks the tokens up first. Each operator that the GPU cannot do adds two. It is read from the log, so a context
    counts only if `capture_log` or `log_to_stderr` came before it.
    """
    return (max(prompt for prompt, _ in _splits), max(step for _, step in _splits)) if _splits else None


def flash_attention() -> bool | None:
    """Whether the first context computes with flash attention, whatever was asked for; None where nothing says it."""
    return _flash[0] if _flash else None


def buffer_bytes() -> int:
    """Memory of weights, caches, states and computing, on all devices, as the engine tells of it; 0 for no model."""
    return round(sum(_buffers.values()) * 2**20)


def buffers(kind: str) -> dict[str, float]:
    """Bytes of a kind by device, the most over this process's contexts; kinds: model, KV, RS, output, compute."""
    return {device: mib * 2**20 for (device, of), mib in _buffers.items() if of == kind}


def lacks_room(n_bytes: int = 0) -> str:
    """Why a model does not fit in the memory that its GPU offers, or "". `n_bytes`: of a file still to be loaded."""
    boards = gpus()
    share = n_bytes / max(sum(gpu["memory_bytes"] for gpu in boards), 1)  # layers are dealt out by memory
    for gpu in boards:
        held = sum(mib for (device, _), mib in _buffers.items() if device.startswith(gpu["name"]))
        needed = share * gpu["memory_bytes"] or 2**20 * held
        if gpu["memory_bytes"] and needed > gpu["memory_bytes"]:
            return f"it needs {needed / 1e9:.3g} GB there, and {gpu['name']} offers {gpu['memory_bytes'] / 1e9:.3g} GB"
    return ""


def refusal() -> str:
    """Why llama.cpp did not load the last model, in its words, whose names come from the file: unprintable characters
    are escaped. "" where it did not say, or the log is not captured."""
    return _refusals[-1] if _refusals else ""


def _log_to(write: Callable[[bytes], None]) -> None:
    @llama.llama_log_callback
    def on_log(level: int, text: bytes, user_data: int) -> None:
        if match := GRAPH.search(text):
            _splits.append((int(match[1]), int(match[2] or match[1])))
        if match := FLASH.search(text):
            _flash.append(match[1] == b"enabled")
        if BEGIN.search(text):
            _added.clear()
        if match := BUFFER.search(text):
            place = match[1].decode(errors="replace"), match[2].decode()
            before = 0.0 if match[2] == b"compute" else _added.get(place, 0.0)  # these are reserved anew
            _added[place] = before + float(match[3])
            _buffers[place] = max(_buffers.get(place, 0.0), _added[place])
        if (match := GPU_FAILED.search(text)) and (match[1] or gpu_failures):  # the second line says why
            gpu_failures.append(plain((match[1] or match[2]).decode(errors="replace"), allowed=""))
        if match := REFUSAL.search(text):
            _refusals.append(plain(match[1].decode(errors="replace"), allowed=""))
        write(text)

    _keep_alive.append(on_log)
    llama.llama_log_set(on_log, ctypes.c_void_p())


# ---------------------------------------------------------------- its quantizer


def quantize(
    source: Path,
    out: Path,
    file_type: int,
    patterns: Sequence[tuple[str, int]] = (),
    metadata: Mapping[str, int] | None = None,
    n_threads: int = 0,
) -> None:
    """Write `out`: `source` as llama_ftype `file_type`, logging one line per tensor. It can abort this process.

    `patterns`: (regular expression, ggml type) pairs; the first one that matches a tensor's name decides. They apply
    only to a quantized file type. `metadata` goes into the file. `n_threads` 0 means all.
    Raises RuntimeError when llama.cpp refuses.
    """
    llama.llama_backend_init()
    params = llama.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.max_buf_size = n_threads, file_type, BUFFER_BYTES
    if patterns:
        params.tt_overrides = _overrides(patterns)
    if metadata:
        params.kv_overrides = _metadata(metadata)
    if llama.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise RuntimeError("llama.cpp refused to quantize (its log says why)")


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
