"""The types to which backends cast the inputs of matrix products, and whether numbers of a given size survive.

The table is read from data/published and comes from llama.cpp 0c1e57098's own sources, with file and line for every
entry. Measuring, checking and analysis must agree on it, so it is below all of them. It does not know which numbers a
model produces. A limit on results is necessary, not sufficient: partial sums may be larger than the result.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llama_meter import paths
from llama_meter.errors import StudyError

TABLE = paths.PUBLISHED / "backend-casts.csv"
BACKENDS = ("CPU x86", "CPU ARM", "Metal", "CUDA", "Vulkan")
ON_GPUS = {"Metal": "MTL", "CUDA": "CUDA", "Vulkan": "Vulkan"}  # backend -> prefix of ggml's names of its devices
TENSOR = "Metal tensor units"  # of an M5 and later, if the engine reports using them
BLAS = "OpenBLAS x86"  # of products with many columns only; the others are the CPU's
PATHS = ("mat-vec", "mat-mul")
ROUNDS_UP = 65520 / 65504  # F16 rounds to its largest number what lies below 65,520
INSIDE = ("kq", "kqv", "cache_k", "cache_v")  # products with the key/value cache, and the values it stores
SERIES = {"largest": "largest", "sum of 16": "sum16", "sum of 32": "sum32", "output": "output"}


@dataclass(frozen=True)
class Cast:
    """One entry: on this backend and path, weights of `types` meet inputs cast to `cast`.

    `of` names the number that is limited: "largest" input, "sum of 16" or "sum of 32" consecutive inputs, "output".
    `limit` is the largest number that survives, infinite for types with F32's range. `columns`: those of the inputs.
    """

    backend: str
    types: tuple[str, ...]
    path: str
    columns: str
    cast: str
    of: str
    limit: float
    source: str
    note: str


@dataclass(frozen=True)
class Verdict:
    """`factor`: the number over its limit, above one where it overflows; `cast`: the entry that decides."""

    factor: float
    cast: Cast

    @property
    def fits(self) -> bool:
        """Whether the number stays finite; F16 rounds numbers slightly above its largest down to it."""
        return self.factor < ROUNDS_UP


@cache
def load(path: Path = TABLE) -> tuple[Cast, ...]:
    """The table, in file order."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(
            Cast(
                **dict[str, Any](row) | {"types": tuple(row["types"].split()), "limit": float(row["limit"] or math.inf)}
            )
            for row in csv.DictReader(file)
        )


def entries(backend: str, dtype: str, path: str) -> list[Cast]:
    """The entries for one product; none for a type that the table does not hold."""
    return [cast for cast in load() if cast.backend == backend and cast.path == path and dtype in cast.types]


def verdict(backend: str, dtype: str, path: str, numbers: Mapping[str, float]) -> Verdict | None:
    """Whether numbers of these sizes survive the cast, judged by the entry they come closest to; None if unknown.

    `numbers`: sizes by the names of `Cast.of`; missing ones are not judged.
    """
    judged = [
        Verdict(numbers[cast.of] / cast.limit if cast.of in numbers else 0.0, cast)
        for cast in entries(backend, dtype, path)
    ]
    return max(judged, key=lambda one: one.factor, default=None)


def limit(backend: str, dtype: str, path: str = "mat-mul") -> Cast | None:
    """The entry with the lowest limit on the largest input, None where there is no limit or nothing is known."""
    casts = [cast for cast in entries(backend, dtype, path) if cast.of == "largest"]
    return min(casts, key=lambda cast: cast.limit, default=None)


def met(kind: str, dtype: str) -> str:
    """The type that a product's input meets, as the table names it: a cache's is distinguished from a weight's."""
    return f"KV-{dtype}" if kind in INSIDE else dtype


def host(machine: str) -> str:
    """The CPU backend of a machine, named as by `platform.machine()` names it."""
    return "CPU ARM" if machine.lower().startswith(("arm", "aarch")) else "CPU x86"


def backend(gpu: Mapping[str, Any]) -> str:
    """The name of a GPU's backend from its facts; ggml's own name of the device for one that is not known here."""
    return next((name for name, start in ON_GPUS.items() if gpu["name"].startswith(start)), str(gpu["name"]))


def of_device(gpu: Mapping[str, Any]) -> str:
    """The backend of a GPU from its facts: ggml's `name` ("CUDA0"), and whether its `tensor` units are used.

    StudyError for one whose casts are not in the table.
    """
    if backend(gpu) not in ON_GPUS:
        raise StudyError(f"device {gpu['name']}", "the table lacks its backend's casts", f"add lines to {TABLE.name}")
    return TENSOR if gpu.get("tensor") else backend(gpu)


def of_engine(corrects: Sequence[str], machine: str, path: str, gpu: Mapping[str, Any] | None = None) -> str:
    """The backend that computes products on a path, from the build's additions and the machine.

    `gpu`: facts of the device that holds the weights, as for `of_device`; None for the CPU.
    """
    if gpu:
        return of_device(gpu)
    return BLAS if "blas" in corrects and path == "mat-mul" else host(machine)


def known_types(casts: Sequence[Cast] | None = None) -> list[str]:
    """Weight types of the table, in its order, without those of caches."""
    names = dict.fromkeys(name for cast in casts or load() for name in cast.types)
    return [name for name in names if not name.startswith("KV-")]
