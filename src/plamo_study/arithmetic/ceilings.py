"""Ceilings of a machine: the one definition, for every study.

A ceiling belongs to a place: one machine, number of threads and device. A matrix ceiling also belongs to one kernel: a
tensor type, the layout of its weights ("packed": rearranged by llama.cpp when it loads a model; "plain": as in the
file; "blas": unpacked to F32 for BLAS, and "accelerate" where that is Apple's) and a number of columns. A file's
ceiling is the mix of the kernels of its tensors. Nothing is ever borrowed from another place, type or layout. A ceiling
is what a kernel reaches, not what the machine could reach. A roof, which nothing may exceed, takes the best sample; a
predicted time takes the usual one, the median of processes.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from llama_meter.errors import StudyError
from plamo_study.arithmetic.roofline import NO_MATMUL, Ceilings, Model, head_tensors
from plamo_study.read.frame import on_main_device, usable
from plamo_study.stats.estimates import NS

NEGLIGIBLE = 0.01  # share of a file's bytes below which a type's kernel is ignored
PACKED, PLAIN, BLAS, ACCELERATE = "packed", "plain", "blas", "accelerate"
STEADY = 1.1  # a reading whose median is more than this many times its shortest counts by its median
READ, MATMUL = "read", "matmul"
OF_ROW = ["machine", "n_threads", "n_gpu_layers", "dtype", "block", "n_bytes", "n_flops"]
Name = TypeVar("Name")  # of a file


@dataclass(frozen=True)
class Place:
    """Where something runs: the id of a machine's fact, threads, and layers on a GPU (0: the CPU)."""

    machine: str
    n_threads: int
    n_gpu_layers: int = 0


@dataclass(frozen=True)
class Rate:
    """Work per second, B/s or FLOP/s: the `best` sample, and the `usual` one of each process."""

    best: float
    by_process: tuple[float, ...]

    @property
    def usual(self) -> float:
        """Median over processes."""
        return float(np.median(self.by_process))


