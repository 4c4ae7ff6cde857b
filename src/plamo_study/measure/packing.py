"""Rows of another machine: its journals as one file, made there, checked line by line here, and filed.

A pack is gzipped text. Each line is a checksum, a space and JSON: first the header, which names the machine, then for
every journal its name and its records. It holds no host name, no user name and no folder.
"""

import getpass
import gzip
import hashlib
import io
import math
import re
import socket
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.measure import journal
from plamo_study.measure.cells import OnModel
from plamo_study.measure.plan import TIME_LIMIT_S
from plamo_study.measure.rows import SCHEMA, Fact, Record, Row, content_id, passed, row_key

SUFFIX = ".rows.gz"
CHECKSUM = 16  # hex digits
MOST_BYTES, MOST_OF_A_LINE, MOST_TEXT = 64 << 20, 8 << 20, 4000  # unpacked; characters of one string
TOLD = ("degenerate_loop",)  # checks that tell and do not judge
FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)  # no row is older
LONGEST_NS = 10**15  # of a row: twelve days
MOST_BYTES_S, MOST_FLOPS_S = 1e14, 1e18  # beyond any machine
HOME = re.compile(r"(?i)(?:/home|/Users|\\Users)[/\\][^/\\\s'\":,;)]+")
QUOTED = re.compile(r"(['\"])(?:[A-Za-z]:)?[/\\~][^'\"\n]*[/\\]")  # a folder in quotes may hold spaces
FOLDER = re.compile(r"(?:[A-Za-z]:)?[^\s'\"=:(),]*[/\\](?=[^/\\\s])")
ABSOLUTE = re.compile(r"(?:(?<![\w./:-])|(?<=-[IL]))(?:[A-Za-z]:[/\\]|/|~/)\w[^\s'\":]*[/\\]")
MEND = "ask for the file again: it is made with `plamo-study rows pack`"


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="pack", tag_field="kind"):
    """The first line: whose rows follow."""

    schema: int
    machine: str


class Name(msgspec.Struct, frozen=True, kw_only=True, tag="journal", tag_field="kind"):
    """Before the records of a journal: which one it is."""

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
        """What the machine says of itself."""
        records = chain(*self.journals.values())
        return next(record.data for record in records if isinstance(record, Fact) and record.id == self.machine)

    @property
    def rows(self) -> int:
        """How many rows it holds."""
        return sum(isinstance(record, Row) for records in self.journals.values() for record in records)


def pack(place: str, machine: str = "") -> tuple[str, bytes]:
    """The journals of a machine, by default of the one measured last, as the bytes of a pack; and the machine's id.

    Raises
    ------
    StudyError
        There are no such rows, or a fact of theirs names a folder.

    """
    found = {path.stem: journal.read(path) for path in sorted((paths.MEASURED / place).glob("*.jsonl"))}
    rows = [record for record in chain(*found.values()) if isinstance(record, Row)]
    newest = max(rows, key=lambda row: row.started, default=None)
    if newest is None:
        raise StudyError(str(paths.MEASURED / place), "no rows to pack", "plamo-study study")
    machine = machine or newest.machine
    if not any(row.machine == machine for row in rows):
        raise StudyError(f"machine {machine!r}", f"has no rows in {place}", "plamo-study rows list")
    return machine, packed(machine, found)


def packed(machine: str, journals: Mapping[str, list[Record]]) -> bytes:
    """A machine's rows out of journals by their names, `study.scale`, as the bytes of a pack.

    Raises
    ------
    StudyError
        A fact of theirs names a folder.

    """
    lines: list[msgspec.Struct] = [Header(schema=SCHEMA, machine=machine)]
    for name, records in journals.items():
        own = [row for row in journal.latest_rows(records) if row.machine == machine]
        named = {fact for row in own for fact in _facts_of(row)}
        facts = {record.id: record for record in records if isinstance(record, Fact) and record.id in named}
        if own:
            study, _, scale = name.rpartition(".")
            lines += [Name(study=study, scale=scale), *facts.values(), *map(_nameless, own)]
    return gzip.compress(b"".join(_line(_checked(record)) for record in lines), mtime=0)


def _line(record: msgspec.Struct) -> bytes:
    encoded = msgspec.json.encode(record)
    return _checksum(encoded) + b" " + encoded + b"\n"


def _checksum(encoded: bytes) -> bytes:
    return hashlib.sha256(encoded).hexdigest()[:CHECKSUM].encode()


def _facts_of(row: Row) -> list[str]:
    return [fact for fact in (row.machine, row.model, *row.others, row.engine) if fact]


def _nameless(row: Row) -> Row:
    """The row without the folders, the host and the user that an error message may name."""
    if not row.failure and not any(request.failure for request in row.requests):
        return row
    failure = row.failure
    if failure:
        message, tail = _anonymous(failure.message), [_anonymous(line) for line in failure.log_tail]
        failure = msgspec.structs.replace(failure, message=message, log_tail=tail)
    requests = [msgspec.structs.replace(each, failure=_anonymous(each.failure)) for each in row.requests]
    return msgspec.structs.replace(row, failure=failure, requests=requests)


