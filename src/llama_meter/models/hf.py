"""Weights in Hugging Face layout: the place of every tensor in its safetensors file. Reads headers, never weights.

The files are untrusted. Sizes are bounded before anything is read, an index may only name files of
its own folder, and every fault becomes one StudyError. It does not know PLaMo.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from llama_meter.errors import StudyError, of_memory, offer
from llama_meter.models import mistaken
from llama_meter.models.finding import printable
from llama_meter.models.registry import ModelSpec
from llama_meter.models.values import STORED

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FETCH = offer("models fetch NAME")
JSON_LIMIT = 8 << 20  # bytes of a configuration, index or header; those of 30 B parameters are below 0.2 MiB
FLOATS = tuple(dtype for dtype in STORED if dtype != "Q8_0")  # types weights may have, by their names in the format


@dataclass(frozen=True)
class Stored:
    """The place of a tensor: it begins at byte `start` of `path`. `shape` is as in PyTorch, (out, in)."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return prod(self.shape)


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A JSON object from a file of at most `limit` bytes. StudyError when it is missing, larger or no object."""
    size = size_of(path)
    if size > limit:
        raise StudyError(str(path), f"has {size:,} bytes, more than {limit:,}", f"name another folder, or {FETCH}")
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise of_memory(error, str(path)) or damaged(path, f"is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(path, f"is no JSON object, but a {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError for a name that is there twice, of which each reader may take another value."""
    fields = dict[str, Any]()
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{printable(name)!r} is there twice")
        fields[name] = value
    return fields


def is_there(path: Path) -> bool:
    """Whether anything has this name, be it a link to nothing."""
    return path.exists() or path.is_symlink()


def size_of(path: Path) -> int:
    """Bytes of a regular file (a link to one is followed). StudyError when there is none."""
    try:
        if path.is_file():
            return path.stat().st_size
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be read ({error})") from error
    raise damaged(path, "is neither a file nor a link to one" if is_there(path) else "no such file")


def damaged(what: Path | str, why: str) -> StudyError:
    """The error for files that cannot be used as they are."""
    return StudyError(str(what), why, f"fetch the files again: {FETCH}")


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder by name: from `model.safetensors.index.json` and its shards, or `model.safetensors`.

    Raises StudyError for a missing or damaged file, an index that names files elsewhere, or one that disagrees with
    its shards.
    """
    if not is_there(folder / INDEX):
        return header(folder / SINGLE)
    tensors: dict[str, Stored] = {}
    for shard, listed in _shards(folder / INDEX).items():
        held = header(folder / shard)
        if wrong := sorted(held.keys() ^ listed):
            where = "is not in the index" if wrong[0] in held else "is in the index, not in the file"
            raise damaged(f"{folder / shard}, tensor {printable(wrong[0])}", where)
        tensors |= held
    return tensors


def _shards(index: Path) -> dict[str, set[str]]:
    """File name → names of the tensors it should hold."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise damaged(index, "has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, name in listed.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            where = f"tensor {printable(tensor)} lies in {printable(name)!r}"
            raise damaged(index, f"{where}, which is no safetensors file of this folder")
        shards.setdefault(name, set()).add(tensor)
    return shards


