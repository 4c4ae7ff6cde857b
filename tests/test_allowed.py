"""Every notebook parameter is checked before anything is measured, whoever runs the notebook."""

import os
import re
import subprocess
import sys
from math import inf, nan

import nbformat
import papermill
import pytest

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study.run import parameters
from plamo_study.studies import registry

NOTEBOOKS = {name: paths.NOTEBOOKS / f"{name}.ipynb" for name in registry.NOTEBOOKS}
REFUSED = {
    "source": ("elsewhere", "", None, 1),
    "scale": ("huge", "", None),
    "minutes": (nan, inf, -1, "soon", None, True),
    "device": ("tpu", "", None, "GPU", 1),
    "prompt": (0, 1.5),
    "answer": (0, -1),
    "users": (0, -1),
    "guess": (0, -1, nan, inf),
    "n_prompt": (0, -1, 2.5, True),
    "n_gen": (0, 2.5),
    "study": (1, None),
}


def values(notebook):
    """The defaults of a notebook's parameters."""
    return {name: eval(found["default"]) for name, found in papermill.inspect_notebook(notebook).items()}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_checks_every_parameter_it_has_in_its_next_cell(name):
    declared = parameters.declared(NOTEBOOKS[name])
    sweeps = {each for each, kind in declared.items() if each in parameters.VARIED and kind == "str"}
    own = declared.keys() - sweeps
    assert {each: declared[each] for each in own} == {each: parameters.PARAMETERS[each].kind.__name__ for each in own}
    cells = nbformat.read(NOTEBOOKS[name], as_version=4).cells
    (place,) = [n for n, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", [])]
    asked = set()
    room = values(NOTEBOOKS[name])
    for line in cells[place + 1].source.splitlines():
        if line.startswith("check("):
            eval(line, {"check": lambda **given: asked.update(given)} | room)
    assert asked == own
    varied = re.search(r"asked = sweep\((.*?)\)(?:\n|  #)", cells[place + 2].source, re.DOTALL)
    assert sweeps == set(re.findall(r"(\w+)=", varied[1]) if varied else ())
    measuring = cells[place + 1].source.split("check(")[0]
    assert not any(word in measuring for word in ("collect(", "read(", "recording(", "recordings("))


def test_every_parameter_that_is_known_belongs_to_a_notebook_and_refuses_something():
    declared = set().union(*(parameters.declared(notebook) for notebook in NOTEBOOKS.values()))
    assert declared >= parameters.VARIED
    declared -= parameters.VARIED - parameters.PARAMETERS.keys()
    assert declared == parameters.PARAMETERS.keys() == REFUSED.keys()


def test_a_value_that_means_nothing_is_refused_and_named():
    for name, value in ((name, value) for name, bad in REFUSED.items() for value in bad):
        with pytest.raises(StudyError) as problem:
            parameters.typed(**{name: value})
        assert f"{name} {value!r}" == problem.value.what


@pytest.mark.case(15)
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("minutes", "5", 5.0),
        ("guess", "1e1", 10.0),
        ("prompt", "64", 64),
        ("study", "", ""),
    ],
)
def test_text_serves_as_the_value_it_stands_for_in_the_notebook_that_checks_it(name, text, value):
    room = {name: text, "check": parameters.check}
    exec(f"check({name}={name})", room)
    assert (room[name], type(room[name])) == (value, type(value))
    assert parameters.convert(name, text, parameters.PARAMETERS[name].kind.__name__) == value


@pytest.mark.case(15)
@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("true", bool, True),
        ("True", bool, True),
        (" yes ", bool, True),
        ("FALSE", bool, False),
        ("no", bool, False),
        ("2", bool, "2"),
        ("", bool, ""),
        ("2.5", int, "2.5"),
        ("1e3", float, 1000.0),
        ("1", str, "1"),
        (1, bool, 1),
    ],
)
def test_text_is_a_truth_or_a_number_where_it_can_be_one_and_else_stays_text(text, kind, value):
    found = parameters.from_text(text, kind)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.case(15)
def test_text_that_papermill_passes_on_serves_as_a_number(tmp_path):
    notebook = nbformat.read(NOTEBOOKS["01-phase-asymmetry"], as_version=4)
    notebook.cells = notebook.cells[1:3]  # parameters and checks
    checks = [line for line in notebook.cells[1].source.splitlines() if "import check" in line or "check(" in line]
    notebook.cells[1].source = "\n".join([*checks, "assert minutes == 5"])
    source, out = tmp_path / "01.ipynb", tmp_path / "out.ipynb"
    nbformat.write(notebook, source)
    given = ["-r", "minutes", "5", "-k", "python3", "--no-progress-bar"]
    command = [sys.executable, "-m", "papermill", source, out, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_papermill_alone_refuses_too_and_measures_nothing(tmp_path):
    command = [sys.executable, "-m", "papermill", NOTEBOOKS["07-latency"], "--no-progress-bar"]
    given = ["-p", "n_chunk", "-1", "-p", "source", "live", "-p", "scale", "mini"]
    environment = os.environ | {"PLAMO_STUDY_ROOT": str(tmp_path)}
    done = subprocess.run([*command, *given], capture_output=True, text=True, check=False, env=environment)
    assert "StudyError: n_chunk -1" in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_files_given_are_measured_and_a_parameter_that_a_notebook_lacks_is_named(capsys):
    cells = [
        "",
        'source: str = "recorded"\nfiles: str = ""',
        '# Parameters\nfiles = "a.gguf"\nscal = "mini"',
        "check()",
    ]
    room = {"source": "recorded", "files": "a.gguf", "In": cells, "check": parameters.check}
    exec("check(source=source)", room)
    assert room["source"] == "live"
    assert "scal" in capsys.readouterr().out
    assert parameters.unknown(cells[:2]) == []
