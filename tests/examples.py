"""What several tests take as an example."""

from llama_meter.cells import Prefill
from llama_meter.measure import plan
from llama_meter.rows import SCHEMA, Conditions, Row


def example_row() -> Row:
    """A row of a prefill's size, for tests of journals."""
    cell = Prefill(model=plan.MODELS[0], scale="mini", dtype="F16", n_prompt=512, n_threads=2, repetitions=3)
    checks: dict[str, float | bool] = {
        "second_path_error": 1.234e-3,
        "second_path": True,
        "finite": True,
        "evaluated": True,
        "n_rot": 64,
    }
    return Row(
        schema=SCHEMA,
        key="0" * 16,
        study="example",
        cell=cell,
        replicate=0,
        block=0,
        order=0,
        model="0" * 16,
        engine="0" * 16,
        machine="0" * 16,
        status="ok",
        started="2026-01-01T00:00:00+00:00",
        elapsed_ns=10**9,
        pid=1,
        conditions=Conditions(load_1min=1.0),
        samples_ns=[[10**9]] * 3,
        warmup_ns=[10**9],
        load_ns=10**7,
        n_evaluated=1536,
        checks=checks,
        valid=True,
    )
