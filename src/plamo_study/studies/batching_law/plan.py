"""The configurations that test the batching law."""

from dataclasses import replace

from plamo_study.errors import StudyError
from plamo_study.measure.cells import Decode
from plamo_study.measure.plan import MODELS, TIME_LIMIT_S, Plan
from plamo_study.studies.batching_law import grid

NEEDED = 15  # configurations of a grid that any finding requires
LAW_SEEDS, LAW_CELLS = (0, 1, 2), 60  # configurations of each


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
