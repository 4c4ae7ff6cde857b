"""Which questions every build is asked: is its answer right at all, and may users share it."""

from dataclasses import replace

from llama_meter.cells import Cell, Gate, Hybrid
from llama_meter.measure.plan import DTYPE, MODELS, Plan, change, gate_tokens
from plamo_study.studies.right_answers import plan
from plamo_study.studies.right_answers.plan import CONTROLS, LISTED, ONE_KIND, RECURRENT

STUDY = "10-builds"
SHARED = ("equal", "unequal", "late", "steps", "left", "gaps", "slots")  # what a server does for several users
SLOTS = 5  # of that question's numbers: the smallest at which a recorded engine aborts
OF_BUILDS = (*SHARED, "moved", "copied")  # of chapter 4's


def builds(scale: str, gpu: bool = False) -> Plan:
    """Chapter 10: both trained models against the oracle, and small files of every architecture against themselves:
    shared, and with head counts by layer where the first layer is recurrent and another is not.

    All of it is asked of every build beside the one in use. At mini whatever the scale: the files are small.
    """
    usual = plan.hybrids("mini", gpu)
    gate = Gate(scale="mini", dtype=DTYPE["mini"], n_gpu_layers=-1 if gpu else 0, **gate_tokens("mini", gpu))
    shared = change(Hybrid(dtype="F32", n_gpu_layers=gate.n_gpu_layers), form=plan.PLAIN)
    listed = change(shared, question=LISTED, form=plan.STATE_FIRST)
    cells: tuple[Cell, ...] = (
        *(change(gate, model=model) for model in MODELS),
        *(
            change(shared, model=model, question=question, number=SLOTS if question == "slots" else 0)
            for question in OF_BUILDS
            for model in (*RECURRENT, *CONTROLS)
        ),
        *(change(listed, model=model) for model in RECURRENT if model not in ONE_KIND),
    )
    limit_s = usual.time_limit_s / 2  # a file whose rotation is lost may take all of it, in every build
    return replace(usual, study=STUDY, cells=cells, compared=cells, needed=len(cells), time_limit_s=limit_s)
