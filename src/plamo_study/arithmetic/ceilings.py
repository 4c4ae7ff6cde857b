"""Ceilings of a machine: the one definition, for every study.

A ceiling belongs to a place: one machine, number of threads and device. A matrix ceiling also belongs to one kernel: a
tensor type, the layout of its weights ("packed": rearranged by llama.cpp when it loads a model; "plain": as in the
file; "blas": unpacked to F32 for BLAS, and "accelerate" where that is Apple's) and a number of columns. A file's
ceiling is the mix of the kernels of its tensors. Nothing is ever borrowed from another place, type or layout. A ceiling
is what a kernel reaches, not what the machine could reach. A roof, which nothing may exceed, takes the best sample; a
predicted time takes the usual one, the median of processes.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.errors import StudyError
from plamo_study.arithmetic.roofline import NO_MATMUL, Ceilings, Model, head_tensors
from plamo_study.read.frame import on_main_device, usable

NEGLIGIBLE = 0.01  # share of a file's bytes below which a type's kernel is ignored
PACKED, PLAIN, BLAS, ACCELERATE = "packed", "plain", "blas", "accelerate"
STEADY = 1.1  # a reading whose median is more than this many times its shortest counts by its median
READ, MATMUL = "read", "matmul"
NS = 1e9
COLUMNS = [
    *("machine", "n_threads", "n_gpu_layers", "ceiling", "dtype", "layout", "columns", "many", "block", "n_bytes"),
    *("n_flops", "best", "usual"),
]
SAME = ("machine", "n_threads", "n_gpu_layers", "dtype", "block", "n_bytes", "n_flops")  # as the rows have them
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


@dataclass(frozen=True)
class Kernel:
    """A matrix product of the engine: weights of a type in a layout, times many columns."""

    dtype: str
    layout: str

    @property
    def name(self) -> str:
        """The kernel in words, such as llama.cpp's Q4_K matrix kernel, with the weights' layout if not the file's."""
        if self.layout in (BLAS, ACCELERATE):
            name = "BLAS" if self.layout == BLAS else "Accelerate"
            return f"{name} in F32, {self.dtype} weights unpacked"
        return f"llama.cpp's {self.dtype} matrix kernel" + (", packed weights" if self.layout == PACKED else "")


