"""The types of the package hold: mypy, as `pyproject.toml` sets it, beside the other tests; on macOS's library too."""

import subprocess
import sys

import pytest

from llama_meter import paths

pytestmark = pytest.mark.long


@pytest.mark.timeout(300)
@pytest.mark.parametrize("platform", ["linux", pytest.param("darwin", marks=pytest.mark.whole)])
def test_mypy_finds_nothing(platform):
    cache = f".mypy_cache/{platform}"  # one cache would be written anew each time
    command = [sys.executable, "-m", "mypy", "--platform", platform, "--cache-dir", cache]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
