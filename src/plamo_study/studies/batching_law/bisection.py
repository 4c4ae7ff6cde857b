"""The smallest batch of packed prompts that aborts, found in as few processes as bisection needs."""

from plamo_study.measure.cells import Prefill
from plamo_study.measure.plan import model_file
from plamo_study.measure.process import Outcome, work
from plamo_study.measure.worker import Job

LIMIT_S = 120.0


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
    packed = Prefill(
        model=model, scale="mini", dtype="F16", n_prompt=n_prompt, n_seq=n_seq, n_batch=n_batch, policy="packed"
    )
    return _run(packed).status == "abort"


def _run(cell: Prefill) -> Outcome:
    return work(Job(cell=cell, path=str(model_file(cell))), LIMIT_S)
