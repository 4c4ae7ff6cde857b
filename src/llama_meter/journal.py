"""The journal: append-only JSON lines, synced when written. A torn last line, as a power cut leaves it, is dropped.

Tracked rows are packed beside it (`.jsonl.gz`): it begins with them, and holds what was measured since.
"""

import gc
import gzip
import os
from pathlib import Path
from shlex import quote
from typing import Self

import msgspec

from llama_meter import paths
from llama_meter.disk import growing, lock
from llama_meter.errors import StudyError
from llama_meter.rows import SCHEMA, Fact, Record, Row

REFERENCE, LOCAL, OTHERS = "reference", "local", "others"  # others: tracked rows of further machines

_decoder = msgspec.json.Decoder(Record)
_encoder = msgspec.json.Encoder()


def journal_path(study: str, scale: str, place: str) -> Path:
    """Where a study's journal lies: data/measured/<place>/<study>.<scale>.jsonl."""
    return paths.MEASURED / place / f"{study}.{scale}.jsonl"


def journals(folder: Path, scale: str = "") -> list[Path]:
    """The paths of a folder's journals, packed or not; of one `scale` where it is given."""
    names = {path.name.removesuffix(".gz") for path in folder.glob("*.jsonl*")}
    return [folder / name for name in sorted(names) if name.endswith(f".{scale}.jsonl" if scale else ".jsonl")]


def packed(path: Path) -> Path:
    """Where the tracked rows of a journal lie."""
    return path.with_name(f"{path.name}.gz")


def stored(path: Path) -> bytes:
    """The lines of a journal, tracked ones first; an absent journal has none."""
    tracked = gzip.decompress(packed(path).read_bytes()) if packed(path).exists() else b""
    return tracked + (path.read_bytes() if path.exists() else b"")


def pack(path: Path) -> None:
    """Move the rows of a journal to its tracked, packed part."""
    with Journal(path):
        with growing(packed(path)) as partial:
            partial.write_bytes(gzip.compress(stored(path), mtime=0))
        path.unlink()


def read(path: Path) -> list[Record]:
    """Every complete record of a journal, in order; an absent journal is empty.

    Raises
    ------
    StudyError
        A complete line does not decode, or was written by another schema.

    """
    data = stored(path)
    gc.disable()  # decoding makes no cycles, and searching for them takes four times its time
    try:
        records = _decoder.decode_lines(data[: data.rfind(b"\n") + 1])
    except ValueError as error:  # a MsgspecError or invalid UTF-8 is a ValueError
        raise StudyError(str(path), f"not a journal of this project ({error})", _aside(path, "broken")) from error
    finally:
        gc.enable()
    schema = next((row.schema for row in records if isinstance(row, Row) and row.schema != SCHEMA), SCHEMA)
    if schema != SCHEMA:
        mend = "update this program" if schema > SCHEMA else f"{_aside(path, 'old')}, and measure again"
        raise StudyError(str(path), f"schema {schema} is not this program's {SCHEMA}", mend)
    return records


def _aside(path: Path, end: str) -> str:
    """The command that moves a journal out of the way."""
    return f"mv {quote(str(path))} {quote(f'{path}.{end}')}"


def latest_rows(records: list[Record]) -> list[Row]:
    """Rows, one per key: a retried failure replaces the row it retries."""
    return list({record.key: record for record in records if isinstance(record, Row)}.values())


class Journal:
    """An open journal. One process writes at a time; rows reach the disk before `append` returns."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            lock(self._fd)
            self.records = read(path)
            os.ftruncate(self._fd, path.read_bytes().rfind(b"\n") + 1)
        except BlockingIOError:
            os.close(self._fd)
            raise StudyError(str(path), "another run is writing to it", "wait for the other run, or stop it") from None
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def append(self, *records: Record) -> None:
        """Write records and sync them. On a full disk only these records are lost, with a StudyError."""
        lines = b"".join(_encoder.encode(record) + b"\n" for record in records)
        size = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, lines) != len(lines):
                raise OSError(28, os.strerror(28))
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, size)
            mend = "free space there with `df -h`, then give the same command"
            raise StudyError(str(self.path), f"rows not written ({error.strerror})", mend) from error
        self.records.extend(records)

    def append_fact(self, fact: Fact) -> None:
        """Write a fact unless the journal has it."""
        if not any(isinstance(record, Fact) and record.id == fact.id for record in self.records):
            self.append(fact)
