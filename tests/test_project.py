"""Pins, notebooks and documents hold together."""

import re
import tomllib

import nbformat
import papermill
import pytest
import yaml
from typer.main import get_command

from plamo_study import paths
from plamo_study.cli import main as cli
from plamo_study.fields import ORDER
from plamo_study.measure.rows import Request, Row
from plamo_study.publish import readme, runs

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())
LOCK = (paths.ROOT / "requirements.lock").read_text()
ENVIRONMENT = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
README = (paths.ROOT / "README.md").read_text()
NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))


def pins(lines):
    return dict(re.match(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines if "==" in line)


LOCKED = pins(re.findall(r"^[a-z][\w.-]*==[\w.]+", LOCK, re.MULTILINE))
DECLARED = pins(PROJECT["project"]["dependencies"])


def test_the_lock_holds_every_declared_version():
    optional = PROJECT["project"]["optional-dependencies"]
    extras = [line for extra in optional.values() for line in extra]
    locked = [line for name, extra in optional.items() if name != "train" for line in extra]
    assert DECLARED.items() <= LOCKED.items()
    assert pins(locked).items() <= LOCKED.items()
    assert len(pins(extras)) == len(extras), "every tool is pinned"
    assert len(DECLARED) == len(PROJECT["project"]["dependencies"])


def test_conda_gets_the_same_versions():
    pip = next(entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict))
    assert pins(pip) == DECLARED
    assert "--editable ." in pip


def test_the_lock_names_hashes_and_no_host():
    assert "://" not in LOCK
    blocks = re.split(r"^(?=[a-z])", LOCK, flags=re.MULTILINE)[1:]
    assert len(blocks) >= len(LOCKED)
    assert all("--hash=sha256:" in block for block in blocks)


def test_every_dependency_says_why():
    text = (paths.ROOT / "pyproject.toml").read_text()
    lines = [line for line in text.splitlines() if re.match(r'\s+"[\w.-]+==', line)]
    assert lines
    assert all("#" in line for line in lines)


# ---------------------------------------------------------------- notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_explains_its_parameters(path):
    shown = papermill.inspect_notebook(str(path))
    assert {"source", "scale"} <= shown.keys()
    for name, parameter in shown.items():
        assert parameter["inferred_type_name"] not in ("", "None"), f"{name} has no type"
        assert parameter["help"], f"{name} has no comment"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_ran(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.cells[0].source.startswith("# ")
    assert not runs.unfinished(notebook)
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type in ("stream", "error") for output in outputs), "stderr never reproduces"
    assert "/home/" not in path.read_text()


# ---------------------------------------------------------------- documents


def commands(group, prefix="plamo-study"):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}"


@pytest.mark.parametrize("command", sorted(commands(get_command(cli.app))))
def test_every_command_says_what_it_does(command):
    words = command.split()[1:]
    found = get_command(cli.app)
    for word in words:
        found = found.commands[word]
    assert found.help


def test_the_readme_says_what_the_rows_say():
    assert readme.is_current(), "plamo-study readme"


@pytest.mark.parametrize("names", [Row.__struct_fields__, Request.__struct_fields__, ORDER])
def test_every_column_stands_in_the_dictionary(names):
    text = (paths.DATA / "ROWS.md").read_text()
    assert [name for name in names if f"`{name}`" not in text] == []
