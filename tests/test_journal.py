"""The journal keeps every row that was ever finished, whatever happens to the process or the disk."""

import gzip
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from examples import example_row

from llama_meter import disk
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


@pytest.mark.parametrize(
    "made",
    [
        lambda rows: gzip.compress(rows, mtime=0),
        lambda rows: b"one line\nand half of another",
        lambda rows: b"\n\nhalf a line",
        lambda rows: b'{"kind":"no',
        lambda rows: b'{"kind": "row", "key": "\xff"}\n' + rows[:-7],
        lambda rows: b"[" * 10**5 + b"\n",
        lambda rows: b"{oops}\n" + rows,
        lambda rows: rows + b"not a row\n" + rows[:-7],
    ],
    ids=["zipped", "text", "blank lines", "other JSON", "not UTF-8", "deep", "a damaged line", "rows and text"],
)
def test_what_is_no_journal_stays_as_it_is(tmp_path, made):
    path = filled(tmp_path / "j.jsonl", "a", "b")
    path.write_bytes(made(path.read_bytes()))
    before = path.read_bytes()
    for opened in (Journal, read):
        with pytest.raises(StudyError, match="not a journal"):
            opened(path)
    assert path.read_bytes() == before


def test_rows_are_written_to_a_file_and_to_nothing_else(tmp_path):
    text, rows = tmp_path / "notes.txt", filled(tmp_path / "rows.jsonl", "a")
    text.write_text("notes of mine")
    link, linked, pipe = (tmp_path / f"{name}.jsonl" for name in ("link", "linked", "pipe"))
    link.symlink_to(text)
    linked.symlink_to(rows)
    os.mkfifo(pipe)
    for path in (link, linked, pipe, tmp_path, text / "j.jsonl"):
        with pytest.raises(StudyError):
            Journal(path)
    assert text.read_text() == "notes of mine"
    assert read(linked) == [row("a")]


def test_one_process_writes_at_a_time_also_where_the_journal_was_taken_away(tmp_path):
    path = filled(tmp_path / "j.jsonl", "a")
    with Journal(path):
        with pytest.raises(StudyError, match="another run"):
            Journal(path)
        path.rename(tmp_path / "k.jsonl")
        assert [r.key for r in read(filled(path, "b"))] == ["b"]
    assert [r.key for r in read(tmp_path / "k.jsonl")] == ["a"]


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "j.jsonl"
    for schema, mend in ((SCHEMA + 1, "update this program"), (SCHEMA - 1, "measure again")):
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(row("a"), schema=schema)) + b"\n")
        with pytest.raises(StudyError, match=mend):
            read(path)


@pytest.mark.parametrize("killed", [False, True])
def test_packed_rows_come_first_and_are_never_doubled_even_where_packing_was_killed(tmp_path, killed):
    path = filled(tmp_path / "j.jsonl", "a", "b")
    added = path.read_bytes()
    pack(path)
    assert [r.key for r in read(path)] == ["a", "b"]
    if killed:
        path.write_bytes(added)
    for keys in ("abc", "abcd"):
        assert journals(tmp_path) == [filled(path, keys[-1])]
        with Journal(path) as journal:
            assert [r.key for r in read(path)] == [r.key for r in journal.records] == [*keys]
        pack(path)
    once = packed(path).read_bytes()
    pack(filled(path))
    assert (packed(path).read_bytes(), path.exists()) == (once, False)


def test_a_torn_line_after_packed_rows_is_dropped_and_a_damaged_packed_part_is_said(tmp_path):
    path = filled(tmp_path / "j.jsonl", "a")
    whole = path.read_bytes()
    pack(path)
    path.write_bytes(whole[:-9])
    assert [r.key for r in read(path)] == ["a"]
    assert [r.key for r in read(filled(path, "b"))] == ["a", "b"]
    packed(path).write_bytes(packed(path).read_bytes()[:-9])
    with pytest.raises(StudyError, match="is damaged"):
        read(path)


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
    places = os.pathsep.join([str(tests), str(tests.parent / "tools"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": places}
    )
    assert "rows not written" in done.stdout, done.stderr
    kept = read(path)
    assert [r.key for r in kept] == [str(n) for n in range(len(kept))]
    assert len(kept) >= 2
    assert path.read_bytes().endswith(b"\n")


def test_a_lock_that_a_killed_run_leaves_for_a_moment_is_waited_for(tmp_path):
    """A process that is killed while it starts another shares its lock with that one until it has begun."""
    path = tmp_path / "j.jsonl"
    path.touch()
    with path.open("rb") as left:
        disk.lock(left.fileno())
        threading.Timer(0.2, left.close).start()
        with Journal(path) as here:
            assert here.records == []


@pytest.mark.parametrize("added", [b"one line\nand half of another", b"not a row\n"])
def test_what_is_no_journal_beside_packed_rows_stays_and_is_named(tmp_path, added):
    path = filled(tmp_path / "my rows.jsonl", "a")
    pack(path)
    path.write_bytes(added)
    for opened in (Journal, read):
        with pytest.raises(StudyError, match=r"my rows.jsonl: not a journal.*\n.*mv '"):
            opened(path)
    assert path.read_bytes() == added


def test_an_empty_packed_part_is_damaged_and_no_journal_without_rows(tmp_path):
    pack(path := filled(tmp_path / "j.jsonl", "a"))
    packed(path).write_bytes(b"")
    with pytest.raises(StudyError, match=r"j.jsonl.gz: is damaged"):
        read(path)
