"""What stands at a door: files that nobody may lose, things without end, words a terminal would obey, full disks."""

import contextlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import mini_file
from test_cli import in_one_process

from llama_meter import disk, paths
from plamo_study.cli.terminal import Terminal, grid
from plamo_study.publish.pages import publish

DRAFT = "plamo-2-draft"
MODEL = str(mini_file())
CLI = [sys.executable, "-m", "plamo_study.cli.main"]
LIMIT = 4 << 30  # bytes of a process that is asked for what has no end
FEW_TOKENS = ("--n-prompt", "16", "--n-gen", "2")


# ------------------------------------------------------------------ outputs

OUTPUTS = {  # every command that is told where to write
    "check": ("models", "check", MODEL, "--repair"),
    "quantize": ("models", "quantize", MODEL, "--type", "Q8_0", "--out"),
}
KINDS = ("fifo", "folder", "to fifo", "to nothing", "old", *(["null", "to null"] if os.geteuid() == 0 else []))


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """Things that have a name already, each called as an output may be."""
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


@pytest.mark.long
@pytest.mark.parametrize("command", OUTPUTS)
def test_what_has_the_name_of_an_output_is_left_as_it_is(refusals, command):
    for (name, kind, _), (code, said) in refusals.items():
        if name == command:
            assert code == 2, said
            assert f"{kind}.json" in said
            assert ("--force" in said) == (kind == "old")


# ------------------------------------------------------------------ what a system refuses

AS_USER = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
NO_WRITING = (  # asked in a project that nobody may write to
    ("publish",),
    ("run", "01", "-p", "source", "recorded"),
    ("measure", "01-phase-asymmetry"),
)


def project(folder):
    """A project whose data and notebooks are this one's, with an executed notebook."""
    for name in ("data/models.toml", "data/published", "data/measured/reference", "notebooks"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(paths.ROOT / name)
    (folder / "reports").mkdir()
    notebook = nbformat.read(Path(__file__).parent / "notebooks/plain.ipynb", as_version=4)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.execution_count = number
    nbformat.write(notebook, folder / "reports/plain.ipynb")
    return folder


@pytest.fixture(scope="module")
def read_only(tmp_path_factory):
    """Exit code and message of each command there."""
    if AS_USER and not shutil.which("setpriv"):
        pytest.skip("root may write everywhere here")
    root = project(tmp_path_factory.mktemp("read-only"))
    shutil.copy(MODEL, root / "model.gguf")
    folders = [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]
    for folder in folders:
        folder.chmod(0o555)
    check = ("models", "check", str(root / "model.gguf"))
    with contextlib.chdir(root):
        told = in_one_process(root, *NO_WRITING, check, prefix=AS_USER)
    for folder in folders:
        folder.chmod(0o755)
    return root, dict(zip([*NO_WRITING, check[:2]], told, strict=True))


@pytest.mark.whole
@pytest.mark.parametrize("command", NO_WRITING, ids=[" ".join(command) for command in NO_WRITING])
def test_a_project_that_cannot_be_written_to_is_named_with_what_mends_it(read_only, command):
    code, said = read_only[1][command]
    assert code == 2, said
    assert "mend:" in said
    assert "Permission denied" in said or "cannot be written" in said
    assert ".partial" not in said


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts need root")
def test_a_read_only_disk_is_not_to_be_mended_with_chmod(tmp_path):
    root = project(tmp_path)
    mount = f"mount --bind {root} {root} && mount -o remount,ro,bind {root}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "-", *CLI, *NO_WRITING[2]],
        capture_output=True,
        text=True,
        env=os.environ | {"PLAMO_STUDY_ROOT": str(root)},
        check=False,
    )
    if "mount" in done.stderr:
        pytest.skip("no mounts here")
    assert done.returncode == 2, done.stderr
    assert "Read-only file system" in done.stderr
    assert "work on a copy on a disk that can be written to" in done.stderr


