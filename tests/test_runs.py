"""Notebooks are executed for real, kernels really die."""

import logging
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.publish import parameters, runs

NOTEBOOKS = Path(__file__).parent / "notebooks"


@pytest.fixture(autouse=True)
def fixture_notebooks(monkeypatch):
    monkeypatch.setattr(paths, "NOTEBOOKS", NOTEBOOKS)


def run_one(name, out_dir, **values):
    (result,) = runs.run_notebooks([name], values, out_dir)
    return result


def printed(notebook):
    cells = nbformat.read(notebook, as_version=4).cells
    return "".join(
        output.text for cell in cells for output in cell.get("outputs", []) if output.output_type == "stream"
    )


def test_a_complete_notebook_gets_its_final_name(tmp_path):
    result = run_one("plain", tmp_path / "new folder")
    assert (result.status, result.error, result.cell) == ("ok", "", None)
    assert result.output == tmp_path / "new folder" / "plain.ipynb"
    assert [path.name for path in result.output.parent.iterdir()] == ["plain.ipynb"]
    assert result.seconds > 0
    assert str(tmp_path) not in result.output.read_text(), "a run names no folder of this machine"


@pytest.mark.parametrize(
    ("name", "status", "error", "message"),
    [
        ("raises", "failed", "ValueError", "no such tensor"),
        ("kernel-killed", "dead_kernel", "DeadKernelError", "died"),
        ("kernel-exits", "dead_kernel", "DeadKernelError", "died"),
        ("system-exit", "incomplete", "SystemExit", "before its last cell"),
        ("no-description", "failed", "StudyError", "chart without a description"),
    ],
)
def test_an_incomplete_notebook_keeps_the_partial_name(name, status, error, message, tmp_path):
    result = run_one(name, tmp_path)
    assert (result.status, result.error, result.output) == (status, error, None)
    assert message in result.message
    failing = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells[result.cell]
    assert any(word in failing.source for word in ("raise", "os.", "sys.exit", "alt.Chart"))
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.partial.ipynb"]
    assert result.partial == tmp_path / f"{name}.partial.ipynb"


def test_the_rest_goes_on_after_a_failure_and_progress_is_told(tmp_path):
    events = []
    results = runs.run_notebooks(["kernel-killed", "plain"], {}, tmp_path, events.append)
    assert [result.status for result in results] == ["dead_kernel", "ok"]
    told = [(event.notebook.stem, event.kind, event.cell, event.cells) for event in events]
    assert told == [
        ("kernel-killed", "started", 0, 4),
        *[("kernel-killed", "cell", cell, 4) for cell in range(3)],
        ("kernel-killed", "finished", 4, 4),
        ("plain", "started", 0, 4),
        *[("plain", "cell", cell, 4) for cell in range(4)],
        ("plain", "finished", 4, 4),
    ]
    assert [event.result for event in events if event.kind == "finished"] == results


def test_a_failure_leaves_the_last_complete_output_alone(tmp_path):
    (tmp_path / "raises.ipynb").write_text("the last complete run")
    run_one("raises", tmp_path)
    assert (tmp_path / "raises.ipynb").read_text() == "the last complete run"


def test_the_kernel_is_this_interpreter_in_the_notebooks_folder_whatever_the_metadata_says(tmp_path):
    notebook = nbformat.read(NOTEBOOKS / "interpreter.ipynb", as_version=4)
    notebook.metadata.kernelspec.name = "kernel-of-another-machine"
    nbformat.write(notebook, tmp_path / "interpreter.ipynb")
    result = run_one(str(tmp_path / "interpreter.ipynb"), tmp_path / "out")
    assert printed(result.output).splitlines() == [sys.executable, str(tmp_path)]


def test_a_run_is_quiet(tmp_path, capfd):
    run_one("kernel-killed", tmp_path)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("papermill").level == logging.CRITICAL


def test_values_arrive_with_their_declared_types(tmp_path):
    text = {"scale": "1e5", "replicates": "5", "margin": "1e-2", "live": "yes", "batch_sizes": "[1, 16]"}
    result = run_one("parameters", tmp_path, **text)
    assert printed(result.output) == "('1e5', 5, 0.01, True, [1, 16])\n"
    assert result.status == "ok"


def test_a_value_goes_only_to_the_notebooks_that_declare_it(tmp_path):
    results = runs.run_notebooks(["plain", "parameters"], {"scale": "shape"}, tmp_path)
    assert [result.status for result in results] == ["ok", "ok"]
    assert "shape" in printed(results[1].output)


