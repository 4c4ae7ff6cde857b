"""What of a machine and an engine outlives an update: the facts that keys name, and the fact that holds the rest.

`rows.row_key` says what a key is made of, and why.
"""

import re
from collections.abc import Mapping
from typing import Any

GIB = 1 << 30
UPDATED = ("os", "macos_build", "python", "compiler", "memory_bytes")  # what of a machine's facts an update changes
REBUILT = ("sha256", "description")  # and of an engine's, where it is built again from the same sources


def of_machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What of a machine's facts a key holds: the system's first version number, Python's first two, memory in GiB."""
    lasting = {name: value for name, value in facts.items() if name not in ("compiler", "macos_build")}
    lasting |= {"os": _version(facts["os"], 1), "python": _version(facts["python"], 2)}
    lasting |= {"memory_bytes": _whole(facts["memory_bytes"])}
    if "gpus" in facts:
        lasting["gpus"] = [board | {"memory_bytes": _whole(board["memory_bytes"])} for board in facts["gpus"]]
    return lasting


def of_engine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What of an engine's facts a key holds; the hash of its libraries only where their sources are not `pinned`."""
    aside = ("pinned", "description", *(["sha256"] if facts.get("pinned") else []))
    return {name: value for name, value in facts.items() if name not in aside}


def system(machine: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of both: what a row tells and no key holds."""
    facts = {name: machine[name] for name in UPDATED if name in machine}
    return facts | {f"engine_{name}": engine[name] for name in REBUILT if name in engine}


def _version(name: str, n: int) -> str:
    """A name with the first `n` numbers of its version: "Linux 6" of "Linux 6.18.44-generic"."""
    match = re.match(rf"(?:\D* )?\d+(?:\.\d+){{{n - 1}}}", name)
    return match.group() if match else name


def _whole(n_bytes: int) -> int:
    """Memory in whole GiB, in bytes: what a kernel keeps for itself differs by build."""
    return max(round(n_bytes / GIB), 1) * GIB
