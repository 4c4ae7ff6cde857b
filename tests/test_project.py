"""Pins and commands hold together."""

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter

import conda
import pytest
import yaml
from typer.main import get_command

from llama_meter import paths
from plamo_study.cli import main as cli

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())
LOCK = (paths.ROOT / "requirements.lock").read_text()


def pins(lines):
    return dict(re.match(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines if "==" in line)


LOCKED = pins(re.findall(r"^[a-z][\w.-]*==[\w.]+", LOCK, re.MULTILINE))
DECLARED = pins(PROJECT["project"]["dependencies"])
UNLOCKED = ("train", "mlx")  # each for one tool beside the package


def test_every_dependency_is_pinned_and_locked_by_hash_and_says_why():
    optional = PROJECT["project"]["optional-dependencies"]
    assert len(DECLARED) == len(PROJECT["project"]["dependencies"])
    assert all(len(pins(extra)) == len(extra) for extra in optional.values())
    assert DECLARED.items() <= LOCKED.items()
    assert all(pins(extra).items() <= LOCKED.items() for name, extra in optional.items() if name not in UNLOCKED)
    assert "://" not in LOCK, "a lock names no host"
    assert all("--hash=sha256:" in block for block in re.split(r"^(?=[a-z])", LOCK, flags=re.MULTILINE)[1:])
    lines = [
        line for line in (paths.ROOT / "pyproject.toml").read_text().splitlines() if re.match(r'\s+"[\w.-]+==', line)
    ]
    assert lines
    assert all("#" in line for line in lines)


def test_conda_gets_what_is_locked():
    assert conda.FILE.read_text() == conda.of_repository(), "python tools/conda.py"
    moved = conda.written((paths.ROOT / "pyproject.toml").read_text(), LOCK.replace("gguf==0.", "gguf==9."))
    pip = next(entry["pip"] for entry in yaml.safe_load(moved)["dependencies"] if isinstance(entry, dict))
    assert pins(pip) == DECLARED | {"gguf": "9." + DECLARED["gguf"].partition(".")[2]}
    with pytest.raises(KeyError, match="gguf"):
        conda.written((paths.ROOT / "pyproject.toml").read_text(), LOCK.replace("gguf==", "other=="))


def commands(group, prefix=""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def test_every_command_says_what_it_does():
    assert [name for name, command in commands(get_command(cli.app)) if not command.help] == []


COUNTED = """
import json, sys
import pytest

class Counted:
    def pytest_collection_finish(self, session):
        marks = [[each.args[0] for each in item.iter_markers("case")] for item in session.items]
        print(json.dumps(marks), file=sys.stderr)

sys.exit(pytest.main(["-o", "addopts=-p early", "-m", "case", "--collect-only", *sys.argv[1:]], [Counted()]))
"""


@pytest.mark.long
def test_each_of_the_sixteen_cases_has_a_test_and_another_of_its_kind():
    files = [path for path in (paths.ROOT / "tests").glob("test_*.py") if "mark.case(" in path.read_text()]
    done = subprocess.run([sys.executable, "-c", COUNTED, *files], cwd=paths.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    counts = Counter(case for marks in json.loads(done.stderr.splitlines()[-1]) for case in marks)
    assert set(counts) == set(range(1, 17))
    assert min(counts.values()) > 1, counts