def test_a_working_directory_that_is_gone_is_named_before_anything_else(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'cd "$1" && rmdir "$1" && shift && exec "$@"', "-", str(gone), *CLI, "run", "00"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "the working directory: has been deleted" in done.stderr
    assert f"cd {paths.ROOT}" in done.stderr


def test_a_file_is_checked_where_nothing_can_be_kept(read_only):
    code, said = read_only[1]["models", "check"]
    assert code == 0, said
    assert "ssm-out-type" in said


@pytest.mark.long
def test_a_full_disk_leaves_the_pages_that_were_there(tmp_path):
    root = project(tmp_path)
    publish([root / "reports/plain.ipynb"], root / "reports", index=True)
    before = {path.name: path.read_bytes() for path in (root / "reports").glob("*.html*")}
    ((code, said),) = in_one_process(root, ("publish", "--author", "Jane"), file_limit=2_000)
    assert code == 2, said
    assert "mend:" in said
    assert "File too large" in said
    assert {path.name: path.read_bytes() for path in (root / "reports").glob("*.html*")} == before


@pytest.mark.long
def test_a_notebook_that_does_not_fit_on_the_disk_is_a_result_and_the_next_one_runs(tmp_path):
    root = project(tmp_path)
    (root / "notebooks").unlink()
    shutil.copytree(Path(__file__).parent / "notebooks", root / "notebooks")
    plain = nbformat.read(root / "notebooks/plain.ipynb", as_version=4)
    for name, code in (("large", "print('x' * 200_000)"), ("small", "1 + 1")):
        given = nbformat.v4.new_code_cell('source = "recorded"\nscale = "mini"', metadata={"tags": ["parameters"]})
        plain.cells = [nbformat.v4.new_markdown_cell("# Is there room?"), given, nbformat.v4.new_code_cell(code)]
        nbformat.write(plain, root / f"notebooks/{name}.ipynb")
    asked = ("run", "large", "small", "-p", "source", "recorded")
    ((code, said),) = in_one_process(root, asked, file_limit=100_000)
    assert code == 1, said
    assert "large.ipynb" in said
    assert "ulimit -f" in said
    assert not (root / "reports/large.ipynb").exists()
    assert (root / "reports/small.ipynb").exists()


# ------------------------------------------------------------------ inputs

LONG = "x" * 300
DEEP = "[" * 100_000
NEW = ("--type", "Q8_0", "--out", "new.gguf")
BAD_INPUT = {
    "long name of a file": (("models", "check", LONG), "File name too long"),
    "long name of an output": (("models", "quantize", MODEL, "--type", "Q8_0", "--out", LONG), "File name too long"),
    "long name of a notebook": (("run", f"{LONG}.ipynb", "-p", "source", "recorded"), "File name too long"),
    "source in a pipe": (("models", "quantize", "fifo", "--type", "Q8_0"), "no regular file"),
    "time that is none": (("probe", "http://127.0.0.1:9", "--seconds", "nan"), "seconds"),
    "tokens beyond any prompt": (("probe", "http://127.0.0.1:9", "--prompt-tokens", "1000000000000"), "1000000"),
    "output without a name": (("models", "quantize", MODEL, "--type", "Q8_0", "--out", ""), "names no file"),
    "repair without a name": (("models", "check", MODEL, "--repair", ""), "names no file"),
    "source without a name": (("models", "quantize", "", "--type", "Q8_0"), "is a folder"),
    "address without an end": (("probe", "http://[::1"), "no http or https address"),
}


@pytest.fixture(scope="module")
def bad_input(tmp_path_factory):
    """Exit code and message of each command, given these files."""
    folder = project(tmp_path_factory.mktemp("bad"))
    os.mkfifo(folder / "fifo")
    (folder / "hosts.toml").write_text(f"host = {DEEP}")
    (folder / "short.txt").write_text("A short text.\n")
    asked = [arguments for arguments, _ in BAD_INPUT.values()]
    with contextlib.chdir(folder):
        return dict(zip(BAD_INPUT, in_one_process(folder, *asked, limit=LIMIT), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", BAD_INPUT)
def test_what_cannot_be_taken_in_is_one_message(bad_input, name):
    code, said = bad_input[name]
    assert code == 2, said
    assert BAD_INPUT[name][1] in said
    assert "Traceback" not in said


# ------------------------------------------------------------------ words


def test_control_characters_are_shown():
    assert disk.plain("\x1b]0;o\x07 \x9b3m \u202ee a\rb \udc80") == "\\x1b]0;o\\x07 \\x9b3m \\x202ee a\\x0db \\xdc80"
    assert disk.plain(fine := "a line\n\tand 日本語\u3000の行") == fine


def test_a_terminal_s_own_colours_stay_and_nobody_else_s_come_through(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    table = grid("name")
    table.add_row("\x1b[2J[bold]x[/bold]")
    console = Terminal()
    console.print(table)
    console.print("\x1b[2J[/nothing]", style="red")
    said = capsys.readouterr().out
    assert "\x1b[31m" in said
    assert "\x1b[2J" not in said
    assert "[bold]x[/bold]" in said


# ------------------------------------------------------------------ widths, encodings, closed streams


def test_a_word_that_does_not_fit_a_table_is_folded_and_never_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    table = grid("name", "size", "state")
    table.add_row("a-long-name-of-a-file", "1,000,000", "unknown")
    Terminal().print(table)
    columns = zip(
        *(line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line[:1] == "│"), strict=True
    )
    assert ["".join(map(str.strip, column)) for column in columns] == ["a-long-name-of-a-file", "1,000,000", "unknown"]


def cli(*arguments, command="", **environment):
    """A command in a process of its own, at the end of a line of a shell."""
    line = shlex.join([*CLI, *arguments])
    shell = ["bash", "-c", f"{line} {command}"]
    return subprocess.run(shell, capture_output=True, env=os.environ | environment, check=False, timeout=120)


@pytest.mark.long
@pytest.mark.case(16)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_output_cannot_encode_is_escaped(encoding, tmp_path):
    name = tmp_path / "文字é😀.gguf"
    shutil.copy(mini_file(DRAFT), name)
    done = cli("models", "check", str(name), PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert r"\u6587\u5b57" in done.stdout.decode(encoding)


@pytest.mark.long
@pytest.mark.case(16)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(closed, tmp_path):
    name = shutil.copy(mini_file(DRAFT), tmp_path / "draft.gguf")
    done = cli("models", "quantize", str(name), "--type", "Q8_0", command=closed)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "draft.Q8_0.gguf").exists()
    assert b"Traceback" not in done.stderr


@pytest.mark.long
def test_a_reader_that_stops_reading_and_a_full_output_are_no_traceback():
    for command in ("| head -c 10", "> /dev/full"):
        done = cli("rows", "list", command=command)
        assert b"Traceback" not in done.stderr
