"""Writing a GGUF file, whole or not at all: numbers narrowed, tensors in chunks, the keys that follow from a shape.

The caller supplies weights and vocabulary.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from llama_meter.disk import growing
from llama_meter.errors import StudyError
from llama_meter.models.file_types import FILE_TYPES
from llama_meter.models.registry import ModelSpec
from llama_meter.models.tensors import TensorInfo

Progress = Callable[[int, int], None]  # bytes done, bytes in all
BLOCK = 32  # weights that share one scale in Q8_0
STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of an F32
    "Q8_0": np.dtype([("scale", "<f2"), ("q", "i1", BLOCK)]),
}


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Float32 numbers, one dimension, as the items of a GGML type (see `STORED`).

    The `gguf` package rounds, bit for bit as llama.cpp does. Numbers beyond F16's range become infinite.
    """
    with np.errstate(all="ignore"):
        return gguf.quantize(values, gguf.GGMLQuantizationType[dtype]).view(STORED[dtype])


def check_space(path: Path, n_bytes: int) -> None:
    """Make the folder of `path`; StudyError unless its disk has `n_bytes` free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < n_bytes:
        raise StudyError(str(path), f"needs {n_bytes:,} bytes, only {free:,} are free", f"free space in {path.parent}")


@contextmanager
def writing(path: Path, arch: str) -> Iterator[gguf.GGUFWriter]:
    """A writer whose file becomes `path` when the block succeeds; nothing is left behind when it fails."""
    with growing(path) as partial, closing(gguf.GGUFWriter(partial, arch)) as writer:
        yield writer


def add_shape(writer: gguf.GGUFWriter, spec: ModelSpec, dtype: str, heads: list[int] | None = None) -> None:
    """Add the keys that llama.cpp's loader reads, as they follow from a spec and its weights' type.

    head_count is a scalar: an array with 0 at layer 0, which `heads` can pass, makes the engine lose RoPE.
    """
    kv_heads = [spec.kv_heads_of(layer) for layer in range(spec.layers)]
    writer.add_file_type(FILE_TYPES[dtype][0])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(spec.vocab)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(heads or spec.heads)
    writer.add_head_count_kv(kv_heads if spec.arch == "plamo2" else spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    _add_mamba(writer, spec) if spec.arch == "plamo2" else _add_window(writer, spec)


def stream(
    writer: gguf.GGUFWriter, parts: Sequence[tuple[TensorInfo, Iterator[NDArray[Any]]]], progress: Progress | None
) -> None:
    """Write everything, tensors in chunks: `GGUFWriter.write_tensor_data` needs whole tensors of up to 0.4 GB."""
    for t, _ in parts:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes, gguf.GGMLQuantizationType[t.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file, done, total = writer.fout[0], 0, sum(tensor.n_bytes for tensor, _ in parts)
    writer.write_padding(file, file.tell())
    for tensor, chunks in parts:
        for chunk in chunks:
            file.write(chunk.data)
            done += chunk.nbytes
            if progress:
                progress(done, total)
        writer.write_padding(file, tensor.n_bytes)
    writer.close()


def _add_mamba(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_ssm_state_size(spec.d_state)
    writer.add_ssm_conv_kernel(spec.d_conv)
    writer.add_ssm_time_step_rank(spec.mamba_heads)
    writer.add_ssm_inner_size(spec.d_inner)
    writer.add_ssm_group_count(0)


def _add_window(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_sliding_window(spec.window)
    writer.add_sliding_window_pattern(spec.window_pattern)
    writer.add_rope_freq_base_swa(spec.rope_theta_swa)
