"""Rows to a pandas frame: one line per row, with its gate's verdict and its block's drift; and which rows count.

Machines bear familiar names here. A fact holds the system's name of a processor and the CPU family; a recorded host has
a letter on every page, and the name of the generation that computed there.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from llama_meter import limits
from llama_meter.cells import ORDER, Depth, columns
from llama_meter.disk import plainly
from llama_meter.limits import DRIFT_LIMIT, LEAST_BLOCKS, RIGHT
from llama_meter.measure import watch
from llama_meter.measure.watch import drift_by_block
from llama_meter.rows import Conditions, Fact, Record, Row, content_id, verdicts

if TYPE_CHECKING:
    import pandas as pd

CONDITIONS = [name for name in Conditions.__struct_fields__ if name not in ("before", "timed", "whole")]
APART_FROM = {"schema", "study", "cell", "model", "others", "pid", "conditions", "failure", "file_sha256", "valid"}
ROW_FIELDS = [name for name in Row.__struct_fields__ if name not in APART_FROM]
TEXTS = [name for name in ORDER if isinstance(columns(Depth())[name], str)]
PAUSE_S = 1800.0  # without a row: after such a pause a machine may have another speed
WITH_WINDOW = " with window"  # behind the name of a model whose attention a build gives its published window
CELL = ["machine", "build", "engine", *ORDER]
STOCK = "stock"  # the build that corrects nothing
NOISY = 0.10  # coefficient of variation between processes that marks a cell noisy
LINUX = re.compile(r"(.*) \(family [^()]*\)")  # a processor as `measure.machine` writes it; a Mac has no family
APART, SHORT = "apart", 8  # of a fact: what distinguishes a machine from another of its name; digits of an id
HOSTS = {  # the machines of the recorded rows, virtual ones, by the id of their fact: letter and processor
    "dbd2b3acfeaa796f": ("A", "AMD EPYC Zen 5"),
    "6d97ed74d70f8581": ("B", "AMD EPYC Zen 4"),
    "19415f43ff8f8a41": ("C", "Intel Xeon Sapphire Rapids or newer"),
    "9a6c13f808f78652": ("D", "Intel Xeon @ 2.50GHz"),
    "d49900bc784c2342": ("E", "Intel Xeon"),
    "cdff279d98980b96": ("F", "AMD EPYC Zen 4"),
    "7420e18a91a314eb": ("G", "AMD EPYC Zen 4"),
    "079700e8bb55e7cf": ("H", "AMD EPYC Zen 5"),
    "735ee00ca0d48b34": ("I", "Intel Xeon Sapphire Rapids or newer"),
    "d96de5fd22bdafd9": ("J", "AMD EPYC Zen 3 or 4"),
    "c631b263a85ab711": ("K", "AMD EPYC Zen 3 or 4"),
    "87bff510c720e24b": ("L", "Intel Xeon"),
}


def frame(rows: Iterable[Row], facts_by_id: dict[str, dict[str, Any]]) -> "pd.DataFrame":
    """Columns: every field of the cell, the row's own, `build`, `verdict`, `drift`, `failure` and the conditions.

    `disturbed`: whether something disturbed the row; `disturbed_by`: the cause, as `watch.causes` names it, or "".
    `others`: the share of the machine's CPUs that others took; `waited`: the CPUs' worth of time that the worker waited
    for one. Both are NaN for rows without evidence.

    `facts_by_id` are the facts of the same journal. The name of a model whose shape is assumed ends in a star; that of
    a model to which the build gives a window says so. Names are plain, as `disk.plain_name` makes them.
    """
    import pandas as pd  # measuring does without frames, and starts sooner

    rows = in_one_go(rows)
    drift, causes = drift_by_block(rows), watch.causes(rows)
    plain_cells = {cell: plainly(columns(cell)) for cell in dict.fromkeys(row.cell for row in rows)}
    cells = [plain_cells[row.cell] for row in rows]
    table: dict[str, Any] = {name: [cell[name] for cell in cells] for name in ORDER}
    table |= {name: [getattr(row, name) for row in rows] for name in ROW_FIELDS}
    table["model"] = [
        starred(computed(facts_by_id[row.model], facts_by_id[row.engine])) if row.model else cell["model"]
        for row, cell in zip(rows, cells, strict=True)
    ]
    table["fact"] = [row.model for row in rows]
    table["build"] = [build_name(facts_by_id[row.engine]) if row.engine else "" for row in rows]
    table["verdict"] = verdicts(rows)
    table["drift"] = [drift.get(row.block, 0.0) for row in rows]
    table["failure"] = [str(row.failure or "") for row in rows]
    for name in CONDITIONS:
        table[name] = [plainly(getattr(row.conditions, name)) for row in rows]
    table["disturbed"] = [row.key in causes for row in rows]
    table["disturbed_by"] = [causes.get(row.key, "") for row in rows]
    table["others"] = pd.Series([watch.others(row.conditions) for row in rows], dtype=float)
    table["waited"] = pd.Series([watch.waited(row.conditions) for row in rows], dtype=float)
    timed = [row.conditions.timed for row in rows]
    table["timed_s"] = pd.Series([part.wall_ns / 1e9 if part else None for part in timed], dtype=float)
    shown = pd.DataFrame(table)
    return shown if rows else shown.astype(dict.fromkeys(TEXTS, str))  # a column of nothing has no type


def in_one_go(rows: Iterable[Row]) -> list[Row]:
    """The rows, with those that a later call added to a block moved to a block of their own.

    Rows of a block are comparable because they were measured close together. A new call begins where nothing was
    measured on the machine for PAUSE_S.
    """
    rows, ends = list(rows), dict[str, float]()
    calls, of = Counter[str](), dict[str, int]()  # by machine; by row
    for row in sorted(rows, key=lambda row: row.started):
        start = datetime.fromisoformat(row.started).timestamp()
        calls[row.machine] += start > ends.get(row.machine, start) + PAUSE_S
        ends[row.machine] = max(start + row.elapsed_ns / 1e9, ends.get(row.machine, start))
        of[row.key] = calls[row.machine]
    parts = sorted({(row.block, of[row.key]) for row in rows if row.block >= 0 and not row.anchor})
    fresh, numbers = count(max((row.block for row in rows), default=0) + 1), dict[tuple[int, int], int]()
    for before, part in pairwise([(-1, 0), *parts]):
        numbers[part] = next(fresh) if part[0] == before[0] else part[0]
    moved = [row.block if row.anchor else numbers.get((row.block, of[row.key]), row.block) for row in rows]
    return [
        row if row.block == block else msgspec.structs.replace(row, block=block)
        for row, block in zip(rows, moved, strict=True)
    ]


def facts(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Facts by id, with plain names, and models also by the name frames give them (the last one of each name)."""
    records = list(records)
    by_id = {record.id: plainly(record.data) for record in records if isinstance(record, Fact)}
    pairs = dict.fromkeys((row.model, row.engine) for row in records if isinstance(row, Row) and row.model)
    models = [computed(by_id[model], by_id[engine]) for model, engine in pairs]
    models += [by_id[record.id] for record in records if isinstance(record, Fact) and record.what == "model"]
    return by_id | {starred(model): model for model in models}


