"""Rows travel in one file: nothing is lost on the way, nobody is named, and what is not a row gets in nowhere."""

import copy
import getpass
import gzip
import json
import random
import re
import shutil
import socket
import tracemalloc
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from llama_meter import journal, packs, paths, plausible
from llama_meter.cells import Decode, columns
from llama_meter.errors import StudyError
from llama_meter.measure.tasks import REPEAT
from llama_meter.rows import Conditions, Evidence, Fact, Failure, Request, Row, State, content_id, row_key
from plamo_study.cli import rows as commands
from plamo_study.laws import strangers
from plamo_study.plans.registry import STUDIES

REFERENCE = paths.MEASURED / "reference"
MUTANTS = 150  # of each kind


@pytest.fixture(scope="module")
def machine() -> str:
    """The recorded machine with the fewest rows, some of them timed."""
    tracked = (found for found in packs.machines() if found[0] == REFERENCE.name)
    tracked = (found for found in tracked if any(row.samples_ns for row in found[3]))
    return min(tracked, key=lambda found: len(found[3]))[1]


@pytest.fixture(scope="module")
def text(machine) -> bytes:
    return gzip.decompress(packs.pack("reference", STUDIES, machine).data)


@pytest.fixture
def measured(tmp_path, monkeypatch) -> Path:
    """An empty folder of measured rows."""
    monkeypatch.setattr(paths, "MEASURED", tmp_path / "measured")
    return tmp_path / "measured"


@pytest.fixture
def own(machine, measured):
    """The facts and rows of one journal of the machine, and a function that writes records as measured here."""
    recorded = ((path, journal.read(path)) for path in sorted(REFERENCE.glob("*.jsonl")))
    name, records = next((path.name, found) for path, found in recorded if rows_of(machine, found))

    def write(*records, name=name):
        with journal.Journal(measured / "local" / name) as here:
            here.append(*records)

    return [each for each in records if isinstance(each, Fact)], rows_of(machine, records), write


def rows_of(machine, records):
    return [row for row in journal.latest_rows(records) if row.machine == machine]


def filed(machine, folder):
    found = [row for path in folder.glob("*.jsonl") for row in journal.latest_rows(journal.read(path))]
    return {row.key: row for row in found if row.machine == machine}


@pytest.mark.long
def test_a_machine_s_rows_come_out_as_they_went_in_and_are_filed_once(text, machine, measured):
    before = {row.key: packs._nameless(row) for row in filed(machine, REFERENCE).values()}
    assert packs.add(gzip.compress(text), STUDIES)[1] == len(before)
    assert filed(machine, measured / machine) == before
    assert packs.add(gzip.compress(text), STUDIES)[1] == 0, "what is here already"


def test_a_pack_names_no_host_no_user_and_no_folder(own):
    facts, (row, *_), write = own
    home, host, user = str(Path.home()), socket.gethostname(), getpass.getuser()
    said = f"{home}/models/a.gguf on {host} by {user}: C:\\Users\\ada\\log, {paths.ROOT}"
    tail = ["/home/ada/secret/x.cpp:3: failed", f"-I/home/ada/include on {host.upper()}", "'/Users/Ada B/a b/m.gguf'"]
    failure = Failure(stage="load", message=said + "\x1b[0m", log_tail=tail)
    write(*facts, msgspec.structs.replace(row, status="error", valid=None, failure=failure, samples_ns=[]))
    packed = gzip.decompress(packs.pack("local", STUDIES).data).decode()
    kept = json.loads(packed.splitlines()[-1].split(" ", 1)[1])["failure"]
    assert "a.gguf" in kept["message"]
    assert (kept["log_tail"][0], kept["log_tail"][2]) == ("x.cpp:3: failed", "'m.gguf'")
    for name in (home, host, "ada", str(paths.ROOT.parent), f"by {user}"):
        assert not re.search(rf"(?i)(?<!\w){re.escape(name)}(?!\w)", packed), name


def test_an_answer_that_was_refused_as_it_should_be_is_packed():
    records = journal.read(REFERENCE / "15-elsewhere.mini.jsonl")
    machine = next(row.machine for row in records if isinstance(row, Row) and row.checks.get("refused"))
    made = packs.packed(machine, {"15-elsewhere.mini": records}, STUDIES)
    assert (made.rows, dict(made.left_out)) == (len(rows_of(machine, records)), {})


