"""Options of several commands: the scale, another build of the engine."""

import math
import os
from typing import Annotated

import typer

from llama_meter.engine import builds as engines
from llama_meter.models.given import REPAIR
from plamo_study.live import conduct
from plamo_study.read.recording import check_device


def finite(value: float | None) -> float | None:
    """The value, if it is finite; an option's range accepts NaN."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number of minutes, seconds or requests")
    return value


Scale = Annotated[str, typer.Option(help="mini (embedded, seconds) or shape (full-size random weights)")]
LIMIT = "including gates, anchors and repeats; a cell still running at the end is cut, and the next call measures it"
Minutes = Annotated[
    float, typer.Option(min=0, callback=finite, help=f"minutes for measuring, {LIMIT}; 0: as long as the plans take")
]
Force = Annotated[bool, typer.Option("--force", help="execute notebooks again even if nothing changed")]
Replace = Annotated[bool, typer.Option("--force", help="replace an existing file")]
Engine = Annotated[
    str | None, typer.Option(help="a build of `plamo-study engine list`, or a folder with llama.cpp's shared libraries")
]


Files = Annotated[
    list[str] | None,
    typer.Option("--file", metavar="GGUF", help="measure this file instead of the study's models; may be repeated"),
]
Repair = Annotated[
    bool,
    typer.Option("--repair", help="where only a repaired copy of a file can be measured, make one in data/models"),
]


Device = Annotated[
    str,
    typer.Option(help="cpu, gpu, or auto: on a GPU where the engine has one, and on its host's CPU beside it"),
]


def use_device(device: str) -> None:
    """Let plans use this device, in this process and in the kernels that it starts; StudyError for an unknown one."""
    check_device(device)
    os.environ[conduct.DEVICE] = device


def may_repair(asked: bool) -> None:
    """Let a repaired copy be made of a file that cannot be measured as it is."""
    if asked:
        os.environ[REPAIR] = "1"


def use_engine(name_or_folder: str | None) -> None:
    """Let every worker load another build; StudyError when there is none."""
    if name_or_folder is not None:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(engines.resolve(name_or_folder))
