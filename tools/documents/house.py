"""The two packages as rooms on floors: which there are, what each is for, and which rests on which."""

import ast
from collections.abc import Iterable
from pathlib import Path

from llama_meter import paths

SOURCES = paths.ROOT / "src"
METER, STUDY = "llama_meter", "plamo_study"
FLOORS: dict[str, tuple[str, ...]] = {  # the lowest first; a module imports its own floor and those below it
    METER: (
        "surroundings", "errors", "paths", "progress", "limits", "disk", "children", "http", "cells", "stats", "engine",
        "oracle", "models", "rows", "journal", "measure", "plausible", "packs", "serve", "simulate", "workloads",
        "__main__",
    ),
    STUDY: ("stats", "plans", "read", "arithmetic", "show", "laws", "live", "measurements", "run", "publish", "cli"),
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module by its dotted name, but for the front doors of rooms."""
    found = (path for package in FLOORS for path in (SOURCES / package).rglob("*.py") if path.name != "__init__.py")
    return {".".join(path.relative_to(SOURCES).with_suffix("").parts): path for path in found}


def imports(path: Path, known: Iterable[str]) -> set[str]:
    """What a module imports, inside functions too: modules of ours by their names, others by their first word."""
    known, found = set(known), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name if alias.name in known else alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = node.module.split(".")[0] in FLOORS
            found |= {name if name in known else node.module for name in names} if ours else {node.module.split(".")[0]}
    return found


def room(name: str) -> str:
    """The room of a module: its package and its folder, or its own name where it stands in the package itself."""
    return ".".join(name.split(".")[:2])


def floor(name: str) -> tuple[int, int]:
    """How high a module stands; ValueError for one without a floor."""
    package, place = name.split(".")[:2]
    return list(FLOORS).index(package), FLOORS[package].index(place)


EVERYWHERE = (
    "surroundings",
    "errors",
    "paths",
    "progress",
    "limits",
    "disk",
    "children",
)  # all others rest on them


def drawn() -> str:
    """The rooms from the top, each with what it is for and the rooms it rests on, but for those of EVERYWHERE."""
    known = modules()
    rests: dict[str, set[str]] = {room(name): set() for name in known}
    for name, path in known.items():
        rests[room(name)] |= {room(other) for other in imports(path, known) & known.keys()} - {room(name)}
    lines = []
    for package in reversed(FLOORS):
        lines += [f"src/{package}/"]
        for place in reversed(FLOORS[package]):
            lines += [f"  {place:<12} {_purpose(package, place)}"]
            for other in reversed(FLOORS):
                below = [each for each in FLOORS[other] if f"{other}.{each}" in rests[f"{package}.{place}"]]
                named = " ".join(each for each in below if each not in EVERYWHERE)
                lines += [f"  {'':<12}   on {'' if other == package else f'{other}: '}{named}"] if named else []
    return "\n".join(["```", *lines, "```"])


def _purpose(package: str, place: str) -> str:
    path = SOURCES / package / place
    door = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    told = ast.get_docstring(ast.parse(door.read_text(encoding="utf-8")))
    return (told or "").split("\n")[0]
