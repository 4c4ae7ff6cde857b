"""Importance matrices on disk, in the GGUF format of llama.cpp's llama-imatrix (tools/imatrix/imatrix.cpp).

For every weight matrix W of y = W x, a file holds the sum of x_j² per input column j over all tokens, and their number.
The quantizer weighs the rounding error of column j by the mean. It does not know the origin of the sums.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from llama_meter.disk import growing
from llama_meter.errors import StudyError, offer, unwritable
from llama_meter.models import header as headers
from llama_meter.models.header import Header, HeaderError, TensorRecord

SUMS, COUNTS = ".in_sum2", ".counts"
CHUNKS, CHUNK_SIZE, DATASETS = "imatrix.chunk_count", "imatrix.chunk_size", "imatrix.datasets"
KEYS = {DATASETS: list, CHUNKS: int, CHUNK_SIZE: int}
RECOMPUTE = offer("models quantize SOURCE --imatrix-text FILE")


@dataclass(frozen=True)
class Imatrix:
    """By tensor name: `sums` of squares (n_columns,) float32, and `counts`, the tokens summed over.

    `dataset` names the text, of which `chunks` pieces of `chunk_size` tokens were evaluated.
    """

    sums: dict[str, NDArray[np.float32]]
    counts: dict[str, int]
    dataset: str = ""
    chunks: int = 0
    chunk_size: int = 0

    def means(self) -> dict[str, NDArray[np.float32]]:
        """Mean square per input column, as the quantizer needs it; ones where no token was counted."""
        return {
            name: sums / np.float32(self.counts[name]) if self.counts[name] else np.ones_like(sums)
            for name, sums in self.sums.items()
        }


def write(path: Path, imatrix: Imatrix) -> Path:
    """Write `path` as llama-imatrix would, entries sorted by name; nothing half-written is left behind.

    Raises StudyError when the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with growing(path) as partial, closing(gguf.GGUFWriter(partial, arch="")) as writer:  # llama-imatrix names none
            _fill(writer, imatrix)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def _fill(writer: gguf.GGUFWriter, imatrix: Imatrix) -> None:
    writer.add_type(gguf.GGUFType.IMATRIX)
    writer.add_array(DATASETS, [imatrix.dataset])
    writer.add_uint32(CHUNKS, imatrix.chunks)
    writer.add_uint32(CHUNK_SIZE, imatrix.chunk_size)
    for name in sorted(imatrix.sums):
        writer.add_tensor(name + SUMS, imatrix.sums[name].astype(np.float32))
        writer.add_tensor(name + COUNTS, np.array([imatrix.counts[name]], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()


def read(path: Path) -> Imatrix:
    """Read an importance matrix from llama-imatrix or `write`, in no more memory than the file's size.

    Raises StudyError when the file is missing, damaged, in the older format without GGUF header, has experts (PLaMo
    has none), or holds values that are not finite.
    """
    try:
        header = headers.read(path)
    except HeaderError as error:
        mend = error.mend if error.code == "not-gguf" else RECOMPUTE
        raise StudyError(str(path), error.why, mend) from error
    records = {record.name: record for record in header.tensors}
    if (n_bytes := sum(record.n_bytes for record in records.values())) > header.size:
        why = f"is cut short or damaged: its tensors take {n_bytes:,} bytes, and it has {header.size:,}"
        raise StudyError(str(path), why, RECOMPUTE)
    names = sorted(name.removesuffix(SUMS) for name in records if name.endswith(SUMS))
    sums = {name: _values(header, records, name + SUMS) for name in names}
    counts = {name: _values(header, records, name + COUNTS) for name in names}
    value = {key: header.value(key) for key in KEYS}
    _check(path, sums, counts, value)
    tokens = {name: round(float(counts[name][0])) for name in names}
    dataset = next(iter(value[DATASETS]), b"").decode(errors="replace")
    return Imatrix(sums, tokens, dataset, value[CHUNKS], value[CHUNK_SIZE])


def _values(header: Header, records: dict[str, TensorRecord], name: str) -> NDArray[np.float32]:
    record = records.get(name)
    if record is None or record.type_id != gguf.GGMLQuantizationType.F32:
        raise StudyError(str(header.path), f"{name} is missing or not F32", RECOMPUTE)
    start = header.data_start + record.offset
    if start + record.n_bytes > header.size:
        raise StudyError(str(header.path), f"is cut short or damaged at {name}", RECOMPUTE)
    return np.fromfile(header.path, "<f4", record.n_bytes // 4, offset=start).astype(np.float32, copy=False)


def _check(
    path: Path, sums: dict[str, NDArray[np.float32]], counts: dict[str, NDArray[np.float32]], value: dict[str, Any]
) -> None:
    missing = [key for key, kind in KEYS.items() if not isinstance(value[key], kind)]
    if not sums or missing:
        raise StudyError(str(path), f"is no importance matrix (it lacks {', '.join(missing) or 'sums'})", RECOMPUTE)
    for name in sums:
        if len(counts[name]) != 1:
            raise StudyError(str(path), f"{name} has {len(counts[name])} experts, PLaMo has none", RECOMPUTE)
        if not (np.isfinite(sums[name]).all() and np.isfinite(counts[name]).all() and counts[name][0] >= 0):
            raise StudyError(str(path), f"{name} holds values that are not finite", RECOMPUTE)
