"""Which questions every build is asked: is its answer right at all, and may users share it."""

from dataclasses import replace

from llama_meter.cells import Gate, Hybrid
from llama_meter.measure.plan import DTYPE, MODELS, Plan, change, gate_tokens
from llama_meter.workloads import architectures
from plamo_study.plans.hybrids import CONTROLS, RECURRENT, hybrids

ASKED = ("equal", "unequal", "late", "steps", "left", "gaps", "moved", "copied")  # of notebook 15's questions


def builds(scale: str, gpu: bool = False) -> Plan:
    """Notebook 17: both trained models against the oracle, and small files of every architecture against themselves.

    All of it is asked of every build beside the one in use. StudyError for a scale other than mini: the files are small
    whatever the scale.
    """
    usual = hybrids(scale, gpu)
    every = [cell for cell in usual.cells if isinstance(cell, Hybrid) and cell.question in ASKED and not cell.planted]
    plain = [cell for cell in every if (cell.dtype, cell.shape) == ("F32", "whole")]
    gate = Gate(scale=scale, dtype=DTYPE[scale], n_gpu_layers=-1 if gpu else 0, **gate_tokens(scale, gpu))
    gates = [change(gate, model=model) for model in MODELS]
    asked = [change(cell, shape=architectures.PLAIN) for cell in plain if cell.model in (*RECURRENT, *CONTROLS)]
    cells = (*gates, *asked)
    return replace(usual, study="17-builds", cells=cells, compared=cells, needed=len(cells))
