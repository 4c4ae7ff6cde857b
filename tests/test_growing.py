"""Files that are there whole or not at all, whoever else writes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_meter.disk import growing
from llama_meter.errors import StudyError

WRITER = """
import sys
from pathlib import Path
from llama_meter.disk import growing
with growing(Path(sys.argv[1])) as partial:
    partial.write_text(sys.argv[2])
    print("wrote", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def started():
    """Starts a process that has written its file and waits to be told that it may end."""
    children = []

    def start(path, text):
        pipe = subprocess.PIPE
        child = subprocess.Popen([sys.executable, "-c", WRITER, path, text], stdin=pipe, stdout=pipe, text=True)
        children.append(child)
        assert child.stdout.readline() == "wrote\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def test_two_writers_do_not_disturb_one_another_and_what_a_killed_one_left_is_removed(started, tmp_path):
    path = tmp_path / "file"
    first, second, killed = (started(path, text) for text in ("first", "second", "killed"))
    killed.kill()
    killed.wait()
    with growing(path) as partial:
        partial.write_text("mine")
    assert path.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3, "mine, and two that are still written"
    for child, text in ((first, "first"), (second, "second")):
        child.communicate("\n")
        assert path.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_was_there_stays_when_its_successor_fails_and_no_link_is_followed(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "other").write_text("theirs")
    (tmp_path / f"file.{os.getpid()}.partial").symlink_to("other")
    with pytest.raises(ZeroDivisionError), growing(tmp_path / "file") as partial:
        partial.write_text(f"half {1 / 0}")
    assert (tmp_path / "file").read_text() == "old"
    with growing(tmp_path / "file") as partial:
        partial.write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "new", "other": "theirs"}


def test_what_only_looks_like_a_left_over_is_somebody_else_s(tmp_path):
    theirs = [f"file.{odd}.partial" for odd in ("²", "9" * 30, "4000000000", "x", "")]
    for name in theirs:
        (tmp_path / name).touch()
    (tmp_path / "file.999999999.partial").mkdir()
    with growing(tmp_path / "file") as partial:
        partial.write_text("mine")
    assert {path.name for path in tmp_path.iterdir()} == {*theirs, "file.999999999.partial", "file"}


def test_a_name_that_names_no_file_is_refused(tmp_path):
    for path in (Path(), Path("/"), tmp_path / ".."):
        with pytest.raises(StudyError, match="names no file"), growing(path):
            pass
