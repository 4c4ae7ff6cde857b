"""The schema of rows as Markdown, from the types that write and read them: fields, defaults, and their comments."""

import ast
import inspect
from collections.abc import Sequence

import msgspec

from llama_meter import cells, rows

ROWS: Sequence[type[msgspec.Struct]] = (
    rows.Row, rows.Results, rows.Conditions, rows.State, rows.Evidence, rows.Request, rows.Failure, rows.Fact
)  # fmt: skip
SHARED: Sequence[type[msgspec.Struct]] = (cells.AnyCell, cells.OnEngine, cells.OnModel, cells.OnText, cells.Comparison)


def of_rows() -> str:
    """A row and its parts, one table per type."""
    return "\n\n".join(_described(each, each.__name__) for each in ROWS)


def of_cells() -> str:
    """All cells: one table per workload, after the tables of shared fields."""
    shared = [_described(each, f"Shared: {each.__name__}") for each in SHARED]
    return "\n\n".join([*shared, *(_described(kind, f"`{name}`") for name, kind in cells.KINDS.items())])


def _described(struct: type[msgspec.Struct], title: str) -> str:
    own = _fields(struct)
    parents = [base.__name__ for base in struct.__bases__ if base is not msgspec.Struct]
    parts = [f"### {title}", inspect.getdoc(struct) or ""]
    if parents:
        parts.append(f"With the fields of {', '.join(parents)}.")
    if own:
        parts.append("\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *own]))
    return "\n\n".join(parts)


def _fields(struct: type[msgspec.Struct]) -> list[str]:
    """A table line for each field that a type adds: the name in JSON, type, default, comment."""
    source = inspect.getsource(struct)
    names = dict(zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True))
    lines = source.splitlines()
    return [
        f"| `{names[node.target.id]}` | `{_cell(ast.unparse(node.annotation))}` | {_default(node.value)} | "
        f"{_cell(lines[(node.end_lineno or node.lineno) - 1].partition('  # ')[2])} |"
        for node in ast.parse(source).body[0].body  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names
    ]


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call):  # field(default=..., name=...)
        value = next((word.value for word in value.keywords if word.arg == "default"), None)
    return "" if value is None else f"`{_cell(ast.unparse(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
