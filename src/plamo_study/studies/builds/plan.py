"""Which questions every build is asked: is its answer right at all, may users share it, and how fast is it."""

from collections.abc import Sequence
from dataclasses import replace

from llama_meter.cells import Cell, Decode, Gate, Hybrid, Prefill
from llama_meter.measure import machine
from llama_meter.measure.plan import DTYPE, MODELS, STEPS, Plan, change, check_scale, gate_tokens, lean, of_kind
from plamo_study.studies.right_answers import architectures
from plamo_study.studies.right_answers.architectures import LISTED
from plamo_study.studies.right_answers.plan import CONTROLS, ONE_KIND, RECURRENT, hybrids

STUDY = "10-builds"
SHARED = ("equal", "unequal", "late", "steps", "left", "gaps", "slots")  # what a server does for several users
SLOTS = 5  # of that question's numbers: the smallest at which a recorded engine aborts
ASKED = (*SHARED, "moved", "copied")  # of chapter 4's questions
N_PROMPT = 512
N_SEQ = (1, 4, 5, 8, 9, 16)  # sequences of a step: on either side of the kernels' tiles
DEPTH = 32  # tokens of the prompt that the sequences of a step share
TYPES = ("Q8_0", "Q4_0", "Q4_K_M")
CHANGED, CHANGES_BLOCKS = ("Q4_K_M", "Q8_0"), 6  # types and blocks where the sources announce changes
LONG = {1: 48, 8: 12, 16: 10}  # steps timed there, by sequences: a second and more, for a machine whose speed sways


def builds(scale: str, gpu: bool = False) -> Plan:
    """Chapter 10: both trained models against the oracle, and small files of every architecture against themselves:
    shared, and with head counts by layer where the first layer is recurrent and another is not.

    All of it is asked of every build beside the one in use. StudyError for a scale other than mini: the files are small
    whatever the scale.
    """
    usual = hybrids(scale, gpu)
    every = [cell for cell in usual.cells if isinstance(cell, Hybrid) and cell.question in ASKED and not cell.planted]
    every = [cell for cell in every if cell.question != "slots" or cell.number == SLOTS]
    plain = [cell for cell in every if (cell.dtype, cell.form) == ("F32", "whole")]
    gate = Gate(scale=scale, dtype=DTYPE[scale], n_gpu_layers=-1 if gpu else 0, **gate_tokens(scale, gpu))
    whole: list[Cell] = [change(gate, model=model) for model in MODELS]
    asked: list[Cell] = [
        change(cell, form=architectures.PLAIN) for cell in plain if cell.model in (*RECURRENT, *CONTROLS)
    ]
    mixed = [model for model in RECURRENT if model not in ONE_KIND]
    listed = change(plain[0], question=LISTED, form=architectures.STATE_FIRST, number=0)
    asked += [change(listed, model=model) for model in mixed]
    cells = (*whole, *asked)
    limit_s = usual.time_limit_s / 2  # a file whose rotation is lost may take all of it, in every build
    return replace(usual, study=STUDY, cells=cells, compared=cells, needed=len(cells), time_limit_s=limit_s)


def changes(scale: str, gpu: bool = False) -> Plan:
    """Chapter 10: the times that the sources of the releases announce to change, in blocks of their own, longer timed.

    Meant beside the releases around each change and the build `untiled`, whose newest kernels are off.
    """
    usual = _timed(scale, gpu, CHANGED, tuple(LONG))
    own = tuple(change(cell, n_gen=LONG[cell.n_seq]) if isinstance(cell, Decode) else cell for cell in usual)
    planned = lean("10-changes", scale, own)
    return replace(planned, compared=planned.cells, blocks=CHANGES_BLOCKS)


def _timed(scale: str, gpu: bool, dtypes: Sequence[str], n_seq: Sequence[int]) -> tuple[Cell, ...]:
    """A prompt and steps of these numbers of sequences, of these types of both models."""
    check_scale(scale)
    base = Prefill(scale=scale, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0, repetitions=1)
    cells: list[Cell] = []
    for dtype in dtypes:
        for model in MODELS:
            prompt = change(base, model=model, dtype=dtype, n_prompt=N_PROMPT)
            step: Decode = of_kind(Decode, prompt, depth=DEPTH, n_gen=STEPS)
            cells += [prompt, *(change(step, n_seq=n, policy="shared") for n in n_seq)]
    return tuple(cells)
