"""What a server operator would ask of a batch, asked of the engine: three tests, and the smallest batch that aborts."""

from plamo_study.measure.plan import model_file
from plamo_study.measure.process import Outcome, work
from plamo_study.measure.rows import Cell
from plamo_study.measure.worker import Job

PROMPTS, TOKENS = 4, 256  # the batch in which the defects were first seen
LIMIT_S = 120.0
TESTS = {
    "identity": "a sequence in a batch equals itself alone",
    "isolation": "a neighbour's prompt does not change your logits",
    "bystander": "a sequence that is not in the step does not change",
}


def cell(test: str, model: str, n_threads: int = 1) -> Cell:
    """The cell that answers one of `TESTS` for an embedded model: four packed prompts, or a step of two slots.

    The bystander is slot 3: slots 1 and 2 step once, then 3 is asked for its next token.
    """
    packed = (tuple((seq, TOKENS) for seq in range(PROMPTS)),)
    alone = tuple(((seq, TOKENS),) for seq in range(PROMPTS))
    calls = (*alone, ((1, 1), (2, 1)), ((3, 1),)) if test == "bystander" else packed
    return Cell(
        workload="isolation" if test == "isolation" else "replay",
        model=model,
        scale="mini",
        dtype="F16",
        n_prompt=TOKENS + 1,
        n_seq=PROMPTS,
        n_threads=n_threads,
        calls=calls,
        repetitions=2 if test == "isolation" else 1,
    )


def error(test: str, model: str) -> float:
    """Largest relative error of the logits the test is about; NaN when the engine did not get that far."""
    checks = _run(cell(test, model)).measured.checks
    ending = {"identity": ("/0", "/1", "/2", "/3"), "isolation": ("isolation_error",), "bystander": ("/3",)}[test]
    wanted = [value for name, value in checks.items() if name.endswith(ending)]
    return float(max(wanted, default=float("nan")))


def smallest_abort(model: str, n_prompt: int, n_batch: int, most: int = 32) -> tuple[int | None, int]:
    """The smallest number of packed prompts that aborts, by bisection, and how many processes it took.

    None when even `most` do not abort. Aborting is monotone in the number of sequences, which the law proves.
    """
    low, high, processes = 0, most, 1
    if not _aborts(model, n_prompt, n_batch, most):
        return None, processes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _aborts(model, n_prompt, n_batch, middle) else (middle, high)
        processes += 1
    return high, processes


def _aborts(model: str, n_prompt: int, n_batch: int, n_seq: int) -> bool:
    packed = Cell(
        workload="prefill",
        model=model,
        scale="mini",
        dtype="F16",
        n_prompt=n_prompt,
        n_seq=n_seq,
        n_batch=n_batch,
        policy="packed",
    )
    return _run(packed).status == "abort"


def _run(cell: Cell) -> Outcome:
    return work(Job(cell=cell, path=str(model_file(cell))), LIMIT_S)