@pytest.mark.parametrize("study", ["16-requests.shape", "16-pairs.mini"])
def test_rows_of_two_files_and_of_one_beside_them_are_packed(study):
    records = journal.read(REFERENCE / f"{study}.jsonl")
    machine = [row.machine for row in records if isinstance(row, Row)][-1]
    made = packs.packed(machine, {study: records}, STUDIES)
    assert dict(made.left_out) == {}
    assert made.rows == len({row.key for row in rows_of(machine, records)})


LONG = 10**8  # ns


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"samples_ns": [[LONG, 0, 0, LONG]]}, "moved in no time"),
        ({"samples_ns": [[0, LONG, LONG, LONG]]}, "took no time"),
        ({"samples_ns": [[LONG, LONG]]}, "four parts"), ({"samples_ns": []}, "faster than any machine"),
        ({"series": {"resident": [1.0]}}, "memory of other files"),
        ({"series": {"resident": [1.0, 2.0, 3.0], "kld/__F16__>Q4_0": [1.0]}}, "no plain text"),
    ],
)  # fmt: skip
def test_a_request_that_nobody_could_have_timed_is_left_out(changed, why):
    records = journal.read(REFERENCE / "16-requests.shape.jsonl")
    pair = next(row for row in records if isinstance(row, Row) and row.cell.files[1:] and row.cell.workload == "relay")
    forged = msgspec.structs.replace(pair, **changed)
    records = [record for record in records if isinstance(record, Fact)] + [forged]
    made = packs.packed(pair.machine, {"16-requests.shape": records}, STUDIES)
    assert made.rows == 0
    assert why in next(iter(made.left_out))


def test_what_names_a_folder_or_that_no_door_takes_is_left_out_and_all_others_packed(own):
    facts, (first, second, third, *others), write = own
    hot = msgspec.structs.replace(first.conditions, thermal="/home/ada/hot")
    write(*facts, msgspec.structs.replace(first, conditions=hot))
    with pytest.raises(StudyError, match="names a folder"):
        packs.pack("local", STUDIES)
    of_model = next(row for row in others if row.model)
    data = {fact.id: fact for fact in facts}[of_model.model].data | {"assumptions": ["see /home/ada/notes"]}
    noted = Fact(id=content_id(data), what="model", data=data)
    write(noted, rekeyed(of_model, {of_model.model: noted.id}), msgspec.structs.replace(second, elapsed_ns=0), third)
    write(*facts, third, name="notes.jsonl")
    made = packs.pack("local", STUDIES)
    assert (made.rows, sum(made.left_out.values()), len(made.left_out)) == (1, 4, 3)
    assert packs.unpack(made.data, STUDIES).rows == 1


