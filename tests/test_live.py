"""What a notebook shows while it measures: one line in the end, a failed gate at once, and papermill's exit code."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import foreign_models
import nbformat
import pytest
from nbclient import NotebookClient

from llama_meter import journal, paths
from llama_meter.errors import FAILED_GATE
from plamo_study import runs
from plamo_study.publish import pages

SMALL = ("-r", "n_prompt", "16", "-r", "n_gen", "4", "-r", "n_seq", "2", "-r", "n_depth", "8")
CEILINGS = """
from llama_meter.measure import machine, plan
from llama_meter.measure import watch
plan.MATMUL_SIZE["file"], machine.last_level_cache = 256, lambda: 1 << 20
watch.disturbed = lambda rows: set()  # other tests compute beside: no row is measured again for it
"""
OF_A_STUDY = """
import time
from types import SimpleNamespace as Any
from conftest import mini
from llama_meter.measure import runner
from plamo_study import live
live.files.make_models = lambda *_: None
def sweep(plan, path, on_progress, **how):
    for done in range(5):
        on_progress(runner.Progress(done, 5, Any(cell=mini("prefill")), None, 60.0))
        time.sleep(live.EVERY_S / 4)
    return runner.Summary([], 5)
runner.sweep = sweep
summary = live.measure(Any(study="a study", program="", cells=(), scale="mini"), None, live.Line("a study"))
"""
INTERRUPTED = OF_A_STUDY.replace("    return", "    raise KeyboardInterrupt\n    return")


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.long
@pytest.mark.parametrize(("code", "says"), [(OF_A_STUDY, "5 processes"), (INTERRUPTED, "kept")])
def test_a_display_in_place_leaves_one_line_where_nbconvert_executes_it(code, says, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(paths.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, kernel_name="python3", allow_errors=True).execute()
    [line, *others] = outputs(notebook)
    assert says in line.data["text/markdown"]
    assert "\n" not in line.data["text/markdown"]
    assert {other.output_type for other in others} <= {"error"}, "nothing on stderr, no widget"


OF_A_ROW = """
from types import SimpleNamespace as Any
from conftest import mini
from plamo_study import live
line = live.Line("a study")
line.say("begins")
row = Any(status="ok", anchor=False, valid=True, cell=mini("decode"), samples_ns=[[5e8, 5e8]])
line.say("goes on", row=live.speed(row))
line.say(f"1 row; {live.MORE}")
"""


@pytest.mark.long
def test_a_measured_row_reaches_the_command_that_runs_a_notebook_which_says_what_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(paths.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
    cell = nbformat.v4.new_code_cell(OF_A_ROW)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "n.ipynb")
    lines = []
    result = runs.run(tmp_path / "n.ipynb", {}, tmp_path / "out", on_line=lambda *line: lines.append(line))
    assert result.status == "in part", result
    assert next(row for _, row, _ in lines if row).endswith("2.0 tokens/s, right"), lines


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A project of its own, with a good hybrid and a llama whose numbers overflow."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "data").mkdir()
    for name in ("data/models.toml", "data/published", "notebooks", "README.md"):
        (folder / name).symlink_to(paths.ROOT / name)
    mine = folder / "私の モデル"
    mine.mkdir()
    foreign_models.write(mine / "good.gguf", "jamba")
    foreign_models.write(mine / "bad.gguf", size=3000)
    startup = folder / "ipython/profile_default/startup"
    startup.mkdir(parents=True)
    (startup / "small.py").write_text(CEILINGS)
    return folder


def said_of(root, *command):
    environment = os.environ | {"PLAMO_STUDY_ROOT": str(root), "IPYTHONDIR": str(root / "ipython"), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=500)


OF_MINI = f"""{CEILINGS}
from llama_meter.measure import files, watch
from plamo_study.studies.your_machine import plan as own
plan.MATMUL_SIZE["mini"] = 256
own.N_PROMPT, own.N_GEN, own.N_SEQ, own.TYPES = (16, 8), (4,), (2, 4), ("Q4_0",)
watch.disturbed = lambda rows: set()  # other tests compute beside: no row is measured again for it
"""
STOPPED = """
def stopped(*_, **__):
    raise RuntimeError("stopped")
