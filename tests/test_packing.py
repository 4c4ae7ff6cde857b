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
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from plamo_study import paths
from plamo_study.cli import rows as commands
from plamo_study.errors import StudyError
from plamo_study.measure import journal, packing
from plamo_study.measure.rows import Fact, Failure, Record, Row, content_id, row_key
from plamo_study.studies.registry import STUDIES

REFERENCE = paths.MEASURED / "reference"
MUTANTS = 250  # of either kind


@pytest.fixture(scope="module")
def machine() -> str:
    """The recorded machine with the fewest rows."""
    tracked = (found for found in packing.machines() if found[0] == REFERENCE.name)
    return min(tracked, key=lambda found: len(found[3]))[1]


@pytest.fixture(scope="module")
def text(machine) -> bytes:
    return gzip.decompress(packing.pack("reference", STUDIES, machine).data)


@pytest.fixture
def measured(tmp_path, monkeypatch) -> Path:
    """An empty folder of measured rows."""
    monkeypatch.setattr(paths, "MEASURED", tmp_path / "measured")
    return tmp_path / "measured"


def written(path: Path, text: bytes) -> Path:
    path.write_bytes(gzip.compress(text, 1))
    return path


def first(records: list[Record], n: int = 30) -> list[Record]:
    """All facts of a journal, and the first rows of each machine in it."""
    seen: Counter[str] = Counter()
    kept = []
    for record in records:
        if isinstance(record, Row):
            seen[record.machine] += 1
        if not isinstance(record, Row) or seen[record.machine] <= n:
            kept.append(record)
    return kept


def rows_of(machine: str, folder: Path) -> dict[str, Row]:
    found = [row for path in folder.glob("*.jsonl") for row in journal.latest_rows(journal.read(path))]
    return {row.key: row for row in found if row.machine == machine}


def test_every_recorded_machine_s_rows_come_out_as_they_went_in(tmp_path, monkeypatch):
    recorded = {path.stem: first(journal.read(path)) for path in REFERENCE.glob("*.jsonl")}
    rows = [row for records in recorded.values() for row in journal.latest_rows(records)]
    machines = {row.machine for row in rows}
    assert len(machines) > 1
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    for machine in machines:
        made = packing.packed(machine, recorded, STUDIES)
        assert not made.left_out
        before = {row.key: packing._nameless(row) for row in rows if row.machine == machine}
        assert packing.add(made.data, STUDIES)[1] == len(before)
        assert rows_of(machine, tmp_path / machine) == before
    assert packing.add(made.data, STUDIES)[1] == 0, "what is here already"
    assert {machine for _, machine, _, _ in packing.machines()} == machines


def test_a_pack_names_no_host_no_user_and_no_folder(machine, measured):
    path = next(path for path in sorted(REFERENCE.glob("*.jsonl")) if rows_in(path, machine))
    records = journal.read(path)
    row = rows_in(path, machine)[0]
    host, user = socket.gethostname(), getpass.getuser()
    said = f"{Path.home()}/models/a.gguf on {host} by {user}: C:\\Users\\ada\\log, {paths.ROOT}"
    tail = [
        "/home/ada/secret/x.cpp:3: failed",
        "-I/home/ada/include on " + host.upper(),
        "'/Users/Ada Lovelace/a b/m.gguf'",
    ]
    failure = Failure(stage="load", message=said + "\x1b[0m", log_tail=tail)
    with journal.Journal(measured / "local" / path.name) as here:
        for record in records:
            if not isinstance(record, Row):
                here.append(record)
        here.append(msgspec.structs.replace(row, status="error", valid=None, failure=failure, samples_ns=[]))
    packed = gzip.decompress(packing.pack("local", STUDIES).data).decode()
    kept = json.loads(packed.splitlines()[-1].split(" ", 1)[1])["failure"]
    assert "a.gguf" in kept["message"]
    assert (kept["log_tail"][0], kept["log_tail"][2]) == ("x.cpp:3: failed", "'m.gguf'")
    for name in (str(Path.home()), socket.gethostname(), "ada", "lovelace", str(paths.ROOT.parent)):
        assert not re.search(rf"(?i)(?<!\w){re.escape(name)}(?!\w)", packed), name
    assert not re.search(rf"by {getpass.getuser()}", packed)


