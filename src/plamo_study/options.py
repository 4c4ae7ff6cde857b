"""What several commands take: the scale, JSON, another build of the engine."""

import os
from pathlib import Path
from typing import Annotated

import typer

from plamo_study.errors import StudyError
from plamo_study.measure.files import ACCEPT

Scale = Annotated[
    str, typer.Option(help="mini (embedded, seconds), shape (full-size random weights) or weights (released ones)")
]
Accept = Annotated[
    str | None,
    typer.Option(
        "--accept", metavar="WORDS", help="measure released files with blocking findings; WORDS enter the rows"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print rows as JSON lines on stdout, for scripts")]
Engine = Annotated[Path | None, typer.Option(help="folder with another build of llama.cpp's shared libraries")]


def use_engine(folder: Path | None) -> None:
    """Let every worker load the build in `folder`; StudyError when it holds none."""
    if folder is not None:
        check_engine(folder)
        os.environ["LLAMA_CPP_LIB_PATH"] = str(folder.resolve())


def accept_findings(words: str | None) -> None:
    """Let released files with blocking findings be measured, with these words in every row's model."""
    if words:
        os.environ[ACCEPT] = words


def check_engine(folder: Path) -> None:
    """StudyError unless a folder holds a build of llama.cpp."""
    if not any(folder.glob("libllama.*")):
        raise StudyError(
            str(folder), "holds no libllama", "build llama.cpp with -DBUILD_SHARED_LIBS=ON and name its bin folder"
        )