def _anonymous(text: str) -> str:
    """A message without names and folders, and without what no reader can see."""
    text = FOLDER.sub("", QUOTED.sub(r"\1", HOME.sub("~", text)))
    for name in _names():
        text = name.sub("...", text)
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)[:MOST_TEXT]


def _names() -> list[re.Pattern[str]]:
    """The host's name, whole and up to its first dot, and the user's."""
    found = {host := socket.gethostname(), host.split(".")[0]}
    with suppress(OSError, KeyError, RuntimeError):  # nobody has to have a name or a home
        found |= {getpass.getuser(), Path.home().name}
    return [re.compile(rf"(?i)(?<![^\W_]){re.escape(name)}(?![^\W_])") for name in sorted(found, reverse=True) if name]


def _checked(record: msgspec.Struct) -> msgspec.Struct:
    """The record itself; StudyError where a text of it still names a folder of this machine.

    What gives a fact or a cell its name cannot be taken out of it.
    """
    text = msgspec.json.encode(record).decode()
    if found := ABSOLUTE.search(text) or HOME.search(text):
        what = record.what if isinstance(record, Fact) else f"a row of {getattr(record, 'study', '')}"
        raise StudyError(what, f"names a folder: {found.group(0)[:100]}", "give files by their name, measure again")
    return record


def unpack(source: Path | bytes, studies: Collection[str]) -> Pack:
    """A pack whose every line was checked, a file or its bytes; `studies`: those there are.

    Raises
    ------
    StudyError
        The first line that is not what a pack of rows holds, and why.

    """
    found, number, name = Pack(), 0, ""
    keys: set[str] = set()
    known: dict[str, Fact] = {}
    try:
        for number, line in enumerate(_lines(source), 1):
            record = _decoded(line)
            if number == 1:
                _check(isinstance(record, Header), "a pack begins with its header")
                _check(record.schema <= SCHEMA, f"schema {record.schema} is newer than this program's {SCHEMA}")
                _check(re.fullmatch("[0-9a-f]{16}", record.machine), "the machine's id is no id")
                found.machine = record.machine
            elif isinstance(record, Name):
                name = f"{record.study}.{record.scale}"
                _check(re.fullmatch("[0-9a-z-]{1,60}", record.study), f"a journal called {record.study[:40]!r}")
                _check(record.scale in TIME_LIMIT_S, f"scale {record.scale[:40]!r} is unknown")
                _check(name not in found.journals, f"journal {name} comes twice")
                found.journals[name], known = [], {}
            else:
                _check(name and not isinstance(record, Header), "a record outside any journal")
                if isinstance(record, Fact):
                    _check_fact(record, found.machine)
                    _check(record.id not in known, "the fact comes twice")
                    known[record.id] = record
                else:
                    _check(record.study in studies, f"study {record.study[:40]!r} is unknown")
                    _check_row(record, name.rpartition(".")[2], found.machine, known)
                    _check(record.key not in keys, "the row comes twice")
                    keys.add(record.key)
                found.journals[name].append(record)
        number += 1
        _check(found.rows, "the pack ends without a row")
    except (ValueError, OSError, EOFError, zlib.error, OverflowError) as error:
        name = "what came" if isinstance(source, bytes) else str(source)
        raise StudyError(f"{name}, line {max(number, 1)}", str(error) or type(error).__name__, MEND) from error
    return found


def _lines(source: Path | bytes) -> Iterator[bytes]:
    """The lines of a pack, no more of them in memory than one, and none longer than MOST_OF_A_LINE."""
    total = 0
    with gzip.open(io.BytesIO(source) if isinstance(source, bytes) else source) as text:
        while line := text.readline(MOST_OF_A_LINE + 1):
            total += len(line)
            _check(len(line) <= MOST_OF_A_LINE and total <= MOST_BYTES, "larger than any pack of rows")
            _check(line.endswith(b"\n"), "the line is cut off")
            yield line


def _decoded(line: bytes) -> Any:
    checksum, _, encoded = line[:-1].partition(b" ")
    _check(checksum == _checksum(encoded), "the line is not the one that was packed")
    try:
        return _decoder.decode(encoded)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a record of this project ({str(error)[:200]})") from error


