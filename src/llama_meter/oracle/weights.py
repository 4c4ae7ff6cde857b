"""Tensors and metadata of one GGUF file, dequantised to float32 when they are used."""

import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from llama_meter.errors import StudyError, offer_check
from llama_meter.models.header import read

CACHE_ELEMENTS = 2**26  # files up to this many weights (256 MiB of float32) are dequantised once and kept
BLOCK_ELEMENTS = 2**24  # larger files: one layer is kept at a time, and at most this many weights of other tensors
LAYER = re.compile(r"blk\.\d+\.")

# Type to which llama.cpp's backends round the inputs of products, by weight type. The CPU's: ggml-cpu.c, vec_dot_type.
# Q8_1 is Q8_0 plus block sums. CUDA uses it for K types too (ggml-cuda/quantize.cu). Metal keeps inputs in F32 or F16.
PLAIN = (Type.F16, Type.BF16)
SMALL = (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.IQ4_NL, Type.MXFP4)
LARGE = tuple(t for t in Type if re.fullmatch(r"Q[2-6]_K|(IQ|TQ)\d_.*", t.name) and t not in SMALL)
CPU = {t: t for t in PLAIN} | dict.fromkeys(SMALL, Type.Q8_0) | dict.fromkeys(LARGE, Type.Q8_K)
CUDA = {t: t for t in PLAIN} | dict.fromkeys((*SMALL, *LARGE), Type.Q8_0)
ROUNDED_TO: dict[str, dict[Type, Type]] = {"": {}, "CPU": CPU, "Vulkan": CPU, "CUDA": CUDA, "Metal": {}}
K_BLOCK = 256  # numbers that share a scale in Q8_K

# CUDA's kernels add the offset of a block of weights times the sum of its inputs. Of these types it is the sum before
# rounding, in F16: for up to 8 columns ggml-cuda/vecdotq.cuh, for more mmq.cuh (MMQ_Q8_1_DS_LAYOUT_DS4; on tensor cores
# Q4_0 has no offset). Not followed: Q2_K's products of many columns, which have other blocks, and IQ1_S.
OFFSET = {Type.Q4_0: 2, Type.Q4_1: 4, Type.Q5_0: 2, Type.Q5_1: 4, Type.Q4_K: 16, Type.Q5_K: 16}  # bytes before the bits
STEPPED = {"CUDA": (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1)}
TOGETHER = {"CUDA": (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)}
Q8_BLOCK = 32  # numbers that share a sum
FEW = 8  # columns that go to the kernels of STEPPED (mmvq.cuh, MMVQ_MAX_BATCH_SIZE; some boards take fewer)


