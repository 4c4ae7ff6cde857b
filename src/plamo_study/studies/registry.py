"""Every chapter and study, found in the folders beside this module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from llama_meter.cells import File
from llama_meter.errors import StudyError
from plamo_study import studies
from plamo_study.studies import HISTORY, Chapter

if TYPE_CHECKING:
    from llama_meter.measure.plan import Plan
    from plamo_study.read.metrics import Quantities

TEMPLATE = "template"  # the folder to copy, no chapter itself


def _chapters() -> tuple[Chapter, ...]:
    """In the order of need: pages without a chapter's number, chapters, appendices."""
    folders = [each.name for each in iter_modules(studies.__path__) if each.ispkg and each.name != TEMPLATE]
    chapters = [_chapter(f"{studies.__name__}.{name}") for name in folders]
    return tuple(
        sorted(chapters, key=lambda each: (each.notebook[0].isdigit() or each.notebook[0].isupper(), each.notebook))
    )


def _chapter(package: str) -> Chapter:
    """A folder's chapter, its studies with the whole names of what plans them."""
    chapter: Chapter = import_module(package).CHAPTER
    near = {name: study for name, study in chapter.studies.items() if study.where.count(".") == 1}
    inside = {name: replace(study, where=f"{package}.{study.where}") for name, study in near.items()}
    first = f"{package}.{chapter.first}" if chapter.first else ""
    return replace(chapter, studies=dict(chapter.studies) | inside, first=first)


@cache
def quantities() -> "Mapping[str, Quantities]":
    """By kind of cell, what its rows hold in place of times in one piece: the QUANTITIES of the folders' `metrics`."""
    by_kind: dict[str, Quantities] = {}
    for place in sorted(Path(studies.__path__[0]).glob("*/metrics.py")):
        by_kind |= import_module(f"{studies.__name__}.{place.parent.name}.metrics").QUANTITIES
    return by_kind


CHAPTERS = _chapters()
NOTEBOOKS = {chapter.notebook: chapter.question for chapter in CHAPTERS}
STUDIES = {name: study for chapter in CHAPTERS for name, study in chapter.studies.items()}
OF_ALL = [chapter.notebook for chapter in CHAPTERS if chapter.of_all]
OF_PAIRS = next(chapter.notebook for chapter in CHAPTERS if chapter.of_pairs)
OF_FULL_SIZE = [chapter.notebook for chapter in CHAPTERS if chapter.of_full_size]
HOME = next(chapter for chapter in CHAPTERS if chapter.first)  # the page of a machine


def plan(study: str) -> "Callable[..., Plan]":
    """The function from a scale to a study's plan. StudyError for one whose rows are history.

    A plan is imported when it is asked for: whoever reads rows needs none.
    """
    where = STUDIES[study].where
    if where == HISTORY:
        raise StudyError(f"study {study}", f"is history: {HISTORY} measured it", "choose another")
    return function(where)


def function(where: str) -> "Callable[..., Any]":
    """A function by its whole name."""
    module, _, name = where.rpartition(".")
    return getattr(import_module(module), name)  # type: ignore[no-any-return] # whatever bears this name


def of_notebook(name: str, scale: str, files: Sequence[File] = ()) -> list[tuple[str, str]]:
    """The studies a notebook shows, with the scale each is measured at when the notebook asks for `scale`.

    `name`: the notebook's, or that of one of its studies. For `files` of a user's own only studies that take some.
    """
    return [
        (study, shown_at(study, scale))
        for study in STUDIES
        if notebook_of(study) == notebook_of(name) and not STUDIES[study].aside and (varies(study) or not files)
    ]


def notebook_of(name: str) -> str:
    """The notebook that a study, or a notebook itself, belongs to; "" for neither."""
    return next((each.notebook for each in CHAPTERS if name == each.notebook or name in each.studies), "")


def shown_at(name: str, scale: str) -> str:
    """The scale at which a study is shown where a notebook asks for `scale`; an unknown study at that one."""
    return "mini" if name in STUDIES and STUDIES[name].at_mini else scale


def varies(study: str) -> bool:
    """Whether a study takes files and values of a user's own."""
    return study in STUDIES and STUDIES[study].where != HISTORY and "sweep" in signature(plan(study)).parameters
