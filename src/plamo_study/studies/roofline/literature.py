"""Other people's parts, formulas and figures (data/published)."""

import tomllib
from typing import Any

from plamo_study import paths
from plamo_study.errors import StudyError


def _toml(name: str) -> dict[str, Any]:
    path = paths.PUBLISHED / name
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise StudyError(str(path), f"cannot be read ({error})", "git checkout data/published") from error


def parts() -> list[dict[str, Any]]:
    """Parts with their published bandwidth, memory and peaks, each with its sources."""
    found: list[dict[str, Any]] = _toml("hardware.toml")["part"]
    return found


def cores() -> list[dict[str, Any]]:
    """Operations per cycle of the cores of the processors measured here, with sources."""
    found: list[dict[str, Any]] = _toml("hardware.toml")["core"]
    return found


def part(name: str) -> dict[str, Any]:
    """The part whose name begins with `name`."""
    return next(entry for entry in parts() if entry["name"].startswith(name))


def printed() -> dict[str, Any]:
    """The sources' figures, the models they calculate with, and the sources' names."""
    return _toml("source-tables.toml")
