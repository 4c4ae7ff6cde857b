"""Rows to a pandas frame: one line per row, with its gate's verdict and its block's drift."""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from llama_meter.cells import ORDER, Depth, columns
from llama_meter.disk import plainly
from llama_meter.measure import defects, verdicts, watch
from llama_meter.measure.watch import drift_by_block
from llama_meter.rows import Conditions, Fact, Record, Row

if TYPE_CHECKING:
    import pandas as pd

CONDITIONS = [name for name in Conditions.__struct_fields__ if name not in ("before", "timed", "whole")]
ROW_FIELDS = [
    "key",
    "replicate",
    "block",
    "order",
    "anchor",
    "engine",
    "machine",
    "system",
    "status",
    "started",
    "elapsed_ns",
    "prefill_ns",
    "load_ns",
    "n_evaluated",
    "n_bytes",
    "n_flops",
    "samples_ns",
    "warmup_ns",
    "splits",
    "buffer_bytes",
    "flash_attention",
    "checks",
    "series",
    "requests",
]
TEXTS = [name for name in ORDER if isinstance(columns(Depth())[name], str)]
PAUSE_S = 1800.0  # without a row: after such a pause a machine may have another speed
WITH_WINDOW = " with window"  # behind the name of a model whose attention a build gives its published window


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
    table["verdict"] = verdicts.of(rows)
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
    """A release by its version, another build by what it corrects (`measure.defects`); "stock" when that is nothing."""
    return engine.get("release") or defects.build_name(engine.get("corrects", ()))
