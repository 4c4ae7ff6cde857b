"""Which configurations the batching law is held against."""

from plamo_study.errors import StudyError
from plamo_study.measure.cells import Decode
from plamo_study.measure.plan import MODELS, TIME_LIMIT_S, Plan
from plamo_study.studies.batching_law import grid

LAW_SEEDS, LAW_CELLS = (0, 1, 2), 60  # configurations of each


def batching_law(scale: str, gpu: bool = False, seeds: tuple[int, ...] = LAW_SEEDS, n: int = LAW_CELLS) -> Plan:
    """`n` configurations from each seed for the batching law, PLaMo 3 as control, one process each, on the CPU.

    Beside them the map of packed prompts by number and batch size, and the operator's three tests. The law is about
    the shape of calls, so it is held against the embedded models.
    """
    if scale != "mini":
        raise StudyError(f"scale {scale!r}", "the law is held against the engine at mini", "choose --scale mini")
    cells = (*(cell for seed in seeds for cell in grid.grid(seed, n, *MODELS)), *grid.packed_map(MODELS[0]))
    cells += tuple(grid.three_tests(test, model) for test in grid.TESTS for model in MODELS)
    anchor = Decode(model=MODELS[0], scale="mini", dtype="F16", depth=16, n_gen=32)
    return Plan("03-batching-law", "mini", cells, (), anchor, 1, 0, TIME_LIMIT_S["mini"], compared=cells)