class Weights:
    """A memory-mapped GGUF. `rounds_as` and `stepped_from` are explained in `Oracle`.

    Raises
    ------
    StudyError
        The file is missing or is no GGUF; later, a requested key or tensor is missing.

    """

    def __init__(self, path: Path | str, rounds_as: str = "", stepped_from: int | None = None):
        self.path, self._rounded_to = Path(path), ROUNDED_TO[rounds_as]
        self._stepped, self._together = STEPPED.get(rounds_as, ()), TOGETHER.get(rounds_as, ())
        self._stepped_from = stepped_from  # the first token evaluated in a call of at most FEW; None: none is
        self._reader = read(self.path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._small = sum(int(tensor.n_elements) for tensor in self._tensors.values()) <= CACHE_ELEMENTS
        self._cache: dict[str, np.ndarray] = {}
        self._layer = ""  # of a large file: the one whose tensors are in the cache

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value as a Python number, text or list; `default` None makes the key mandatory."""
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise self._missing(f"metadata key {key}")
        return default

    def per_layer(self, key: str, n_layer: int) -> list[Any]:
        """A metadata value that a file may give once for all layers or as an array, one entry per layer."""
        value = self.value(key)
        return value if isinstance(value, list) else [value] * n_layer

    def n_rows(self, name: str) -> int:
        """Rows of a tensor, i.e. output features of a matrix or entries of a vocabulary."""
        return int(self._tensor(name).data.shape[0])

    def rows(self, name: str, index: slice | np.ndarray) -> np.ndarray:
        """Some rows of a tensor, float32, in NumPy order (out, in)."""
        if self._small or LAYER.match(name):
            return self.array(name)[index]
        tensor = self._tensor(name)
        return dequantize(tensor.data[index], tensor.tensor_type)

    def array(self, name: str) -> np.ndarray:
        """A whole tensor, float32, in NumPy order: the reverse of ggml's, so matrices are (out, in)."""
        tensor = self._tensor(name)
        if not self._small and not self._enter_layer_of(name):
            return dequantize(tensor.data, tensor.tensor_type)
        if name not in self._cache:
            self._cache[name] = dequantize(tensor.data, tensor.tensor_type)
        return self._cache[name]

    def linear(self, x: np.ndarray, name: str, at: np.ndarray | None = None, first: int = 0) -> np.ndarray:
        """y = x Wᵀ for x (n_tokens, in) and W (out, in); uncached weights are dequantised a block of rows at a time.

        `at`: which token of the text each row of x is, (n_tokens,); None: the first ones, in order. `first`: the first
        output feature that is wanted.
        """
        n_out, step = self.n_rows(name), max(1, BLOCK_ELEMENTS // x.shape[1])
        kind = self._tensor(name).tensor_type
        to, exact = self._rounded_to.get(kind), x
        x = x if to is None else rounded(x, to)
        lost = self._lost(exact, x, kind, np.arange(len(x)) if at is None else at)
        y = np.empty((len(x), n_out - first), dtype=np.float32)
        for start in range(first, n_out, step):
            block, out = slice(start, start + step), slice(start - first, start - first + step)
            y[:, out] = x @ self.rows(name, block).T
            if lost is not None:
                y[:, out] += lost @ offsets(self._tensor(name).data[block], kind).T
        return y

    @property
    def depends_on_calls(self) -> bool:
        """Whether a token's products are rounded otherwise in a call of its own than together with others."""
        differ = set(self._stepped) ^ set(self._together)
        return any(tensor.tensor_type in differ for tensor in self._tensors.values())

    def _lost(self, exact: np.ndarray, near: np.ndarray, kind: Type, at: np.ndarray) -> np.ndarray | None:
        """How much larger each sum of 32 inputs, (n_tokens, in / 32), was before rounding; None: does not matter."""
        if kind not in (*self._stepped, *self._together):
            return None
        before, after = (values.reshape(len(at), -1, Q8_BLOCK).sum(-1) for values in (exact, near))
        stepped = at >= (np.inf if self._stepped_from is None else self._stepped_from)
        met = np.where(stepped, kind in self._stepped, kind in self._together)
        with np.errstate(over="ignore"):  # a sum beyond F16 is infinite in the engine, too
            return np.where(met[:, None], before.astype(np.float16).astype(np.float32) - after, np.float32(0))

    def _enter_layer_of(self, name: str) -> bool:
        """Keep the tensors of one layer at a time; False for a tensor of no layer."""
        layer = LAYER.match(name)
        if layer and layer[0] != self._layer:
            self._layer = layer[0]
            self._cache.clear()
            pages: Any = self._reader.data
            pages._mmap.madvise(mmap.MADV_DONTNEED)  # the file's pages would count as memory used
        return layer is not None

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise self._missing(f"tensor {name}")
        return self._tensors[name]

    def _missing(self, what: str) -> StudyError:
        return StudyError(str(self.path), f"{what} is missing", offer_check(self.path))


def rounded(x: np.ndarray, to: Type) -> np.ndarray:
    """`x` (n_tokens, in) after rounding to a type and back, float32."""
    return _rounded_to_q8_k(x) if to == Type.Q8_K else dequantize(quantize(x, to), to)


def offsets(data: np.ndarray, kind: Type) -> np.ndarray:
    """What a weight is worth whose bits are zero, for each 32 of rows of stored weights: (out, in / 32) float32."""
    _, size = GGML_QUANT_SIZES[kind]
    blocks = np.array(data).reshape(len(data), -1, size)
    blocks[..., OFFSET[kind] :] = 0
    return dequantize(blocks.reshape(data.shape), kind)[:, ::Q8_BLOCK]


def _rounded_to_q8_k(x: np.ndarray) -> np.ndarray:
    """Q8_K, which `gguf` cannot write (ggml-quants.c, quantize_row_q8_K_ref).

    Each block of 256 uses the step that maps its largest magnitude to -127, and whole numbers up to 127.
    """
    blocks = x.reshape(-1, K_BLOCK).astype(np.float32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    inverse = np.divide(np.float32(-127), largest, out=np.zeros_like(largest), where=largest != 0)
    step = np.divide(np.float32(1), inverse, out=np.zeros_like(inverse), where=inverse != 0)
    return (np.minimum(np.rint(inverse * blocks), np.float32(127)) * step).reshape(x.shape)
