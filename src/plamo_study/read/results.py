"""Figures that others published, with their sources."""

import tomllib
from typing import Any

import pandas as pd
from IPython.display import Markdown

from llama_meter import paths


def load(name: str) -> pd.DataFrame:
    """The figures of one source, with the columns of its file; `sources.toml` says where they come from."""
    return pd.read_csv(paths.PUBLISHED / f"{name}.csv")


def weights(name: str) -> str:
    """The model files behind a source's figures."""
    return str(_entry(name)["weights"])


def source(name: str) -> Markdown:
    """The publisher of the figures, machine, build, and notes for their reading."""
    entry = _entry(name)
    head = f"Source: *{entry['title']}*, {entry['subject']}; {entry['machine']}; {entry['engine']}; {entry['weights']}."
    return Markdown("\n".join([head, "", *(f"- {note}" for note in entry["notes"])]))


def _entry(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = tomllib.loads((paths.PUBLISHED / "sources.toml").read_text(encoding="utf-8"))[name]
    return entry
