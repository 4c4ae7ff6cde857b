"""The type that llama.cpp's quantizer gives each tensor of a PLaMo file, by file type.

The rules are those of `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp (commit 0c1e57098), as far as they
apply to PLaMo's tensors. It does not know recipes or files, and another build may choose otherwise.
"""

from collections import Counter
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from llama_meter.models import tensors
from llama_meter.models.file_types import FILE_TYPES
from llama_meter.models.tensors import TensorInfo

HEADS = ("attention.head_count", "attention.head_count_kv")  # a number, or one of each layer
FLOATS = ("F32", "F16", "BF16")
SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # the type of 32 weights in place of one of 256
SMALLER_BLOCKS |= dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0")
SMALLER_BLOCKS |= dict.fromkeys(
    ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"
)
ATTN_OUTPUT = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_XXS": "IQ3_S", "IQ3_M": "Q4_K"}
ATTN_OUTPUT |= {"IQ1_S": "IQ2_XXS", "IQ1_M": "IQ2_XXS", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S"}
EMBEDDING = dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), "Q2_K")  # of models that are not tied
EMBEDDING |= dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), "IQ3_S") | dict.fromkeys(("TQ1_0", "TQ2_0"), "Q4_K")
LOWEST = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")  # file types with rules of their own
BLIND = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")  # types that need an importance matrix


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
            return self._output(tensor)
        if kind == "token_embd":
            return EMBEDDING.get(self.file_type, self.default)
        i, self.met[kind] = self.met[kind], self.met[kind] + 1
        if kind == "attn_qkv":
            return self._attention(i)
        if kind == "ffn_down":
            return self._ffn_down(i)
        if kind == "ffn_up" and self.file_type == "IQ3_XS":
            return "IQ3_XXS" if self.n_layer // 8 <= i < 7 * self.n_layer // 8 else self.default
        return ATTN_OUTPUT.get(self.file_type, self.default) if kind == "attn_output" else self.default

    def needs_imatrix(self, tensor: TensorInfo, dtype: str) -> bool:
        """Whether the quantizer writes this tensor in this type only with an importance matrix."""
        in_block = tensor.kind not in ("output", "token_embd")
        return in_block and (dtype in BLIND or (dtype, self.file_type) == ("Q2_K", "Q2_K_S"))

    def _output(self, tensor: TensorInfo) -> str:
        if self.default == "Q8_0" or tensor.shape[-1] % _block(self.default):
            return "Q8_0"
        return "Q5_K" if self.file_type in (*LOWEST, "IQ3_XXS") else "Q6_K"

    def _attention(self, i: int) -> str:
        match self.file_type:
            case "IQ1_S" | "IQ1_M" | "IQ2_XXS" | "IQ2_XS" | "IQ2_S" | "IQ2_M":
                return "Q4_K" if self.grouped else self._early()
            case "Q2_K":
                return "Q4_K" if self.grouped else "Q3_K"
            case "IQ3_XXS":
                return "Q4_K" if self.grouped else "IQ3_XXS" if self.imatrix else "IQ3_S"
            case "Q2_K_S" | "IQ3_XS" | "IQ3_S":
                return "Q4_K" if self.grouped else self.default
            case "IQ4_NL" | "IQ4_XS":
                return "Q5_K" if self.grouped else self.default
            case "IQ3_M":
                return "Q4_K"
            case "Q3_K_M":
                return "Q5_K" if i < 2 else "Q4_K"
            case "Q3_K_L":
                return "Q5_K"
            case "Q4_K_S":
                return "Q5_K" if i < 4 else self.default
            case "Q4_K_M" | "Q5_K_M":
                return "Q6_K" if _more_bits(i, self.n_attention) else self.default
        return self.default

    def _ffn_down(self, i: int) -> str:
        first = i < self.n_layer // 8
        match self.file_type:
            case "IQ1_S" | "IQ1_M" | "IQ2_XXS" | "IQ2_XS" | "IQ2_S" | "IQ2_M":
                return self._early() if first else self.default
            case "Q2_K":
                return "Q3_K"
            case "Q2_K_S" | "IQ3_M":
                return "Q4_K" if first else self.default
            case "IQ3_XXS":
                return self.default if self.imatrix else "Q4_K" if first else "Q3_K"
            case "Q3_K_M":
                return "Q5_K" if i < self.n_layer // 16 else "Q4_K"
            case "Q3_K_L":
                return "Q5_K"
            case "Q4_K_S":
                return "Q5_K" if first else self.default
            case "IQ4_NL" | "IQ4_XS":
                return "Q5_K" if first and not self.imatrix else self.default
            case "Q4_0" | "Q5_0":
                return f"{self.default[:2]}_1" if first and self.imatrix else self.default
            case "Q4_K_M" | "Q5_K_M":
                return "Q6_K" if _more_bits(i, self.n_layer) else self.default
        return self.default

    def _early(self) -> str:
        """What file types of two bits and less give to attention and to the first layers."""
        return "IQ3_S" if self.file_type in ("IQ2_S", "IQ2_M") else "Q2_K"


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
