"""Notebooks are executed for real, kernels really die."""

import errno
import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study.run import inputs, parameters, runs
from plamo_study.studies.registry import OF_ALL

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
    text = {"scale": "1e5", "replicates": "5", "margin": "1e-2", "live": "true", "batch_sizes": "[1, 16]"}
    result = runs.run(tmp_path / "parameters.ipynb", text, tmp_path / "out")
    said = printed(result.output).splitlines()
    assert said == ["('1e5', 5, 0.01, True, [1, 16])", f"{sys.executable} {tmp_path}"]


LATE = """
import time
handlers = get_ipython().kernel.shell_handlers
answer = handlers["kernel_info_request"]

async def late(*request):
    await answer(*request)
    time.sleep(0.5)

handlers["kernel_info_request"] = late
"""  # after its last answer a kernel is still at work for a moment


def test_a_kernel_ends_in_order_and_is_not_interrupted_after_its_last_answer(tmp_path, capfd):
    notebook = nbformat.read(NOTEBOOKS / "plain.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(LATE))
    nbformat.write(notebook, tmp_path / "late.ipynb")
    assert runs.run(tmp_path / "late.ipynb", {}, tmp_path / "out").status == "ok"
    assert capfd.readouterr().err == ""


@pytest.mark.whole
def test_a_notebook_is_executed_again_only_if_something_changed_also_side_by_side(tmp_path):
    jobs = [(NOTEBOOKS / f"{name}.ipynb", {}, "a") for name in ("raises", "parameters")]

    def together():
        return [result.status for result in runs.side_by_side(jobs, tmp_path, 2)]

    assert together() == ["failed", "ok"]
    assert together() == ["failed", "unchanged"]
    one = NOTEBOOKS / "parameters.ipynb"
    assert runs.is_current(one, {}, tmp_path, "a")
    assert not runs.is_current(one, {}, tmp_path, "b"), "other rows or code"
    assert not runs.is_current(one, {"scale": "shape"}, tmp_path, "a"), "another parameter"
    assert not runs.is_current(one, {}, tmp_path, ""), "told to"
    (tmp_path / "parameters.ipynb").write_text("{")
    assert not runs.is_current(one, {}, tmp_path, "a"), "an output that cannot be read is made anew"


@pytest.mark.parametrize(
    ("type_name", "text", "value"),
    [
        ("bool", "False", False),
        ("bool", "yes", True),
        ("int", "-3", -3),
        ("float", "1e5", 1e5),
        ("float", 2, 2.0),
        ("str", "007", "007"),
        ("list[int]", "1,2", [1, 2]),
        ("list[float]", "[1e5, 2]", [1e5, 2.0]),
        ("dict", "{a: 1}", {"a": 1}),
        ("Path", "data", "data"),
    ],
)
def test_text_is_converted_to_the_declared_type(type_name, text, value):
    converted = parameters.convert("name", text, type_name)
    assert (converted, type(converted)) == (value, type(value))


@pytest.mark.parametrize(
    ("type_name", "value"),
    [
        ("bool", "maybe"),
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
    ("name", "values", "message"),
    [
        (NOTEBOOKS / "plain.ipynb", {"scale": "mini"}, "no such parameter in plain"),
        (NOTEBOOKS / "parameters.ipynb", {"scal": "mini"}, "use one of: batch_sizes, live, margin, replicates, scale"),
        (NOTEBOOKS / "parameters.ipynb", {"replicates": "many"}, "not of type int"),
        ("broken.ipynb", {}, "broken.ipynb: not a readable notebook"),
        ("plain.ipynb", {}, "overwritten by its own output"),
    ],
)
def test_wrong_usage_stops_before_anything_runs(name, values, message, tmp_path):
    (tmp_path / "broken.ipynb").write_text("{")
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
    (tmp_path / "sub").mkdir()
    shutil.copy(NOTEBOOKS / "plain.ipynb", tmp_path / "sub/01-phase-asymmetry.ipynb")
    one = tmp_path / "01-phase-asymmetry.ipynb"
    for name in ("01", "01-phase-asymmetry", "./01-phase-asymmetry.ipynb", str(one)):
        assert runs.find_notebooks([name]) == [one]
    assert [path.stem[:2] for path in runs.find_notebooks(["02", "01", "02"])] == ["02", "01"]
    assert len(runs.find_notebooks([])) == 4
    for names, message in (
        (["03"], "fits several"),
        (["99"], "no such notebook"),
        ([one, "sub/" + one.name], "one output"),
    ):
        with pytest.raises(StudyError, match=message):
            runs.find_notebooks(list(map(str, names)))


def test_the_digest_of_what_a_notebook_is_made_from_changes_with_its_rows_and_the_engine(tmp_path, monkeypatch):
    one, data = "01-phase-asymmetry", tmp_path / "data"
    for name in ("measured/local/01.jsonl", "published/figures.csv", "models.toml"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("first")
    for name, path in {"ROOT": tmp_path, "DATA": data, "MEASURED": data / "measured"}.items():
        monkeypatch.setattr(paths, name, path)
    found = [inputs.digest(one)]
    assert inputs.digest(one) == found[0]
    for name in ("measured/local/01.jsonl", "published/figures.csv", "models.toml"):
        (data / name).write_text("other")
        found.append(inputs.digest(one))
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "elsewhere")
    found.append(inputs.digest(one))
    assert len(set(found)) == len(found)
    of_all = [inputs.digest(name) for name in OF_ALL]
    (data / "measured/local/06-context.mini.jsonl").write_text("measured")
    assert inputs.digest(one) == found[-1], "rows of another notebook"
    assert not set(of_all) & {inputs.digest(name) for name in OF_ALL}


def test_notebooks_run_one_after_the_other_where_the_system_has_no_semaphores(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))  # as with a /dev/shm that is read-only

    monkeypatch.setattr(runs, "ProcessPoolExecutor", refused)
    jobs = [(NOTEBOOKS / f"{name}.ipynb", {}, "") for name in ("plain", "plain")]
    assert [result.status for result in runs.side_by_side(jobs, tmp_path, 2)] == ["ok", "ok"]


def test_an_executed_notebook_that_is_torn_is_no_result(tmp_path, monkeypatch):
    """As a disk that fills up leaves it: papermill thinks that it wrote the file."""
    execute = runs._execute

    def torn(notebook, partial, values):
        problem = execute(notebook, partial, values)
        os.truncate(partial, partial.stat().st_size // 2)
        return problem

    monkeypatch.setattr(runs, "_execute", torn)
    result = runs.run(NOTEBOOKS / "plain.ipynb", {}, tmp_path)
    assert (result.status, result.output) == ("incomplete", None)
    assert "df -h" in result.message
    assert not (tmp_path / "plain.ipynb").exists()
