"""Notebooks are executed for real, kernels really die."""

import shutil
import sys
from pathlib import Path

import nbformat
import pytest

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study import runs

NOTEBOOKS = Path(__file__).parent / "notebooks"
ENDS = {  # notebook -> status, error, words of the message, the cell where it ended
    "plain": ("ok", "", "", None),
    "raises": ("failed", "ValueError", "no such tensor", 2),
    "kernel-killed": ("dead_kernel", "DeadKernelError", "died", 2),
    "system-exit": ("incomplete", "SystemExit", "before its last cell", 2),
}


def printed(notebook):
    cells = nbformat.read(notebook, as_version=4).cells
    return "".join(
        output.text for cell in cells for output in cell.get("outputs", []) if output.output_type == "stream"
    )


@pytest.mark.long
def test_only_a_notebook_whose_every_cell_ran_gets_its_final_name_and_the_others_still_run(tmp_path, caplog):
    (tmp_path / "raises.ipynb").write_text("the last complete run")
    results = [runs.run(NOTEBOOKS / f"{name}.ipynb", {}, tmp_path) for name in ENDS]
    for (name, (status, error, message, cell)), result in zip(ENDS.items(), results, strict=True):
        assert (result.status, result.error, result.cell) == (status, error, cell), name
        assert message in result.message
        assert result.output == (tmp_path / f"{name}.ipynb" if status == "ok" else None)
    complete = {"plain.ipynb", "raises.ipynb"}
    assert {path.name for path in tmp_path.iterdir()} - complete == {f"{name}.partial.ipynb" for name in [*ENDS][1:]}
    assert (tmp_path / "raises.ipynb").read_text() == "the last complete run"
    assert str(tmp_path) not in (tmp_path / "plain.ipynb").read_text(), "a run names no folder of this machine"
    assert caplog.text == "", "what became of a notebook is told once, by its result"


def test_the_kernel_is_this_interpreter_in_the_notebooks_folder_and_gets_values_of_the_declared_types(tmp_path):
    notebook = nbformat.read(NOTEBOOKS / "parameters.ipynb", as_version=4)
    notebook.metadata.kernelspec.name = "kernel-of-another-machine"
    notebook.cells.append(nbformat.v4.new_code_cell("import os, sys; print(sys.executable, os.getcwd())"))
    nbformat.write(notebook, tmp_path / "parameters.ipynb")
    text = {"scale": "1e5", "replicates": "5", "margin": "1e-2", "live": "true", "batch_sizes": [1, 16]}
    result = runs.run(tmp_path / "parameters.ipynb", text, tmp_path / "out")
    said = printed(result.output).splitlines()
    assert said == ["('1e5', 5, 0.01, True, [1, 16])", f"{sys.executable} {tmp_path}"]


@pytest.mark.long
def test_a_notebook_is_executed_again_only_if_something_changed_also_side_by_side(tmp_path):
    jobs = [(NOTEBOOKS / f"{name}.ipynb", {}) for name in ("raises", "parameters")]

    def together():
        return [result.status for result in runs.side_by_side(jobs, tmp_path)]

    assert together() == ["failed", "ok"]
    assert together() == ["failed", "unchanged"]
    one = NOTEBOOKS / "parameters.ipynb"
    assert runs.is_current(one, {}, tmp_path)
    assert not runs.is_current(one, {"scale": "1e5"}, tmp_path), "another parameter"
    assert runs.run(one, {}, tmp_path, force=True).status == "ok"
    (tmp_path / "parameters.ipynb").write_text("{")
    assert not runs.is_current(one, {}, tmp_path), "an output that cannot be read is made anew"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [("float", "1e5", 1e5), ("str", "007", "007")],
)
def test_text_is_converted_to_the_declared_type(kind, text, value):
    converted = runs._typed("name", text, kind)
    assert (converted, type(converted)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (NOTEBOOKS / "parameters.ipynb", {"scal": "mini"}, "use one of: batch_sizes, live, margin, replicates, scale"),
        (NOTEBOOKS / "parameters.ipynb", {"replicates": "many"}, "not of type int"),
        ("plain.ipynb", {}, "overwritten by its own output"),
    ],
)
def test_wrong_usage_stops_before_anything_runs(name, values, message, tmp_path):
    shutil.copy(NOTEBOOKS / "plain.ipynb", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(StudyError, match=message):
        runs.run(tmp_path / name, values, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_notebooks_are_found_by_number_name_and_path(tmp_path, monkeypatch):
    for name in ("01-phase-asymmetry", "02-roofline", "03-one", "03-two"):
        shutil.copy(NOTEBOOKS / "plain.ipynb", tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    monkeypatch.chdir(tmp_path)
    one = tmp_path / "01-phase-asymmetry.ipynb"
    for name in ("01", "01-phase-asymmetry", "./01-phase-asymmetry.ipynb", str(one)):
        assert runs.find_notebooks([name]) == [one]
    assert [path.stem[:2] for path in runs.find_notebooks(["02", "01", "02"])] == ["02", "01"]
    assert len(runs.find_notebooks([])) == 4
    with pytest.raises(StudyError, match="fits several"):
        runs.find_notebooks(["03"])


def test_what_a_page_is_made_from_changes_with_its_rows_and_the_engine(tmp_path, monkeypatch):
    one, data = paths.NOTEBOOKS / "01-phase-asymmetry.ipynb", tmp_path / "data"
    for name in (names := ("measured/local/01.jsonl", "measured/others/02.jsonl", "models.toml")):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("first")
    for name, path in {"ROOT": tmp_path, "DATA": data, "MEASURED": data / "measured"}.items():
        monkeypatch.setattr(paths, name, path)
    found = [runs._made_from(one, {})]
    for name in names:
        (data / name).write_text("other")
        found.append(runs._made_from(one, {}))
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "elsewhere")
    found.append(runs._made_from(one, {}))
    assert len(set(found)) == len(found)
    (data / "measured/local/06-context.mini.jsonl").write_text("measured")
    assert runs._made_from(one, {}) == found[-1], "rows of another notebook"
