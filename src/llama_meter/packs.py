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
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from llama_meter import journal, paths
from llama_meter.cells import Arrival, Decode, Depth, Gate, MatMul, Naive, OnModel, Prefill, Read, columns
from llama_meter.errors import StudyError, offer
from llama_meter.journal import OTHERS
from llama_meter.measure import facts
from llama_meter.measure.identity import renewed
from llama_meter.measure.plan import TIME_LIMIT_S
from llama_meter.measure.tasks import REPEAT
from llama_meter.rows import SCHEMA, Fact, Record, Row, content_id, passed, row_key

SUFFIX = ".rows.gz"
ID = "[0-9a-f]{16}"  # of a machine
LEAST_OF_ID = 4  # characters that name a machine where no other one begins so
CHECKSUM = 16  # hex digits
MOST_BYTES, MOST_OF_A_LINE, MOST_TEXT = 64 << 20, 2 << 20, 4000  # unpacked; characters of a sentence
MOST_NAME = 200
SENTENCES = ("failure", "log", *facts.SENTENCES)
MOST_TIMES = 40  # unpacked size over packed size, at most: rows reach 3 to 8
MOST_VALUES, MOST_OF_A_ROW = 4_000_000, 250_000  # numbers, lists and objects of some 60 bytes; our packs have a fifth
TOLD = ("degenerate_loop", "refused")  # checks that do not judge
FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)  # the earliest date of a row
LONGEST_NS = 10**15  # the longest row: twelve days
MOST_BYTES_S, MOST_FLOPS_S = 1e14, 1e18  # beyond any machine
FINITE = (-sys.float_info.max, sys.float_info.max)
TIME, COUNT, MANY, BYTES = (0, LONGEST_NS), (0, 1 << 32), (0, 1 << 20), (0, 1 << 50)
CPU_TIME = (-(10**10), 9999 * LONGEST_NS)  # a difference of two counts, over all CPUs
BOUNDS: Mapping[str, tuple[float, float]] = {  # the least and the most of every number in a row, by its field
    "schema": (1, SCHEMA), "replicate": (0, 10**5), "block": (-1, REPEAT - 1), "order": (-1, 10**6), "pid": COUNT,
    "elapsed_ns": (1, LONGEST_NS),
    # results
    "samples_ns": TIME, "warmup_ns": TIME, "prefill_ns": TIME, "load_ns": TIME, "n_evaluated": (0, 1 << 40),
    "n_bytes": BYTES, "n_flops": (0, 1 << 60), "splits": (1, 1 << 20), "checks": FINITE, "series": FINITE,
    # requests, whose n_prompt is the cell's
    "arrived_ns": TIME, "token_ns": TIME, "sent_ns": TIME, "byte_ns": TIME, "ended_ns": TIME,
    # how it ended, and the conditions
    "exit_code": (-(1 << 31), 1 << 32), "load_1min": (0, 10**6), "throttled_us": TIME, "peak_rss_bytes": BYTES,
    "swapped_bytes": (0, 1 << 60), "gpu_used": (0, 100), "gpu_mhz": (0, 10**6),
    # what the system counted
    "wall_ns": (1, LONGEST_NS), "cpu_ns": CPU_TIME, "cpus": (1, 9999), "waited_ns": CPU_TIME, "involuntary": COUNT,
    "voluntary": (0, 1 << 40), "others_ns": CPU_TIME, "others_slow_ns": CPU_TIME, "throttled_ns": CPU_TIME,
    "stolen_ns": CPU_TIME, "pressure_ns": TIME, "mhz": (0, 10**6),
    "stalled_ns": TIME, "hot": COUNT, "stops": COUNT, "held_ns": TIME, "joules": (0, 10**12), "limits_w": (0, 10**6),
    # a cell
    "n_prompt": MANY, "n_gen": MANY, "n_seq": MANY, "n_threads": (1, 9999), "n_batch": (1, 1 << 24),
    "n_ubatch": (1, 1 << 24), "n_gpu_layers": (-1, 1 << 12), "calls": MANY, "n_chunks": MANY, "size": BYTES,
    "repetitions": (1, 10**6), "seed": BYTES, "n_arriving": MANY, "n_chunk": MANY, "n_processes": (1, 1 << 20),
    "killed": (-1, 1 << 20), "link_bps": BYTES, "n_requests": (1, 1 << 32), "per_second": (1e-6, 1e6),
    "n_draft": MANY, "rungs": MANY, "accepts": (0, 1), "temperature": (0, 1000), "n_clients": MANY,
}  # fmt: skip
HOME = re.compile(r"(?i)(?:/home|/Users|\\Users)[/\\][^/\\\s'\":,;)]+")
QUOTED = re.compile(r"(['\"])(?:[A-Za-z]:)?[/\\~][^'\"\n]*[/\\]")  # a folder in quotes may hold spaces
FOLDER = re.compile(r"(?:[A-Za-z]:)?[^\s'\"=:(),]*[/\\](?=[^/\\\s])")
ABSOLUTE = re.compile(r"(?:(?<![\w./:-])|(?<=-[IL]))(?:[A-Za-z]:[/\\]|/|~/)\w[^\s'\":]*[/\\]")
INSTRUCTIONS = {  # of architectures, as `platform.machine` and builds of the engine name them
    "x86_64": ("SSE3", "AVX", "AVX2", "AVX512"),
    "arm64": ("NEON", "SVE"),  # macOS
    "aarch64": ("NEON", "SVE"),  # Linux
}
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
    found = {path.stem: renewed(journal.read(path)) for path in sorted((paths.MEASURED / place).glob("*.jsonl"))}
    rows = [record for record in chain(*found.values()) if isinstance(record, Row)]
    newest = max(rows, key=lambda row: row.started, default=None)
    if newest is None:
        raise StudyError(str(paths.MEASURED / place), "no rows to pack", offer("study"))
    machine = identified(machine) if machine else newest.machine
    if not any(row.machine == machine for row in rows):
        raise StudyError(f"machine {machine!r}", f"has no rows in {place}", offer("rows list"))
    made = packed(machine, found, studies)
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
        known = {record.id: record for record in records if isinstance(record, Fact)}
        unfit = {fact.id: why for fact in known.values() if (why := _why_not(fact, _check_fact, machine))}
        study, _, scale = name.rpartition(".")
        own: list[Row] = []
        for row in (_nameless(row) for row in journal.latest_rows(records) if row.machine == machine):
            why = next((unfit[fact] for fact in row.facts if fact in unfit), "")
            if why := why or _why_not(row, _check_row, (study, scale), known, packed, studies):
                left_out[f"{name}: {why}"] += 1
            else:
                own.append(row)
                packed.add(row.key)
        if own:
            used = {fact for row in own for fact in row.facts}
            lines += [Name(study=study, scale=scale), *(fact for fact in known.values() if fact.id in used), *own]
    return Packed(machine, gzip.compress(b"".join(map(_line, lines)), mtime=0), len(packed), left_out)