def rows_in(path: Path, machine: str) -> list[Row]:
    return [row for row in journal.latest_rows(journal.read(path)) if row.machine == machine]


def test_a_byte_that_changed_on_the_way_is_found_in_its_line(text, measured, tmp_path):
    rng = random.Random(1)
    for _ in range(MUTANTS):
        at = rng.randrange(len(text) - 1)
        broken = bytearray(text)
        broken[at] ^= 1 << rng.randrange(8)
        changed = text[:at].count(b"\n") + 1
        with pytest.raises(StudyError, match=rf"line {changed}\b"):
            packing.add(written(tmp_path / "broken.rows.gz", bytes(broken)), STUDIES)
    assert not measured.exists()


# Changes to a record that whoever forges a pack gives a right checksum: what is left is what the rows say.


def put(**changes):
    return lambda record, rng: record | changes


def made_faster(record, rng):
    return record | {"samples_ns": [[-1 - rng.randrange(10**9)]]}


def made_longer_than_its_row(record, rng):
    return record | {"samples_ns": [[record["elapsed_ns"] + 1 + rng.randrange(10**12)]]}


def another_cell(record, rng):
    return record | {"cell": record["cell"] | {"n_threads": 3 + rng.randrange(99)}}


def without(record, rng):
    name = rng.choice(["schema", "key", "study", "cell", "machine", "status", "started", "elapsed_ns", "conditions"])
    return {key: value for key, value in record.items() if key != name}


def endless(record, rng):
    return record | {"failure": {"stage": "load", "message": "a" * 10**5}, "status": "error", "valid": None}


def hidden(record, rng):
    return record | {"failure": {"stage": "load", "message": "\x1b]0;owned\x07"}, "status": "error", "valid": None}


def deep(record, rng):
    value = []
    for _ in range(900):
        value = [value]
    return record | {"checks": {"deep": value}}


ROW = [
    made_faster, made_longer_than_its_row, another_cell, without, endless, hidden, deep,
    put(schema=99), put(study="../../etc/passwd"), put(study="99-nothing"), put(key="0" * 16), put(key="../x"),
    put(machine="0" * 16), put(machine=""), put(model="f" * 16), put(engine="e" * 16), put(replicate=10**6),
    put(replicate=-1), put(started="yesterday"), put(started="1999-01-01T00:00:00+00:00"), put(started="2026-11-01"),
    put(started="2999-01-01T00:00:00+00:00"), put(elapsed_ns=0), put(elapsed_ns=-5), put(elapsed_ns=10**400),
    put(status="fine"), put(status="error", valid=True), put(failure={"stage": "run"}), put(n_evaluated=-1),
    put(samples_ns="fast"), put(samples_ns=[[1]], n_bytes=10**15), put(samples_ns=[[1]], n_flops=10**15),
    put(checks={"error": "none"}), put(kind="fact"), put(kind="pack"), put(kind=None), put(cell={"workload": "mine"}),
    put(valid=True, checks={"second_path": False}), put(model=""), put(engine=""), put(block=10**30), put(schema=0),
    put(pid=-1), put(order=-2), put(series={"pss": ["a"]}), put(requests=[{"id": "0", "n_prompt": 1, "arrived_ns": -1}])
]  # fmt: skip
FACT = [
    put(id="0" * 16), put(data={}), put(data={"chip": "M9", "cores": 2, "memory_bytes": 2**34}), put(what="secret"),
    put(what="machine"), put(kind="row"), put(data="nothing"),
]  # fmt: skip
NAME = [put(study="../outside"), put(study="a/b"), put(scale="huge"), put(scale="../mini"), put(study="")]
HEADER = [put(machine="../reference"), put(machine="0" * 16), put(schema=99), put(kind="journal"), put(machine=None)]
CHANGES = {"row": ROW, "fact": FACT, "journal": NAME, "pack": HEADER}


