"""The inverse of `convert`: a GGUF of this project written as a released repository, for round-trip tests.

Matrices get the requested type; norms, biases and Mamba scalars stay F32 and the logarithms of decay rates are F64,
where real releases have one type for everything. This makes the round trip exact: `Rule.to_released` says for which
values. It does not write model code or a model card.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from numpy.typing import NDArray

from plamo_study.errors import StudyError
from plamo_study.models import hf, hf_config, hf_names, numbers, tensors, vocabulary
from plamo_study.models.expected import read_spec
from plamo_study.models.gguf_file import check_space
from plamo_study.models.header import read
from plamo_study.models.hf_names import Rule
from plamo_study.models.registry import ModelSpec
from plamo_study.models.tensors import TensorInfo

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # by PyTorch's names
WORDS_SPACE = 64 << 20  # bytes on disk for vocabulary and configuration, with room to spare
ARCHITECTURES = {arch: name for name, arch in reversed(hf_config.ARCHITECTURES.items())}


@dataclass(frozen=True)
class Part:
    """One tensor to write: its place in the GGUF, from byte `start`, and its released name."""

    tensor: TensorInfo
    start: int
    rule: Rule
    dtype: str

    @property
    def n_bytes(self) -> int:
        """Bytes in the released file."""
        return self.tensor.n_elements * numbers.STORED[self.dtype].itemsize


def write_released(gguf: Path, folder: Path, shards: int = 1, dtype: str = "F32") -> Path:
    """Write `folder` in Hugging Face layout from a GGUF of this project (F32, F16, BF16 or Q8_0); returns `folder`.

    `dtype`: F32, F16 or BF16, of the matrices, rounded to nearest even. `shards`: number of safetensors files.
    Memory does not depend on the model; nothing is left behind on failure.
    Raises StudyError for a file that is no such GGUF, a `folder` that exists, and too little free space.
    """
    if dtype not in DTYPES:
        raise StudyError(f"type {dtype!r}", f"unknown; known: {', '.join(DTYPES)}", "choose one of these")
    if folder.exists():
        raise StudyError(str(folder), "exists already", "name a new folder")
    spec = spec_of(gguf)
    parts, words = _read(gguf, spec, dtype)
    if not 1 <= shards <= len(parts):
        raise StudyError(f"{shards} shards", f"not a number from 1 to {len(parts)}", "choose fewer")
    partial = folder.with_name(folder.name + ".partial")
    try:
        partial.mkdir(parents=True)
        check_space(folder, sum(part.n_bytes for part in parts) + WORDS_SPACE)
        _write_shards(gguf, partial, parts, shards)
        _write_json(partial / "config.json", configuration(spec, dtype))
        words.write_hf(partial, spec.arch)
        os.replace(partial, folder)
    except OSError as error:
        raise StudyError(str(folder), f"cannot be written ({error})", "choose a writable folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def spec_of(path: Path) -> ModelSpec:
    """The spec of a GGUF, from its metadata and tensor table. StudyError when it is no whole PLaMo."""
    header = read(path)
    spec, found = read_spec(header)
    if spec is None:
        raise StudyError(str(path), found[0].evidence, found[0].mend)
    if {tensor.name: tensor.shape for tensor in tensors.tensor_table(path)} != spec.tensor_shapes():
        raise StudyError(str(path), "does not have the tensors of its metadata", f"plamo-study models check {path}")
    return replace(spec, name=header.text("general.name") or path.stem)


def configuration(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json that `hf_config.read` turns back into this spec, with the engine's full attention."""
    config = {key: getattr(spec, name) for name, key in hf_config.SIZES[spec.arch].items()}
    config |= {"architectures": [ARCHITECTURES[spec.arch]], "model_type": spec.arch, "_name_or_path": spec.name}
    config |= {"rms_norm_eps": spec.rms_eps, "rope_theta": spec.rope_theta, "tie_word_embeddings": spec.tied}
    config["torch_dtype"] = DTYPES[dtype]
    if spec.arch == "plamo3":
        return config | {"window_size": spec.window, "rope_local_theta": spec.rope_theta_swa}
    config |= {"mamba_enabled": True, "mamba_step": 2, "mamba_chunk_size": 256, "attention_window_size": 2048}
    config["full_attention_idx"] = [layer for layer in range(spec.layers) if not spec.is_mamba(layer)]
    return config if spec.mamba_head_dim == spec.head_dim else config | {"mamba_head_dim": spec.mamba_head_dim}


def _read(path: Path, spec: ModelSpec, dtype: str) -> tuple[list[Part], vocabulary.Vocabulary]:
    """Reads only the header. Tensors are ordered by falling item size, as in the format's own library."""
    reader, rules = GGUFReader(path), hf_names.rules(spec)
    parts = []
    for found in reader.tensors:
        if found.tensor_type.name not in numbers.STORED:
            known = ", ".join(numbers.STORED)
            raise StudyError(f"{path}, tensor {found.name}", f"has type {found.tensor_type.name}", f"use {known}")
        tensor = TensorInfo(found.name, found.tensor_type.name, tuple(found.shape[::-1].tolist()))
        kind = "F64" if rules[found.name].logarithm else "F32" if tensors.stays_f32(found.name) else dtype
        parts.append(Part(tensor, found.data_offset, rules[found.name], kind))
    try:
        words = vocabulary.read_gguf(reader)
    except (KeyError, ValueError) as error:
        raise StudyError(str(path), f"has no readable vocabulary ({error})", tensors.REMAKE) from error
    return sorted(parts, key=lambda part: -numbers.STORED[part.dtype].itemsize), words


def _write_shards(gguf: Path, folder: Path, parts: list[Part], shards: int) -> None:
    """One safetensors file, or several of about as many tensors each and their index."""
    if shards == 1:
        _write_file(gguf, folder / hf.SINGLE, parts)
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = parts[i * len(parts) // shards : (i + 1) * len(parts) // shards]
        _write_file(gguf, folder / name, mine)
        weight_map |= {part.rule.name: name for part in mine}
    total = sum(part.n_bytes for part in parts)
    _write_json(folder / hf.INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_file(gguf: Path, path: Path, parts: list[Part]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in parts:
        start, end = end, end + part.n_bytes
        header[part.rule.name] = {"dtype": part.dtype, "shape": part.rule.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            for items in _items(gguf, part):
                file.write(items.data)


def _items(gguf: Path, part: Part) -> Iterator[NDArray[Any]]:
    """One tensor as the released file will hold it, a chunk at a time."""
    with gguf.open("rb") as file:
        for values in numbers.chunks(file, part.start, part.tensor.n_elements, part.tensor.dtype):
            released = part.rule.to_released(values)
            yield released if part.dtype == "F64" else numbers.narrow(released, part.dtype)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
