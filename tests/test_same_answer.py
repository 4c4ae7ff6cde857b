"""The same call twice gives the same answer, also where a row failed."""

import msgspec
import nbformat
from examples import example_row

from llama_meter import paths
from llama_meter.measure.runner import Summary
from llama_meter.rows import Failure
from plamo_study.cli import notebooks, report
from plamo_study.studies import registry

NAME = "01-phase-asymmetry"
PARAMETERS = 'source: str = "recorded"  # where from\nscale: str = "shape"  # how large'


def test_a_killed_row_fails_every_call_until_it_is_measured_again(tmp_path, monkeypatch):
    cell = nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(paths, "REPORTS", tmp_path / "reports")
    nbformat.write(notebook, tmp_path / f"{NAME}.ipynb")
    failure = Failure(stage="run", signal="SIGKILL")
    killed = msgspec.structs.replace(example_row(), status="killed", valid=None, failure=failure, samples_ns=[])
    asked = notebooks.Asked([str(tmp_path / f"{NAME}.ipynb")], "live", "mini", {})
    for row, code in ((killed, 1), (killed, 1), (example_row(), 0)):
        monkeypatch.setattr(report, "measure", lambda *_, row=row, **__: Summary([row], 0))
        assert notebooks.execute(asked) == code


def test_a_published_page_about_speed_never_shows_models_that_lie_in_a_cache():
    for name in registry.OF_FULL_SIZE:
        assert notebooks.as_recorded(name, "mini") == {"source": "recorded", "scale": "shape"}
        assert notebooks.as_recorded(name, "shape") == {}
    assert notebooks.as_recorded("09-serving", "mini") == {}