def measured(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One line per process that measured a ceiling, from the usable rows of each frame.

    `columns` of the product (0 for reading), `many`: whether they are a ceiling's full number, `n_bytes` and `n_flops`
    of a sample, its `best` and `usual` seconds. Rows whose packing was requested but not checked are left out.
    """
    used = (usable(rows[rows["workload"].isin([READ, MATMUL])]) for rows in frames)
    entries = [entry for rows in used for entry in _entries(rows)]
    return pd.DataFrame(entries, columns=COLUMNS).astype({"many": bool})


def main_place(rows: pd.DataFrame) -> Place:
    """The main set-up of a study: its most frequent machine, offloaded where possible, with all threads."""
    usable_rows = usable(rows)
    usable_rows = usable_rows[usable_rows["machine"] == usable_rows["machine"].mode().iloc[0]]
    machine, threads = usable_rows["machine"].iloc[0], usable_rows["n_threads"].max()
    layers = on_main_device(usable_rows)["n_gpu_layers"].min()
    return Place(str(machine), int(threads), int(layers))


def place_of(cell: Mapping[str, Any]) -> Place:
    """Where a cell ran."""
    return Place(str(cell["machine"]), int(cell["n_threads"]), int(cell["n_gpu_layers"]))


class Here:
    """The rates measured at a place, from the first table that has each; what was looked up once is remembered."""

    def __init__(self, tables: Sequence[pd.DataFrame], place: Place):
        self.place, self._tables = place, [at(table, place) for table in tables]
        self.read, self.kernel = cache(self._read), cache(self._kernel)

    def _read(self) -> Rate:
        """Read bandwidth in B/s. Raises StudyError where no table has it."""
        for table in self._tables:
            if len(rows := table[table["ceiling"] == READ]):
                return _rate(rows, rows["n_bytes"])
        raise _missing("read ceiling", self.place)

    def _kernel(self, dtype: str) -> Rate:
        """FLOP/s for many columns of the kernel of a loaded tensor of a type. StudyError where no table has it."""
        for table in self._tables:
            rows = _loaded(table[table["ceiling"] == MATMUL], dtype)
            if len(rows := rows[rows["many"]]):
                return _rate(rows, rows["n_flops"])
        raise _missing(f"matmul ceiling of {dtype}", self.place)

    def limits(self, model: Model, heads: float = 0.0) -> tuple[Ceilings, Ceilings]:
        """(best, usual) ceilings for a file: its weights over the time of its kernels, each type at its own rate.

        `heads`: rows of the output head per token (1 in decode, almost 0 in a prompt). Raises StudyError for a kernel
        that was not measured and a file whose bytes are not counted; types of less than NEGLIGIBLE of the file's bytes
        are left out.
        """
        if why := model.get("uncounted"):
            raise StudyError(f"the ceilings of {model['name']}", f"are not computed: {why}", "compare its times alone")
        bandwidth, shares = self.read(), multiplied(model, heads)
        rates = {dtype: self.kernel(dtype) for dtype in shares}
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


def of_study(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per ceiling, kernel, device and threads: `best` sample and `usual` (median of processes), B/s or FLOP/s.

    For the study's main machine, kernels at their full number of columns. Reading has the kernel "read", or
    "accelerate" where Apple's Accelerate computed the dot products.
    """
    table, entries = measured([rows]), []
    here = table[table["machine"] == main_place(rows).machine]
    for (layers, threads), group in here.groupby(["n_gpu_layers", "n_threads"]):
        place = Place(str(group["machine"].iloc[0]), int(threads), int(layers))
        rates: dict[str, Rate] = {READ: Here([table], place).read()} if (group["ceiling"] == READ).any() else {}
        rates |= {kernel.name: rate for kernel, rate in every_kernel([table], place).items()}
        own = ACCELERATE if ACCELERATE in set(at(table, place, READ)["layout"]) else READ
        for name, rate in rates.items():
            entry: dict[str, Any] = {"ceiling": READ if name == READ else MATMUL}
            entry |= {"kernel": own if name == READ else name, "n_gpu_layers": layers, "n_threads": threads}
            entry |= {"best": rate.best, "usual": stats.median(rate.by_process)}
            entries.append(entry)
    return pd.DataFrame(entries)


def by_block(table: pd.DataFrame, place: Place, model: Model) -> pd.DataFrame:
    """The usual ceilings of each block, columns read (B/s) and matmul (FLOP/s); NaN where a kernel is missing."""
    reads, shares, spent = at(table, place, READ).set_index("block"), multiplied(model), []
    for dtype, n in shares.items():
        products = loaded(table, place, dtype)
        products = products[products["many"]].set_index("block")
        spent.append(n / (products["n_flops"] / products["usual"]))
    matmul = sum(shares.values()) / pd.concat(spent, axis=1).sum(axis=1, skipna=False)
    return pd.DataFrame({READ: reads["n_bytes"] / reads["usual"], MATMUL: matmul})


def every_kernel(tables: Sequence[pd.DataFrame], place: Place) -> dict[Kernel, Rate]:
    """FLOP/s for many columns of every kernel measured at a place, over all tables."""
    products = at(pd.concat(tables, ignore_index=True), place, MATMUL)
    groups = products[products["many"]].groupby(["dtype", "layout"], sort=False)
    return {Kernel(str(dtype), str(layout)): _rate(group, group["n_flops"]) for (dtype, layout), group in groups}


def loaded(table: pd.DataFrame, place: Place, dtype: str) -> pd.DataFrame:
    """The products measured with the kernel of a loaded model's tensors of a type: packed where there is one."""
    return _loaded(at(table, place, MATMUL), dtype)


def _loaded(products: pd.DataFrame, dtype: str) -> pd.DataFrame:
    own = products[products["dtype"] == dtype]
    packed = own["layout"] == PACKED
    return own[packed] if packed.any() else own


def at(table: pd.DataFrame, place: Place, ceiling: str = "") -> pd.DataFrame:
    """The lines of a place, and of one ceiling where it is named."""
    here = (table["machine"] == place.machine) & (table["n_threads"] == place.n_threads)
    here &= table["n_gpu_layers"] == place.n_gpu_layers
    return table[here & (table["ceiling"] == ceiling)] if ceiling else table[here]


def multiplied(model: Model, heads: float = 0.0) -> dict[str, float]:
    """Number of weights that a token is multiplied with, by tensor type, plus `heads` times the output head."""
    types = weighty(by_type(model))
    head = _parts(head_tensors(model)) if heads else {}
    amounts = {
        dtype: amount["multiplied"] + (heads * head[dtype]["n_elements"] if dtype in head else 0.0)
        for dtype, amount in types.items()
    }
    return {dtype: amount for dtype, amount in amounts.items() if amount}


def by_type(model: Model) -> dict[str, dict[str, int]]:
    """By tensor type of a file's matrices: `bytes` a decode step reads, weights `multiplied` with every token."""
    untied = "output" in model["tensors"]
    amounts: dict[str, dict[str, int]] = {}
    for kind, tensors in model["tensors"].items():
        if (kind in NO_MATMUL and kind not in ("token_embd", "output")) or kind.endswith("_norm"):
            continue
        for dtype, part in _parts(tensors).items():
            sums = amounts.setdefault(dtype, {"bytes": 0, "multiplied": 0})
            sums["bytes"] += 0 if untied and kind == "token_embd" else part["n_bytes"]
            sums["multiplied"] += 0 if kind in NO_MATMUL else part["n_elements"]
    return amounts


def weighty(amounts: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """The amounts without types of negligible size, such as those of narrow matrices."""
    total = sum(amount["bytes"] for amount in amounts.values())
    return {dtype: amount for dtype, amount in amounts.items() if amount["bytes"] >= NEGLIGIBLE * total}


def _parts(tensors: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
    parts: Mapping[str, Mapping[str, int]] = tensors.get("by_type", {tensors["type"]: tensors})
    return parts


def _entries(rows: pd.DataFrame) -> Iterable[dict[str, Any]]:
    ok_rows = rows[rows["status"] == "ok"]
    for row in ok_rows[[*SAME, "workload", "layout", "checks", "n_rows", "n_columns", "samples_ns"]].to_dict("records"):
        layout, times = _layout(row), list(chain(*row["samples_ns"]))
        entry = {name: row[name] for name in SAME} | {"ceiling": row["workload"], "layout": layout, "many": False}
        usual = float(np.median(times))
        wavers = row["workload"] == READ and usual > STEADY * min(times)
        best = usual if wavers else min(times)
        entry |= {"columns": 0, "weights": 0, "best": best / NS, "usual": usual / NS}
        if row["workload"] == MATMUL:
            weights = int(row["n_rows"]) ** 2
            entry |= {"columns": row["n_columns"] or round(row["n_flops"] / (2 * weights)), "weights": weights}
            entry["many"] = not row["n_columns"]
        if layout:
            yield entry


def _layout(row: Mapping[str, Any]) -> str:
    """Layout of a row's weights; "" where it was not checked."""
    for layout in (PACKED, ACCELERATE, BLAS):
        if row["checks"].get(layout):
            return layout
    if "packed" in row["checks"]:
        return PLAIN
    return "" if row["layout"] == PACKED else PLAIN


def _rate(rows: pd.DataFrame, work: pd.Series) -> Rate:
    return Rate(float((work / rows["best"]).max()), tuple((work / rows["usual"]).tolist()))


def _missing(what: str, place: Place) -> StudyError:
    device = ", offloaded" if place.n_gpu_layers else ""
    why = f"no study measured it on that machine with {place.n_threads} threads{device}"
    fix = "05-quantization" if " of " in what else "02-roofline"
    return StudyError(what, why, f"plamo-study measure {fix}")
