"""The road from released weights to numbers, on commands alone: fetch, convert, check, quantize, run."""

import nbformat
import pytest
from conftest import mini_file
from hub import files_of, serve
from test_cli import root, run  # noqa: F401 (a fixture)

from plamo_study.measure import plan
from plamo_study.models import registry, released


def done(root, *arguments, **environment):  # noqa: F811
    finished = run(root, *arguments, **environment)
    assert finished.returncode == 0, finished.stderr
    return finished


@pytest.mark.timeout(600)
def test_from_a_released_repository_to_an_executed_notebook(root, tmp_path):  # noqa: F811
    models = root / "data" / "models"
    for name in plan.MODELS:
        repository = released.write_released(mini_file(name), tmp_path / name, shards=2)
        with serve(files_of(repository), registry.hub(name).repository) as hub:
            fetched = done(root, "models", "fetch", name, HF_ENDPOINT=hub.url)
        assert "UNPINNED" in fetched.stderr
        done(root, "models", "convert", name)
        converted = models / f"{name}.weights.BF16.gguf"
        done(root, "models", "check", str(converted))
        done(root, "models", "quantize", str(converted), "--type", "Q8_0")
        assert (models / f"{name}.weights.Q8_0.gguf").stat().st_size < converted.stat().st_size
    done(root, "run", "01", "--scale", "weights")
    notebook = nbformat.read(root / "reports/01-phase-asymmetry.ipynb", as_version=4)
    text = "".join(str(cell.get("outputs", "")) for cell in notebook.cells)
    assert "released weights, Q8_0" in text
    assert "scale weights (Q8_0 released weights)" in text
