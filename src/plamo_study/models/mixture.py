"""The type that llama.cpp's quantizer gives each tensor of a PLaMo file, by file type.

The rules are those of `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp (commit 0c1e57098), as far as they
apply to PLaMo's tensors. It does not know recipes or files, and another build may choose otherwise.
"""

from collections import Counter
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from plamo_study.models import tensors
from plamo_study.models.file_types import FILE_TYPES
from plamo_study.models.tensors import TensorInfo

HEADS = ("attention.head_count", "attention.head_count_kv")  # a number, or one of each layer
FLOATS = ("F32", "F16", "BF16")
SMALLER_BLOCKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # 256 -> 32 weights
ATTN_OUTPUT = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K"}


def quantizable(tensor: TensorInfo) -> bool:
    """Whether a tensor is a matrix of several rows, but no norm or convolution (`tensor_allows_quantization`)."""
    is_matrix = len(tensor.shape) > 1 and tensor.shape[0] > 1
    return is_matrix and tensor.name.endswith(".weight") and not tensors.stays_f32(tensor.name)


class Mixture:
    """The type of each tensor, to be asked for in the quantizer's order: several rules count the tensors met so far."""

    def __init__(self, file_type: str, table: list[TensorInfo], facts: dict[str, Any], imatrix: bool):
        self.file_type, self.default, self.imatrix = file_type, FILE_TYPES[file_type][1], imatrix
        self.n_layer = int(facts[f"{facts['general.architecture']}.block_count"])
        self.n_attention = sum(tensor.kind == "attn_qkv" for tensor in table)
        self.tied = all(tensor.name != "output.weight" for tensor in table)
        self.grouped = _queries_per_key(facts) >= 4
        self.met: Counter[str] = Counter()

    def choose(self, tensor: TensorInfo) -> str:
        """The type the quantizer wants for the next matrix. Skip matrices with an exception: they do not count."""
        kind = tensor.kind
        if self.default in FLOATS:
            return self.default
        if kind == "output" or (kind == "token_embd" and self.tied):
            return "Q8_0" if self.default == "Q8_0" or tensor.shape[-1] % _block(self.default) else "Q6_K"
        i, self.met[kind] = self.met[kind], self.met[kind] + 1
        if kind == "attn_qkv":
            return self._attention(i)
        if kind == "ffn_down":
            return self._ffn_down(i)
        return ATTN_OUTPUT.get(self.file_type, self.default) if kind == "attn_output" else self.default

    def _attention(self, i: int) -> str:
        if self.file_type == "Q2_K":
            return "Q4_K" if self.grouped else "Q3_K"
        if self.file_type == "Q3_K_M":
            return "Q5_K" if i < 2 else "Q4_K"
        more = self.file_type in ("Q4_K_M", "Q5_K_M") and _more_bits(i, self.n_attention)
        return "Q6_K" if more else self.default

    def _ffn_down(self, i: int) -> str:
        if self.file_type == "Q2_K":
            return "Q3_K"
        if self.file_type == "Q3_K_M":
            return "Q5_K" if i < self.n_layer // 16 else "Q4_K"
        if self.file_type in ("Q4_0", "Q5_0") and self.imatrix and i < self.n_layer // 8:
            return "Q4_1" if self.file_type == "Q4_0" else "Q5_1"
        more = self.file_type in ("Q4_K_M", "Q5_K_M") and _more_bits(i, self.n_layer)
        return "Q6_K" if more else self.default


def _more_bits(i: int, n: int) -> bool:
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def fitting(wanted: str, columns: int) -> str:
    """The wanted type or, when rows of `columns` weights are not whole blocks of it, the one that replaces it."""
    if columns % _block(wanted) == 0:
        return wanted
    smaller = SMALLER_BLOCKS.get(wanted, wanted)
    return smaller if columns % _block(smaller) == 0 else "F16"


def _queries_per_key(facts: dict[str, Any]) -> int:
    """Query heads per key/value head of layer 0, as the quantizer takes it: 0 where that layer is Mamba."""
    arch = facts["general.architecture"]
    counts = [facts.get(f"{arch}.{key}", 0) for key in HEADS]
    heads, kv_heads = (int(count[0]) if isinstance(count, list) else int(count) for count in counts)
    return heads // kv_heads if kv_heads else 0


def _block(dtype: str) -> int:
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[dtype]][0])
