"""Allowed values of notebook parameters, checked before anything is measured.

The command line checks before it runs a notebook. For plain papermill and JupyterLab, a notebook also checks in the
cell after its parameters: `check(source=source, scale=scale, ...)` with every parameter it has. Papermill passes on as
text what it is given raw, such as `-r minutes 5`: the notebook goes on with the number that the text stands for.
"""

import ast
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]  # ships no types; only safe_load is used

from llama_meter.errors import StudyError
from llama_meter.measure.asked import Sweep
from llama_meter.measure.plan import DTYPE
from plamo_study.read.recording import DEVICES, SOURCES


@dataclass(frozen=True)
class Allowed:
    """The type of a parameter and its range: at least `least`, above `above`, at most `most`, below `below`.

    `one_of`: the only allowed values, if any are given. Numbers are finite.
    """

    kind: type
    one_of: Sequence[Any] = ()
    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def wrong(self, value: Any) -> str:
        """Why a value is not allowed; "" if it is."""
        whole = type(value) is int and self.kind is float
        if type(value) is not self.kind and not whole:
            return f"is not of type {self.kind.__name__}"
        if self.one_of:
            return "" if value in self.one_of else f"is not one of {', '.join(map(str, self.one_of))}"
        if isinstance(value, str):
            return ""
        fits = math.isfinite(value) and self.least <= value <= self.most and self.above < value < self.below
        return "" if fits else f"is not a finite number {self._range()}".rstrip()

    def _range(self) -> str:
        words = {"of at least": self.least, "above": self.above, "of at most": self.most, "below": self.below}
        return " and ".join(f"{word} {limit:g}" for word, limit in words.items() if math.isfinite(limit))


TRUTHS = {"true": True, "yes": True, "false": False, "no": False}
FACTOR, COUNT = Allowed(float, above=0), Allowed(int, least=1)
PARAMETERS = {
    "source": Allowed(str, SOURCES),
    "scale": Allowed(str, tuple(DTYPE)),
    "minutes": Allowed(float, least=0),
    "device": Allowed(str, DEVICES),
    "guess": FACTOR,
    "study": Allowed(str),
    "prompt": COUNT,
    "answer": COUNT,
    "users": COUNT,
    "n_prompt": COUNT,
    "n_gen": COUNT,
}


VARIED = {field.name for field in fields(Sweep)}  # text of these is a sweep, which has a check of its own


def from_text(value: Any, kind: type) -> Any:
    """The truth value or number of this kind that a text stands for; anything else as it is."""
    if not isinstance(value, str) or kind not in (bool, int, float):
        return value
    try:
        return TRUTHS[value.strip().lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        return value


def typed(**values: Any) -> dict[str, Any]:
    """The values, text as what it stands for; StudyError for the first that is not allowed.

    An unknown parameter may have any value.
    """
    checked = {
        name for name, value in values.items() if name in PARAMETERS and not (name in VARIED and isinstance(value, str))
    }
    converted = {
        name: from_text(value, PARAMETERS[name].kind) if name in checked else value for name, value in values.items()
    }
    for name in converted:
        if name in checked and (why := PARAMETERS[name].wrong(value := converted[name])):
            raise StudyError(f"{name} {value!r}", why, f"give another in the first cell, or with -p {name} VALUE")
    return converted


def check(**values: Any) -> None:
    """Check a notebook's parameters as `typed` does, and give those that were text their values in the notebook.

    Files given are measured: their source is live. A parameter that papermill was given and the notebook does not have
    is said.
    """
    room = sys._getframe(1).f_globals
    converted = typed(**values)
    if room.get("files") and "source" in converted:
        converted["source"] = "live"
    room.update({name: value for name, value in converted.items() if value is not values[name]})
    for name in unknown(room.get("In", ())) if "source" in values else ():
        print(f"-p {name}: this notebook has no such parameter, so nothing changes")


def unknown(cells: Sequence[str]) -> list[str]:
    """Return the names that papermill's cell sets and the cell before it, which declares the parameters, does not."""
    injected = next((at for at, cell in enumerate(cells) if at and cell.startswith("# Parameters\n")), 0)
    if not injected:
        return []
    own, given = (
        [
            node.id
            for node in ast.walk(ast.parse(cell))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        for cell in cells[injected - 1 : injected + 1]
    )
    return [name for name in given if name not in own]


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
    from papermill import inspection, iorw  # a third of a second, and what only checks values does without

    try:
        cells = iorw.load_notebook_node(str(notebook))  # inspect_notebook wants the name of a kernel, which is not used
        entries = {found.name: found._asdict() for found in inspection._infer_parameters(cells, "python3", "python")}
    except Exception as problem:  # nbformat, papermill and JSON each raise their own kind here
        raise StudyError(str(notebook), f"not a readable notebook ({problem})", "jupyter lab notebooks") from problem
    return {name: _type_name(entry["inferred_type_name"], entry["default"]) for name, entry in entries.items()}


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
    all_names = sorted({name for names in types.values() for name in names})
    for name in values:
        if name not in all_names:
            chosen = ", ".join(path.stem for path in notebooks)
            raise StudyError(
                f"-p {name}", f"no such parameter in {chosen}", f"use one of: {', '.join(all_names) or 'none'}"
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
    read = from_text(value, TYPES[type_name])
    try:
        if isinstance(value, str) and type_name.startswith(("list", "dict")):
            bare = type_name.startswith("list") and not value.lstrip().startswith("[")
            read = yaml.safe_load(f"[{value}]" if bare else value)
        return msgspec.convert(read, TYPES[type_name], strict=False)
    except (msgspec.ValidationError, ValueError, yaml.YAMLError) as problem:
        mend = f"give {name} a value of type {type_name}"
        raise StudyError(f"-p {name} {value}", f"not of type {type_name}", mend) from problem
