"""Rows from another machine: its journals as one file, packed there, checked line by line here, and filed.

A pack is gzipped text. Each line is a checksum, a space and JSON: first the header, which names the machine, then for
every journal its name and its records. It holds no host name, no user name and no folder.
"""

import getpass
import gzip
import hashlib
import io
import re
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from llama_meter import journal, paths, plausible
from llama_meter.errors import StudyError, offer
from llama_meter.journal import OTHERS
from llama_meter.measure.identity import renewed
from llama_meter.plausible import check
from llama_meter.rows import SCHEMA, Fact, Record, Row

SUFFIX = ".rows.gz"
ID = "[0-9a-f]{16}"  # of a machine
LEAST_OF_ID = 4  # characters that name a machine where no other one begins so
CHECKSUM = 16  # hex digits
MOST_BYTES, MOST_OF_A_LINE = 64 << 20, 2 << 20  # unpacked
MOST_TIMES = 40  # unpacked size over packed size, at most: rows reach 3 to 8
MOST_VALUES, MOST_OF_A_ROW = 4_000_000, 250_000  # numbers, lists and objects of some 60 bytes; our packs have a fifth
HOME = re.compile(r"(?i)(?:/home|/Users|\\Users)[/\\][^/\\\s'\":,;)]+")
QUOTED = re.compile(r"(['\"])(?:[A-Za-z]:)?[/\\~][^'\"\n]*[/\\]")  # a folder in quotes may hold spaces
FOLDER = re.compile(r"(?:[A-Za-z]:)?[^\s'\"=:(),]*[/\\](?=[^/\\\s])")
ABSOLUTE = re.compile(r"(?:(?<![\w./:-])|(?<=-[IL]))(?:[A-Za-z]:[/\\]|/|~/)\w[^\s'\":]*[/\\]")
MEND = f"ask for the file again: it is made with `{offer('rows pack')}`"


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="pack", tag_field="kind"):
    """The first line: whose rows follow."""

    schema: int
    machine: str


class Name(msgspec.Struct, frozen=True, kw_only=True, tag="journal", tag_field="kind"):
    """The line before the records of a journal: its name."""

    study: str
    scale: str


_decoder = msgspec.json.Decoder(Header | Name | Row | Fact)