def computed(model: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """A model as a build computes it: a PLaMo 2 has a window where the build's `window` (tokens) sets one."""
    window, shape = engine.get("window", 0), model.get("shape", {})
    if not window or shape.get("arch") != "plamo2":
        return model
    slides = {"window": window, "window_pattern": shape["layers"] + 1}  # no layer is left that sees everything
    return model | {"name": model["name"] + WITH_WINDOW, "shape": shape | slides}


def starred(model: dict[str, Any]) -> str:
    """A model's name, with a star when some of its shape is assumed and not published."""
    return model["name"] + ("*" if model["assumptions"] else "")


def build_name(engine: dict[str, Any]) -> str:
    """A release by its version, another build by what it corrects (`limits.DEFECTS`); "stock" when that is nothing."""
    return engine.get("release") or limits.build_name(engine.get("corrects", ()))


# ------------------------------------------------------------------ rows that count


def usable(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Valid, undisturbed rows, without anchors and gates.

    Where fewer than two blocks of a cell remain, all its blocks are used: an honest wide interval beats no number, and
    `evidence.disturbed` reports it before the finding. A repeated row replaces the original.
    """
    return undisturbed(rows[~rows["anchor"] & rows["verdict"].isin([*RIGHT, "n/a"])])


def undisturbed(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Undisturbed rows; for a cell with fewer than two undisturbed blocks, one row of each of its blocks."""
    steady = ~marked(rows)
    if steady.all():
        return rows[steady]
    cells = _cells(rows)
    lacking = rows["block"].where(steady).groupby(cells).transform("nunique") < LEAST_BLOCKS
    better = steady.groupby([cells, rows["block"]]).transform("any")
    last = ~rows.assign(cell=cells).duplicated(["cell", "block"], keep="last")
    return rows[steady | (lacking & ~better & last)]


def unrepeated(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Rows without those that another of the same cell and block, measured again, replaces: pairs are of two."""
    return rows[~rows.assign(cell=_cells(rows)).duplicated(["cell", "block"], keep="last")]


def marked(rows: "pd.DataFrame") -> "pd.Series":
    """Whether each row was disturbed, or its block drifted."""
    return rows.get("disturbed", False) | (rows["drift"] > DRIFT_LIMIT)


def marked_by(rows: "pd.DataFrame") -> "pd.Series":
    """What marks each row: the frame's `disturbed_by` where it is not empty, else "drift" or ""."""
    drift = (rows["drift"] > DRIFT_LIMIT).map({True: "drift", False: ""})
    return rows["disturbed_by"].mask(rows["disturbed_by"] == "", drift) if "disturbed_by" in rows else drift


def disturbed_cells(rows: "pd.DataFrame") -> tuple[int, int]:
    """(cells whose numbers come from disturbed rows for lack of others, number of all cells)."""
    used = usable(rows[rows["block"] >= 0])
    cells = _cells(used)
    return cells[marked(used)].nunique(), cells.nunique()


def _cells(rows: "pd.DataFrame") -> "pd.Series":
    """A number for each row, the same for rows of one cell, build and machine."""
    return rows.groupby([name for name in CELL if name in rows], dropna=False, sort=False).ngroup()


def main_rows(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Usable rows of the machine's main set-up: offloaded where possible, with all threads."""
    device_rows = on_main_device(usable(rows))
    return device_rows[device_rows["n_threads"] == device_rows["n_threads"].max()]


def on_main_device(rows: "pd.DataFrame") -> "pd.DataFrame":
    """The GPU's rows where layers were offloaded, else the CPU's: all rows."""
    offloaded = rows["n_gpu_layers"] != 0
    return rows[offloaded == offloaded.any()]


def main_build(rows: "pd.DataFrame") -> str:
    """The engine as released, or where it ran nothing the build with most rows."""
    builds = rows.loc[rows["model"] != "", "build"]
    return STOCK if (builds == STOCK).any() or builds.empty else str(builds.mode().iloc[0])


def model_names(rows: "pd.DataFrame") -> list[str]:
    """The models of a frame, in alphabetical order."""
    return sorted(name for name in rows["model"].unique() if name)


# ------------------------------------------------------------------ names of machines


def processor_name(fact: Mapping[str, Any]) -> str:
    """The processor of a machine: that of a recorded host, else the system's name of it without maker's marks."""
    if host := HOSTS.get(_id(fact)):
        return host[1]
    linux = LINUX.fullmatch(fact["chip"])
    return re.sub(r"\((?:R|TM)\)", "", linux[1] if linux else fact["chip"])


def cores(fact: Mapping[str, Any]) -> str:
    """The number of cores used: "2 vCPUs" of a recorded host, "8 cores" elsewhere."""
    n, what = fact["performance_cores"], "vCPU" if _id(fact) in HOSTS else "core"
    return f"{n} {what}{'s' * (n != 1)}"


def machine_name(fact: Mapping[str, Any]) -> str:
    """A machine by its processor and the cores used. For a Mac, the chip's name is enough."""
    counted = LINUX.fullmatch(fact["chip"]) and "performance_cores" in fact
    return (f"{processor_name(fact)}, {cores(fact)}" if counted else processor_name(fact)) + _mark(fact)


def device_name(fact: Mapping[str, Any], offloaded: bool) -> str:
    """What computes on a machine: its first GPU where layers are `offloaded`, else its processor.

    A chip that is both is told apart: "Apple M4 Pro, GPU" and "Apple M4 Pro, CPU". So is a GPU that nobody named.
    """
    chip, boards = processor_name(fact), [str(gpu["chip"]) for gpu in fact.get("gpus", ())]
    if offloaded:
        board = next(iter(boards), chip)
        return (f"{chip}, GPU" if board == chip else board) + _mark(fact)
    return (f"{chip}, CPU" if chip in boards or "gpu_cores" in fact else chip) + _mark(fact)


def distinct_machines(*sources: Mapping[str, Mapping[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Facts by id, of several sources, with a name of its own for every machine.

    Recorded hosts have a letter. Of other machines with one name the first keeps it, and the others add their id.
    """
    bearers: dict[str, str] = {}  # of a name: the id of its machine
    marks: dict[str, str] = {}
    for name, fact in {name: fact for facts in sources for name, fact in facts.items() if "chip" in fact}.items():
        names = {device_name(fact, False), *([device_name(fact, True)] if fact.get("gpus") else [])}
        if any(bearers.setdefault(each, name) != name for each in names):
            marks[name] = name[:SHORT]
    return [
        {name: {**fact, APART: marks[name]} if name in marks else dict(fact) for name, fact in facts.items()}
        for facts in sources
    ]


def _mark(fact: Mapping[str, Any]) -> str:
    host = HOSTS.get(_id(fact))
    mark = f"host {host[0]}" if host else fact.get(APART)
    return f" ({mark})" if mark else ""


def _id(fact: Mapping[str, Any]) -> str:
    return content_id({name: value for name, value in fact.items() if name != APART})
