"""Machines by names that people know. Facts stay as they were recorded; a page says what they amount to.

A fact holds the system's name of a processor and the CPU family, but no model number. Firecracker shows its guests one
name for every processor of a maker. The family then tells the generation. Where it leaves two open, the instructions of
an engine that computed right there may decide. What neither tells is not said.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from plamo_study.measure.rows import content_id

LINUX = re.compile(r"(?P<name>.*) \(family (?P<family>[^()]*)\)")  # as `measure.machine` writes it; a Mac has no family
EPYC, XEON = "AMD EPYC", "Intel(R) Xeon(R) Processor"  # what Firecracker shows; of a Xeon perhaps the clock behind it
GUEST = re.compile(rf"(?P<maker>{EPYC}|{re.escape(XEON)})(?P<clock>| @ .*)")
ZEN = {"23": "Zen or Zen 2", "25": "Zen 3 or 4", "26": "Zen 5"}
AVX512, AVX_VNNI = "AVX512 = 1", "AVX_VNNI = 1"  # as an engine's fact lists what it was built with
USED = {  # by engines that computed right on recorded machines: what their rows say, and a test asks them
    "6d97ed74d70f8581": {AVX512},
    "7420e18a91a314eb": {AVX512},
    "19415f43ff8f8a41": {AVX512, AVX_VNNI},
    "735ee00ca0d48b34": {AVX512, AVX_VNNI},
}


def processor(fact: Mapping[str, Any]) -> str:
    """The processor of a machine: maker and generation of a guest's, which has no name of its own, else its name."""
    linux, guest = _told(fact)
    if guest:
        return _generation(guest["maker"], linux["family"], USED.get(content_id(fact), ())) + guest["clock"]
    return re.sub(r"\((?:R|TM)\)", "", linux["name"] if linux else fact["chip"])


def cores(fact: Mapping[str, Any]) -> str:
    """How many cores are used: "2 vCPUs" of a guest, "8 cores" elsewhere."""
    n, what = fact["performance_cores"], "vCPU" if _told(fact)[1] else "core"
    return f"{n} {what}{'s' * (n != 1)}"


def machine(fact: Mapping[str, Any]) -> str:
    """A machine by its processor and the cores used. Of a Mac the chip's name is enough."""
    counted = _told(fact)[0] and "performance_cores" in fact
    return f"{processor(fact)}, {cores(fact)}" if counted else processor(fact)


def _told(fact: Mapping[str, Any]) -> tuple[Any, Any]:
    """What a fact says of a processor of Linux, and of a guest's; None each where it is none."""
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
