"""CONTRIBUTING's walk-through, walked: the template copied, its page moved to the notebooks, and run live."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest

from llama_meter import paths

pytestmark = pytest.mark.whole


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository without its rows; the engine is that of this environment."""
    shutil.copytree(paths.ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        paths.DATA / "models", tmp_path / "data/models", ignore=shutil.ignore_patterns("*.shape.*", "*.weights.*")
    )
    for name in ("data/models.toml", "data/published"):
        (tmp_path / name).symlink_to(paths.ROOT / name)
    (tmp_path / "notebooks").mkdir()
    return tmp_path


@pytest.mark.timeout(600)
def test_the_template_copied_is_a_study_with_a_page(copy):
    studies = copy / "src/plamo_study/studies"
    shutil.copytree(studies / "template", studies / "half_a_prompt")
    shutil.move(studies / "half_a_prompt/page.ipynb", copy / "notebooks/99-half-a-prompt.ipynb")
    everything = {"PYTHONPATH": str(copy / "src"), "PLAMO_STUDY_ROOT": str(copy), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "plamo_study.cli.main", "run", "99", "--scale", "mini"],
        env=os.environ | everything,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    executed = nbformat.read(copy / "reports/99-half-a-prompt.ipynb", as_version=4)
    shown = [str(output.get("data", "")) for cell in executed.cells for output in cell.get("outputs", ())]
    assert any("32 tokens take" in text for text in shown)
    rows = (copy / "data/measured/local/99-half-a-prompt.mini.jsonl").read_text()
    assert rows.count('"workload":"prefill"') >= 20, "two files, two lengths, five blocks"
