"""One request: parsed at the command or in a notebook, before anything is measured, and its minutes shared."""

import os
import subprocess
import sys
from math import inf, nan

import nbformat
import pytest

from llama_meter import paths
from llama_meter.errors import StudyError
from llama_meter.measure.request import VALUES, Request, Sweep, sweep
from plamo_study import live, runs
from plamo_study.cli import notebooks
from plamo_study.studies import registry

NOTEBOOKS = {name: paths.NOTEBOOKS / f"{name}.ipynb" for name in registry.NOTEBOOKS}
MEASURING = {name: path for name, path in NOTEBOOKS.items() if registry.of_notebook(name, "mini")}
OWN = {"prompt", "answer", "users", "guess", "study"}  # what a page computes with


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("n_prompt", "128-1024*2", (128, 256, 512, 1024)),
        ("n_prompt", "4-12+4,4", (4, 8, 12)),
        ("n_prompt", [64, "32"], (64, 32)),
        ("rates", "0.5, 2", (0.5, 2.0)),
        ("flash_attn", "0", "off"),
    ],
)
def test_text_numbers_and_lists_become_the_values_of_a_sweep(name, value, parsed):
    assert getattr(sweep(**{name: value}), name) == parsed


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("source", ("elsewhere", "", None, 1)),
        ("scale", ("huge", "", None)),
        ("minutes", (nan, inf, -1, "soon", None, True)),
        ("device", ("tpu", "", None, "GPU")),
        ("n_prompt", (0, -1, 2.5, True, "4-1", "0-8*2", "1-4*1", "many", "1-1000", 1 << 21)),
        ("acceptance", (-0.1, 1.5, "nan")),
        ("rates", (0,)),
        ("flash_attn", ("maybe",)),
        ("type_v", ("q3_k",)),
        ("n_gpu_layers", ("all",)),
    ],
)
def test_a_value_that_means_nothing_is_refused_and_named(name, values):
    for value in values:
        with pytest.raises(StudyError) as problem:
            Request.of({"source": "live", name: value})
        assert problem.value.what.startswith(name)


def test_values_are_measured_and_recorded_rows_have_none():
    assert Request.of({"source": "live", "minutes": "5", "n_seq": "2"}) == Request(
        "live", minutes=5, sweep=sweep(n_seq=2)
    )
    assert Request.of({"guess": 3}) == Request()
    for wrong in ({"n_seq": "2"}, {"source": "live", "draft_file": "a.gguf"}):
        with pytest.raises(StudyError):
            Request.of(wrong)
    with pytest.raises(StudyError, match="no study varies it"):
        sweep(colour="blue")
    both = Request(sweep=Sweep(n_seq=(2,), n_gen=(3,)))
    assert both.only("n_gen").sweep == Sweep(n_gen=(3,))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_parses_all_its_parameters_before_anything_else(name):
    declared = runs.declared(NOTEBOOKS[name])
    assert declared.keys() <= {"source", "scale", "minutes", "device", *VALUES, *OWN}
    assert {declared[each] for each in declared.keys() & set(VALUES)} <= {"str"}
    cells = [cell.source for cell in nbformat.read(NOTEBOOKS[name], as_version=4).cells if cell.cell_type == "code"]
    assert "request = Request.of(globals())" in cells[1]
    assert not any(word in cells[1] for word in ("measurements(", "recording(", "parts(", "read("))


@pytest.mark.long
def test_papermill_alone_refuses_too_and_measures_nothing(tmp_path):
    command = [sys.executable, "-m", "papermill", NOTEBOOKS["07-latency"], "--no-progress-bar"]
    values = ["-p", "n_chunk", "-1", "-p", "source", "live", "-p", "scale", "mini"]
    environment = os.environ | {"PLAMO_STUDY_ROOT": str(tmp_path)}
    done = subprocess.run([*command, *values], capture_output=True, text=True, check=False, env=environment)
    assert "StudyError: n_chunk -1" in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("scale", "minutes"), [("mini", 3), ("shape", 60)])
def test_notebooks_needed_most_are_measured_and_each_study_has_time_to_say_something(scale, minutes):
    def shares(minutes):
        return notebooks.shares([*MEASURING.values()], Request("live", scale, minutes))

    fitting = shares(minutes)
    n = sum(len(registry.of_notebook(path.stem, scale)) for path in fitting)
    assert [*fitting] == [path for path in MEASURING.values() if path in fitting], "in the order of need"
    assert len(fitting) == 1 or minutes / n >= notebooks.LEAST[scale]
    assert sum(fitting.values()) == pytest.approx(minutes)
    assert len(fitting) <= len(shares(2 * minutes))
    assert set(shares(0).values()) == {0}
    assert len(shares(0)) == len(MEASURING)


def test_what_is_meaningless_in_part_is_shown_as_recorded_where_its_share_is_too_short():
    found = live.collect("05-quality", Request("live", "mini", 1))
    assert (found.source, len(found.rows) > 0) == ("recorded", True)


def test_a_parameter_that_a_notebook_lacks_is_named(capsys):
    cells = [
        "",
        'source: str = "recorded"  # which\nscale: str = "mini"',
        '# Parameters\nsource = "recorded"\ncolour = 1\n',
    ]
    Request.of({"In": cells, "source": "recorded", "scale": "mini", "colour": 1})
    assert capsys.readouterr().out == "-p colour: this notebook has no such parameter, so nothing changes\n"
