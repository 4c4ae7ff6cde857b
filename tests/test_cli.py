"""The command line as a user meets it: real commands, one clear message for bad input, nothing half-written."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import nbformat
import pytest
from conftest import mini_file

from llama_meter import disk, journal, paths
from plamo_study.cli.terminal import Terminal, grid
from plamo_study.publish.pages import publish

COMMAND = [sys.executable, "-m", "plamo_study.cli.main"]
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
TIME = ("--minutes", "9")  # more than they take


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


def run_few(root, *arguments):
    """A command that measures few blocks, and so do the notebooks it executes."""
    command = [sys.executable, "-c", f"{FEW}\nfrom plamo_study.cli import main\nmain.main()", *arguments]
    everything = os.environ | {"PLAMO_STUDY_ROOT": str(root), "COLUMNS": "200"} | few(root)
    return subprocess.run(command, capture_output=True, text=True, env=everything, check=False, timeout=580)


def run(root, *arguments, command=COMMAND, **environment):
    everything = os.environ | {"PLAMO_STUDY_ROOT": str(root), "COLUMNS": "200"} | environment
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=everything, check=False, timeout=580
    )


WRONG = (
    (("run", "99-nothing"), "no such notebook"),
    (("run", "01", "--scale", "huge"), "scale 'huge'"),
    (("run", "01", "-p", "source", "elsewhere"), "source 'elsewhere'"),
    (("run", "01", "-p", "source", "recorded", "-p", "colour", "blue"), "colour"),
    (("run", "01", "-p", "source", "recorded", "-p", "guess", "many"), "guess"),
    (("run", "07", "-p", "n_chunk", "-1"), "n_chunk -1"),
    (("run", "01", "-p", "minutes", "nan"), "minutes nan"),
    (("study", "--minutes", "nan"), "--minutes"),
    (("run", "01", "--engine", "/nowhere"), "libllama"),
    (("run", "01", "--device", "tpu"), "device 'tpu'"),
    (("run", "01", "--device", "cpu", "-p", "device", "gpu"), "-p device gpu"),
    (("measure", "99-nothing"), "study '99-nothing'"),
    (("measure", "your-machine", "--file", ""), "names no file"),
    (("measure", "04-batching-law", "--scale", "shape"), "held against the engine at mini"),
    (("measure", "03-batch-scaling", "--beside", "/nowhere"), "libllama"),
    (("models", "fetch", "owner//nothing", "a.gguf"), "check both names"),
    (("models", "check", "nowhere.gguf"), "nowhere.gguf"),
    (("models", "quantize", "nowhere.gguf", "--type", "Q99"), "type 'Q99'"),
    (("publish",), "no executed notebook"),
    (("frobnicate",), "No such command"),
    (("models", "check", "x" * 300), "File name too long"),
    (("models", "quantize", str(mini_file()), "--type", "Q8_0", "--out", str(paths.ROOT / "README.md")), "--force"),
    (("models", "quantize", str(mini_file()), "--type", "Q8_0", "--out", str(paths.ROOT)), "folder"),
    (("models", "check", str(mini_file()), "--repair", ""), "is a folder"),
    (("probe", "http://[::1"), "address"),
    (("probe", "http://127.0.0.1:9", "--seconds", "nan"), "seconds"),
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


@pytest.fixture(scope="module")
def answers(root):
    """Exit code and message for each of WRONG."""
    before = {path for path in root.rglob("*") if "measured" not in str(path)}
    told = in_one_process(root, *(arguments for arguments, _ in WRONG))
    assert {path for path in root.rglob("*") if path.is_file() and "measured" not in str(path)} <= before
    return dict(zip((arguments for arguments, _ in WRONG), told, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_bad_input_is_one_clear_message_and_exit_code_two(answers, arguments, message):
    code, said = answers[arguments]
    assert code == 2, said
    assert message in said


def test_models_are_listed_with_their_assumptions(root):
    ((code, said),) = in_one_process(root, ("models", "list"))
    assert code == 0
    assert "plamo-2-1b" in said
    assert "assumed of plamo-3-nict-2b" in said


@pytest.mark.long
def test_a_folder_that_is_a_file_is_named_with_what_mends_it(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/models.toml").symlink_to(paths.MODELS_TOML)
    (tmp_path / "data/models").write_text("not a folder")
    done = run(tmp_path, "measure", "01-phase-asymmetry")
    assert (done.returncode, "mend:" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def rows_of(root):
    return journal.latest_rows(journal.read(root / "data/measured/local/01-phase-asymmetry.mini.jsonl"))


@pytest.fixture(scope="module")
def measured(root):
    """The rows of a live run."""
    first = run_few(root, "run", "01", "--scale", "mini", *TIME, "-p", "guess", "4")
    assert first.returncode == 0, first.stderr
    return rows_of(root)


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_rows_are_measured_once_and_become_a_page(root, measured):
    assert {row.status for row in measured} == {"ok"}
    assert all(row.valid is not False for row in measured)
    second = run_few(root, "run", "01", "--scale", "mini", *TIME, "-p", "guess", "4")
    assert second.returncode == 0, second.stderr
    assert "unchanged 01-phase-asymmetry.ipynb" in second.stderr
    assert rows_of(root) == measured
    notebook = nbformat.read(root / "reports/01-phase-asymmetry.ipynb", as_version=4)
    text = "".join(str(cell.get("outputs", "")) for cell in notebook.cells)
    assert "a factor of **4**" in text
    published = run(root, "publish")
    assert published.returncode == 0, published.stderr
    assert {path.name for path in (root / "reports").glob("*.html")} == {
        f"{name}.html" for name in ("index", "01-phase-asymmetry", "glossary")
    }


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_papermill_alone_runs_the_notebook_live_and_measures_only_what_is_missing(root, measured):
    out, path = root / "by-papermill.ipynb", root / "data/measured/local/01-phase-asymmetry.mini.jsonl"
    *kept, last = path.read_bytes().splitlines(True)
    assert msgspec.json.decode(last)["key"] in {row.key for row in measured}
    path.write_bytes(b"".join(kept))
    command = [sys.executable, "-m", "papermill", str(paths.NOTEBOOKS / "01-phase-asymmetry.ipynb"), str(out)]
    asked = ("-p", "source", "live", "-p", "scale", "mini", "-p", "minutes", "9")
    environment = os.environ | {"PLAMO_STUDY_ROOT": str(root)} | few(root)
    done = subprocess.run([*command, *asked], capture_output=True, env=environment, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [row.key for row in journal.latest_rows(journal.read(path))]
    assert sorted(found) == sorted(row.key for row in measured)


@pytest.mark.whole
def test_a_page_that_there_is_no_time_for_is_an_error_and_shows_no_recorded_rows(root, tmp_path):
    place = tmp_path / "data/measured"
    place.mkdir(parents=True)
    (place / "reference").symlink_to(paths.MEASURED / "reference")
    for name in ("data/models", "data/models.toml", "data/published", "notebooks"):
        (tmp_path / name).symlink_to(root / name)
    done = run(tmp_path, "run", "03", "--minutes", "0.001")
    assert done.returncode == 1, done.stderr
    assert "--minutes" in done.stderr
    assert "03-batch-scaling" in done.stderr
    assert not (tmp_path / "reports/03-batch-scaling.ipynb").exists()
    assert not list(place.glob("local/*.jsonl")) or '"kind":"row"' not in "".join(
        path.read_text() for path in place.glob("local/*.jsonl")
    )


# ------------------------------------------------------------------ full disks


@pytest.fixture
def small(tmp_path):
    """A project with an executed notebook, and two others of which one prints more than fits on a small disk."""
    for name in ("data/models.toml", "data/published", "data/measured/reference"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(paths.ROOT / name)
    (tmp_path / "reports").mkdir()
    shutil.copytree(Path(__file__).parent / "notebooks", tmp_path / "notebooks")
    plain = nbformat.read(tmp_path / "notebooks/plain.ipynb", as_version=4)
    for number, cell in enumerate(plain.cells):
        if cell.cell_type == "code":
            cell.execution_count = number
    nbformat.write(plain, tmp_path / "reports/plain.ipynb")
    for name, code in (("large", "print('x' * 200_000)"), ("small", "1 + 1")):
        given = nbformat.v4.new_code_cell('source = "recorded"\nscale = "mini"', metadata={"tags": ["parameters"]})
        plain.cells = [nbformat.v4.new_markdown_cell("# Is there room?"), given, nbformat.v4.new_code_cell(code)]
        nbformat.write(plain, tmp_path / f"notebooks/{name}.ipynb")
    return tmp_path


@pytest.mark.long
def test_a_full_disk_leaves_the_pages_that_were_there_and_the_next_notebook_runs(small):
    reports = small / "reports"
    publish([reports / "plain.ipynb"], reports, index=True)
    before = {path.name: path.read_bytes() for path in reports.glob("*.html*")}
    ((code, said),) = in_one_process(small, ("publish", "--author", "Jane"), file_limit=2_000)
    assert (code, "mend:" in said, "File too large" in said) == (2, True, True), said
    assert {path.name: path.read_bytes() for path in reports.glob("*.html*")} == before
    asked = ("run", "large", "small", "-p", "source", "recorded")
    ((code, said),) = in_one_process(small, asked, file_limit=100_000)
    assert (code, "large.ipynb" in said, "ulimit -f" in said) == (1, True, True), said
    assert not (reports / "large.ipynb").exists()
    assert (reports / "small.ipynb").exists()


# ------------------------------------------------------------------ what a terminal shows


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


def test_a_word_that_does_not_fit_a_table_is_folded_and_never_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    table = grid("name", "size")
    table.add_row("a-long-name-of-a-file-in-a-row", "1,000,000")
    Terminal().print(table)
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line[:1] == "│"]
    columns = ["".join(map(str.strip, column)) for column in zip(*lines, strict=True)]
    assert columns == ["a-long-name-of-a-file-in-a-row", "1,000,000"]


@pytest.mark.long
def test_what_an_output_cannot_encode_is_escaped(root, tmp_path):
    name = shutil.copy(mini_file("plamo-2-draft"), tmp_path / "文字é😀.gguf")
    done = run(root, "models", "check", str(name), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert r"\u6587\u5b57" in done.stdout
