"""What all tests share: the embedded models, and cells to measure on them."""

from pathlib import Path

import msgspec
import pytest

from plamo_study.measure import plan
from plamo_study.measure.cells import Cell
from plamo_study.models import synthetic

HYBRID, ATTENTION = plan.MODELS


def pytest_configure(config: pytest.Config) -> None:
    """Write the embedded models once, before xdist's workers start."""
    if not hasattr(config, "workerinput"):
        for name in plan.MODELS:
            synthetic.make(name, "mini", "F16")


def mini(workload: str, model: str = HYBRID, **fields: object) -> Cell:
    """A cell on an embedded model, one thread, so that parallel tests do not wait for one another.

    Fields by their names in JSON.
    """
    usual = {"workload": workload, "model": model, "scale": "mini", "dtype": "F16", "n_prompt": 16}
    return msgspec.convert(usual | fields, Cell)


def mini_file(model: str = HYBRID) -> Path:
    return plan.model_file(mini("prefill", model))
