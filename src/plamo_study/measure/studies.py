"""Every study by name: the function that plans it. A new study is one entry here."""

from collections.abc import Callable

from plamo_study.measure import plan
from plamo_study.measure.plan import Plan

STUDIES: dict[str, Callable[..., Plan]] = {
    "01-phase-asymmetry": plan.phase_asymmetry,
    "03-batch-scaling": plan.batch_scaling,
    "03-source-table": plan.source_table,
    "03-batching-law": plan.batching_law,
}


def of_notebook(name: str, scale: str) -> list[tuple[str, str]]:
    """The studies a notebook shows, with the scale each is measured at when the notebook asks for `scale`."""
    own = [study for study in STUDIES if study[:2] == name[:2]]
    return [(study, "mini" if study == "03-batching-law" else scale) for study in own]
