"""What a GGUF file holds: tensor table, metadata, hash. Reads headers only; weights stay on disk."""

import hashlib
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType

from plamo_study.errors import StudyError
from plamo_study.models.registry import ARCHS, ModelSpec

MAKE = "plamo-study models make"
REMAKE = f"delete the file, then {MAKE}"
LONGEST = 256  # entries of the longest array that is read; only the vocabulary is longer


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` in NumPy order (out, in), `dtype` the name of its GGML type."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def layer(self) -> int | None:
        """Block number, None for embeddings and the final norm."""
        return int(self.name.split(".")[1]) if self.name.startswith("blk.") else None

    @property
    def kind(self) -> str:
        """The name without block and `.weight`, e.g. "ffn_up"; a bias keeps its suffix ("ssm_dt.bias")."""
        local = self.name if self.layer is None else self.name.split(".", 2)[2]
        return local.removesuffix(".weight")

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes in the file, without alignment padding."""
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.dtype]]
        return self.n_elements // block * size


def stays_f32(name: str) -> bool:
    """Norms, biases, the convolution and the Mamba scalars are F32 in every file (the converter's rule)."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return kind.endswith("_norm") or kind in {"bias", "ssm_a", "ssm_d", "ssm_conv1d"}


def planned_table(spec: ModelSpec, dtype: str) -> list[TensorInfo]:
    """The tensor table that a file of this spec and type has, in file order, without any file."""
    shapes = spec.tensor_shapes().items()
    return [TensorInfo(name, "F32" if stays_f32(name) else dtype, shape) for name, shape in shapes]


def tensor_table(path: Path) -> list[TensorInfo]:
    """The tensors of a PLaMo GGUF in file order. StudyError on a file that is missing, damaged or no PLaMo."""
    return [TensorInfo(t.name, t.tensor_type.name, tuple(t.shape[::-1].tolist())) for t in _open(path).tensors]


def metadata(path: Path) -> dict[str, Any]:
    """Scalars and short arrays of a PLaMo GGUF by key; the vocabulary is left out. StudyError as `tensor_table`."""
    return {key: field.contents() for key, field in _open(path).fields.items() if field.data}


def sha256(path: Path) -> str:
    """SHA-256 of a file as 64 hex digits, read in pieces. StudyError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StudyError(str(path), f"cannot be read ({error.strerror})", MAKE) from error


class _Header(GGUFReader):
    """GGUFReader that steps over the vocabulary instead of making objects of it, which takes seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type == GGUFValueType.ARRAY:
            item, n = struct.unpack_from("<IQ", self.data.data, orig_offs)
            if n > LONGEST:
                return 12 + self._array_bytes(orig_offs + 12, item, n), [], [], [GGUFValueType.ARRAY]
        return super()._get_field_parts(orig_offs, raw_type)

    def _array_bytes(self, start: int, item: int, n: int) -> int:
        if item != GGUFValueType.STRING:
            return n * self.gguf_scalar_to_np[GGUFValueType(item)]().itemsize
        end = start
        for _ in range(n):
            end += 8 + struct.unpack_from("<Q", self.data.data, end)[0]
        return end - start


def _open(path: Path) -> _Header:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise StudyError(str(path), f"cannot be read ({error.strerror})", MAKE) from error
    if magic != b"GGUF":
        raise StudyError(str(path), "is not a GGUF file", "name a .gguf file, or make one: " + MAKE)
    try:
        reader = _Header(path)
    except Exception as error:  # the reader raises whatever NumPy makes of damaged bytes
        why = f"is damaged or cut short at {path.stat().st_size:,} bytes ({error})"
        raise StudyError(str(path), why, REMAKE) from error
    arch = reader.get_field("general.architecture")
    if arch is None or arch.contents() not in ARCHS:
        why = f"architecture is {arch.contents() if arch else None!r}, not one of {', '.join(ARCHS)}"
        raise StudyError(str(path), why, "name a PLaMo file, or make one: " + MAKE)
    return reader
