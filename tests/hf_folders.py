"""Small models as GGUF files and in Hugging Face layout, and ways to break copies of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import released
from conftest import ATTENTION, HYBRID

from plamo_study.errors import StudyError
from plamo_study.models import convert, registry, synthetic
from plamo_study.models.registry import ModelSpec

MODELS = (HYBRID, ATTENTION)


def spec_of(name: str, tied: bool = True) -> ModelSpec:
    """Small enough to convert in a tenth of a second, with both kinds of layer."""
    return replace(registry.spec(name, "mini"), layers=2, window_pattern=2 if name == ATTENTION else 0, tied=tied)


def make_files(folder: Path) -> SimpleNamespace:
    """`gguf(model, type, tied)` and `repository(model, type, shards, tied)`: paths of files written once, read-only."""

    def gguf_file(name: str, dtype: str = "F32", tied: bool = True) -> Path:
        path = folder / f"{name}.{dtype}.{tied}.gguf"
        return path if path.exists() else synthetic.write(spec_of(name, tied), dtype, path)

    def repository(name: str, dtype: str = "F32", shards: int = 1, tied: bool = True) -> Path:
        path = folder / f"{name}.{dtype}.{tied}.{shards}"
        return path if path.exists() else released.write_released(gguf_file(name, dtype, tied), path, shards, dtype)

    folder.mkdir(exist_ok=True)
    return SimpleNamespace(gguf=gguf_file, repository=repository)


def linked(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def rewrite(path: Path, content: str | bytes) -> None:
    path.unlink()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    value = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}
    rewrite(path, json.dumps(value))


def same_tensors(one: Path, other: Path) -> None:
    for a, b in zip(gguf.GGUFReader(one).tensors, gguf.GGUFReader(other).tensors, strict=True):
        assert (a.name, a.tensor_type, a.shape.tolist()) == (b.name, b.tensor_type, b.shape.tolist())
        np.testing.assert_array_equal(a.data.view(np.uint8), b.data.view(np.uint8), err_msg=a.name)


def contents(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    return {key: fields[key].contents() for key in fields if not key.startswith("GGUF.")}


def refused(source: Path, tmp_path: Path, match: str, dtype: str = "F16") -> None:
    out = tmp_path / "out"
    with pytest.raises(StudyError, match=match):
        convert.convert(source, out / "model.gguf", dtype)
    assert not out.exists() or not list(out.iterdir())


def edit_rows(folder: Path, change: Callable[[list[list[Any]]], None]) -> None:
    path = folder / "tokenizer.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    rewrite(path, "".join(json.dumps(row) + "\n" for row in rows))
