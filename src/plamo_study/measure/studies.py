"""Every study by name: the function that plans it. A new study is one entry here."""

from collections.abc import Callable

from plamo_study.measure import (
    plan,
    plan_context,
    plan_quality,
    plan_quantization,
    plan_ranges,
    plan_roofline,
    plan_scan,
    plan_trace,
)
from plamo_study.measure.plan import Plan

STUDIES: dict[str, Callable[..., Plan]] = {
    "00-gates": plan.gates,
    "01-phase-asymmetry": plan.phase_asymmetry,
    "02-roofline": plan_roofline.roofline,
    "02-trace": plan_trace.trace,
    "03-batch-scaling": plan.batch_scaling,
    "03-source-table": plan.source_table,
    "03-batching-law": plan.batching_law,
    "04-quantization": plan_quantization.speed,
    "04-modes": plan_quantization.modes,
    "04-controlled": plan_quantization.controlled,
    "04-quality": plan_quality.quality,
    "04-scan": plan_scan.scan,
    "04-ranges": plan_ranges.numeric_range,
    "05-context": plan_context.context,
    "05-memory": plan_context.memory,
    "05-naive": plan_context.naive,
    "05-drift": plan_context.drift,
    "05-window": plan_context.window,
}
AT_MINI = {"03-batching-law", "05-drift", "05-window"}  # held against the embedded models whatever scale is asked for
ASIDE = {"00-gates", "04-modes", "04-controlled", "05-window"}  # shown as recorded, never measured by a live notebook
NO_QUALITY_IN = "shape"  # random weights: these studies are then shown at mini
OF_WEIGHTS = {"04-quality", "04-scan", "04-ranges"}


def of_notebook(name: str, scale: str) -> list[tuple[str, str]]:
    """The studies a notebook shows, with the scale each is measured at when the notebook asks for `scale`."""
    return [(study, shown_at(study, scale)) for study in STUDIES if study[:2] == name[:2] and study not in ASIDE]


def shown_at(study: str, scale: str) -> str:
    """The scale at which a study is shown where a notebook asks for `scale`."""
    random_weights = scale == NO_QUALITY_IN and study in OF_WEIGHTS
    return "mini" if study in AT_MINI or random_weights else scale