def forged(text: bytes, rng: random.Random) -> tuple[bytes, int, str]:
    """A pack with one record changed and all checksums right; the line of the change, and what was changed."""
    lines = text.splitlines()
    number = rng.choice([0, 1, rng.randrange(2, 8), *[rng.randrange(2, len(lines)) for _ in range(6)]])
    record = json.loads(lines[number].split(b" ", 1)[1])
    change = rng.choice(CHANGES[record["kind"]])
    changed = change(copy.deepcopy(record), rng)
    if changed == record:
        return forged(text, rng)
    encoded = json.dumps(changed).encode()
    lines[number] = packing._checksum(encoded) + b" " + encoded
    return (
        b"\n".join(lines) + b"\n",
        number + 1,
        str({name: value for name, value in changed.items() if record.get(name) != value}),
    )


def test_a_forged_record_is_refused_with_its_line(text, measured, tmp_path):
    rng = random.Random(2)
    for _ in range(MUTANTS):
        broken, changed, what = forged(text, rng)
        try:
            packing.add(written(tmp_path / "forged.rows.gz", broken), STUDIES)
        except StudyError as error:
            refused = error
        else:
            pytest.fail(what)
        line = int(re.search(r"line (\d+)", str(refused)).group(1))
        # A fact or a name that is wrong may show only in the first row that rests on it.
        assert changed <= line <= changed + 20, (what, str(refused))
    assert not measured.exists()


def test_rows_that_name_a_folder_or_that_no_door_takes_are_left_out_and_all_others_packed(machine, measured):
    path = next(path for path in sorted(REFERENCE.glob("*.jsonl")) if rows_in(path, machine))
    first, second, third = rows_in(path, machine)[:3]
    named = msgspec.structs.replace(
        first, conditions=msgspec.structs.replace(first.conditions, thermal="/home/ada/hot")
    )
    wrong = msgspec.structs.replace(second, elapsed_ns=0)
    facts = [record for record in journal.read(path) if not isinstance(record, Row)]
    with journal.Journal(measured / "local" / path.name) as here:
        here.append(*facts, named)
    with pytest.raises(StudyError, match="names a folder"):
        packing.pack("local", STUDIES)
    with journal.Journal(measured / "local" / path.name) as here:
        here.append(wrong, third)
    with journal.Journal(measured / "local" / "notes.jsonl") as here:
        here.append(*facts, third)
    made = packing.pack("local", STUDIES)
    assert (made.rows, sum(made.left_out.values()), len(made.left_out)) == (1, 3, 3)
    assert packing.unpack(made.data, STUDIES).rows == 1


def test_a_row_whose_facts_name_a_folder_is_left_out(machine, measured):
    path = next(path for path in sorted(REFERENCE.glob("*.jsonl")) if rows_in(path, machine))
    rows = [row for row in rows_in(path, machine) if row.model]
    facts = {record.id: record for record in journal.read(path) if isinstance(record, Fact)}
    data = facts[rows[0].model].data | {"assumptions": ["accepted: see /home/ada/notes"]}
    fact = Fact(id=content_id(data), what="model", data=data)
    with journal.Journal(measured / "local" / path.name) as here:
        here.append(*facts.values(), fact, rekeyed(rows[0], {rows[0].model: fact.id}), rows[1])
    made = packing.pack("local", STUDIES)
    assert (made.rows, list(made.left_out.values())) == (1, [1])


