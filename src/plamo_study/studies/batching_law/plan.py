"""The configurations that test the batching law."""

from dataclasses import replace

from plamo_study.errors import StudyError
from plamo_study.measure.cells import Answers, Decode
from plamo_study.measure.plan import MODELS, TIME_LIMIT_S, Plan, change, with_gates
from plamo_study.studies.batching_law import grid

NEEDED = 15  # configurations of a grid that any finding requires
LAW_SEEDS, LAW_CELLS = (0, 1, 2), 60  # configurations of each
ASKED, ANSWER = 32, 32  # prompts of a process, tokens of an answer
SEEDS = range(8)  # of prompts: 256 distinct ones a load
SLOTS = 16
# Users at once and tokens of their prompts. Two ask as notebook 11's users do. The prompts of sixteen fill one
# micro-batch, which the released engine survives if all are equally long.
LOADS = ((2, 128), (16, 32))


def batching_law(scale: str, gpu: bool = False, seeds: tuple[int, ...] = LAW_SEEDS, n: int = LAW_CELLS) -> Plan:
    """`n` configurations from each seed for the batching law, PLaMo 3 as control, one process each, on the CPU.

    Also the map of packed prompts by number and batch size, and the operator's three tests. The law depends only on
    the shape of calls, so the embedded models suffice.
    """
    if scale != "mini":
        raise StudyError(f"scale {scale!r}", "the law is held against the engine at mini", "choose --scale mini")
    tests = [grid.three_tests(test, model) for test in grid.TESTS for model in MODELS]
    grids = (grid.grid(seed, n, *MODELS) for seed in seeds)
    drawn = [cell for of_seeds in zip(*grids, strict=True) for cell in of_seeds]
    cells = (*tests, *drawn[:NEEDED], *grid.packed_map(MODELS[0]), *drawn[NEEDED:])
    anchor = Decode(model=MODELS[0], scale="mini", dtype="F16", depth=16, n_gen=32)
    planned = Plan("03-batching-law", "mini", cells, (), anchor, 1, 0, TIME_LIMIT_S["mini"])
    return replace(planned, compared=cells, needed=len(tests) + NEEDED)


def answers(scale: str, gpu: bool = False) -> Plan:
    """Whole answers to 256 distinct prompts, alone and beside others, for the share of prompts that company changes.

    Both numbers of users with prompts of one length and of drawn ones. PLaMo 3 is the control.
    """
    if scale != "mini":
        raise StudyError(f"scale {scale!r}", "answers of random weights mean nothing", "choose --scale mini")
    base = Answers(scale="mini", dtype="F16", n_gen=ANSWER, n_seq=SLOTS, n_requests=ASKED)
    cells = tuple(
        change(base, model=model, n_clients=users, n_prompt=tokens, lengths=lengths, seed=seed)
        for seed in SEEDS
        for users, tokens in LOADS
        for lengths in ("", "drawn")
        for model in MODELS
    )
    planned = with_gates("03-answers", "mini", cells, exact_cache=False)
    compared = tuple(cell for cell in cells if cell.model == MODELS[0])
    planned = replace(planned, anchor=None, blocks=1, extra_blocks=0, grows=False, compared=compared)
    return replace(planned, workload=f"{__package__}.workload")
