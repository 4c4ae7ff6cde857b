"""Which questions every build is asked: may users share it, and is its answer right at all."""

from dataclasses import replace

from llama_meter.cells import Cell, Gate, Hybrid
from llama_meter.measure.plan import DTYPE, MODELS, Plan, change, gate_tokens
from plamo_study.plans import batching_law
from plamo_study.plans.hybrids import CONTROLS, RECURRENT, hybrids

ASKED = ("equal", "unequal", "late", "steps", "left", "gaps", "moved", "copied")  # of notebook 15's questions


def builds(scale: str, gpu: bool = False) -> Plan:
    """Notebook 17: both trained models against the oracle, the law's three tests, and notebook 15's questions.

    Everything is asked of every build beside the one in use. StudyError for a scale other than mini: the files are
    small whatever the scale.
    """
    usual = hybrids(scale, gpu)
    every = [cell for cell in usual.cells if isinstance(cell, Hybrid) and cell.question in ASKED and not cell.planted]
    asked = [cell for cell in every if (cell.dtype, cell.shape) == ("F32", "whole") and cell.model in (*RECURRENT, *CONTROLS)]
    law = [batching_law.three_tests(test, model) for test in batching_law.TESTS for model in MODELS]
    law = [change(cell, n_gpu_layers=-1 if gpu else 0) for cell in law]
    gate = Gate(scale=scale, dtype=DTYPE[scale], n_gpu_layers=-1 if gpu else 0, **gate_tokens(scale, gpu))
    gates = tuple(change(gate, model=model) for model in MODELS)
    cells: tuple[Cell, ...] = (*law, *asked)
    return replace(usual, study="17-builds", cells=cells, gates=gates, compared=cells, needed=len(cells))
