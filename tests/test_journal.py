"""The journal keeps every row that was ever finished, whatever happens to the process or the disk."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from examples import example_row

from llama_meter.errors import StudyError
from llama_meter.journal import Journal, journals, latest_rows, pack, packed, read
from llama_meter.rows import SCHEMA, Fact


def row(key):
    return msgspec.structs.replace(example_row(), key=key)


def filled(path, *keys):
    with Journal(path) as journal:
        for key in keys:
            journal.append(row(key))
    return path


def test_rows_come_back_as_they_were_written_facts_once_and_retried_rows_in_place_of_failed_ones(tmp_path):
    path = filled(tmp_path / "new folder" / "j.jsonl", "a", "b")
    assert read(path) == [row("a"), row("b")]
    failed, fact = msgspec.structs.replace(row("c"), status="killed"), Fact(id="x", what="engine", data={"a": 1})
    with Journal(path) as journal:
        journal.append_fact(fact)
        journal.append(failed, row("c"))
        journal.append_fact(fact)
    assert latest_rows(read(path)) == [row("a"), row("b"), row("c")]
    assert read(path).count(fact) == 1


def test_a_torn_last_line_is_dropped_wherever_it_was_torn_and_everything_before_it_kept(tmp_path):
    path = filled(tmp_path / "j.jsonl", "a")
    whole = path.read_bytes()
    for before, kept in ((b"", []), (whole, ["a"])):
        for end in (1, 5, 9, len(whole) // 2, len(whole) - 1):
            path.write_bytes(before + whole[:end])
            assert [r.key for r in read(path)] == kept
            assert [r.key for r in read(filled(path, "c"))] == [*kept, "c"]


@pytest.mark.parametrize("line", [b"not a row", b"{oops}", b'{"kind": "row", "key": "\xff"}'])
def test_what_is_no_journal_stays_as_it_is(tmp_path, line):
    path = filled(tmp_path / "my rows.jsonl", "a", "b")
    path.write_bytes(path.read_bytes() + line + b"\n")
    before = path.read_bytes()
    for opened in (Journal, read):
        with pytest.raises(StudyError, match=r"not a journal.*\n.*mv '"):
            opened(path)
    assert path.read_bytes() == before


def test_one_process_writes_at_a_time(tmp_path):
    path = filled(tmp_path / "j.jsonl", "a")
    with Journal(path), pytest.raises(StudyError, match="another run"):
        Journal(path)
    assert [r.key for r in read(filled(path, "b"))] == ["a", "b"]


@pytest.mark.parametrize(("schema", "mend"), [(SCHEMA + 1, "update this program"), (SCHEMA - 1, "measure again")])
def test_another_schema_is_refused(tmp_path, schema, mend):
    path = tmp_path / "j.jsonl"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(row("a"), schema=schema)) + b"\n")
    with pytest.raises(StudyError, match=mend):
        read(path)


def test_packed_rows_come_first_and_are_never_doubled(tmp_path):
    pack(path := filled(tmp_path / "j.jsonl", "a", "b"))
    assert [r.key for r in read(path)] == ["a", "b"]
    for keys in ("abc", "abcd"):
        assert journals(tmp_path) == [filled(path, keys[-1])]
        with Journal(path) as journal:
            assert [r.key for r in read(path)] == [r.key for r in journal.records] == [*keys]
        path.write_bytes(path.read_bytes() + b'{"kind":"ro')
        pack(path)
    once = packed(path).read_bytes()
    pack(filled(path))
    assert (packed(path).read_bytes(), path.exists()) == (once, False)


FULL_DISK = """
import resource, sys
from pathlib import Path
from test_journal import Journal, StudyError, row
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
with Journal(Path(sys.argv[1])) as journal:
    try:
        for number in range(99):
            journal.append(row(str(number)))
    except StudyError as error:
        print(error)
"""


def test_a_full_disk_loses_only_the_row_that_did_not_fit(tmp_path):
    path, tests = tmp_path / "j.jsonl", Path(__file__).parent
    places = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": places}
    )
    assert "rows not written" in done.stdout, done.stderr
    kept = read(path)
    assert [r.key for r in kept] == [str(n) for n in range(len(kept))]
    assert len(kept) >= 2
    assert path.read_bytes().endswith(b"\n")
