"""What stands at a door: files that nobody may lose, things without end, words a terminal would obey, full disks."""

import json
import os
import stat
import subprocess
import sys

import pytest
from conftest import mini_file
from test_cli import in_one_process

from plamo_study import paths
from plamo_study.errors import StudyError, of_system
from plamo_study.growing import growing

MODEL = str(mini_file())


# ------------------------------------------------------------------ outputs

OUTPUTS = {  # every command that is told where to write
    "check": ("models", "check", MODEL, "--no-gate", "--repair"),
    "convert": ("models", "convert", "."),
    "quantize": ("models", "quantize", MODEL, "--type", "Q8_0", "--out"),
    "trace": ("trace", MODEL, "--prompt", "4", "--gen", "1", "--out"),
    "pack": ("rows", "pack", "--place", "reference"),
    "probe": ("probe", "http://127.0.0.1:9", "--html"),
}
KINDS = ("fifo", "folder", "to fifo", "to nothing", "old", *(["null", "to null"] if os.geteuid() == 0 else []))


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """Things that have a name already, each called as a trace may be."""
    folder = tmp_path_factory.mktemp("taken")
    os.mkfifo(folder / "fifo.json")
    (folder / "folder.json").mkdir()
    (folder / "old.json").write_text("old")
    if "null" in KINDS:
        os.mknod(folder / "null.json", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    for name in KINDS:
        if name.startswith("to "):
            (folder / f"{name}.json").symlink_to(f"{name.removeprefix('to ')}.json")
    return folder


@pytest.fixture(scope="module")
def refusals(taken, tmp_path_factory):
    """Exit code and message of each command for each of them, also where it may replace files."""
    before = {path.name: os.lstat(path)[:3] for path in taken.iterdir()}
    asked = {
        (command, kind, force): [*words, str(taken / f"{kind}.json"), *force]
        for command, words in OUTPUTS.items()
        for kind in KINDS
        for force in ((), ("--force",))
        if (kind, force) != ("old", ("--force",))
    }
    told = in_one_process(paths.ROOT, *asked.values())
    assert {path.name: os.lstat(path)[:3] for path in taken.iterdir()} == before
    assert (taken / "old.json").read_text() == "old"
    return dict(zip(asked, told, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", OUTPUTS)
def test_what_has_the_name_of_an_output_is_left_as_it_is(refusals, command, kind):
    for (name, what, _), (code, said) in refusals.items():
        if (name, what) == (command, kind):
            assert code == 2, said
            assert f"{kind}.json" in said
            assert ("--force" in said) == (kind == "old")


def test_a_file_is_replaced_where_that_was_asked_for(tmp_path):
    (tmp_path / "old.json").write_text("old")
    asked = [*OUTPUTS["trace"], str(tmp_path / "old.json"), "--force"]
    ((code, said),) = in_one_process(paths.ROOT, asked)
    assert code == 0, said
    assert json.loads((tmp_path / "old.json").read_text())["traceEvents"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "old"])
def test_no_file_grows_into_what_is_none(taken, kind):
    with pytest.raises(StudyError, match="no regular file"), growing(taken / f"{kind}.json") as partial:
        partial.write_text("new")


def test_a_link_that_lies_where_a_file_would_grow_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("theirs")
    (tmp_path / f"file.{os.getpid()}.partial").symlink_to("other")
    with growing(tmp_path / "file") as partial:
        partial.write_text("mine")
    assert ((tmp_path / "file").read_text(), (tmp_path / "other").read_text()) == ("mine", "theirs")
