"""Machines by familiar names. Facts stay as recorded; pages show what they mean.

A fact holds the system's name of a processor and the CPU family, but no model number. Firecracker shows its guests one
name for all processors of a maker. The family then gives the generation. Where it allows two, the instructions of an
engine that computed correctly there may decide. Anything beyond that is left out.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from llama_meter.rows import content_id

LINUX = re.compile(r"(?P<name>.*) \(family (?P<family>[^()]*)\)")  # as `measure.machine` writes it; a Mac has no family
EPYC, XEON = "AMD EPYC", "Intel(R) Xeon(R) Processor"  # as shown by Firecracker; a Xeon's clock may follow
GUEST = re.compile(rf"(?P<maker>{EPYC}|{re.escape(XEON)})(?P<clock>| @ .*)")
ZEN = {"23": "Zen or Zen 2", "25": "Zen 3 or 4", "26": "Zen 5"}
AVX512, AVX_VNNI = "AVX512 = 1", "AVX_VNNI = 1"  # as listed in an engine's fact
APART, SHORT = "apart", 8  # of a fact: what distinguishes a machine from another of its name; digits of an id
HOSTS = {  # the machines of the recorded rows, by the id of their fact: one letter each, on every page
    "dbd2b3acfeaa796f": "A",
    "6d97ed74d70f8581": "B",
    "19415f43ff8f8a41": "C",
    "9a6c13f808f78652": "D",
    "d49900bc784c2342": "E",
    "cdff279d98980b96": "F",
    "7420e18a91a314eb": "G",
    "079700e8bb55e7cf": "H",
    "735ee00ca0d48b34": "I",
    "d96de5fd22bdafd9": "J",
    "c631b263a85ab711": "K",
    "87bff510c720e24b": "L",
}
USED = {  # instructions of engines that computed correctly on recorded machines; a test checks them against the rows
    "6d97ed74d70f8581": {AVX512},
    "cdff279d98980b96": {AVX512},
    "7420e18a91a314eb": {AVX512},
    "19415f43ff8f8a41": {AVX512, AVX_VNNI},
    "735ee00ca0d48b34": {AVX512, AVX_VNNI},
}


def processor(fact: Mapping[str, Any]) -> str:
    """The processor of a machine: maker and generation for a guest, which has no name of its own, else its name."""
    linux, guest = _matches(fact)
    if guest:
        return _generation(guest["maker"], linux["family"], USED.get(_id(fact), ())) + guest["clock"]
    return re.sub(r"\((?:R|TM)\)", "", linux["name"] if linux else fact["chip"])


def cores(fact: Mapping[str, Any]) -> str:
    """The number of cores used: "2 vCPUs" for a guest, "8 cores" elsewhere."""
    n, what = fact["performance_cores"], "vCPU" if _matches(fact)[1] else "core"
    return f"{n} {what}{'s' * (n != 1)}"


def machine(fact: Mapping[str, Any]) -> str:
    """A machine by its processor and the cores used. For a Mac, the chip's name is enough."""
    counted = _matches(fact)[0] and "performance_cores" in fact
    return (f"{processor(fact)}, {cores(fact)}" if counted else processor(fact)) + _apart(fact)


def device(fact: Mapping[str, Any], offloaded: bool) -> str:
    """What computes on a machine: its first GPU where layers are `offloaded`, else its processor.

    A chip that is both is told apart: "Apple M4 Pro, GPU" and "Apple M4 Pro, CPU". So is a GPU that nobody named.
    """
    own, boards = processor(fact), [str(gpu["chip"]) for gpu in fact.get("gpus", ())]
    if offloaded:
        board = next(iter(boards), own)
        return (f"{own}, GPU" if board == own else board) + _apart(fact)
    return (f"{own}, CPU" if own in boards or "gpu_cores" in fact else own) + _apart(fact)


def told_apart(*sources: Mapping[str, Mapping[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Facts by id, of several sources, with a name of its own for every machine.

    Recorded hosts have a letter. Of other machines with one name the first keeps it, and the others add their id.
    """
    machines = {name: fact for facts in sources for name, fact in facts.items() if "chip" in fact}
    bearers: dict[str, str] = {}  # of a name: the id of its machine
    marks: dict[str, str] = {}
    for name, fact in machines.items():
        if any(bearers.setdefault(label, name) != name for label in _names(fact)):
            marks[name] = name[:SHORT]
    return [
        {name: {**fact, APART: marks[name]} if name in marks else dict(fact) for name, fact in facts.items()}
        for facts in sources
    ]


def _names(fact: Mapping[str, Any]) -> set[str]:
    """What a machine is called, and what its GPU is."""
    return {device(fact, False), *([device(fact, True)] if fact.get("gpus") else [])}


def _apart(fact: Mapping[str, Any]) -> str:
    mark = f"host {HOSTS[name]}" if (name := _id(fact)) in HOSTS else fact.get(APART)
    return f" ({mark})" if mark else ""


def _id(fact: Mapping[str, Any]) -> str:
    return content_id({name: value for name, value in fact.items() if name != APART})


def _matches(fact: Mapping[str, Any]) -> tuple[Any, Any]:
    """Matches of a fact with a Linux processor's name and with a guest's; None each where they fail."""
    linux = LINUX.fullmatch(fact["chip"])
    return linux, GUEST.fullmatch(linux["name"]) if linux else None


def _generation(maker: str, family: str, used: Collection[str]) -> str:
    if maker == EPYC:
        zen = "Zen 4" if family == "25" and AVX512 in used else ZEN.get(family, f"(family {family})")  # Zen 3 lacks it
        return f"{EPYC} {zen}"
    if family != "6":
        return f"Intel Xeon (family {family})"
    newer = AVX512 in used and AVX_VNNI in used  # no Xeon before Sapphire Rapids has both
    return f"Intel Xeon{' Sapphire Rapids or newer' * newer}"
