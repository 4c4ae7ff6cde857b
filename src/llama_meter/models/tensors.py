"""The tensors of a GGUF file, planned and as they are, and its hash. Reads headers only; weights stay on disk."""

import functools
import hashlib
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from llama_meter import paths
from llama_meter.disk import growing
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


def matrix_bytes(parts: Sequence[Path]) -> dict[str, int]:
    """Bytes of the matrices in all parts of a file, by tensor type; an embedding that is only looked up is none."""
    sizes: dict[str, int] = {}
    records = [tensor for part in parts for tensor in headers.read(part).tensors]
    looked_up = {"token_embd.weight"} if any(tensor.name == "output.weight" for tensor in records) else set()
    for tensor in records:
        if len(headers.core(shape(tensor))) > 1 and tensor.name not in looked_up and "conv1d" not in tensor.name:
            sizes[type_name(tensor)] = sizes.get(type_name(tensor), 0) + tensor.n_bytes
    return sizes


def sha256(path: Path) -> str:
    """SHA-256 of a file as 64 hex digits, read in pieces where it is new or looks other than when it was read.

    It is remembered in data/models/given.json, so that a large file is read once. Raises StudyError when it cannot be
    read. What exists to catch changed bytes asks `read_sha256`.
    """
    before = looks(path)
    known = _memory().get(str(path.resolve()))
    if known and known.looks == before:
        return known.sha256
    digest = read_sha256(path)
    if looks(path) == before:  # nobody wrote to it meanwhile
        _remember(path, Known(before, digest))
    return digest


def first_name(path: Path, now: str) -> str:
    """The name under which a file without one in its header was first given, wherever it lies; `now` for a new one."""
    here, memory = Known(looks(path), sha256(path)), _memory()
    first = next((known.name for known in memory.values() if known.sha256 == here.sha256 and known.name), now)
    if (named := msgspec.structs.replace(here, name=first)) != memory.get(str(path.resolve())):
        _remember(path, named)
    return first


def read_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, cached per process while the file looks the same. StudyError as `looks`."""
    return _digest(path.resolve(), *looks(path))


def sha256_of_parts(parts: Sequence[Path]) -> str:
    """The hash of a file with all its parts: of the hashes of these where there are several."""
    digests = [sha256(part) for part in parts]
    return digests[0] if len(parts) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def looks(path: Path) -> tuple[int, int, int, int]:
    """What tells a file from the same one before a change: its inode, size, and both times. StudyError without it."""
    try:
        stat = path.stat()
    except OSError as error:
        raise StudyError(str(path), f"cannot be read ({error.strerror})", MAKE) from error
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@functools.lru_cache
def _digest(path: Path, *_looks: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Known(msgspec.Struct, frozen=True):
    """How a file looked, its hash, and, where its header has no name, the one under which it was first given."""

    looks: tuple[int, int, int, int]
    sha256: str
    name: str = ""


_writing = threading.Lock()  # files are hashed side by side


def _remember(path: Path, known: Known) -> None:
    with _writing, suppress(OSError, StudyError):  # a folder that cannot be written to: the next call reads it again
        paths.MODELS.mkdir(parents=True, exist_ok=True)
        with growing(paths.MODELS / "given.json") as partial:
            partial.write_bytes(msgspec.json.encode(_memory() | {str(path.resolve()): known}))


def _memory() -> dict[str, Known]:
    try:
        return msgspec.json.decode((paths.MODELS / "given.json").read_bytes(), type=dict[str, Known])
    except (OSError, msgspec.MsgspecError):  # none, or one that is torn
        return {}
