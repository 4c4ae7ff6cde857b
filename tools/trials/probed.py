"""Is the probe right? Servers that are known to be right or wrong, each started anew, probed once, and counted.

What is known does not come from the probe. PLaMo 2 as released is what the batching law says of its slots' prompts in
one call; the corrected build, and PLaMo 3, which has no Mamba layers, keep sequences apart (notebooks 03 and 11).
Random files of other recurrent architectures are right by notebook 15. A server of one request at a time has no
neighbours. Types differ in how they round in batches of another shape: as floating-point numbers, and as quantized
blocks that are multiplied one way for one sequence and another way for several.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_meter.engine import server_build
from llama_meter.errors import StudyError
from llama_meter.measure import machine, plan, result_file
from llama_meter.models import synthetic
from llama_meter.serve import probe, right, server
from llama_meter.serve.client import Target
from llama_meter.serve.meeting import Ask
from llama_meter.serve.server import Kind, Setup
from llama_meter.workloads import architectures
from plamo_study.laws import batching
from plamo_study.plans.hybrids import CONTROLS, RECURRENT
from plamo_study.read.results import PROBED, Probed, Probings

SLOTS, TYPES = (2, 3, 4, 8), ("F16", "Q8_0")
OTHER_TYPES = ("BF16",)
UNTOLD = (2, 4)  # slots of servers whose log probabilities are not asked for
TOKENS = 1536  # of a slot
SECONDS = 60.0  # of one probe, at most
HYBRID, ATTENTION = plan.MODELS
STARTLESS = ("kimi-linear-moe", "minimax-01-moe")  # notebook 15: they abort before they listen with most slots
OF_PLAMO = 200  # tokens of a prompt, about: the law's outcome is the same for every length of the probe's prompts


@dataclass(frozen=True)
class Known:
    """A server to start; `top`: log probabilities that are asked for."""

    model: str
    dtype: str = "F16"
    build: str = server_build.STOCK
    slots: int = 4
    top: int = right.TOP
    kind: Kind = "llama-server"

    @property
    def is_random(self) -> bool:
        """Whether the file is the generator's."""
        return self.model not in plan.MODELS

    def truth(self) -> right.Right:
        """What is known of it."""
        recurrent = self.model in (HYBRID, "plamo2-dense")
        if not recurrent or self.build != server_build.STOCK or self.kind != "llama-server" or self.slots == 1:
            return "right"
        n = min(self.slots, right.TOGETHER[0])
        call = [(seq, OF_PLAMO) for seq in range(n)]
        return "right" if batching.replay([call], self.slots).outcome == "right" else "wrong"

    def file(self, folder: Path) -> Path:
        """Its file, made where it is missing; StudyError where the generator cannot write it."""
        if self.is_random:
            return architectures.write(self.model, folder)
        return synthetic.make(self.model, "mini", self.dtype)


def known() -> Iterator[Known]:
    """Every server, the kinds that a reader of the page asks about first."""
    for slots in SLOTS:
        for dtype in TYPES:
            for model, build in ((HYBRID, "stock"), (HYBRID, "corrected"), (ATTENTION, "stock")):
                yield Known(model, dtype, build, slots)
    for slots in UNTOLD:
        for model, build in ((HYBRID, "stock"), (HYBRID, "corrected"), (ATTENTION, "stock")):
            yield Known(model, "F16", build, slots, top=0)
    for dtype in OTHER_TYPES:
        yield Known(HYBRID, dtype, "corrected")
        yield Known(ATTENTION, dtype)
    for dtype in TYPES:
        yield Known(HYBRID, dtype, slots=1)
    for model in plan.MODELS:
        yield Known(model, slots=1, kind="llama_cpp.server")
    for model in (*RECURRENT, *CONTROLS):
        if model not in STARTLESS:
            yield Known(model, "F32")
    yield Known("plamo2-dense", "F32", "corrected")


def run(servers: list[Known], folder: Path, place: str, tell: Callable[[str], None] = print) -> Probings:
    """Probe each server once; what was found is kept after each. A server that does not start is told and left out.

    StudyError where there is no llama-server.
    """
    if not server.find():
        raise StudyError("llama-server", "not found", f"plamo-study server build, or set {server.NAMED} to one")
    found: list[Probed] = []
    kept = Probings(machine=machine.facts(), servers=found)
    for number, each in enumerate(servers):
        try:
            found.append(probed(each, folder))
        except StudyError as error:
            tell(f"{number + 1} of {len(servers)}: {each.model} {each.dtype} {each.build}: left out, {error}")
            continue
        said = found[-1]
        tell(
            f"{number + 1} of {len(servers)}: {each.model} {each.dtype} {each.build}, {each.slots} slots: "
            f"{said.truth}, probed {said.verdict} ({said.why})"
        )
        result_file.keep(kept, place, PROBED)
    return kept


def probed(each: Known, folder: Path) -> Probed:
    """Start a server and probe it. StudyError where it does not start."""
    libraries = server_build.libraries(each.build)
    path = each.file(folder)
    setup = Setup(each.kind, path, each.slots, TOKENS, libraries=libraries if each.kind == "llama-server" else None)
    with server.started(setup) as running:
        begin = time.monotonic()
        found = probe.rightness(Ask(Target(running.url), seconds=SECONDS, top=each.top))
        seconds = time.monotonic() - begin
        died = bool(running.ended(1.0 if found.failed else 0.0))
    return Probed(
        model=each.model, dtype=each.dtype, build=each.build, slots=each.slots, server=each.kind, truth=each.truth(),
        verdict=found.verdict, why=found.why, log_probabilities=found.log_probabilities, compared=found.compared,
        identical=found.identical, distinct=found.distinct, other=found.other, near_ties=found.near_ties,
        unknown=found.unknown, failed=found.failed, gap=found.gap, died=died, seconds=seconds,
    )  # fmt: skip