def _check(holds: object, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _check_fact(fact: Fact, machine: str) -> None:
    _check(fact.id == content_id(fact.data), f"{fact.what} {fact.id[:16]!r} is not named by its content")
    _check_texts(fact.data)
    if fact.what == "machine":
        _check(fact.id == machine, "facts of another machine")
        cores, memory = fact.data.get("cores"), fact.data.get("memory_bytes")
        _check(isinstance(fact.data.get("chip"), str), "the machine's chip has no name")
        _check(type(cores) is int and 0 < cores < 10_000, f"a machine of {cores!r:.40} cores")
        _check(type(memory) is int and 2**28 < memory < 2**50, f"a machine of {memory!r:.40} bytes")


def _check_row(row: Row, scale: str, machine: str, known: dict[str, Fact]) -> None:
    _check(0 < row.schema <= SCHEMA, f"schema {row.schema} is not one of this program's {SCHEMA}")
    _check(row.machine == machine, "a row of another machine")
    kinds = {"machine": [row.machine], "model": [row.model, *row.others], "engine": [row.engine]}
    for what, names in kinds.items():
        for fact in filter(None, names):
            _check(fact in known and known[fact].what == what, f"{what} {fact[:16]!r} is not among the facts before it")
    study = f"{row.study}/anchor" if row.anchor else row.study
    key = row_key(study, row.cell, row.model, row.engine, row.machine, row.replicate, *row.others)
    _check(row.key == key, "the row is not named by its content")
    started = datetime.fromisoformat(row.started)
    _check(started.tzinfo and FIRST_DAY < started < datetime.now(UTC) + timedelta(days=1), f"begun {row.started[:40]}")
    _check(row.status != "ok" or row.failure is None, "ended well, with a failure")
    _check(row.status == "ok" or not row.valid, "did not end well, and valid")
    _check(row.status == "ok" or not row.samples_ns, "did not end well, and has times")
    _check(0 < row.elapsed_ns < LONGEST_NS, "a row that took no time, or months")
    counts = (row.pid, row.replicate, row.order, row.block + 1)
    _check(0 <= min(counts) <= max(counts) < 2**32, "a number below nothing, or beyond any count")
    _check(not row.cell.files or (row.model and row.engine), "a model that ran on nothing")
    _check(not isinstance(row.cell, OnModel) or row.cell.scale == scale, f"a cell of another scale than {scale}")
    judged = {name: value for name, value in row.checks.items() if name not in TOLD}
    _check(not row.valid or passed(judged), "valid, and a check of it does not hold")
    _check_results(row)
    _check_texts(msgspec.to_builtins(row))


def _check_results(row: Row) -> None:
    """Times are no longer than the worker ran, and nothing is faster than any machine."""
    times = [*chain(*row.samples_ns), *row.warmup_ns, *row.prefill_ns, row.load_ns]
    times += [at for request in row.requests for at in (request.arrived_ns, *request.token_ns)]
    _check(all(0 <= time <= row.elapsed_ns for time in times), "a time that is negative, or longer than the row took")
    _check(min(row.n_evaluated, row.n_bytes, row.n_flops) >= 0, "a count below nothing")
    fastest = min(chain(*row.samples_ns), default=0) / 1e9
    for amount, most in ((row.n_bytes, MOST_BYTES_S), (row.n_flops, MOST_FLOPS_S)):
        _check(not amount or row.status != "ok" or amount <= most * fastest, "faster than any machine")
    numbers = chain(row.checks.values(), *row.series.values())
    _check(all(math.isfinite(number) for number in numbers), "a number that is not finite")


def _check_texts(value: str | dict[str, Any] | list[Any]) -> None:
    """No text is endless or hides control characters."""
    if isinstance(value, str):
        _check(len(value) <= MOST_TEXT, "a text without end")
        _check(value.replace("\n", " ").replace("\t", " ").isprintable(), "a text with control characters")
    else:
        for each in chain(value, value.values()) if isinstance(value, dict) else value:
            if isinstance(each, (str, dict, list)):
                _check_texts(each)


def add(source: Path | bytes, studies: Collection[str], place: str = "") -> tuple[Pack, int]:
    """File the rows of a pack that are not here yet, at a place or in the machine's own folder; the pack, and how many
    were new.

    A row that went well replaces a failed one of the same key. Nothing is written before every line was checked.
    """
    found, new = unpack(source, studies), 0
    for name, records in found.journals.items():
        with journal.Journal(paths.MEASURED / (place or found.machine) / f"{name}.jsonl") as here:
            rows = {row.key: row for row in journal.latest_rows(here.records)}
            facts = {record.id for record in here.records if isinstance(record, Fact)}
            missing = [record for record in records if _is_missing(record, rows, facts)]
            here.append(*missing)
            new += sum(isinstance(record, Row) for record in missing)
    return found, new


def _is_missing(record: Record, rows: Mapping[str, Row], facts: Collection[str]) -> bool:
    if isinstance(record, Fact):
        return record.id not in facts
    return record.key not in rows or (rows[record.key].status != "ok" and record.status == "ok")


def machines() -> Iterator[tuple[str, str, dict[str, Any], list[Row]]]:
    """Every machine that has rows here: the folder they lie in, its id, its facts and its rows."""
    for folder in sorted(path for path in paths.MEASURED.glob("*") if path.is_dir()):
        records = [record for path in sorted(folder.glob("*.jsonl")) for record in journal.read(path)]
        rows = journal.latest_rows(records)
        facts = {record.id: record.data for record in records if isinstance(record, Fact)}
        for machine in dict.fromkeys(row.machine for row in rows):
            yield folder.name, machine, facts[machine], [row for row in rows if row.machine == machine]
