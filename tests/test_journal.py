"""The journal keeps every row that was ever finished, whatever happens to the process or the disk."""

import gzip
import os
import subprocess
import sys

import msgspec
import pytest
from crosscheck.selfcheck import example_row

from plamo_study.errors import StudyError
from plamo_study.measure.journal import Journal, latest_rows, read
from plamo_study.measure.rows import SCHEMA, Fact


def row(key):
    return msgspec.structs.replace(example_row(), key=key)


def filled(path, *keys):
    with Journal(path) as journal:
        for key in keys:
            journal.append(row(key))
    return path


def test_rows_come_back_as_they_were_written(tmp_path):
    path = filled(tmp_path / "new folder" / "j.jsonl", "a", "b")
    assert read(path) == [row("a"), row("b")]


def test_a_torn_last_line_is_dropped_and_everything_before_it_kept(tmp_path):
    path = filled(tmp_path / "j.jsonl", "a", "b")
    path.write_bytes(path.read_bytes()[:-7])
    assert [r.key for r in read(path)] == ["a"]
    assert [r.key for r in read(filled(path, "c"))] == ["a", "c"]


def test_a_damaged_line_in_the_middle_is_an_error_and_not_a_loss(tmp_path):
    path = filled(tmp_path / "j.jsonl", "a")
    path.write_bytes(b"{oops}\n" + path.read_bytes())
    before = path.read_bytes()
    with pytest.raises(StudyError, match="not a journal"):
        Journal(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "made",
    [
        lambda rows: gzip.compress(rows, mtime=0),
        lambda rows: b"notes of mine",
        lambda rows: b"one line\nand half of another",
        lambda rows: b"\n\nhalf a line",
        lambda rows: b'{"kind":"no',
        lambda rows: b"\xff\xfe\n" + rows[:-7],
        lambda rows: b"[" * 10**5 + b"\n",
        lambda rows: rows + b"not a row\n" + rows[:-7],
    ],
    ids=["zipped", "half a line", "text", "blank lines", "other JSON", "not UTF-8", "deep", "rows and text"],
)
def test_what_is_no_journal_stays_as_it_is(tmp_path, made):
    path = filled(tmp_path / "j.jsonl", "a", "b")
    path.write_bytes(made(path.read_bytes()))
    before = path.read_bytes()
    for opened in (Journal, read):
        with pytest.raises(StudyError, match="not a journal"):
            opened(path)
    assert path.read_bytes() == before


def test_a_first_row_that_was_torn_anywhere_begins_anew(tmp_path):
    path = filled(tmp_path / "j.jsonl", "a")
    whole = path.read_bytes()
    for end in (1, 5, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert [r.key for r in read(filled(path, "c"))] == ["c"]


def test_rows_are_written_to_a_file_and_to_nothing_else(tmp_path):
    text, rows = tmp_path / "notes.txt", filled(tmp_path / "rows.jsonl", "a")
    text.write_text("notes of mine")
    link, linked, pipe = (tmp_path / f"{name}.jsonl" for name in ("link", "linked", "pipe"))
    link.symlink_to(text)
    linked.symlink_to(rows)
    os.mkfifo(pipe)
    for path in (link, linked, pipe, tmp_path):
        with pytest.raises(StudyError):
            Journal(path)
    assert text.read_text() == "notes of mine"
    assert read(linked) == [row("a")]


def test_a_journal_that_was_taken_away_gets_no_rows(tmp_path):
    path = filled(tmp_path / "j.jsonl", "a")
    with Journal(path):
        path.rename(tmp_path / "k.jsonl")
        assert [r.key for r in read(filled(path, "b"))] == ["b"]
    assert [r.key for r in read(tmp_path / "k.jsonl")] == ["a"]


def test_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(row("a"), schema=SCHEMA + 1)) + b"\n")
    with pytest.raises(StudyError, match="newer"):
        read(path)


def test_one_process_writes_at_a_time(tmp_path):
    with Journal(tmp_path / "j.jsonl"), pytest.raises(StudyError, match="another run"):
        Journal(tmp_path / "j.jsonl")


def test_a_retried_row_replaces_the_one_before(tmp_path):
    failed = msgspec.structs.replace(row("a"), status="killed")
    assert latest_rows([failed, row("b"), row("a")]) == [row("a"), row("b")]


def test_a_fact_is_written_once(tmp_path):
    with Journal(tmp_path / "j.jsonl") as journal:
        for _ in range(2):
            journal.append_fact(Fact(id="x", what="engine", data={"a": 1}))
    assert len(read(tmp_path / "j.jsonl")) == 1


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {tests!r} + '/../tools']
from test_journal import Journal, StudyError, row
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
with Journal(Path({path!r})) as journal:
    try:
        for number in range(99):
            journal.append(row(str(number)))
    except StudyError as error:
        print(error)
"""


def test_a_full_disk_loses_only_the_row_that_did_not_fit(tmp_path):
    path = tmp_path / "j.jsonl"
    script = FULL_DISK.format(tests=str(__file__).rsplit("/", 1)[0], path=str(path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "rows not written" in done.stdout
    assert "mend:" in done.stdout
    kept = read(path)
    assert [r.key for r in kept] == [str(n) for n in range(len(kept))]
    assert len(kept) >= 2
    assert path.read_bytes().endswith(b"\n")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="cannot be written"):
        Journal(tmp_path / "file" / "j.jsonl")