files.quantize = stopped
"""


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_a_machine_has_its_page_before_a_file_is_quantized_and_anew_at_the_end(root, tmp_path):
    for name in ("data", "ipython"):
        shutil.copytree(root / name, tmp_path / name, symlinks=True)
    (tmp_path / "notebooks").mkdir()
    shutil.copy(paths.NOTEBOOKS / "your-machine.ipynb", tmp_path / "notebooks")
    page = tmp_path / "reports/your-machine.html"

    def study(code=""):
        (tmp_path / "ipython/profile_default/startup/small.py").write_text(f"{OF_MINI}{code}")
        script = f"{OF_MINI}\nfrom plamo_study.cli import main, notebooks\nnotebooks.SCALE = 'mini'\nmain.main()"
        return said_of(tmp_path, sys.executable, "-c", script, "study", "--minutes", "60")

    def cells():
        [path] = (tmp_path / "data/measured/local").glob("*.jsonl")
        return Counter((row.cell, row.replicate) for row in journal.latest_rows(journal.read(path)))

    stopped = study(STOPPED)
    assert stopped.returncode == 1, stopped.stderr
    assert "reports/your-machine.html is the first page" in stopped.stderr
    early, first = page.read_text(), cells()
    assert all(f"<strong>{asked}</strong>" in early for asked in ("Limit:", "Sure?", "Right?"))
    assert (tmp_path / "reports/index.html").exists()
    assert not list((tmp_path / "data/models").glob("*Q4*"))
    done = study()
    assert done.returncode == 0, done.stderr
    assert "is the first page" not in done.stderr
    whole = cells()
    assert first < whole
    assert set(whole.values()) == {1}, "nothing is measured twice"
    assert {1 if cell.workload == "gate" else 3 for cell, _ in whole} == set(Counter(c for c, _ in whole).values())
    assert {cell.dtype for cell, _ in whole if cell.files} == {"F16", "Q4_0"}
    assert page.read_text() != early


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_papermill_exits_with_one_where_a_gate_failed_and_its_notebook_is_whole(root):
    given = [str(root / f"私の モデル/{name}.gguf") for name in ("good", "bad")]
    page, out = paths.NOTEBOOKS / "your-machine.ipynb", root / "out.ipynb"
    asked = ("-p", "source", "live", "-r", "files", json.dumps(given, ensure_ascii=False), *SMALL)
    done = said_of(root, sys.executable, "-m", "papermill", str(page), str(out), "--no-progress-bar", *asked)
    assert done.returncode == 1, done.stderr
    assert "gate of bad in F16" in done.stderr
    notebook = nbformat.read(out, as_version=4)
    assert not runs.unfinished(notebook)
    assert not [cell for cell in pages.read(out).cells if runs.MARKED in cell.metadata.get("tags", ())]
    errors = [output for output in outputs(notebook) if output.output_type == "error"]
    assert [error.ename for error in errors] == [FAILED_GATE]
    assert "models check" in errors[0].evalue
    [line] = [output for output in outputs(notebook) if "measured here in" in str(output.get("data"))]
    assert line.output_type == "display_data"
    assert not [output for output in outputs(notebook) if output.output_type == "stream"]
    text = json.dumps(notebook, ensure_ascii=False)
    assert "consistent" in text
    assert "**good F16**" in text, "the page is about the file that is computed right"
    [path] = (root / "data/measured/local").glob("*.jsonl")
    timed = [row for row in journal.latest_rows(journal.read(path)) if row.cell.files and row.cell.workload != "gate"]
    assert {row.cell.model for row in timed} == {"good"}
    command = (sys.executable, "-c", f"{CEILINGS}\nfrom plamo_study.cli import main\nmain.main()")
    small = [word.replace("-r", "-p") for word in SMALL]
    files = [word for path in given for word in ("--file", path)]
    again = said_of(root, *command, "run", "your-machine", *files, *small)
    assert again.returncode == 1, again.stderr
    for said in ("all rows were measured before", "gate of bad in F16", "gate failed your-machine.ipynb"):
        assert said in again.stderr
