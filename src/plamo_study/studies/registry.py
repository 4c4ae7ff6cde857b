"""Every study by name: the function that plans it. A new study is one entry here."""

from collections.abc import Callable

from plamo_study.measure import plan
from plamo_study.measure.plan import Plan
from plamo_study.studies.batch_scaling import plan as batch_scaling_plan
from plamo_study.studies.batching_law import plan as batching_law_plan
from plamo_study.studies.context import plan as plan_context
from plamo_study.studies.fragility import plan as plan_scan
from plamo_study.studies.numeric_range import plan as plan_ranges
from plamo_study.studies.phase_asymmetry import plan as phase_asymmetry_plan
from plamo_study.studies.quality import plan as plan_quality
from plamo_study.studies.quantization import plan as plan_quantization
from plamo_study.studies.roofline import plan as plan_roofline
from plamo_study.studies.timeline import plan as plan_trace

STUDIES: dict[str, Callable[..., Plan]] = {
    "00-gates": plan.gates,
    "01-phase-asymmetry": phase_asymmetry_plan.phase_asymmetry,
    "02-roofline": plan_roofline.roofline,
    "02-trace": plan_trace.trace,
    "03-batch-scaling": batch_scaling_plan.batch_scaling,
    "03-source-table": batch_scaling_plan.source_table,
    "03-batching-law": batching_law_plan.batching_law,
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
