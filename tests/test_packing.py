"""Rows travel in one file: nothing is lost on the way, nobody is named, and what is not a row gets in nowhere."""

import copy
import getpass
import gzip
import json
import random
import re
import socket
from pathlib import Path

import msgspec
import pytest

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.measure import journal, packing
from plamo_study.measure.rows import Failure, Row
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
    return gzip.decompress(packing.pack("reference", machine)[1])


@pytest.fixture
def measured(tmp_path, monkeypatch) -> Path:
    """An empty folder of measured rows."""
    monkeypatch.setattr(paths, "MEASURED", tmp_path / "measured")
    return tmp_path / "measured"


def written(path: Path, text: bytes) -> Path:
    path.write_bytes(gzip.compress(text, 1))
    return path


def rows_of(machine: str, folder: Path) -> dict[str, Row]:
    found = [row for path in folder.glob("*.jsonl") for row in journal.latest_rows(journal.read(path))]
    return {row.key: row for row in found if row.machine == machine}


def test_every_recorded_machine_s_rows_come_out_as_they_went_in(tmp_path, monkeypatch):
    recorded = {path.stem: journal.read(path) for path in REFERENCE.glob("*.jsonl")}
    rows = [row for records in recorded.values() for row in journal.latest_rows(records)]
    machines = {row.machine for row in rows}
    assert len(machines) > 1
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    for machine in machines:
        packed = packing.packed(machine, recorded)
        before = {row.key: packing._nameless(row) for row in rows if row.machine == machine}
        assert packing.add(packed, STUDIES)[1] == len(before)
        assert rows_of(machine, tmp_path / machine) == before
    assert packing.add(packed, STUDIES)[1] == 0, "what is here already"
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
        here.append(msgspec.structs.replace(row, status="error", valid=None, failure=failure))
    packed = gzip.decompress(packing.pack("local")[1]).decode()
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
    put(pid=-1), put(order=-1), put(series={"pss": ["a"]}), put(requests=[{"id": "0", "n_prompt": 1, "arrived_ns": -1}])
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


def test_a_fact_or_a_cell_that_names_a_folder_is_not_packed(machine, measured):
    path = next(path for path in sorted(REFERENCE.glob("*.jsonl")) if rows_in(path, machine))
    row = rows_in(path, machine)[0]
    named = msgspec.structs.replace(row, conditions=msgspec.structs.replace(row.conditions, thermal="/home/ada/hot"))
    with journal.Journal(measured / "local" / path.name) as here:
        for record in (*(each for each in journal.read(path) if not isinstance(each, Row)), named):
            here.append(record)
    with pytest.raises(StudyError, match="names a folder"):
        packing.pack("local")


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
        packing.pack("local")