def _why_not(record: Record, check: Callable[..., None], *told: Any) -> str:
    """Why a record may not be packed, or "": it names a folder, which cannot be removed from anything that a fact or a
    cell is identified by, or a check of it fails."""
    text = msgspec.json.encode(record).decode()
    if found := ABSOLUTE.search(text) or HOME.search(text):
        return f"names a folder: {found.group(0)[:100]}"
    try:
        check(record, *told)
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
    requests = [msgspec.structs.replace(each, failure=_anonymous(each.failure)) for each in row.requests]
    return msgspec.structs.replace(row, failure=failure, requests=requests)


def _anonymous(text: str) -> str:
    """A message without names and folders, and with unprintable characters replaced."""
    text = FOLDER.sub("", QUOTED.sub(r"\1", HOME.sub("~", text)))
    for name in _names():
        text = name.sub("...", text)
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)[:MOST_TEXT]


def _names() -> list[re.Pattern[str]]:
    """The host's name, whole and up to its first dot, and the user's."""
    found = {host := socket.gethostname(), host.split(".")[0]}
    with suppress(OSError, KeyError, RuntimeError):  # a user need not have a name or a home
        found |= {getpass.getuser(), Path.home().name}
    return [re.compile(rf"(?i)(?<![^\W_]){re.escape(name)}(?![^\W_])") for name in sorted(found, reverse=True) if name]


def unpack(source: Path | bytes, studies: Collection[str]) -> Pack:
    """The checked content of a pack, given as a file or its bytes; `studies`: the names of all studies.

    Raises
    ------
    StudyError
        A line does not belong in a pack of rows: the first such line, and why.

    """
    found, number, keys = Pack(), 0, set[str]()
    name = "", ""  # of the journal that the records belong to: study and scale
    records: list[Record] = []
    known: dict[str, Fact] = {}
    try:
        for number, line in enumerate(_lines(source), 1):
            record = _decoded(line)
            if number == 1:
                _check(isinstance(record, Header), "a pack begins with its header")
                _check(record.schema <= SCHEMA, f"schema {record.schema} is newer than this program's {SCHEMA}")
                _check(re.fullmatch(ID, record.machine), "the machine's id is no id")
                found.machine = record.machine
            elif isinstance(record, Name):
                name, known = (record.study, record.scale), {}
                _check_name(*name)
                _check(".".join(name) not in found.journals, f"journal {'.'.join(name)} comes twice")
                found.journals[".".join(name)] = records = []
            else:
                _check(found.journals and not isinstance(record, Header), "a record outside any journal")
                if isinstance(record, Fact):
                    _check_fact(record, found.machine)
                    _check(record.id not in known, "the fact comes twice")
                    known[record.id] = record
                else:
                    _check(record.machine == found.machine, "a row of another machine")
                    _check_row(record, name, known, keys, studies)
                    keys.add(record.key)
                records.append(record)
        number += 1
        _check(found.rows, "the pack ends without a row")
    except (ValueError, OSError, EOFError, zlib.error, OverflowError) as error:
        where = "what came" if isinstance(source, bytes) else str(source)
        raise StudyError(f"{where}, line {max(number, 1)}", str(error) or type(error).__name__, MEND) from error
    return found


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
            _check(len(line) <= MOST_OF_A_LINE and total <= most, "larger than any pack of rows")
            _check(own <= MOST_OF_A_ROW and values <= MOST_VALUES, "more numbers than any pack of rows has")
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
    _check(fact.what != "machine" or fact.id == machine, "facts of another machine")
    try:
        msgspec.convert(fact.data, facts.KINDS[fact.what])
    except msgspec.ValidationError as error:
        raise ValueError(f"{fact.what} {fact.id[:16]!r}: {error}") from error
    _check_texts(fact.data)


