"""Every notebook, live at mini, by plain papermill in a project of its own: the slowest tests there are."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from llama_meter import paths
from plamo_study.run import parameters

MINUTES = "0.7"  # a notebook: enough for most at mini; one that gets no row in it is skipped
ASKED = {"source": "live", "scale": "mini", "minutes": MINUTES}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """This one's files without rows measured here: what a notebook measures the later ones find."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "data/measured").mkdir(parents=True)
    shared = [path for path in paths.DATA.iterdir() if path.name not in ("measured", "models")]
    shared += [path for path in paths.MEASURED.iterdir() if path.name != "local"]
    shared += [paths.ROOT / name for name in ("notebooks", "README.md", "requirements.lock", "pyproject.toml", "src")]
    for path in shared:
        (folder / path.relative_to(paths.ROOT)).symlink_to(path)
    return folder


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", sorted(paths.NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_live_at_mini_by_plain_papermill(path, project, tmp_path):
    declared = parameters.declared(path)
    given = [text for name, value in ASKED.items() if name in declared for text in ("-p", name, value)]
    papermill = shutil.which("papermill", path=str(Path(sys.executable).parent))
    command = [papermill, path, tmp_path / path.name, *given, "--no-progress-bar", "--log-level", "ERROR"]
    environment = os.environ | {"PLAMO_STUDY_ROOT": str(project)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "not built here" in done.stderr:
        pytest.skip("a build that `plamo-study engine build` makes is not here")
    if "nothing was measured" in done.stderr:
        pytest.skip(f"no row in {MINUTES} minutes on this machine")
    assert done.returncode == 0, done.stderr[-2000:]
    cells = nbformat.read(tmp_path / path.name, as_version=4).cells
    assert all(cell.execution_count for cell in cells if cell.cell_type == "code" and cell.source.strip())
