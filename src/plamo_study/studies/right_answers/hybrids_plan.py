"""Which architectures are asked which questions."""

from dataclasses import replace

from llama_meter.cells import Cell, Hybrid
from llama_meter.errors import StudyError
from llama_meter.measure.plan import TIME_LIMIT_S, Plan, change
from plamo_study.studies.right_answers import architectures
from plamo_study.studies.right_answers.architectures import QUESTIONS

RECURRENT = (  # every one that the generator of the locked engine writes
    "bailingmoe3-moe",
    "falcon-h1-dense",
    "glm5-next-moe",
    "granitehybrid-dense",
    "jamba-dense",
    "kimi-k3-moe",
    "kimi-linear-moe",
    "lfm2-dense",
    "lfm2moe-moe",
    "mamba-dense",
    "mamba2-dense",
    "minimax-01-moe",
    "nemotron_h-dense",
    "nemotron_h_moe-dense",
    "plamo2-dense",
    "qwen35-dense",
    "qwen35moe-moe",
    "qwen3next-moe",
    "qwen4exp-moe",
    "rwkv6-dense",
)
ONE_KIND = ("falcon-h1-dense", "mamba-dense", "mamba2-dense", "rwkv6-dense")  # of layer, in all their layers
FOUR = ("falcon", "granite", "jamba", "lfm2", "mamba", "minimax", "nemotron", "plamo2")
CONTROLS = ("llama-dense", "llama-moe", "plamo3-dense")  # attention alone
UNWRITTEN = ("rwkv6qwen2-dense", "rwkv7-dense", "arwkv7-dense")  # asked too: the row says why there is no file
OTHER_TYPES = ("F16", "Q8_0")  # of all weights
KEEP = (  # those that keep states in the engine as released; our build `rollback` adds PLaMo 2
    "bailingmoe3-moe",
    "glm5-next-moe",
    "kimi-k3-moe",
    "lfm2-dense",
    "lfm2moe-moe",
    "nemotron_h-dense",
    "nemotron_h_moe-dense",
    "qwen35-dense",
    "qwen35moe-moe",
    "qwen4exp-moe",
)
LONGER = 32  # columns from which BLAS is handed a product
FIRST = ("unequal", "late", "copied", "kept", "moved")  # in their order: a software GPU is slow
SOFTWARE_LIMIT_S = 1800.0  # there, the first process to meet a kernel compiles it: minutes
SHAPES = {
    "three layers": {*RECURRENT, *CONTROLS} - {"bailingmoe3-moe"},
    "four heads": {*CONTROLS} | {name for name in RECURRENT if name.startswith(FOUR)},
}  # the files that the generator can write


def hybrids(scale: str, gpu: bool = False) -> Plan:
    """Each question with each of its numbers; with the middle one also a planted fault, other types, two shapes.

    StudyError for a scale other than mini: the files are small whatever the scale.
    """
    if scale != "mini":
        raise StudyError(f"scale {scale!r}", "these files are small and random", "choose --scale mini")
    base = Hybrid(dtype="F32", n_gpu_layers=-1 if gpu else 0)
    asked: list[Cell] = []
    others: list[Cell] = []
    for name, question in QUESTIONS.items():
        middle = question.numbers[(len(question.numbers) - 1) // 2]
        for model in (*RECURRENT, *CONTROLS):
            of = change(base, model=model, question=name)
            asked += [change(of, number=number) for number in question.numbers]
            one = change(of, number=middle)
            others += [change(one, planted=True), *(change(one, dtype=dtype) for dtype in OTHER_TYPES)]
            others += [change(one, form=form) for form, written in SHAPES.items() if model in written]
    asked += [change(base, model=model, question="steps") for model in UNWRITTEN]
    cells = (*asked, *others)
    mended = tuple(cell for cell in cells if isinstance(cell, Hybrid) and _is_mended(cell))
    return Plan(
        "04-hybrids",
        "mini",
        cells,
        (),
        None,
        1,
        0,
        TIME_LIMIT_S["mini"],
        compared=mended,
        needed=len(asked),
        workload="plamo_study.studies.right_answers.hybrids",
        program=architectures.NAME,
        grows=False,
    )


def elsewhere(scale: str, gpu: bool = False) -> Plan:
    """Each question with its middle number, plainly and with a planted fault: for other backends than the CPU's own.

    Prompts are longer on a CPU, so that BLAS is handed their products too. StudyError for a scale other than mini.
    """
    usual = hybrids(scale, gpu)
    one = [cell for cell in usual.cells if isinstance(cell, Hybrid) and cell.planted]
    cells: list[Cell] = []
    for name in dict.fromkeys((*FIRST, *QUESTIONS)):
        of = [change(cell, longer=0 if gpu else LONGER) for cell in one if cell.question == name]
        cells += [change(cell, planted=planted) for planted in (False, True) for cell in of]
    limit_s, needed = SOFTWARE_LIMIT_S if gpu else usual.time_limit_s, len(RECURRENT) + len(CONTROLS)
    return replace(
        usual, study="04-elsewhere", cells=tuple(cells), time_limit_s=limit_s, compared=tuple(cells), needed=needed
    )


def _is_mended(cell: Hybrid) -> bool:
    """Whether the build `recurrent` is asked the same: where it should answer otherwise, or could break something."""
    reserves = cell.model in ("kimi-linear-moe", "minimax-01-moe") and cell.question in ("slots", "resized")
    return not cell.planted and cell.dtype == "F32" and (reserves or cell.question.startswith("kept"))
