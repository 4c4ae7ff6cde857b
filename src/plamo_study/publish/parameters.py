"""Typed notebook parameters: a notebook's declarations, and command-line text converted to their types.

papermill only warns about a name that the notebook does not declare and guesses types from the text (`1e5` becomes a
float, `[1,2]` stays text). Here an unknown name or a value of the wrong type is an error before anything runs.
"""

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import papermill
import yaml  # type: ignore[import-untyped]  # ships no types; only safe_load is used

from plamo_study.errors import StudyError
from plamo_study.studies import allowed

KINDS = (bool, int, float, str, list, dict, list[bool], list[int], list[float], list[str])
TYPES: dict[str, Any] = {kind.__name__ if isinstance(kind, type) else str(kind): kind for kind in KINDS}


def declared(notebook: Path) -> dict[str, str]:
    """Return {parameter: type name} as the notebook's `parameters` cell declares them.

    An unannotated parameter has the type of its default. Raises StudyError when the file is not a readable notebook.
    """
    seen = notebook.stat() if notebook.exists() else None
    return dict(_as_seen(notebook, (seen.st_mtime_ns, seen.st_size, seen.st_ino) if seen else ()))


@cache
def _as_seen(notebook: Path, seen: tuple[int, ...]) -> dict[str, str]:
    """What a notebook declares, read once as long as it looks the same: a command asks five times for each."""
    try:
        found = papermill.inspect_notebook(notebook)
    except Exception as problem:  # nbformat, papermill and JSON each raise their own kind here
        raise StudyError(str(notebook), f"not a readable notebook ({problem})", "jupyter lab notebooks") from problem
    return {name: _type_name(entry["inferred_type_name"], entry["default"]) for name, entry in found.items()}


def _type_name(annotation: str, default: str) -> str:
    if annotation != "None":
        return annotation.replace(" ", "")
    try:
        return type(ast.literal_eval(default)).__name__
    except (ValueError, SyntaxError):
        return "Any"


def assign(notebooks: Sequence[Path], values: Mapping[str, Any]) -> dict[Path, dict[str, Any]]:
    """Return, for each notebook, the `values` it declares, converted to the declared types.

    Text is converted (`"1e5"` to a float parameter, `"[1, 2]"` or `"1,2"` to a list); other values must already fit.
    Raises StudyError when no chosen notebook declares a name, or a value does not fit the type.
    """
    types = {notebook: declared(notebook) for notebook in notebooks}
    known = sorted({name for names in types.values() for name in names})
    for name in values:
        if name not in known:
            chosen = ", ".join(path.stem for path in notebooks)
            raise StudyError(
                f"-p {name}", f"no such parameter in {chosen}", f"use one of: {', '.join(known) or 'none'}"
            )
    return {
        notebook: {name: convert(name, value, names[name]) for name, value in values.items() if name in names}
        for notebook, names in types.items()
    }


def convert(name: str, value: Any, type_name: str) -> Any:
    """Return `value` as one of TYPES; other types pass unchanged. Text is converted, for lists and dicts as YAML.

    Raises StudyError when the value cannot be read as that type.
    """
    if type_name not in TYPES:
        return value
    read = allowed.from_text(value, TYPES[type_name])
    try:
        if isinstance(value, str) and type_name.startswith(("list", "dict")):
            bare = type_name.startswith("list") and not value.lstrip().startswith("[")
            read = yaml.safe_load(f"[{value}]" if bare else value)
        return msgspec.convert(read, TYPES[type_name], strict=False)
    except (msgspec.ValidationError, yaml.YAMLError) as problem:
        mend = f"give {name} a value of type {type_name}"
        raise StudyError(f"-p {name} {value}", f"not of type {type_name}", mend) from problem
