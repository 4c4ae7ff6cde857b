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

from llama_meter import journal, paths

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
    (("run", "01", "-p", "device", "tpu"), "device 'tpu'"),
    (("run", "01", "--device", "cpu", "-p", "device", "gpu"), "-p device gpu"),
    (("measure", "99-nothing"), "study '99-nothing'"),
    (("measure", "04-batching-law", "--scale", "shape"), "held against the engine at mini"),
    (("measure", "03-batch-scaling", "--beside", "/nowhere"), "libllama"),
    (("models", "fetch", "owner//nothing", "a.gguf"), "check both names"),
    (("models", "check", "nowhere.gguf"), "nowhere.gguf"),
    (("models", "quantize", "nowhere.gguf", "--type", "Q99"), "type 'Q99'"),
    (("publish",), "no executed notebook"),
    (("frobnicate",), "No such command"),
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


def in_one_process(root, *asked, limit=None, file_limit=None, prefix=(), **environment):
    """Exit code and what was said of several commands, one after the other: loading the command line takes a second.

    `limit`: bytes that the process may take, `file_limit`: that a file may have; `prefix` begins the command.
    """
    everything = os.environ | {"PLAMO_STUDY_ROOT": str(root), "COLUMNS": "200"} | environment
    if file_limit:
        everything["PYTHONDONTWRITEBYTECODE"] = "1"  # Python would keep a torn module
    command = [*prefix, sys.executable, "-c", EACH]
    limits = {resource.RLIMIT_DATA: limit, resource.RLIMIT_FSIZE: file_limit}

    def hold():
        for what, most in limits.items():
            if most:
                resource.setrlimit(what, (most, most))

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


TEXT = str(paths.ROOT / "README.md")
ENDING = {  # every command, with arguments that bring it to an end within some seconds
    "study": ["--minutes", "nan"],
    "run": ["99-nothing"],
    "measure": ["01-phase-asymmetry", "--minutes", "0.001"],
    "publish": [],
    "probe": ["http://127.0.0.1:9"],
    "models list": [],
    "models fetch": ["owner//nothing", "a.gguf"],
    "models check": [str(mini_file())],
    "models quantize": [str(mini_file()), "--type", "Q9"],
    "engine build": ["nothing"],
    "engine list": [],
}
FORKED = """
import json, os, sys
from plamo_study.cli import main
import typer

def leaves(command, *names):
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, *names, name)
    if names and not hasattr(command, "commands"):
        yield " ".join(names)

def mapped():
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if "libllama" in line or "libggml" in line})

ending, found, reading = json.load(sys.stdin), {"": mapped()}, {}
assert set(ending) == set(leaves(typer.main.get_command(main.app)))
for name, arguments in ending.items():
    answer, asked = os.pipe()
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        sys.argv[1:] = [*name.split(), *arguments]
        try:
            main.main()
        finally:
            os.write(asked, json.dumps(mapped()).encode())
            os._exit(0)
    os.close(asked)
    reading[name] = open(answer)
for name, answer in reading.items():
    found[name] = json.loads(answer.read())
json.dump(found, sys.stdout)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list what a process maps")
def test_no_command_maps_the_engine_s_libraries_which_its_workers_load(root):
    everything = os.environ | {"PLAMO_STUDY_ROOT": str(root)}
    pipes = {"input": json.dumps(ENDING), "capture_output": True, "text": True, "cwd": root}
    done = subprocess.run([sys.executable, "-c", FORKED], env=everything, check=True, **pipes)
    assert {name: mapped for name, mapped in json.loads(done.stdout).items() if mapped} == {}


def test_models_are_listed_with_their_assumptions(root):
    ((code, said),) = in_one_process(root, ("models", "list"))
    assert code == 0
    assert "plamo-2-1b" in said
    assert "assumed of plamo-3-nict-2b" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "arguments", "message"),
    [
        ("", ("measure", "01-phase-asymmetry"), "cannot be written"),
        ("plamo-2-1b.mini.F16.gguf", ("measure", "01-phase-asymmetry"), "plamo-2-1b.mini.F16.gguf"),
    ],
)
def test_a_file_in_place_of_a_folder_and_a_truncated_model_are_named_with_what_mends_them(
    broken, arguments, message, tmp_path
):
    models = tmp_path / "data/models"
    models.parent.mkdir()
    (tmp_path / "data/models.toml").symlink_to(paths.MODELS_TOML)
    if broken:
        models.mkdir()
        (models / broken).write_bytes((paths.MODELS / broken).read_bytes()[:1_000_000])
    else:
        models.write_text("not a folder")
    done = run(tmp_path, *arguments)
    assert (done.returncode, message in done.stderr, "mend:" in done.stderr) == (2, True, True), done.stderr
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