@pytest.mark.parametrize(
    ("type_name", "text", "value"),
    [
        ("bool", "False", False),
        ("bool", "1", True),
        ("int", "-3", -3),
        ("float", "1e5", 1e5),
        ("float", 2, 2.0),
        ("str", "007", "007"),
        ("str", "", ""),
        ("list[int]", "1,2", [1, 2]),
        ("list[float]", "[1e5, 2]", [1e5, 2.0]),
        ("list[str]", "Q8_0, F16", ["Q8_0", "F16"]),
        ("list", [1, "a"], [1, "a"]),
        ("dict", "{a: 1}", {"a": 1}),
        ("Path", "data", "data"),
    ],
)
def test_text_is_converted_to_the_declared_type(type_name, text, value):
    converted = parameters.convert("name", text, type_name)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("type_name", "value"),
    [
        ("bool", "maybe"),
        ("bool", 1),
        ("int", "1.5"),
        ("int", True),
        ("float", "fast"),
        ("str", 1),
        ("list[int]", "[1, two]"),
        ("list[int]", "[1"),
        ("dict", "[1]"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(type_name, value):
    with pytest.raises(StudyError, match="not of type ") as problem:
        parameters.convert("replicates", value, type_name)
    assert problem.value.mend == f"give replicates a value of type {type_name}"


@pytest.mark.parametrize(
    ("notebooks", "values", "message"),
    [
        (["plain", "99"], {}, "99: no such notebook"),
        (["kernel"], {}, "fits several notebooks"),
        (["plain", "parameters"], {"scal": "mini"}, "use one of: batch_sizes, live, margin, replicates, scale"),
        (["plain"], {"scale": "mini"}, "no such parameter in plain"),
        (["parameters"], {"replicates": "many"}, "not of type int"),
    ],
)
def test_wrong_usage_stops_before_anything_runs(notebooks, values, message, tmp_path):
    with pytest.raises(StudyError, match=message):
        runs.run_notebooks(notebooks, values, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_notebooks_are_found_by_number_name_and_path(tmp_path, monkeypatch):
    for name in ("01-phase-asymmetry", "02-roofline", "10-scheduling"):
        shutil.copy(NOTEBOOKS / "plain.ipynb", tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    monkeypatch.chdir(tmp_path)
    one = tmp_path / "01-phase-asymmetry.ipynb"
    for name in ("01", "01-phase-asymmetry", "01-phase-asymmetry.ipynb", "./01-phase-asymmetry.ipynb", str(one)):
        assert runs.find_notebooks([name]) == [one]
    assert [path.stem for path in runs.find_notebooks(["10", "01", "10"])] == ["10-scheduling", "01-phase-asymmetry"]
    assert [path.stem[:2] for path in runs.find_notebooks([])] == ["01", "02", "10"]


def test_a_file_that_is_no_notebook_is_named(tmp_path):
    (tmp_path / "broken.ipynb").write_text("{")
    with pytest.raises(StudyError, match=r"broken\.ipynb: not a readable notebook"):
        runs.run_notebooks([str(tmp_path / "broken.ipynb")], {}, tmp_path / "out")


def test_a_notebook_is_never_overwritten_by_its_output(tmp_path):
    shutil.copy(NOTEBOOKS / "plain.ipynb", tmp_path)
    with pytest.raises(StudyError, match="overwritten"):
        runs.run_notebooks([str(tmp_path / "plain.ipynb")], {}, tmp_path)


def test_a_notebook_is_not_executed_again_from_the_same(tmp_path):
    def again(inputs, **values):
        (result,) = runs.run_notebooks(["parameters"], values, tmp_path, inputs=inputs)
        return result.status

    assert [again("a"), again("a")] == ["ok", "unchanged"]
    assert again("b") == "ok", "other rows or code"
    assert again("b", scale="shape") == "ok", "another parameter"
    assert again("") == "ok", "told to"
    (tmp_path / "parameters.ipynb").write_text("{")
    assert again("b", scale="shape") == "ok", "an output that cannot be read is made anew"


def test_notebooks_run_side_by_side_and_what_was_executed_stays(tmp_path):
    names = [str(NOTEBOOKS / f"{name}.ipynb") for name in ("plain", "raises", "parameters")]

    def together():
        return [result.status for _, result in runs.side_by_side([(name, {}, "a") for name in names], tmp_path, 2)]

    assert together() == ["ok", "failed", "ok"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.ipynb")}
    assert together() == ["unchanged", "failed", "unchanged"]
    assert {path for path in before if path.stat().st_mtime_ns != before[path]} == {tmp_path / "raises.partial.ipynb"}
