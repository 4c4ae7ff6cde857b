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
    letters, unless `notebook` names another.

    `at_mini`: held against the embedded models, whatever scale is asked for. `of_weights`: needs trained weights, so it
    is shown at mini where a notebook asks for random ones. `aside`: shown as recorded, never measured by a live
    notebook. `whole`: times nothing and is meaningless in part.
    """

    where: str
    at_mini: bool = False
    of_weights: bool = False
    aside: bool = False
    whole: bool = False
    notebook: str = ""

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
    "your-machine": "how fast, what holds it back, how many at once, which type, and is it right",
    "00-start-here": "two numbers and one explanation, in five minutes: guess first, then see",
    "01-phase-asymmetry": "how far apart are prefill and decode, and why",
    "02-roofline": "where do both phases stand against their machine's ceilings",
    "03-batch-scaling": "what does a batch buy, and where does it stop",
    "03b-batching-law": "is an answer its own when others ask too",
    "04-quantization": "what does a smaller type of weights buy, in each phase",
    "04b-quality": "what does a type lose",
    "05-context-length": "how both phases move with context, by attention kernel and cache type",
    "06-chunked-prefill": "what one long prompt does to everyone else",
    "07-replicas": "N processes against one process with N sequences",
    "08-speculative": "when drafting pays, and the hybrid's rollback tax",
    "09-disaggregation": "prefill here, decode there: bytes, time, identity",
    "10-scheduling": "who is served when, simulated and held against the engine",
    "11-serving": "a real server under load: are its answers right, and what does it add to the engine",
    "13-machines": "what one machine's rows say about another",
    "14-methods": "how a number gets onto a page: processes, gates, watch, intervals",
    "15-hybrids": "is a hybrid's answer its own: every recurrent architecture of llama.cpp",
    "16-two-files": "may one file read the prompt and another write the answer",
    "17-builds": "which build of llama.cpp is right, and since when users may share it",
}
STUDIES = {
    "your-machine": Study("your_machine.your_machine"),
    "00-gates": Study("llama_meter.measure.plan.gates", aside=True),
    "01-phase-asymmetry": Study("phase_asymmetry.phase_asymmetry"),
    "02-roofline": Study("roofline.roofline"),
    "02-trace": Study("timeline.trace"),
    "03-batch-scaling": Study("batch_scaling.batch_scaling"),
    "03-source-table": Study("batch_scaling.source_table"),
    "03-batching-law": Study("batching_law.batching_law", at_mini=True, notebook="03b-batching-law"),
    "03-answers": Study("batching_law.answers", at_mini=True, aside=True, notebook="03b-batching-law"),
    "04-quantization": Study("quantization.speed"),
    "04-controlled": Study(HISTORY, aside=True),
    "04-lifelike": Study("quantization.lifelike", aside=True),
    "04-quality": Study("quality.quality", of_weights=True, whole=True, notebook="04b-quality"),
    "05-context": Study("context.context"),
    "05-memory": Study("context.memory"),
    "05-naive": Study("context.naive"),
    "05-drift": Study("context.drift", at_mini=True, whole=True),
    "05-window": Study("context.window", at_mini=True, aside=True, whole=True),
    "05-copies": Study(HISTORY, aside=True),
    "06-chunked": Study("chunked.chunked"),
    "06-tiles": Study(HISTORY, aside=True),
    "06-every-chunk": Study(HISTORY, aside=True),
    "07-replicas": Study("replicas.replicas"),
    "08-speculative": Study("speculative.speculative"),
    "08-several": Study(HISTORY, aside=True),
    "08-columns": Study("speculative.columns", aside=True),
    "08-drafters": Study("speculative.drafters", of_weights=True),
    "09-disaggregation": Study("disaggregation.disaggregation"),
    "10-scheduling": Study("scheduling.scheduling"),
    "10-fleet": Study("scheduling.fleet", aside=True),
    "11-serving": Study("serving.serving"),
    "11-knees": Study(HISTORY, aside=True),
    "15-hybrids": Study("hybrids.hybrids", at_mini=True),
    "15-costs": Study(HISTORY, at_mini=True, aside=True),
    "15-elsewhere": Study("hybrids.elsewhere", at_mini=True, aside=True),
    "16-pairs": Study("handover.pairs", at_mini=True),
    "16-requests": Study("handover.requests"),
    "17-builds": Study("history.builds", at_mini=True),
    "17-speeds": Study(HISTORY, aside=True),
    "17-changes": Study("history.changes", aside=True),
}
OF_ALL = ("02-roofline", "13-machines")  # notebooks that show the rows of every study, and so come last
OF_PAIRS = "16-two-files"  # the notebook whose files have to be of one model
RANDOM_WEIGHTS = "shape"
OF_FULL_SIZE = (  # as their titles say
    "01-phase-asymmetry",
    "02-roofline",
    "03-batch-scaling",
    "04-quantization",
    "05-context-length",
    "06-chunked-prefill",
    "07-replicas",
    "08-speculative",
    "09-disaggregation",
    "13-machines",
    "14-methods",
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
    if name in STUDIES and STUDIES[name].notebook:
        return STUDIES[name].notebook
    return next((notebook for notebook in NOTEBOOKS if notebook[:2] == name[:2]), "")


def shown_at(name: str, scale: str) -> str:
    """The scale at which a study is shown where a notebook asks for `scale`; an unknown study at that one."""
    study = STUDIES.get(name)
    at_mini = study and (study.at_mini or (study.of_weights and scale == RANDOM_WEIGHTS))
    return "mini" if at_mini else scale


def varies(study: str) -> bool:
    """Whether a study takes files and values of a user's own."""
    return study in STUDIES and STUDIES[study].where != HISTORY and "sweep" in signature(STUDIES[study].plan).parameters
