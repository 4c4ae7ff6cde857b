"""Pins and commands hold together."""

import re
import tomllib

from typer.main import get_command

from llama_meter import paths
from plamo_study.cli import main as cli

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())
LOCK = (paths.ROOT / "requirements.lock").read_text()


def pins(lines):
    return dict(re.match(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines if "==" in line)


LOCKED = pins(re.findall(r"^[a-z][\w.-]*==[\w.]+", LOCK, re.MULTILINE))
DECLARED = pins(PROJECT["project"]["dependencies"])


def test_every_dependency_is_pinned_and_locked_by_hash_and_says_why():
    optional = PROJECT["project"]["optional-dependencies"]
    assert len(DECLARED) == len(PROJECT["project"]["dependencies"])
    assert all(len(pins(extra)) == len(extra) for extra in optional.values())
    assert DECLARED.items() <= LOCKED.items()
    assert all(pins(extra).items() <= LOCKED.items() for extra in optional.values())
    assert "://" not in LOCK, "a lock names no host"
    assert all("--hash=sha256:" in block for block in re.split(r"^(?=[a-z])", LOCK, flags=re.MULTILINE)[1:])
    lines = [
        line for line in (paths.ROOT / "pyproject.toml").read_text().splitlines() if re.match(r'\s+"[\w.-]+==', line)
    ]
    assert lines
    assert all("#" in line for line in lines)


def commands(group, prefix=""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def test_every_command_says_what_it_does():
    assert [name for name, command in commands(get_command(cli.app)) if not command.help] == []


def test_conda_gets_what_is_locked():
    named = dict(re.findall(r"      - ([\w.-]+)==(\S+)", (paths.ROOT / "environment.yml").read_text()))
    assert named == DECLARED
