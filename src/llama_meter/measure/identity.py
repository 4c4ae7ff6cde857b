"""What of a machine and an engine outlives an update: the facts that keys name, and the fact that holds the rest.

`rows.row_key` says what a key is made of, and why. Rows that are older than that name facts with everything in them;
`renewed` gives them the keys that they would have today.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from llama_meter.rows import Fact, Record, Row, row_key

GIB = 1 << 30
UPDATED = ("os", "macos_build", "python", "compiler", "memory_bytes")  # what of a machine's facts an update changes
REBUILT = ("sha256", "description")  # and of an engine's, where it is built again from the same sources
TELLING = ("gpus", "corrects", "window", "options", "environment", "patches", "source")  # a lack of them tells, too


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


def renewed(records: Iterable[Record]) -> list[Record]:
    """Records of a journal in which older rows name the newer facts that agree with theirs, and have their keys.

    Without such a fact a row stays as it is: nothing was measured there since.
    """
    records = list(records)
    facts = [record for record in records if isinstance(record, Fact)]
    ids = dict(_pairs(facts))
    return [_renamed(record, ids) if isinstance(record, Row) else record for record in records] if ids else records


def _pairs(facts: list[Fact]) -> Iterator[tuple[str, str]]:
    """Ids of older facts, each with that of a newer one of the same machine or engine."""
    for what, is_newer, agree in (
        ("machine", lambda data: "compiler" not in data, lambda old, new: _agree(of_machine(old), new)),
        ("engine", lambda data: "libraries" in data, _is_same_engine),
    ):
        own = [fact for fact in facts if fact.what == what]
        newer = [fact for fact in own if is_newer(fact.data)]
        for fact in own if newer else ():
            if not is_newer(fact.data):
                yield from ((fact.id, other.id) for other in newer if agree(fact.data, other.data))


def _is_same_engine(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """In older facts a build's ggml is that of the installed libraries, by a hash; newer ones give its version."""
    if old.get("sha256") != new.get("sha256", old.get("sha256")):
        return False
    by_hash = str(old.get("ggml")).startswith("sha256 ")
    return _agree({name: old[name] for name in old if name not in REBUILT and not (by_hash and name == "ggml")}, new)


def _agree(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two facts say the same; the newer may say more, but for what is TELLING."""
    return all(new.get(name) == value for name, value in old.items()) and all(
        name in old for name in TELLING if name in new
    )


def _renamed(row: Row, ids: Mapping[str, str]) -> Row:
    machine, engine = ids.get(row.machine, row.machine), ids.get(row.engine, row.engine)
    if (machine, engine) == (row.machine, row.engine):
        return row
    study = f"{row.study}/anchor" if row.anchor else row.study
    key = row_key(study, row.cell, row.model, engine, machine, row.replicate, *row.others)
    return msgspec.structs.replace(row, machine=machine, engine=engine, key=key)


def _version(name: str, n: int) -> str:
    """A name with the first `n` numbers of its version: "Linux 6" of "Linux 6.18.44-generic"."""
    match = re.match(rf"(?:\D* )?\d+(?:\.\d+){{{n - 1}}}", name)
    return match.group() if match else name


def _whole(n_bytes: int) -> int:
    """Memory in whole GiB, in bytes: what a kernel keeps for itself differs by build."""
    return max(round(n_bytes / GIB), 1) * GIB
