"""Files that are there whole or not at all, whoever else writes them."""

import signal
import subprocess
import sys

import pytest

from plamo_study.growing import growing

WRITER = """
import sys, time
from pathlib import Path
from plamo_study.growing import growing
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


def test_two_processes_that_make_the_same_file_do_not_write_into_one_another_s(started, tmp_path):
    first, second = started(tmp_path / "file", "first"), started(tmp_path / "file", "second")
    for child, text in ((first, "first"), (second, "second")):
        child.communicate("\n")
        assert child.returncode == 0
        assert (tmp_path / "file").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(started, tmp_path):
    killed, living = started(tmp_path / "file", "killed"), started(tmp_path / "file", "living")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    with growing(tmp_path / "file") as partial:
        partial.write_text("mine")
    assert len(list(tmp_path.iterdir())) == 2, "mine, and the one that is still written"
    living.communicate("\n")
    assert (tmp_path / "file").read_text() == "living"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_was_there_stays_when_its_successor_fails(tmp_path):
    (tmp_path / "file").write_text("old")

    def fail() -> None:
        with growing(tmp_path / "file") as partial:
            partial.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
