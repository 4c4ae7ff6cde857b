"""The inverse of `convert`: a GGUF of this project written as a released repository, for round-trip tests.

Matrices get the requested type; norms, biases and Mamba scalars stay F32 and the logarithms of decay rates are F64,
where real releases have one type for everything. This makes the round trip exact for the values that synthetic files
have. It does not write model code or a model card.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from safetensors import TensorSpec, serialize_file

from llama_meter.models import hf, hf_config, tensors, values as numbers, vocabulary
from llama_meter.models.expected import read_spec
from llama_meter.models.header import read
from llama_meter.models.registry import ModelSpec

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}  # by PyTorch's names
ARCHITECTURES = {arch: name for name, arch in reversed(hf_config.ARCHITECTURES.items())}
KINDS = {int(kind): name for name, kind in vocabulary.TYPES.items()}


def write_released(gguf: Path, folder: Path, shards: int = 1, dtype: str = "F32") -> Path:
    """Write `folder` in Hugging Face layout from a GGUF of this project; returns `folder`.

    `dtype`: F32, F16 or BF16, of the matrices, rounded to nearest even. `shards`: number of safetensors files.
    """
    header, reader = read(gguf), GGUFReader(gguf)
    spec, _ = read_spec(header)
    assert spec
    rules = hf.rules(spec)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else hf.SINGLE
        held, arrays = {}, []  # the library keeps addresses alone
        for found in reader.tensors[i * len(rules) // shards : (i + 1) * len(rules) // shards]:
            rule = rules[found.name]
            kind = "F64" if rule.logarithm else "F32" if tensors.stays_f32(found.name) else dtype
            values = dequantize(found.data, found.tensor_type).ravel()
            values = np.log(-values.astype(np.float64)) if rule.logarithm else values - np.float32(rule.offset)
            arrays.append(values if kind == "F64" else numbers.narrow(values, kind))
            at = {"data_ptr": arrays[-1].ctypes.data, "data_len": arrays[-1].nbytes}
            held[rule.name] = TensorSpec(dtype=DTYPES[kind], shape=list(rule.shape), **at)
        serialize_file(held, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(held, name)
    if shards > 1:
        (folder / hf.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    named = {"_name_or_path": header.text("general.name") or gguf.stem}
    (folder / "config.json").write_text(json.dumps(configuration(spec, dtype) | named, indent=2), encoding="utf-8")
    _write_words(folder, vocabulary.read_gguf(reader), spec.arch)
    return folder


def configuration(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json that `hf_config.read` turns back into this spec, with the engine's full attention."""
    config = {key: getattr(spec, name) for name, key in hf_config.SIZES[spec.arch].items()}
    config |= {"architectures": [ARCHITECTURES[spec.arch]], "model_type": spec.arch, "torch_dtype": DTYPES[dtype]}
    config |= {"rms_norm_eps": spec.rms_eps, "rope_theta": spec.rope_theta, "tie_word_embeddings": spec.tied}
    if spec.arch == "plamo3":
        return config | {"window_size": spec.window, "rope_local_theta": spec.rope_theta_swa}
    config |= {"mamba_enabled": True, "mamba_step": 2, "mamba_chunk_size": 256, "attention_window_size": 2048}
    config["full_attention_idx"] = [layer for layer in range(spec.layers) if not spec.is_mamba(layer)]
    return config if spec.mamba_head_dim == spec.head_dim else config | {"mamba_head_dim": spec.mamba_head_dim}


def _write_words(folder: Path, words: vocabulary.Vocabulary, arch: str) -> None:
    """The tokenizer's files, without padding."""
    with (folder / "tokenizer.jsonl").open("w", encoding="utf-8") as file:
        for token, score, kind in zip(words.tokens, words.scores, words.types, strict=True):
            if kind != TokenType.UNUSED:
                file.write(json.dumps([token, score, KINDS.get(kind, "NORMAL")], ensure_ascii=False) + "\n")
    config: dict[str, Any] = {"tokenizer_class": f"{arch.capitalize()}Tokenizer", **words.flags}
    config |= {f"{role}_token": words.tokens[token] for role, token in words.special.items() if role != "eot"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if words.chat_template:
        (folder / "chat_template.jinja").write_text(words.chat_template, encoding="utf-8")