def _check_name(study: str, scale: str) -> None:
    _check(re.fullmatch("[0-9a-z-]{1,60}", study), f"a journal called {study[:40]!r}")
    _check(scale in TIME_LIMIT_S, f"scale {scale[:40]!r} is unknown")


def _check_row(
    row: Row, name: tuple[str, str], known: Mapping[str, Fact], keys: Collection[str], studies: Collection[str]
) -> None:
    """Check a row of a journal of this name: study and scale."""
    _check_name(*name)
    scale = name[1]
    _check_bounds(row)
    _check(row.study in studies, f"study {row.study[:40]!r} is unknown")
    _check(row.key not in keys, "the row comes twice")
    kinds = {"machine": [row.machine], "model": [row.model, *row.others], "engine": [row.engine]}
    kinds |= {"system": [row.system]}
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
    _check_place(row)
    _check(not row.cell.files or (row.model and row.engine), "a model that ran on nothing")
    if row.engine:
        _check_engine(row, known[row.machine].data, known[row.engine].data)
    models = [known[fact].data for fact in (row.model, *row.others) if fact]
    ran = [(model["name"], model["scale"], model["dtype"]) for model in models]
    _check(ran == list(row.cell.files), "a cell of other models than its facts'")
    _check(not isinstance(row.cell, OnModel) or row.cell.scale == scale, f"a cell of another scale than {scale}")
    judged = {name: value for name, value in row.checks.items() if name not in TOLD}
    _check(not row.valid or passed(judged), "valid, and a check of it does not hold")
    _check(columns(row.cell)["n_seq"] or isinstance(row.cell, Arrival), "a cell of nothing")  # nobody need decode
    _check_results(row)
    if row.status == "ok":
        _check_samples(row)
    _check_texts(_without_numbers(row))