@dataclass
class Pack:
    """A checked pack: the machine's id, and the records of every journal by its name, `study.scale`."""

    machine: str = ""
    journals: dict[str, list[Record]] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the machine."""
        records = chain(*self.journals.values())
        return next(record.data for record in records if isinstance(record, Fact) and record.id == self.machine)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(isinstance(record, Row) for records in self.journals.values() for record in records)


@dataclass(frozen=True)
class Packed:
    """The bytes of a pack, its machine and number of rows, and the number of rows left out, by study and reason."""

    machine: str
    data: bytes
    rows: int
    left_out: Mapping[str, int]


def pack(place: str, studies: Collection[str], machine: str = "") -> Packed:
    """Pack the journals of a machine, by default the one measured last; `studies`: the names of all studies.

    Raises
    ------
    StudyError
        The machine has no rows, or none that a pack may hold.

    """
    journals = {path.stem: renewed(journal.read(path)) for path in sorted((paths.MEASURED / place).glob("*.jsonl"))}
    rows = [record for record in chain(*journals.values()) if isinstance(record, Row)]
    newest = max(rows, key=lambda row: row.started, default=None)
    if newest is None:
        raise StudyError(str(paths.MEASURED / place), "no rows to pack", offer("study"))
    machine = identified(machine) if machine else newest.machine
    if not any(row.machine == machine for row in rows):
        raise StudyError(f"machine {machine!r}", f"has no rows in {place}", offer("rows list"))
    made = packed(machine, journals, studies)
    if not made.rows:
        why = next(iter(made.left_out))
        raise StudyError(f"machine {machine!r}", f"has no rows that may be packed ({why})", "measure again")
    return made


def packed(machine: str, journals: Mapping[str, list[Record]], studies: Collection[str]) -> Packed:
    """Pack a machine's rows out of journals by name, `study.scale`.

    A row that names a folder of this machine, or that `unpack` would refuse, is left out with its reason.
    """
    lines: list[msgspec.Struct] = [Header(schema=SCHEMA, machine=machine)]
    packed, left_out = set[str](), Counter[str]()
    for name, records in journals.items():
        facts = {record.id: record for record in records if isinstance(record, Fact)}
        unfit = {fact.id: why for fact in facts.values() if (why := _why_not(fact, plausible.check_fact, machine))}
        study, _, scale = name.rpartition(".")
        own: list[Row] = []
        for row in (_nameless(row) for row in journal.latest_rows(records) if row.machine == machine):
            why = next((unfit[fact] for fact in row.facts if fact in unfit), "")
            if why := why or _why_not(row, plausible.check_row, (study, scale), facts, packed, studies):
                left_out[f"{name}: {why}"] += 1
            else:
                own.append(row)
                packed.add(row.key)
        if own:
            used = {fact for row in own for fact in row.facts}
            lines += [Name(study=study, scale=scale), *(fact for fact in facts.values() if fact.id in used), *own]
    return Packed(machine, gzip.compress(b"".join(map(_line, lines)), mtime=0), len(packed), left_out)


def _why_not(record: Record, check: Callable[..., None], *context: Any) -> str:
    """Why a record may not be packed, or "": it names a folder, which cannot be removed from anything that a fact or a
    cell is identified by, or a check of it fails."""
    text = msgspec.json.encode(record).decode()
    if match := ABSOLUTE.search(text) or HOME.search(text):
        return f"names a folder: {match.group(0)[:100]}"
    try:
        check(record, *context)
    except (ValueError, OverflowError) as error:
        return str(error)
    return ""


def _line(record: msgspec.Struct) -> bytes:
    encoded = msgspec.json.encode(record)
    return _checksum(encoded) + b" " + encoded + b"\n"


def _checksum(encoded: bytes) -> bytes:
    return hashlib.sha256(encoded).hexdigest()[:CHECKSUM].encode()


def _nameless(row: Row) -> Row:
    """The row without any folder, host name or user name in its error messages."""
    if not row.failure and not any(request.failure for request in row.requests):
        return row
    failure = row.failure
    if failure:
        message, tail = _anonymous(failure.message), [_anonymous(line) for line in failure.log_tail]
        failure = msgspec.structs.replace(failure, message=message, log_tail=tail)
    requests = [msgspec.structs.replace(request, failure=_anonymous(request.failure)) for request in row.requests]
    return msgspec.structs.replace(row, failure=failure, requests=requests)


def _anonymous(text: str) -> str:
    """A message without names and folders, and with unprintable characters replaced."""
    text = FOLDER.sub("", QUOTED.sub(r"\1", HOME.sub("~", text)))
    for name in _names():
        text = name.sub("...", text)
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)[
        : plausible.MOST_TEXT
    ]


def _names() -> list[re.Pattern[str]]:
    """The host's name, whole and up to its first dot, and the user's."""
    names = {host := socket.gethostname(), host.split(".")[0]}
    with suppress(OSError, KeyError, RuntimeError):  # a user need not have a name or a home
        names |= {getpass.getuser(), Path.home().name}
    return [re.compile(rf"(?i)(?<![^\W_]){re.escape(name)}(?![^\W_])") for name in sorted(names, reverse=True) if name]


def unpack(source: Path | bytes, studies: Collection[str]) -> Pack:
    """The checked content of a pack, given as a file or its bytes; `studies`: the names of all studies.

    Raises
    ------
    StudyError
        A line does not belong in a pack of rows: the first such line, and why.

    """
    content, number, keys = Pack(), 0, set[str]()
    name = "", ""  # of the journal that the records belong to: study and scale
    records: list[Record] = []
    facts: dict[str, Fact] = {}
    try:
        for number, line in enumerate(_lines(source), 1):
            record = _decoded(line)
            if number == 1:
                check(isinstance(record, Header), "a pack begins with its header")
                check(record.schema <= SCHEMA, f"schema {record.schema} is newer than this program's {SCHEMA}")
                check(re.fullmatch(ID, record.machine), "the machine's id is no id")
                content.machine = record.machine
            elif isinstance(record, Name):
                name, facts = (record.study, record.scale), {}
                plausible.check_name(*name)
                check(".".join(name) not in content.journals, f"journal {'.'.join(name)} comes twice")
                content.journals[".".join(name)] = records = []
            else:
                check(content.journals and not isinstance(record, Header), "a record outside any journal")
                if isinstance(record, Fact):
                    plausible.check_fact(record, content.machine)
                    check(record.id not in facts, "the fact comes twice")
                    facts[record.id] = record
                else:
                    check(record.machine == content.machine, "a row of another machine")
                    plausible.check_row(record, name, facts, keys, studies)
                    keys.add(record.key)
                records.append(record)
        number += 1
        check(content.rows, "the pack ends without a row")
    except (ValueError, OSError, EOFError, zlib.error, OverflowError) as error:
        where = "what came" if isinstance(source, bytes) else str(source)
        raise StudyError(f"{where}, line {max(number, 1)}", str(error) or type(error).__name__, MEND) from error
    return content


def _lines(source: Path | bytes) -> Iterator[bytes]:
    """The lines of a pack, one at a time in memory, none longer than MOST_OF_A_LINE.

    A few bytes can expand to very many, and these to even more objects: limits on both apply before decoding.
    """
    total = values = 0
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    most = min(MOST_BYTES, max(MOST_TIMES * size, 1 << 20))
    with gzip.open(io.BytesIO(source) if isinstance(source, bytes) else source) as text:
        while line := text.readline(min(MOST_OF_A_LINE, most - total) + 1):
            total += len(line)
            values += (own := sum(map(line.count, (b",", b"[", b"{"))))
            check(len(line) <= MOST_OF_A_LINE and total <= most, "larger than any pack of rows")
            check(own <= MOST_OF_A_ROW and values <= MOST_VALUES, "more numbers than any pack of rows has")
            check(line.endswith(b"\n"), "the line is cut off")
            yield line


def _decoded(line: bytes) -> Any:
    checksum, _, encoded = line[:-1].partition(b" ")
    check(checksum == _checksum(encoded), "the line is not the one that was packed")
    try:
        return _decoder.decode(encoded)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a record of this project ({str(error)[:200]})") from error


def add(source: Path | bytes, studies: Collection[str], place: str = "") -> tuple[Pack, int]:
    """File a pack's rows that are missing here, at a place or in the machine's own folder; the pack, and the number of
    new rows.

    A successful row replaces a failed one of the same key. Nothing is written until every line is checked.
    """
    content = unpack(source, studies)
    return content, file(content, place)


def file(content: Pack, place: str = "") -> int:
    """File the rows of a checked pack that are missing here; the number of new rows."""
    new = 0
    for name, records in content.journals.items():
        with journal.Journal(paths.MEASURED / (place or content.machine) / f"{name}.jsonl") as here:
            rows = {row.key: row for row in journal.latest_rows(here.records)}
            facts = {record.id for record in here.records if isinstance(record, Fact)}
            missing = [record for record in records if _is_missing(record, rows, facts)]
            here.append(*missing)
            new += sum(isinstance(record, Row) for record in missing)
    return new


def remove(machine: str) -> dict[Path, int]:
    """Remove the rows of a machine that `add` filed, in `others` or its own folder; the number removed, by journal.

    Raises StudyError where there are none. Rows measured here and the reference's rows are never touched.
    """
    machine = identified(machine)
    folders = [folder for folder in (paths.MEASURED / OTHERS, paths.MEASURED / machine) if not folder.is_symlink()]
    counts: dict[Path, int] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.jsonl"))):
        dropped = journal.drop(path, lambda record: isinstance(record, Row) and record.machine == machine)
        counts |= {path: len(journal.latest_rows(dropped))} if dropped else {}
    if not counts:
        raise StudyError(f"machine {machine!r}", "has no rows that came from elsewhere", offer("rows list"))
    with suppress(OSError):  # the folder is not empty
        (paths.MEASURED / machine).rmdir()
    return counts


def identified(start: str) -> str:
    """The id of a machine with rows here, from its beginning; StudyError where none or several begin so."""
    if not re.fullmatch(f"[0-9a-f]{{{LEAST_OF_ID},}}", start):
        why = f"is no machine's id, nor the first {LEAST_OF_ID} or more of its characters"
        raise StudyError(f"machine {start!r}", why, offer("rows list"))
    ids = sorted({machine for _, machine, _, _ in machines() if machine.startswith(start)})
    if len(ids) > 1:
        raise StudyError(f"machine {start!r}", f"may be {' or '.join(ids)}", "give more of its id")
    return ids[0] if ids else start


def _is_missing(record: Record, rows: Mapping[str, Row], facts: Collection[str]) -> bool:
    if isinstance(record, Fact):
        return record.id not in facts
    return record.key not in rows or (rows[record.key].status != "ok" and record.status == "ok")


def machines() -> Iterator[tuple[str, str, dict[str, Any], list[Row]]]:
    """Every machine with rows here: its folder, its id, its facts and its rows."""
    for folder in sorted(path for path in paths.MEASURED.glob("*") if path.is_dir()):
        records = [record for path in sorted(folder.glob("*.jsonl")) for record in renewed(journal.read(path))]
        rows = journal.latest_rows(records)
        facts = {record.id: record.data for record in records if isinstance(record, Fact)}
        for machine in dict.fromkeys(row.machine for row in rows):
            own_facts = {"chip": "unknown", "cores": None} | facts.get(machine, {})
            yield folder.name, machine, own_facts, [row for row in rows if row.machine == machine]
