"""The tensors of a GGUF file, planned and as they are, and its hash. Reads headers only; weights stay on disk."""

import functools
import hashlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from llama_meter.errors import StudyError
from llama_meter.models import header as headers
from llama_meter.models.header import Header, shape, type_name
from llama_meter.models.registry import ARCHS, ModelSpec

MAKE = "plamo-study run 01"
REMAKE = f"delete the file, then {MAKE}"


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
    """Whether a tensor is F32 in every file: norms, biases, the convolution, Mamba scalars (the converter's rule)."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return kind.endswith("_norm") or kind in {"bias", "ssm_a", "ssm_d", "ssm_conv1d"}


def planned_table(spec: ModelSpec, dtype: str) -> list[TensorInfo]:
    """The tensor table of a file of this spec and type, in file order; needs no file."""
    shapes = spec.tensor_shapes().items()
    return [TensorInfo(name, "F32" if stays_f32(name) else dtype, shape) for name, shape in shapes]


def tensor_table(path: Path) -> list[TensorInfo]:
    """The tensors of a PLaMo GGUF in file order. StudyError for a missing or damaged file, or one that is no PLaMo."""
    header = headers.read(path)
    if header.arch not in ARCHS:
        why = f"architecture is {header.arch!r:.60}, not one of {', '.join(ARCHS)}"
        raise StudyError(str(path), why, f"name a PLaMo file, or make one: {MAKE}")
    return table_of(header)


def table_of(header: Header) -> list[TensorInfo]:
    """The tensors of any header in file order."""
    return [TensorInfo(tensor.name, type_name(tensor), shape(tensor)) for tensor in header.tensors]


def sha256(path: Path) -> str:
    """SHA-256 of a file as 64 hex digits, read in pieces; cached per process while the file is unchanged.

    Raises StudyError when it cannot be read.
    """
    try:
        return _digest(path.resolve(), *looks(path))
    except OSError as error:
        raise StudyError(str(path), f"cannot be read ({error.strerror})", MAKE) from error


def looks(path: Path) -> tuple[int, int, int, int]:
    """What tells a file from the same one before a change: its inode, size, and both times. StudyError as `sha256`."""
    try:
        stat = path.stat()
    except OSError as error:
        raise StudyError(str(path), f"cannot be read ({error.strerror})", MAKE) from error
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@functools.lru_cache
def _digest(path: Path, *_looks: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
