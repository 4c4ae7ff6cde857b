"""The types of the package hold: mypy, as `pyproject.toml` sets it, beside the other tests."""

import subprocess
import sys

import pytest

from plamo_study import paths


@pytest.mark.timeout(300)
def test_mypy_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