def header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file, in the order of their bytes.

    The format's own library parses the header: it refuses gaps, overlaps and sizes that do not fill the file. It is not
    asked for the values, because NumPy has no BF16. StudyError for what it refuses, and for weights that are no floats.
    """
    size = size_of(path)
    tensors: dict[str, Stored] = {}
    try:
        with path.open("rb") as file:
            first = file.read(mistaken.LOOKED_AT)
            if not mistaken.is_safetensors(first, size):
                what = mistaken.foreign(first, size)
                raise damaged(path, what.what if what else "is no safetensors file, or is cut short")
            start = 8 + int.from_bytes(first[:8], "little")
            if start > JSON_LIMIT:
                raise ValueError(f"its header has {start:,} bytes, more than {JSON_LIMIT:,}")
            file.seek(8)
            json.loads(file.read(start - 8), object_pairs_hook=_unique)  # the library takes the last of two
        with safe_open(path, framework="numpy") as weights:
            for name in weights.offset_keys():
                view = weights.get_slice(name)
                tensor = Stored(path, str(view.get_dtype()), tuple(view.get_shape()), start)
                if tensor.dtype not in FLOATS:
                    why = f"has type {tensor.dtype!r}, which cannot be converted"
                    raise StudyError(f"{path}, tensor {printable(name)}", why, f"use weights in {', '.join(FLOATS)}")
                tensors[name] = tensor
                start += tensor.n_elements * STORED[tensor.dtype].itemsize
    except (OSError, ValueError, RecursionError, MemoryError, SafetensorError) as error:
        raise of_memory(error, str(path)) or damaged(
            path, f"is no whole safetensors file ({printable(error, 300)})"
        ) from error
    return tensors


BLOCK_NORMS = {
    "attn_norm.weight": ("pre_mixer_norm.weight", 1.0),
    "post_attention_norm": ("post_mixer_norm.weight", 1 / 5),
    "ffn_norm.weight": ("pre_mlp_norm.weight", 1.0),
    "post_ffw_norm": ("post_mlp_norm.weight", 1 / 5**1.5),
}
LOCAL = {
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_qkv.weight": "mixer.qkv_proj.weight",
    "attn_output.weight": "mixer.o_proj.weight",
    "ssm_in.weight": "mixer.in_proj.weight",
    "ssm_conv1d.weight": "mixer.conv1d.weight",
    "ssm_x.weight": "mixer.bcdt_proj.weight",
    "ssm_dt.weight": "mixer.dt_proj.weight",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_out.weight": "mixer.out_proj.weight",
    "ssm_dt_norm": "mixer.dt_norm_weight",
    "ssm_b_norm": "mixer.B_norm_weight",
    "ssm_c_norm": "mixer.C_norm_weight",
}
QK_NORMS = {  # PLaMo 2: whole, one row per head; PLaMo 3: offsets from 1
    "plamo2": {"attn_q_norm.weight": ("mixer.q_weight", 0.0), "attn_k_norm.weight": ("mixer.k_weight", 0.0)},
    "plamo3": {"attn_q_norm.weight": ("mixer.q_norm.weight", 1.0), "attn_k_norm.weight": ("mixer.k_norm.weight", 1.0)},
}
OUTER = {
    "token_embd.weight": ("model.embed_tokens.weight", 0.0),
    "output_norm.weight": ("model.norm.weight", 1.0),
    "output.weight": ("lm_head.weight", 0.0),
}


@dataclass(frozen=True)
class Rule:
    """One tensor: its released name and shape, and how its values become those of the GGUF file.

    value = −exp(released) where `logarithm`, else released + `offset` in float32.
    """

    name: str
    shape: tuple[int, ...]
    offset: float = 0.0
    logarithm: bool = False

    def to_gguf(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Released values (float32 or float64) in the engine's form. exp is rounded once, from float64."""
        with np.errstate(all="ignore"):  # what does not fit becomes infinite: the caller checks
            if self.logarithm:
                return (-np.exp(values.astype(np.float64))).astype(np.float32)
            values = values.astype(np.float32, copy=False)
            return values + np.float32(self.offset) if self.offset else values


def rules(spec: ModelSpec) -> dict[str, Rule]:
    """The rule of every tensor of a file of this spec, by its GGUF name, in file order."""
    local = {name: (released, 0.0) for name, released in LOCAL.items()} | BLOCK_NORMS | QK_NORMS[spec.arch]
    table: dict[str, Rule] = {}
    for name, shape in spec.tensor_shapes().items():
        if name in OUTER:
            released, offset = OUTER[name]
        else:
            _, layer, kind = name.split(".", 2)
            released, offset = local[kind]
            released = f"model.layers.layers.{layer}.{released}"
        if name.endswith("ssm_conv1d.weight"):  # PyTorch's depthwise convolution has an axis of one input channel
            shape = (shape[0], 1, shape[1])
        table[name] = Rule(released, shape, offset, logarithm=name.endswith("ssm_a"))
    return table
