"""Every notebook, live at mini, by plain papermill in a project of its own: it is whole, or says what it lacked."""

import os
import subprocess
import sys

import pytest

from llama_meter import paths
from plamo_study import runs

LACKED = ("mend: give more minutes", "no study has live rows")  # the second of a page about other pages' rows
LIVE = {"source": "live", "scale": "mini", "minutes": "0.2"}


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_live_at_mini_by_plain_papermill_is_whole_or_says_what_it_lacked(name, tmp_path):
    (tmp_path / "data/measured").mkdir(parents=True)
    shared = [path for path in paths.DATA.iterdir() if path != paths.MEASURED]
    shared += [path for path in paths.MEASURED.iterdir() if path.name != "local"]
    shared += [paths.ROOT / part for part in ("notebooks", "README.md", "requirements.lock", "pyproject.toml", "src")]
    for path in shared:
        (tmp_path / path.relative_to(paths.ROOT)).symlink_to(path)
    page = paths.NOTEBOOKS / f"{name}.ipynb"
    values = [word for key in LIVE.keys() & runs.declared(page).keys() for word in ("-p", key, LIVE[key])]
    command = [sys.executable, "-m", "papermill", page, tmp_path / "out.ipynb", *values, "--no-progress-bar"]
    done = subprocess.run(command, env=os.environ | {"PLAMO_STUDY_ROOT": str(tmp_path)}, capture_output=True, text=True)
    if "mend: plamo-study engine build" in done.stderr:
        pytest.skip("a build that `plamo-study engine build` makes is not here")
    assert done.returncode == 0 or any(words in done.stderr for words in LACKED), done.stderr[-2000:]