def _check_engine(row: Row, machine: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """Check that a row is one that the engine named by its facts can have made on this machine."""
    built = {word for name, words in INSTRUCTIONS.items() for word in words if f"{word} = 1" in engine["build"]}
    own = INSTRUCTIONS.get(machine["architecture"], built)
    _check(built <= set(own), f"an engine built for another machine than {machine['architecture'][:20]!r}")
    offloaded = bool(getattr(row.cell, "n_gpu_layers", 0))
    _check(not offloaded or engine["gpu_offload"], "layers on a GPU, by an engine whose facts say that it has none")
    _check(not offloaded or machine.get("gpus"), "layers on a GPU, on a machine whose facts name none")


def _without_numbers(row: Row) -> dict[str, Any]:
    """A row's content for the check of its texts, without the numbers that are most of it."""
    requests = [msgspec.structs.replace(each, token_ns=[]) for each in row.requests]
    less = {"samples_ns": [], "warmup_ns": [], "prefill_ns": [], "series": {name: [] for name in row.series}}
    return dict(msgspec.to_builtins(msgspec.structs.replace(row, requests=requests, **less)))


def _check_bounds(row: Row) -> None:
    """Check every number of a row, and of all that it is made of, against BOUNDS."""
    for name in row.__struct_fields__:
        if name != "cell":
            _check_numbers(name, getattr(row, name))
    for name, value in columns(row.cell).items():
        _check_numbers(name, value)


def _check_numbers(name: str, value: Any) -> None:
    if isinstance(value, msgspec.Struct):
        for part in value.__struct_fields__:
            _check_numbers(part, getattr(value, part))
        return
    several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    if numbers := [each for each in several if type(each) in (int, float)]:
        low, high = BOUNDS[name]
        for number in (min(numbers), max(numbers)):
            _check(low <= number <= high, f"{name} is {number:.6g}, and may be {low:.6g} to {high:.6g}")
    for each in several:
        if isinstance(each, msgspec.Struct | dict | list | tuple):
            _check_numbers(name, each)


def _check_place(row: Row) -> None:
    """Check that a row is the one process of its cell in its block, or a repeat of it, as a sweep numbers them."""
    gate = isinstance(row.cell, Gate)
    _check((row.block < 0) == gate, "a gate in a block, or another cell in none")
    _check(row.replicate % REPEAT == max(row.block, 0), "a second replicate of one cell in a block")


def _check_results(row: Row) -> None:
    """Check that no time exceeds the worker's, that answers come in order, and that no rate exceeds any machine's."""
    times = [*chain(*row.samples_ns), *row.warmup_ns, *row.prefill_ns, row.load_ns]
    times += [at for request in row.requests for at in (request.arrived_ns, *request.token_ns)]
    _check(max(times) <= row.elapsed_ns, "a time longer than the row took")
    fastest = min(chain(*row.samples_ns), default=0) / 1e9
    for amount, most in ((row.n_bytes, MOST_BYTES_S), (row.n_flops, MOST_FLOPS_S)):
        _check(not amount or row.status != "ok" or amount <= most * fastest, "faster than any machine")
    for request in row.requests:
        _check(request.token_ns == sorted(request.token_ns), "tokens that came before others of their answer")


def _check_samples(row: Row) -> None:
    """Check that the samples that every machine times have the form their workload gives them."""
    cell, samples = row.cell, row.samples_ns
    _check(all(time > 0 for time in chain(*samples, row.prefill_ns)), "a pass that took no time")
    if isinstance(cell, Read | MatMul | Prefill | Decode | Naive | Depth):
        _check(samples and all(samples), "a pass that was not timed")
    if isinstance(cell, Read | MatMul):
        _check(columns(cell)["size"] > 0 and row.n_bytes + row.n_flops > 0, "a ceiling of nothing")
    if isinstance(cell, Naive):
        _check(len(samples) == 2, "not two ways to generate")
    if isinstance(cell, Depth) and not cell.text:
        depths = [row.series.get(name, []) for name in ("part_depth", "step_depth")]
        _check(list(map(len, depths)) == list(map(len, samples)), "times without their depths")


def _check_texts(value: Any, name: bool = True) -> None:
    """Check that names are plain, and that sentences are bounded and free of control characters."""
    if isinstance(value, str):
        _check(len(value) <= (MOST_NAME if name else MOST_TEXT), "a text without end")
        _check(value.replace("\n", " ").replace("\t", " ").isprintable(), "a text with control characters")
        _check(not name or facts.plain(value) == value, f"a name that is no plain text: {value[:40]!r}")
    elif isinstance(value, dict):
        for key, each in value.items():
            _check_texts(key)
            _check_texts(each, name and key not in SENTENCES)
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, (str, dict, list)):
                _check_texts(each, name)


def add(source: Path | bytes, studies: Collection[str], place: str = "") -> tuple[Pack, int]:
    """File a pack's rows that are missing here, at a place or in the machine's own folder; the pack, and the number of
    new rows.

    A successful row replaces a failed one of the same key. Nothing is written until every line is checked.
    """
    found = unpack(source, studies)
    return found, file(found, place)


def file(found: Pack, place: str = "") -> int:
    """File the rows of a checked pack that are missing here; the number of new rows."""
    new = 0
    for name, records in found.journals.items():
        with journal.Journal(paths.MEASURED / (place or found.machine) / f"{name}.jsonl") as here:
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
    found: dict[Path, int] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.jsonl"))):
        dropped = journal.drop(path, lambda record: isinstance(record, Row) and record.machine == machine)
        found |= {path: len(journal.latest_rows(dropped))} if dropped else {}
    if not found:
        raise StudyError(f"machine {machine!r}", "has no rows that came from elsewhere", offer("rows list"))
    with suppress(OSError):  # the folder is not empty
        (paths.MEASURED / machine).rmdir()
    return found


def identified(start: str) -> str:
    """The id of a machine with rows here, from its beginning; StudyError where none or several begin so."""
    if not re.fullmatch(f"[0-9a-f]{{{LEAST_OF_ID},}}", start):
        why = f"is no machine's id, nor the first {LEAST_OF_ID} or more of its characters"
        raise StudyError(f"machine {start!r}", why, offer("rows list"))
    known = sorted({machine for _, machine, _, _ in machines() if machine.startswith(start)})
    if len(known) > 1:
        raise StudyError(f"machine {start!r}", f"may be {' or '.join(known)}", "give more of its id")
    return known[0] if known else start


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
            known = {"chip": "unknown", "cores": None} | facts.get(machine, {})
            yield folder.name, machine, known, [row for row in rows if row.machine == machine]
