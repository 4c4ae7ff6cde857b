"""The defects of llama.cpp's PLaMo 2, by name: the one table for reports, notebooks and builds.

Recorded engines carry the codes in `corrects`; output shows the names.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """A defect of the engine: its code in engine.toml, its name, and what it does in one sentence."""

    code: str
    name: str
    says: str


DEFECTS = (
    Defect(
        "D1",
        "lost rotation",
        "A file whose head counts are an array that starts with 0 gets no rotary positions: "
        "the CPU backend never returns, other backends answer wrongly.",
    ),
    Defect(
        "D2",
        "mixed prompts",
        "Several prompts in one micro-batch exchange tokens, so one request changes another's answer.",
    ),
    Defect(
        "D3",
        "misplaced states",
        "A micro-batch of several sequences that starts at a cell above 0 stores its states in other sequences' "
        "cells, or aborts behind the last one.",
    ),
    Defect(
        "D4",
        "split projections",
        "A decode step of B sequences multiplies each Mamba projection by B vectors, not by one matrix.",
    ),
    Defect(
        "D5",
        "half-precision overflow",
        "The input of ssm_out is unnormalised, and overflows where a backend casts it to F16.",
    ),
)
BY_CODE = {defect.code: defect for defect in DEFECTS}
BUILDS = {
    (): "stock",
    ("D1",): "corrected-rotation",
    ("D2",): "corrected-prompts",
    ("D3",): "corrected-states",
    ("D2", "D3"): "corrected",
    ("D2", "D3", "D4"): "corrected-projections",
    ("D2", "D3", "rollback"): "rollback",
}  # short enough for a chart; the names of `plamo-study engine build`


def name(code: str) -> str:
    """A defect's name, or any other word of a build (e.g. `window`) unchanged."""
    return BY_CODE[code].name if code in BY_CODE else code


def build_name(corrects: Sequence[str]) -> str:
    """A build's name by what it corrects: "stock" for nothing, its build name, else the defects' names joined."""
    return BUILDS.get(tuple(corrects)) or " + ".join(name(code) for code in corrects)
