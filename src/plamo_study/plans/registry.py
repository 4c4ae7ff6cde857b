"""Every study by name, and every notebook with its question. A new study is one entry here."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING

from llama_meter.errors import StudyError

if TYPE_CHECKING:
    from llama_meter.measure.plan import Plan


HISTORY = "commit 53f8ee5"  # the last one that had the plans of these rows


@dataclass(frozen=True)
class Study:
    """What is measured under one name. `where`: the function that plans it, by its module in this
    room or by its whole name; HISTORY: no longer measured, its rows are kept.

    A plan is imported when it is asked for: whoever reads rows needs none. Its notebook begins with the same two
    letters.

    `at_mini`: held against the embedded models, whatever scale is asked for. `of_weights`: needs trained weights, so it
    is shown at mini where a notebook asks for random ones. `aside`: shown as recorded, never measured by a live
    notebook. `whole`: times nothing and is meaningless in part.
    """

    where: str
    at_mini: bool = False
    of_weights: bool = False
    aside: bool = False
    whole: bool = False

    @property
    def plan(self) -> "Callable[..., Plan]":
        """The function from a scale to a plan. StudyError for one whose rows are history."""
        if self.where == HISTORY:
            raise StudyError("this study", f"is history: {HISTORY} measured it", "choose another")
        module, _, name = self.where.rpartition(".")
        planner: Callable[..., Plan] = getattr(
            import_module(module if "." in module else f"{__package__}.{module}"), name
        )
        return planner


NOTEBOOKS = {
    "your-machine": "which file, how many at once, and can I trust it",
    "01-phase-asymmetry": "why is reading faster than writing",
    "02-roofline": "how near is the limit",
    "03-batch-scaling": "how many at once",
    "04-right-answers": "is my answer mine",
    "05-quantization": "which type",
    "06-context": "what does context cost",
    "07-latency": "who waits",
    "08-speculative": "do drafts pay",
    "09-serving": "what does a server add",
    "10-builds": "which build",
    "A-methods": "how is a number made",
    "B-two-files": "can one file read and another write",
}
STUDIES = {
    "your-machine": Study("your_machine.your_machine"),
    "01-phase-asymmetry": Study("phase_asymmetry.phase_asymmetry"),
    "02-roofline": Study("roofline.roofline"),
    "02-trace": Study("timeline.trace"),
    "03-batch-scaling": Study("batch_scaling.batch_scaling"),
    "03-replicas": Study("replicas.replicas"),
    "04-source-table": Study("batch_scaling.source_table"),
    "04-batching-law": Study("batching_law.batching_law", at_mini=True),
    "04-answers": Study("batching_law.answers", at_mini=True, aside=True),
    "04-hybrids": Study("hybrids.hybrids", at_mini=True),
    "04-elsewhere": Study("hybrids.elsewhere", at_mini=True, aside=True),
    "05-quantization": Study("quantization.speed"),
    "05-controlled": Study(HISTORY, aside=True),
    "05-lifelike": Study("quantization.lifelike", aside=True),
    "05-quality": Study("quality.quality", of_weights=True, whole=True),
    "06-context": Study("context.context"),
    "06-memory": Study("context.memory"),
    "06-naive": Study("context.naive"),
    "06-drift": Study("context.drift", at_mini=True, whole=True),
    "06-window": Study("context.window", at_mini=True, aside=True, whole=True),
    "06-copies": Study(HISTORY, aside=True),
    "07-chunked": Study("chunked.chunked"),
    "07-disaggregation": Study("disaggregation.disaggregation"),
    "07-scheduling": Study("scheduling.scheduling"),
    "07-fleet": Study("scheduling.fleet", aside=True),
    "08-speculative": Study("speculative.speculative"),
    "08-several": Study(HISTORY, aside=True),
    "08-columns": Study("speculative.columns", aside=True),
    "08-drafters": Study("speculative.drafters", of_weights=True),
    "09-serving": Study("serving.serving"),
    "09-knees": Study(HISTORY, aside=True),
    "10-builds": Study("history.builds", at_mini=True),
    "10-changes": Study("history.changes", aside=True),
    "A-gates": Study("llama_meter.measure.plan.gates", aside=True),
    "B-pairs": Study("handover.pairs", at_mini=True),
    "B-requests": Study("handover.requests"),
}
OF_ALL = ("02-roofline",)  # notebooks that show the rows of every study, and so come last
OF_PAIRS = "B-two-files"  # the notebook whose files have to be of one model
RANDOM_WEIGHTS = "shape"
OF_FULL_SIZE = (  # as their titles say
    "01-phase-asymmetry",
    "02-roofline",
    "03-batch-scaling",
    "05-quantization",
    "06-context",
    "07-latency",
    "08-speculative",
    "A-methods",
)


def of_notebook(name: str, scale: str) -> list[tuple[str, str]]:
    """The studies a notebook shows, with the scale each is measured at when the notebook asks for `scale`."""
    return [
        (own, shown_at(own, scale))
        for own in STUDIES
        if notebook_of(own) == notebook_of(name) and not STUDIES[own].aside
    ]


def notebook_of(name: str) -> str:
    """The notebook that a study, or a notebook itself, belongs to; "" for neither."""
    if name in NOTEBOOKS:
        return name
    return next((notebook for notebook in NOTEBOOKS if notebook[:2] == name[:2]), "")


def shown_at(name: str, scale: str) -> str:
    """The scale at which a study is shown where a notebook asks for `scale`; an unknown study at that one."""
    study = STUDIES.get(name)
    at_mini = study and (study.at_mini or (study.of_weights and scale == RANDOM_WEIGHTS))
    return "mini" if at_mini else scale


def varies(study: str) -> bool:
    """Whether a study takes files and values of a user's own."""
    return study in STUDIES and STUDIES[study].where != HISTORY and "sweep" in signature(STUDIES[study].plan).parameters
