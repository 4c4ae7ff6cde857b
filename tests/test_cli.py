"""The command line as a user meets it: real commands, one clear message for bad input, nothing half-written."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import mini_file

from llama_meter import disk, journal, paths
from plamo_study.cli.terminal import Terminal, grid
from plamo_study.publish.pages import publish

FEW = """
from dataclasses import replace
from llama_meter.measure import runner
runner.MOST_BLOCKS, runner._Sweep._repeat = 2, lambda sweep: False
whole, one = runner.Bench.__init__, "plamo-2-1b"
def needed(bench, plan, *others):
    needed = [cell for cell in plan.cells[: plan.needed] if getattr(cell, "model", one) in ("", one)]
    whole(bench, replace(plan, cells=tuple(needed), anchors=1), *others)
runner.Bench.__init__ = needed
"""  # few blocks of what the finding needs of one model, each once, however much time there is


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A project folder of its own: data and notebooks are copies, so that tests share no journal."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("data/models.toml", "data/published", "notebooks", "README.md"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(paths.ROOT / name)
    shutil.copytree(paths.MEASURED / "reference", folder / "data/measured/reference")
    return folder


def few(root):
    """The environment of kernels that measure few blocks."""
    startup = root / "ipython/profile_default/startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "few.py").write_text(FEW)
    return {"IPYTHONDIR": str(root / "ipython")}


WRONG = (
    (("run", "99-nothing"), "no such notebook"),
    (("run", "01", "--scale", "huge"), "scale 'huge'"),
    (("run", "01", "-p", "source", "recorded", "-p", "colour", "blue"), "colour"),
    (("run", "01", "--device", "cpu", "-p", "device", "gpu"), "-p device gpu"),
    (("study", "--minutes", "nan"), "--minutes"),
    (("measure", "your-machine", "--file", ""), "names no file"),
    (("measure", "03-batch-scaling", "--beside", "/nowhere"), "libllama"),
    (("models", "check", "nowhere.gguf"), "nowhere.gguf"),
    (("models", "quantize", str(mini_file()), "--type", "Q8_0", "--out", str(paths.ROOT / "README.md")), "--force"),
    (("publish",), "no executed notebook"),
    (("frobnicate",), "No such command"),
    (("probe", "http://[::1"), "address"),
)
EACH = """
import contextlib, io, json, sys
from plamo_study.cli import main
said = []
for arguments in json.load(sys.stdin):
    sys.argv[1:], heard = arguments, io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        try:
            main.main()
        except SystemExit as ended:
            said.append((ended.code, heard.getvalue()))
json.dump(said, sys.stdout)
"""


def in_one_process(root, *asked, file_limit=None, **environment):
    """Exit code and what was said of several commands, one after the other: loading the command line takes a second.

    `file_limit`: bytes that a file may have.
    """
    everything = os.environ | {"PLAMO_STUDY_ROOT": str(root), "COLUMNS": "200"} | environment
    if file_limit:
        everything["PYTHONDONTWRITEBYTECODE"] = "1"  # Python would keep a torn module
    command = [sys.executable, "-c", EACH]

    def hold():
        if file_limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    pipes = {"input": json.dumps(asked), "capture_output": True, "text": True}
    done = subprocess.run(command, **pipes, env=everything, check=False, preexec_fn=hold)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_bad_input_is_one_clear_message_and_exit_code_two_and_writes_nothing(root):
    before = {path for path in root.rglob("*") if "measured" not in str(path)}
    answers = in_one_process(root, *(arguments for arguments, _ in WRONG))
    for (arguments, message), (code, said) in zip(WRONG, answers, strict=True):
        assert (code, message in said) == (2, True), (arguments, said)
    assert {path for path in root.rglob("*") if path.is_file() and "measured" not in str(path)} <= before


def run(root, *arguments, code="", **environment):
    command = [sys.executable, "-c", f"{code}\nfrom plamo_study.cli import main\nmain.main()", *arguments]
    everything = os.environ | {"PLAMO_STUDY_ROOT": str(root), "COLUMNS": "200"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=everything, check=False, timeout=580)


def rows_of(root):
    return journal.latest_rows(journal.read(root / "data/measured/local/01-phase-asymmetry.mini.jsonl"))


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_rows_are_measured_once_and_become_a_page(root):
    """With few blocks of what the page needs."""
    asked = ("run", "01", "--scale", "mini", "--minutes", "9", "-p", "guess", "4")
    first = run(root, *asked, code=FEW, **few(root))
    assert first.returncode == 0, first.stderr
    measured = rows_of(root)
    assert {row.status for row in measured} == {"ok"}
    assert all(row.valid is not False for row in measured)
    second = run(root, *asked, code=FEW, **few(root))
    assert (second.returncode, "unchanged 01-phase-asymmetry.ipynb" in second.stderr) == (0, True), second.stderr
    assert rows_of(root) == measured
    notebook = nbformat.read(root / "reports/01-phase-asymmetry.ipynb", as_version=4)
    assert "a factor of **4**" in "".join(str(cell.get("outputs", "")) for cell in notebook.cells)
    published = run(root, "publish")
    assert published.returncode == 0, published.stderr
    assert {path.stem for path in (root / "reports").glob("*.html")} == {"index", "01-phase-asymmetry", "glossary"}


@pytest.mark.whole
def test_a_page_that_there_is_no_time_for_is_an_error_and_shows_no_recorded_rows(root, tmp_path):
    place = tmp_path / "data/measured"
    place.mkdir(parents=True)
    for name in ("data/measured/reference", "data/models", "data/models.toml", "data/published", "notebooks"):
        (tmp_path / name).symlink_to(root / name)
    done = run(tmp_path, "run", "03", "--minutes", "0.001")
    assert (done.returncode, "--minutes" in done.stderr, "03-batch" in done.stderr) == (1, True, True), done.stderr
    assert not (tmp_path / "reports/03-batch-scaling.ipynb").exists()
    assert not any('"kind":"row"' in path.read_text() for path in place.glob("local/*.jsonl"))


@pytest.mark.long
def test_a_full_disk_leaves_the_pages_that_were_there(root, tmp_path):
    for name in ("data/models.toml", "data/published"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(paths.ROOT / name)
    (reports := tmp_path / "reports").mkdir()
    plain = nbformat.read(Path(__file__).parent / "notebooks/plain.ipynb", as_version=4)
    for number, cell in enumerate(plain.cells):
        if cell.cell_type == "code":
            cell.execution_count = number
    nbformat.write(plain, reports / "plain.ipynb")
    publish([reports / "plain.ipynb"], reports, index=True)
    before = {path.name: path.read_bytes() for path in reports.glob("*.html*")}
    ((code, said),) = in_one_process(tmp_path, ("publish", "--author", "Jane"), file_limit=2_000)
    assert (code, "mend:" in said, "File too large" in said) == (2, True, True), said
    assert {path.name: path.read_bytes() for path in reports.glob("*.html*")} == before


def test_a_terminal_s_own_colours_stay_and_nobody_else_s_come_through(monkeypatch, capsys):
    assert disk.plain("\x1b]0;o\x07 \u202ee a\rb \udc80") == "\\x1b]0;o\\x07 \\x202ee a\\x0db \\xdc80"
    assert disk.plain(fine := "a line\n\tand 日本語\u3000の行") == fine
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