def measured(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One line per process that measured a ceiling, from the usable rows of each frame.

    `ceiling`, READ or MATMUL; `layout` of the weights, and `kernel`, both in words; `columns` of a product, 0 for a
    ceiling's full number; `n_bytes` and `n_flops` of a sample, its `best` and `usual` seconds. Rows whose packing was
    requested but not checked are left out.
    """
    rows = pd.concat([usable(rows[rows["workload"].isin([READ, MATMUL])]) for rows in frames], ignore_index=True)
    rows = rows[rows["status"] == "ok"]
    times = [[ns / NS for ns in chain(*samples)] for samples in rows["samples_ns"]]
    table = rows[OF_ROW].assign(ceiling=rows["workload"], layout=[_layout(row) for row in rows.to_dict("records")])
    table["kernel"] = [_kernel(row.ceiling, row.dtype, row.layout) for row in table.itertuples()]
    table["columns"] = rows["n_columns"].where(rows["workload"] == MATMUL, 0)
    table["usual"], table["best"] = np.array([(np.median(taken), min(taken)) for taken in times]).reshape(-1, 2).T
    wavers = (table["ceiling"] == READ) & (table["usual"] > STEADY * table["best"])
    return table.assign(best=table["best"].mask(wavers, table["usual"]))[table["layout"] != ""]


def _layout(row: Mapping[str, Any]) -> str:
    """Layout of a row's weights; "" where it was not checked."""
    for layout in (PACKED, ACCELERATE, BLAS):
        if row["checks"].get(layout):
            return layout
    if "packed" in row["checks"]:
        return PLAIN
    return "" if row["layout"] == PACKED else PLAIN


def _kernel(ceiling: str, dtype: str, layout: str) -> str:
    """What measured a ceiling in words, such as llama.cpp's Q4_K matrix kernel; of reading READ, or Apple's library."""
    if ceiling == READ:
        return ACCELERATE if layout == ACCELERATE else READ
    if layout in (BLAS, ACCELERATE):
        return f"{'BLAS' if layout == BLAS else 'Accelerate'} in F32, {dtype} weights unpacked"
    return f"llama.cpp's {dtype} matrix kernel" + (", packed weights" if layout == PACKED else "")


def main_place(rows: pd.DataFrame) -> Place:
    """The main set-up of a study: its most frequent machine, offloaded where possible, with all threads."""
    usable_rows = usable(rows)
    usable_rows = usable_rows[usable_rows["machine"] == usable_rows["machine"].mode().iloc[0]]
    machine, threads = usable_rows["machine"].iloc[0], usable_rows["n_threads"].max()
    layers = on_main_device(usable_rows)["n_gpu_layers"].min()
    return Place(str(machine), int(threads), int(layers))


class Here:
    """The rates measured at a place, from the first table that has each; what was looked up once is remembered."""

    def __init__(self, tables: Sequence[pd.DataFrame], place: Place):
        self.place, self._tables = place, [at(table, place) for table in tables]
        self.rate = cache(self._rate)

    def _rate(self, dtype: str = "") -> Rate:
        """Of reading, or of the kernel of a type (`of_ceiling`). StudyError where no table has it."""
        for table in self._tables:
            if len(lines := of_ceiling(table, dtype)):
                return rate(lines)
        what, fix = (f"matmul ceiling of {dtype}", "05-quantization") if dtype else ("read ceiling", "02-roofline")
        device = ", offloaded" if self.place.n_gpu_layers else ""
        why = f"no study measured it on that machine with {self.place.n_threads} threads{device}"
        raise StudyError(what, why, f"plamo-study measure {fix}")

    def limits(self, model: Model, heads: float = 0.0) -> tuple[Ceilings, Ceilings]:
        """(best, usual) ceilings for a file: its weights over the time of its kernels, each type at its own rate.

        `heads`: rows of the output head per token (1 in decode, almost 0 in a prompt). Raises StudyError for a kernel
        that was not measured and a file whose bytes are not counted; types of less than NEGLIGIBLE of the file's bytes
        are left out.
        """
        if why := model.get("uncounted"):
            raise StudyError(f"the ceilings of {model['name']}", f"are not computed: {why}", "compare its times alone")
        bandwidth, shares = self.rate(), multiplied(model, heads)
        rates = {dtype: self.rate(dtype) for dtype in shares}
        best, usual = (
            sum(shares.values()) / sum(n / getattr(rates[dtype], which) for dtype, n in shares.items())
            for which in ("best", "usual")
        )
        return Ceilings(bandwidth.best, best), Ceilings(bandwidth.usual, usual)


def limits(rows: pd.DataFrame, files: Mapping[Name, Model], usual: bool = False) -> dict[Name, Ceilings]:
    """The ceilings of a study's main set-up for each file whose ceilings were measured.

    The best ones, a roof; or the `usual` ones, medians over processes, for predicted times.
    """
    table, by_name = measured([rows]), dict[Name, Ceilings]()
    for name, file in files.items() if len(table) else ():
        with suppress(StudyError):  # a kernel of this file was not measured
            by_name[name] = Here([table], main_place(rows)).limits(file)[usual]
    return by_name


def by_block(table: pd.DataFrame, place: Place, model: Model) -> pd.DataFrame:
    """The usual ceilings of each block, columns read (B/s) and matmul (FLOP/s); NaN where a kernel is missing."""
    here, shares, spent = at(table, place), multiplied(model), []
    reads = of_ceiling(here).set_index("block")
    for dtype, n in shares.items():
        products = of_ceiling(here, dtype).set_index("block")
        spent.append(n / (products["n_flops"] / products["usual"]))
    matmul = sum(shares.values()) / pd.concat(spent, axis=1).sum(axis=1, skipna=False)
    return pd.DataFrame({READ: reads["n_bytes"] / reads["usual"], MATMUL: matmul})


def at(table: pd.DataFrame, place: Place) -> pd.DataFrame:
    """The lines of a place."""
    here = (table["machine"] == place.machine) & (table["n_threads"] == place.n_threads)
    return table[here & (table["n_gpu_layers"] == place.n_gpu_layers)]


def loaded(here: pd.DataFrame, dtype: str) -> pd.DataFrame:
    """The products measured with the kernel of a loaded model's tensors of a type: packed where there is one."""
    products = here[(here["ceiling"] == MATMUL) & (here["dtype"] == dtype)]
    packed = products["layout"] == PACKED
    return products[packed] if packed.any() else products


def of_ceiling(here: pd.DataFrame, dtype: str = "") -> pd.DataFrame:
    """The lines of reading; with a type those of many columns of the kernel that its loaded tensors have."""
    lines = loaded(here, dtype) if dtype else here[here["ceiling"] == READ]
    return lines[lines["columns"] == 0]


def rate(lines: pd.DataFrame) -> Rate:
    """The rate of a ceiling's lines: bytes a second of reading, else FLOPs a second."""
    work = lines["n_bytes"].where(lines["ceiling"] == READ, lines["n_flops"])
    return Rate(float((work / lines["best"]).max()), tuple((work / lines["usual"]).tolist()))


def multiplied(model: Model, heads: float = 0.0) -> dict[str, float]:
    """Number of weights that a token is multiplied with, by tensor type, plus `heads` times the output head."""
    head = _parts(head_tensors(model)) if heads else {}
    amounts = {
        dtype: amount["multiplied"] + (heads * head[dtype]["n_elements"] if dtype in head else 0.0)
        for dtype, amount in by_type(model).items()
    }
    return {dtype: amount for dtype, amount in amounts.items() if amount}


def by_type(model: Model) -> dict[str, dict[str, int]]:
    """By tensor type of a file's matrices: `bytes` a decode step reads, weights `multiplied` with every token.

    Without types of negligible size, such as those of narrow matrices.
    """
    untied = "output" in model["tensors"]
    amounts: dict[str, dict[str, int]] = {}
    for kind, tensors in model["tensors"].items():
        if (kind in NO_MATMUL and kind not in ("token_embd", "output")) or kind.endswith("_norm"):
            continue
        for dtype, part in _parts(tensors).items():
            sums = amounts.setdefault(dtype, {"bytes": 0, "multiplied": 0})
            sums["bytes"] += 0 if untied and kind == "token_embd" else part["n_bytes"]
            sums["multiplied"] += 0 if kind in NO_MATMUL else part["n_elements"]
    total = sum(amount["bytes"] for amount in amounts.values())
    return {dtype: amount for dtype, amount in amounts.items() if amount["bytes"] >= NEGLIGIBLE * total}


def _parts(tensors: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
    parts: Mapping[str, Mapping[str, int]] = tensors.get("by_type", {tensors["type"]: tensors})
    return parts