def test_a_pack_that_is_refused_is_not_written(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = sorted(REFERENCE.glob("*.jsonl"))[0]
    records = journal.read(path)
    row = next(record for record in records if isinstance(record, Row))
    with journal.Journal(measured / "local" / path.name) as here:
        here.append(*(record for record in records if isinstance(record, Fact)), row)
    monkeypatch.setattr(packing, "MOST_VALUES", 1)
    with pytest.raises(StudyError):
        commands.pack()
    assert not list(tmp_path.glob("*.gz*"))


NAMES = {  # of every fact, those that a page shows
    "machine": [("chip",), ("os",), ("compiler",), ("gpus", 0, "chip"), ("gpus", 0, "name"), ("new",)],
    "engine": [("binding",), ("commit",), ("corrects", 0), ("llama",), ("new",)],
    "model": [("name",), ("dtype",), ("shape", "arch"), ("findings", 0), ("tensors", "<b>")],
}
MARKUP = ["<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "`x`", "a|b", "$x$", "a\nb", "\u202ex", "x" * 999]


@pytest.mark.parametrize(("what", "where"), [(what, where) for what in NAMES for where in NAMES[what]])
def test_a_name_that_is_no_plain_text_does_not_come_in(text, measured, what, where):
    for name in MARKUP:
        data = forged_fact(text, what, lambda fact, name=name: placed(fact, where, name))
        with pytest.raises(StudyError):
            packing.add(data, STUDIES)
    assert not measured.exists()


WRONG = [None, -1, 2**62, 1.5, 1e308, "", "x", [], [1], ["x"], {}, {"a": 1}, True]
FIELDS = {
    "machine": ["chip", "cores", "performance_cores", "memory_bytes", "last_level_cache_bytes", "os"],
    "engine": ["binding", "commit", "gpu_offload", "sha256", "corrects", "window"],
    "model": ["name", "dtype", "synthetic", "sha256", "file_bytes", "n_params", "assumptions", "shape", "tensors"],
}
FINE = {  # of these, what a fact may hold
    "chip": ["x"], "os": ["x"], "binding": ["x"], "commit": ["x"], "name": ["x"], "dtype": ["x"], "cores": [None],
    "gpu_offload": [True], "synthetic": [True], "corrects": [[], ["x"]], "assumptions": [[], ["x"]],
    "last_level_cache_bytes": [],
}  # fmt: skip


@pytest.mark.parametrize(("what", "name"), [(what, name) for what in FIELDS for name in FIELDS[what]])
def test_a_fact_of_another_type_or_beyond_any_machine_does_not_come_in(text, measured, what, name):
    for value in [value for value in WRONG if value not in FINE.get(name, [])]:
        with pytest.raises(StudyError):
            packing.add(forged_fact(text, what, lambda fact, value=value: fact | {name: value}), STUDIES)
    lacking = forged_fact(text, what, lambda fact: {key: value for key, value in fact.items() if key != name})
    if name not in ("corrects", "window"):
        with pytest.raises(StudyError):
            packing.add(lacking, STUDIES)
    assert not measured.exists()


def placed(fact: dict, where: tuple, value: str) -> dict:
    """A fact with a name somewhere in it; for the last key, which is none yet, as its name too."""
    made = copy.deepcopy(fact)
    made.setdefault("gpus", [{"name": "CUDA0", "chip": "Board", "memory_bytes": 1}])
    made |= {"corrects": ["D2"], "findings": ["x"]}
    at = made
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    if where[-1] == "new":
        made = made | {value: 1}
    return made


def rekeyed(row: Row, ids: dict[str, str]) -> Row:
    new = {name: ids.get(getattr(row, name), getattr(row, name)) for name in ("machine", "model", "engine")}
    row = msgspec.structs.replace(row, **new, others=[ids.get(other, other) for other in row.others])
    study = f"{row.study}/anchor" if row.anchor else row.study
    key = row_key(study, row.cell, row.model, row.engine, row.machine, row.replicate, *row.others)
    return msgspec.structs.replace(row, key=key)


def forged_fact(text: bytes, what: str, change) -> bytes:
    """The pack with every fact of a kind changed, and all names that are made of its content right."""
    records = [packing._decoded(line + b"\n") for line in text.splitlines()]
    ids = {}
    for number, record in enumerate(records):
        if isinstance(record, Fact) and record.what == what:
            data = change(record.data)
            records[number] = Fact(id=content_id(data), what=what, data=data)
            ids[record.id] = records[number].id
        elif isinstance(record, Row):
            records[number] = rekeyed(record, ids)
    records[0] = msgspec.structs.replace(records[0], machine=ids.get(records[0].machine, records[0].machine))
    return gzip.compress(b"".join(map(packing._line, records)), 1)


def test_a_machine_s_rows_are_removed_and_nobody_else_s(text, machine, measured):
    reference = measured / "reference"
    reference.mkdir(parents=True)
    for path in sorted(REFERENCE.glob("*.mini.jsonl"))[:3]:
        shutil.copy(path, reference)
    other = forged_fact(text, "machine", lambda fact: fact | {"chip": "another"})
    there = packing.add(other, STUDIES, "others")[0].machine
    packing.add(text_packed := gzip.compress(text), STUDIES, "others")
    before = {path: path.read_bytes() for path in reference.iterdir()}
    kept = rows_of(there, measured / "others")
    packing.add(text_packed, STUDIES)
    removed = packing.remove(machine)
    assert sum(removed.values()) == 2 * packing.unpack(text_packed, STUDIES).rows
    assert not (measured / machine).exists()
    assert (rows_of(there, measured / "others"), rows_of(machine, measured / "others")) == (kept, {})
    assert {path: path.read_bytes() for path in reference.iterdir()} == before
    packing.remove(there)
    assert not list((measured / "others").iterdir())


@pytest.mark.parametrize("machine", ["reference", "local", "others", "../reference", "", "0" * 16, "*"])
def test_what_is_no_machine_from_elsewhere_is_not_removed(measured, machine):
    for place in ("reference", "local", "others"):
        (measured / place).mkdir(parents=True)
        shutil.copy(REFERENCE / "00-gates.mini.jsonl", measured / place)
    (measured / ("0" * 16)).symlink_to("reference")
    with pytest.raises(StudyError):
        packing.remove(machine)
    assert len(list(measured.glob("*/*.jsonl"))) == 4


def bombs(text: bytes, size: int) -> dict[str, bytes]:
    """Small packs whose lines become very many objects, in a row whose checksum is right."""
    line = next(line for line in text.splitlines() if b'"kind":"row"' in line and b'"samples_ns"' in line)
    encoded = line.split(b" ", 1)[1]
    at = encoded.index(b'"samples_ns":') + len(b'"samples_ns":')
    packs = {}
    for name, piece in {"empty lists": b"[],", "numbers": b"[999],", "one list": b""}.items():
        many = b"[" + (piece * (size // len(piece)))[:-1] + b"]" if piece else b"[[" + b"9," * (size // 2) + b"9]]"
        made = encoded[:at] + many + b"," + encoded[at:].split(b"]],", 1)[1]
        bomb = packing._checksum(made) + b" " + made + b"\n"
        head = text[: text.index(line)]
        packs[name] = gzip.compress(head + bomb * ((45 << 20) // size))
    return packs


@pytest.mark.parametrize("size", [1 << 18, 3 << 20], ids=["many rows", "large rows"])
def test_a_small_pack_cannot_take_much_memory(text, measured, size):
    for name, packed in bombs(text, size).items():
        assert len(packed) < 1 << 20
        tracemalloc.start()
        with pytest.raises(StudyError):
            packing.add(packed, STUDIES)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 50 << 20, name


def test_a_row_that_went_well_replaces_the_one_that_did_not(text, machine, measured, tmp_path):
    packing.add(written(tmp_path / "good.rows.gz", text), STUDIES)
    path = next((measured / machine).glob("*.jsonl"))
    rows = journal.latest_rows(journal.read(path))
    with journal.Journal(path) as here:
        here.append(msgspec.structs.replace(rows[0], status="error", valid=None, failure=Failure(stage="run")))
    assert packing.add(tmp_path / "good.rows.gz", STUDIES)[1] == 1
    assert {row.key: row for row in journal.latest_rows(journal.read(path))} == {row.key: row for row in rows}


def a_fact_twice(text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if b'"kind":"fact"' in line)
    return b"".join([*lines[: first + 1], *lines[first:]])


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda text: gzip.compress(text)[:-200], "ended|Compressed|end"),
        (lambda text: b"not gzip at all", "gzip"),
        (lambda text: gzip.compress(b""), "without a row"),
        (lambda text: gzip.compress(text[:-1]), "cut off"),
        (lambda text: gzip.compress(text.splitlines()[0] + b"\n"), "without a row"),
        (lambda text: gzip.compress(text + text.splitlines()[-1] + b"\n"), "twice"),
        (lambda text: gzip.compress(a_fact_twice(text)), "the fact comes twice"),
        (lambda text: gzip.compress(b"a" * (64 << 20)), "larger than any"),
    ],
    ids=["cut", "no gzip", "empty", "half a line", "header alone", "a row twice", "a fact twice", "a bomb"],
)
def test_what_is_no_pack_is_refused(text, measured, tmp_path, made, why):
    (tmp_path / "bad.rows.gz").write_bytes(made(text))
    with pytest.raises(StudyError, match=why):
        packing.add(tmp_path / "bad.rows.gz", STUDIES)
    assert not measured.exists()


def test_a_folder_without_rows_packs_nothing(measured):
    with pytest.raises(StudyError, match="no rows to pack"):
        packing.pack("local", STUDIES)