def test_a_pack_that_is_refused_is_not_written(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts, (row, *_), write = own
    with pytest.raises(StudyError, match="no rows to pack"):
        packs.pack("local", STUDIES)
    write(*facts, row)
    monkeypatch.setattr(packs, "MOST_VALUES", 1)
    with pytest.raises(StudyError):
        commands.pack()
    assert not list(tmp_path.glob("*.gz*"))


def test_a_byte_that_changed_on_the_way_is_found_in_its_line(text, measured):
    rng = random.Random(1)
    for _ in range(MUTANTS):
        at = rng.randrange(len(text) - 1)
        broken = bytearray(text)
        broken[at] ^= 1 << rng.randrange(8)
        with pytest.raises(StudyError, match=rf"line {text[:at].count(bytes([10])) + 1}\b"):
            packs.add(gzip.compress(bytes(broken), 1), STUDIES)
    assert not measured.exists()


# Changes to a record that whoever forges a pack gives a right checksum: what is left is what the rows say.

BAD = {"status": "error", "valid": None}
ROW = [
    {"samples_ns": [[-1]]}, {"samples_ns": [[10**15]]}, {"failure": {"stage": "load", "message": "a" * 10**5}} | BAD,
    {"failure": {"stage": "load", "message": "\x1b]0;owned\x07"}} | BAD,
    {"checks": {"deep": json.loads("[" * 900 + "]" * 900)}},
    {"schema": 99}, {"study": "../../etc/passwd"}, {"study": "99-nothing"}, {"key": "0" * 16}, {"key": "../x"},
    {"machine": "0" * 16}, {"machine": ""}, {"model": "f" * 16}, {"engine": "e" * 16}, {"replicate": 10**6},
    {"replicate": -1}, {"started": "yesterday"}, {"started": "1999-01-01T00:00:00+00:00"}, {"started": "2026-11-01"},
    {"started": "2999-01-01T00:00:00+00:00"}, {"elapsed_ns": 0}, {"elapsed_ns": -5}, {"elapsed_ns": 10**400},
    {"status": "fine"}, {"status": "error", "valid": True}, {"failure": {"stage": "run"}}, {"n_evaluated": -1},
    {"samples_ns": "fast"}, {"samples_ns": [[1]], "n_bytes": 10**15}, {"samples_ns": [[1]], "n_flops": 10**15},
    {"checks": {"error": "none"}}, {"kind": "fact"}, {"kind": "pack"}, {"kind": None}, {"cell": {"workload": "mine"}},
    {"valid": True, "checks": {"second_path": False}}, {"model": ""}, {"engine": ""}, {"block": 10**30}, {"schema": 0},
    {"pid": -1}, {"order": -2}, {"series": {"pss": ["a"]}},
    {"requests": [{"id": "0", "n_prompt": 1, "arrived_ns": -1}]},
    {"splits": [1]}, {"splits": [0, 1]}, {"splits": [1, 10**12]},
]  # fmt: skip
FACT = [
    {"id": "0" * 16}, {"data": {}}, {"data": {"chip": "M9", "cores": 2, "memory_bytes": 2**34}}, {"what": "secret"},
    {"what": "machine"}, {"kind": "row"}, {"data": "nothing"},
]  # fmt: skip
NAME = [{"study": "../outside"}, {"study": "a/b"}, {"scale": "huge"}, {"scale": "../mini"}, {"study": ""}]
HEADER = [{"machine": "../reference"}, {"machine": "0" * 16}, {"schema": 99}, {"kind": "journal"}, {"machine": None}]
CHANGES = {"row": ROW, "fact": FACT, "journal": NAME, "pack": HEADER}


def test_a_forged_record_is_refused_with_its_line(text, measured):
    rng, lines = random.Random(2), text.splitlines()
    for _ in range(MUTANTS):
        number = rng.choice([0, 1, rng.randrange(2, 8), *[rng.randrange(2, len(lines)) for _ in range(6)]])
        record = json.loads(lines[number].split(b" ", 1)[1])
        change = rng.choice(CHANGES[record["kind"]])
        if record | change == record:
            continue
        encoded = json.dumps(record | change).encode()
        forged = [*lines[:number], packs._checksum(encoded) + b" " + encoded, *lines[number + 1 :], b""]
        with pytest.raises(StudyError, match=r"line \d+") as refused:
            packs.add(gzip.compress(b"\n".join(forged), 1), STUDIES)
        line = int(re.search(r"line (\d+)", str(refused.value)).group(1))
        # A fact or a name that is wrong may show only in the first row that rests on it.
        assert number + 1 <= line <= number + 21, change
    assert not measured.exists()


def numeric(kind):
    """The fields of a type whose values are numbers, or are made of numbers."""
    named = {name for name, told in get_type_hints(kind).items() if re.search(r"\b(int|float)\b", str(told))}
    return named & set(kind.__struct_fields__)


def test_every_number_in_a_row_has_bounds():
    parts = {name for kind in (Row, Conditions, State, Evidence, Request, Failure) for name in numeric(kind)}
    of_cells = {name for name, value in columns(Decode()).items() if type(value) in (int, float)} | {"calls", "rungs"}
    assert parts | of_cells == set(plausible.BOUNDS)


@pytest.fixture(scope="module")
def timed():
    """A row that has every kind of number, and a check of it."""
    records = journal.read(REFERENCE / "09-disaggregation.shape.jsonl")
    known = {each.id: each for each in records if isinstance(each, Fact)}
    row = next(each for each in records if isinstance(each, Row) and each.requests and each.valid)
    times = sorted(range(1, 1 + len(row.requests)))
    counted = msgspec.structs.replace(row.conditions.whole, joules={"package": 1.0}, limits_w={"package": 1.0})
    conditions = msgspec.structs.replace(row.conditions, timed=counted, before=State(swapped_bytes=0, gpu_used=0.0))
    row = msgspec.structs.replace(row, conditions=conditions, prefill_ns=times, splits=(1, 1))

    def check(changed):
        plausible.check_row(changed, ("09-disaggregation", "shape"), known, set(), STUDIES)

    check(rekeyed(row, {}))
    return row, check


@pytest.mark.parametrize("beyond", [lambda low, high: low - 1, lambda low, high: 2 * high + 1], ids=["below", "above"])
def test_no_number_of_a_row_lies_beyond_its_bounds(timed, beyond):
    row, check = timed
    for name, (low, high) in plausible.BOUNDS.items():
        if name in ("checks", "series", "exit_code", "schema"):  # all that is finite; of a failure; a later program's
            continue
        changed = rekeyed(changed_number(row, name, beyond(low, high)), {})
        if changed != row:
            with pytest.raises((ValueError, OverflowError)):
                check(changed)


def changed_number(value, name, number):
    """A row or a part of it with one of its numbers replaced, wherever it is."""
    changes = {}
    names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
    for attribute, field in names:
        own = getattr(value, attribute)
        if field == name:
            changes[attribute] = put(own, number)
        elif isinstance(own, msgspec.Struct):
            changes[attribute] = changed_number(own, name, number)
        elif field == "requests":
            changes[attribute] = [changed_number(each, name, number) for each in own]
    return msgspec.structs.replace(value, **changes)


def put(own, number):
    if isinstance(own, dict):
        return dict.fromkeys(own, number)
    if isinstance(own, list | tuple):
        return type(own)(put(each, number) for each in own)
    return number


def test_a_second_replicate_of_a_cell_in_a_block_is_refused_and_a_repeat_of_it_is_not(timed):
    row, check = timed
    check(rekeyed(msgspec.structs.replace(row, replicate=row.replicate + REPEAT), {}))
    for changes in ({"replicate": row.replicate + 1}, {"block": row.block + 1}, {"block": -1}):
        with pytest.raises(ValueError, match="block"):
            check(rekeyed(msgspec.structs.replace(row, **changes), {}))


def test_an_analysis_that_raises_on_a_pack_is_a_refusal_with_a_reason(text, monkeypatch):
    monkeypatch.setattr(strangers.machines, "passes", lambda studies: 1 / 0)
    found = packs.unpack(gzip.compress(text), STUDIES)
    found.journals = {f"{name.partition('.')[0]}.shape": records for name, records in found.journals.items()}
    with pytest.raises(StudyError, match=r"cannot be analysed \(ZeroDivisionError"):
        strangers.check(found)


MARKUP = ["<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "`x`", "a|b", "$x$", "a\nb", "\u202ex", "x" * 999]
NAMED = {  # where a fact holds a name that a page shows
    "machine": [("chip",), ("os",), ("compiler",), ("gpus", 0, "chip"), ("gpus", 0, "name"), ("new",)],
    "engine": [("binding",), ("commit",), ("corrects", 0), ("llama",), ("new",)],
    "model": [("name",), ("dtype",), ("shape", "arch"), ("findings", 0), ("tensors", "<b>")],
}
WRONG = [-1, 2**62, 1.5, 1e308, "", {}, {"a": 1}]
FIELDS = {
    "machine": ["chip", "cores", "performance_cores", "memory_bytes", "os"],
    "engine": ["binding", "commit", "gpu_offload", "sha256", "corrects", "window"],
    "model": ["name", "dtype", "synthetic", "sha256", "file_bytes", "n_params", "assumptions", "shape", "tensors"],
}


def test_a_fact_with_markup_or_beyond_any_machine_does_not_come_in(text, measured):
    rng = random.Random(3)
    names = [(what, where, name) for what in NAMED for where in NAMED[what] for name in rng.sample(MARKUP, 2)]
    fields = [(what, (name,), value) for what in FIELDS for name in FIELDS[what] for value in rng.sample(WRONG, 2)]
    for what, where, value in [*names, *fields]:
        with pytest.raises(StudyError):
            packs.add(forged_fact(text, what, where, value), STUDIES)
    assert not measured.exists()


def forged_fact(text: bytes, what: str, where: tuple, value: object) -> bytes:
    """The pack with a value put into every fact of a kind, and all names that are made of its content right."""
    records, ids = [packs._decoded(line + b"\n") for line in text.splitlines()], {}
    for number, record in enumerate(records):
        if isinstance(record, Fact) and record.what == what:
            data = copy.deepcopy(record.data)
            if len(where) > 1 or where == ("new",):
                data |= {"corrects": ["D2"], "findings": ["x"]}
                data.setdefault("gpus", [{"name": "CUDA0", "chip": "Board", "memory_bytes": 1}])
            at = data
            for key in where[:-1]:
                at = at[key]
            at[where[-1]] = value
            records[number] = Fact(id=content_id(data), what=what, data=data)
            ids[record.id] = records[number].id
        elif isinstance(record, Row):
            records[number] = rekeyed(record, ids)
    records[0] = msgspec.structs.replace(records[0], machine=ids.get(records[0].machine, records[0].machine))
    return gzip.compress(b"".join(map(packs._line, records)), 1)


def rekeyed(row: Row, ids: dict[str, str]) -> Row:
    new = {name: ids.get(getattr(row, name), getattr(row, name)) for name in ("machine", "model", "engine")}
    row = msgspec.structs.replace(row, **new, others=[ids.get(other, other) for other in row.others])
    study = f"{row.study}/anchor" if row.anchor else row.study
    key = row_key(study, row.cell, row.model, row.engine, row.machine, row.replicate, *row.others)
    return msgspec.structs.replace(row, key=key)


def test_a_machine_s_rows_are_removed_and_nobody_else_s(text, machine, measured):
    (measured / "reference").mkdir(parents=True)
    shutil.copy(REFERENCE / "00-gates.mini.jsonl", measured / "reference")
    (measured / ("0" * 16)).symlink_to("reference")
    before = {path: path.read_bytes() for path in (measured / "reference").iterdir()}
    there = packs.add(forged_fact(text, "machine", ("chip",), "another"), STUDIES, "others")[0].machine
    for place in ("others", ""):
        n_rows = packs.add(gzip.compress(text), STUDIES, place)[0].rows
    kept = filed(there, measured / "others")
    for no_machine in ("reference", "local", "others", "../reference", "", "0" * 16, "*"):
        with pytest.raises(StudyError):
            packs.remove(no_machine)
    assert sum(packs.remove(machine).values()) == 2 * n_rows
    assert not (measured / machine).exists()
    assert (filed(there, measured / "others"), filed(machine, measured / "others")) == (kept, {})
    packs.remove(there)
    assert not list((measured / "others").iterdir())
    assert {path: path.read_bytes() for path in (measured / "reference").iterdir()} == before


@pytest.mark.whole
@pytest.mark.parametrize("size", [1 << 18, 3 << 20], ids=["many rows", "large rows"])
def test_a_small_pack_cannot_take_much_memory(text, measured, size):
    """Its lines become very many objects, in a row whose checksum is right."""
    line = next(line for line in text.splitlines() if b'"kind":"row"' in line and b'"samples_ns"' in line)
    before, after = line.split(b" ", 1)[1].split(b'"samples_ns":')
    for piece in (b"[],", b"[999],"):
        made = before + b'"samples_ns":[' + (piece * (size // len(piece)))[:-1] + b"]," + after.split(b"]],", 1)[1]
        bomb = packs._checksum(made) + b" " + made + b"\n"
        packed = gzip.compress(text[: text.index(line)] + bomb * ((45 << 20) // size))
        assert len(packed) < 1 << 20
        tracemalloc.start()
        with pytest.raises(StudyError):
            packs.add(packed, STUDIES)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 50 << 20, piece


def test_a_row_that_went_well_replaces_the_one_that_did_not(text, machine, measured):
    packs.add(gzip.compress(text), STUDIES)
    path = next((measured / machine).glob("*.jsonl"))
    rows = journal.latest_rows(journal.read(path))
    with journal.Journal(path) as here:
        here.append(msgspec.structs.replace(rows[0], status="error", valid=None, failure=Failure(stage="run")))
    assert packs.add(gzip.compress(text), STUDIES)[1] == 1
    assert {row.key: row for row in journal.latest_rows(journal.read(path))} == {row.key: row for row in rows}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda text, lines: gzip.compress(text)[:-200], "ended|Compressed|end"),
        (lambda text, lines: b"not gzip at all", "gzip"),
        (lambda text, lines: gzip.compress(b""), "without a row"),
        (lambda text, lines: gzip.compress(text[:-1]), "cut off"),
        (lambda text, lines: gzip.compress(lines[0]), "without a row"),
        (lambda text, lines: gzip.compress(text + lines[-1]), "twice"),
        (lambda text, lines: gzip.compress(b"".join([*lines[:3], *lines[2:]])), "the fact comes twice"),
        (lambda text, lines: gzip.compress(b"a" * (64 << 20)), "larger than any"),
    ],
    ids=["cut", "no gzip", "empty", "half a line", "header alone", "a row twice", "a fact twice", "a bomb"],
)
def test_what_is_no_pack_is_refused(text, measured, tmp_path, made, why):
    (tmp_path / "bad.rows.gz").write_bytes(made(text, text.splitlines(keepends=True)))
    with pytest.raises(StudyError, match=why):
        packs.add(tmp_path / "bad.rows.gz", STUDIES)
    assert not measured.exists()
