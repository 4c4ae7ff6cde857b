"""What a folder of llama.cpp's libraries says of itself: its `engine.toml`, which anybody may have written."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from llama_meter import disk
from llama_meter.errors import StudyError

NAME = "engine.toml"
Words = Annotated[str, Meta(max_length=2000)]
Code = Annotated[str, Meta(min_length=1, max_length=200)]
Setting = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=[^\x00]*$", max_length=2000)]


class Note(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of an `engine.toml`; `data/upstream/engines.toml` says what they mean."""

    description: Words = ""
    corrects: Annotated[list[Code], Meta(max_length=64)] = []
    window: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    options: Annotated[list[Code], Meta(max_length=64)] = []
    environment: Annotated[list[Setting], Meta(max_length=64)] = []
    program: Code = ""
    release: Code = ""
    source: Words = ""
    ggml: Words = ""
    patches: Annotated[dict[Code, Code], Meta(max_length=64)] = {}


def read(folder: Path) -> dict[str, Any]:
    """The checked content of a folder's `engine.toml`; empty without one. StudyError for what is none."""
    path = folder / NAME
    if not path.exists():
        return {}
    content = disk.toml(path)
    try:
        msgspec.convert(content, Note)
    except msgspec.ValidationError as error:
        raise StudyError(str(path), f"describes no engine ({error})", f"mend it, or remove it: rm {path}") from error
    return content
