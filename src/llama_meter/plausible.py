"""Whether a record can be one that this project measured: named by its content, of this form, within what is possible.

Rows from elsewhere are not trusted. ValueError says what cannot be; every number has a least and a most.
"""

import re
import sys
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any

import msgspec

from llama_meter.cells import Arrival, Decode, Depth, Gate, MatMul, Naive, OnModel, Prefill, Read, Relay, columns
from llama_meter.measure import facts
from llama_meter.measure.plan import TIME_LIMIT_S
from llama_meter.measure.tasks import REPEAT
from llama_meter.rows import SCHEMA, Fact, Row, content_id, passed, row_key

MOST_TEXT = 4000  # characters of a sentence
MOST_NAME = 200
SENTENCES = ("failure", "log", *facts.SENTENCES)
TOLD = ("degenerate_loop", "refused")  # checks that do not judge
TYPE = r"[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*"
PAIR = re.compile(rf"[a-z]+(?:_[a-z]+)*/{TYPE}>{TYPE}(?:/[a-z]+(?: [a-z]+)*)?")  # a series of a file that reads for one
FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)  # the earliest date of a row
LONGEST_NS = 10**15  # the longest row: twelve days
MOST_BYTES_S, MOST_FLOPS_S = 1e14, 1e18  # beyond any machine
FINITE = (-sys.float_info.max, sys.float_info.max)
TIME, COUNT, MANY, BYTES = (0, LONGEST_NS), (0, 1 << 32), (0, 1 << 20), (0, 1 << 50)
CPU_TIME = (-(10**10), 9999 * LONGEST_NS)  # a difference of two counts, over all CPUs
BOUNDS: Mapping[str, tuple[float, float]] = {  # the least and the most of every number in a row, by its field
    "schema": (1, SCHEMA), "replicate": (0, 10**5), "block": (-1, REPEAT - 1), "order": (-1, 10**6), "pid": COUNT,
    "elapsed_ns": (1, LONGEST_NS),
    # results
    "samples_ns": TIME, "warmup_ns": TIME, "prefill_ns": TIME, "load_ns": TIME, "n_evaluated": (0, 1 << 40),
    "n_bytes": BYTES, "n_flops": (0, 1 << 60), "splits": (1, 1 << 20), "checks": FINITE, "series": FINITE,
    # requests, whose n_prompt is the cell's
    "arrived_ns": TIME, "token_ns": TIME, "sent_ns": TIME, "byte_ns": TIME, "ended_ns": TIME,
    # how it ended, and the conditions
    "exit_code": (-(1 << 31), 1 << 32), "load_1min": (0, 10**6), "throttled_us": TIME, "peak_rss_bytes": BYTES,
    "swapped_bytes": (0, 1 << 60), "gpu_used": (0, 100), "gpu_mhz": (0, 10**6),
    # what the system counted
    "wall_ns": (1, LONGEST_NS), "cpu_ns": CPU_TIME, "cpus": (1, 9999), "waited_ns": CPU_TIME, "involuntary": COUNT,
    "voluntary": (0, 1 << 40), "others_ns": CPU_TIME, "others_slow_ns": CPU_TIME, "throttled_ns": CPU_TIME,
    "stolen_ns": CPU_TIME, "pressure_ns": TIME, "mhz": (0, 10**6),
    "stalled_ns": TIME, "hot": COUNT, "stops": COUNT, "held_ns": TIME, "joules": (0, 10**12), "limits_w": (0, 10**6),
    # a cell
    "n_prompt": MANY, "n_gen": MANY, "n_seq": MANY, "n_threads": (1, 9999), "n_batch": (1, 1 << 24),
    "n_ubatch": (1, 1 << 24), "n_gpu_layers": (-1, 1 << 12), "calls": MANY, "n_chunks": MANY, "size": BYTES,
    "repetitions": (1, 10**6), "seed": BYTES, "n_arriving": MANY, "n_chunk": MANY, "n_processes": (1, 1 << 20),
    "killed": (-1, 1 << 20), "link_bps": BYTES, "n_requests": (1, 1 << 32), "per_second": (1e-6, 1e6),
    "n_draft": MANY, "rungs": MANY, "accepts": (0, 1), "temperature": (0, 1000), "n_clients": MANY,
}  # fmt: skip
INSTRUCTIONS = {  # of architectures, as `platform.machine` and builds of the engine name them
    "x86_64": ("SSE3", "AVX", "AVX2", "AVX512"),
    "arm64": ("NEON", "SVE"),  # macOS
    "aarch64": ("NEON", "SVE"),  # Linux
}


def check(holds: object, why: str) -> None:
    """ValueError with the reason unless it holds."""
    if not holds:
        raise ValueError(why)


def check_fact(fact: Fact, machine: str) -> None:
    """Check a fact; one about a machine must be about this one."""
    check(fact.id == content_id(fact.data), f"{fact.what} {fact.id[:16]!r} is not named by its content")
    check(fact.what != "machine" or fact.id == machine, "facts of another machine")
    try:
        msgspec.convert(fact.data, facts.KINDS[fact.what])
    except msgspec.ValidationError as error:
        raise ValueError(f"{fact.what} {fact.id[:16]!r}: {error}") from error
    _check_texts(fact.data)


def check_name(study: str, scale: str) -> None:
    """Check what a journal is called."""
    check(re.fullmatch("[0-9a-z-]{1,60}", study), f"a journal called {study[:40]!r}")
    check(scale in TIME_LIMIT_S, f"scale {scale[:40]!r} is unknown")


def check_row(
    row: Row, name: tuple[str, str], facts_by_id: Mapping[str, Fact], keys: Collection[str], studies: Collection[str]
) -> None:
    """Check a row of a journal of this name: study and scale."""
    check_name(*name)
    scale = name[1]
    _check_bounds(row)
    check(row.study in studies, f"study {row.study[:40]!r} is unknown")
    check(row.key not in keys, "the row comes twice")
    kinds = {"machine": [row.machine], "model": [row.model, *row.others], "engine": [row.engine]}
    kinds |= {"system": [row.system]}
    for what, names in kinds.items():
        for fact in filter(None, names):
            check(
                fact in facts_by_id and facts_by_id[fact].what == what,
                f"{what} {fact[:16]!r} is not among the facts before it",
            )
    study = f"{row.study}/anchor" if row.anchor else row.study
    key = row_key(study, row.cell, row.model, row.engine, row.machine, row.replicate, *row.others)
    check(row.key == key, "the row is not named by its content")
    started = datetime.fromisoformat(row.started)
    check(started.tzinfo and FIRST_DAY < started < datetime.now(UTC) + timedelta(days=1), f"begun {row.started[:40]}")
    check(row.status != "ok" or row.failure is None, "ended well, with a failure")
    check(row.status == "ok" or not row.valid, "did not end well, and valid")
    check(row.status == "ok" or not row.samples_ns, "did not end well, and has times")
    _check_place(row)
    check(not row.cell.files or (row.model and row.engine), "a model that ran on nothing")
    if row.engine:
        _check_engine(row, facts_by_id[row.machine].data, facts_by_id[row.engine].data)
    models = [facts_by_id[fact].data for fact in (row.model, *row.others) if fact]
    ran = [(model["name"], model["scale"], model["dtype"]) for model in models]
    check(ran == list(row.cell.files), "a cell of other models than its facts'")
    check(not isinstance(row.cell, OnModel) or row.cell.scale == scale, f"a cell of another scale than {scale}")
    judged = {name: value for name, value in row.checks.items() if name not in TOLD}
    check(not row.valid or passed(judged), "valid, and a check of it does not hold")
    check(columns(row.cell)["n_seq"] or isinstance(row.cell, Arrival), "a cell of nothing")  # nobody need decode
    _check_results(row)
    if row.status == "ok":
        _check_samples(row)
    _check_texts(_without_numbers(row))


def _check_engine(row: Row, machine: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """Check that a row is one that the engine named by its facts can have made on this machine."""
    built = {word for name, words in INSTRUCTIONS.items() for word in words if f"{word} = 1" in engine["build"]}
    own = INSTRUCTIONS.get(machine["architecture"], built)
    check(built <= set(own), f"an engine built for another machine than {machine['architecture'][:20]!r}")
    offloaded = bool(getattr(row.cell, "n_gpu_layers", 0))
    check(not offloaded or engine["gpu_offload"], "layers on a GPU, by an engine whose facts say that it has none")
    check(not offloaded or machine.get("gpus"), "layers on a GPU, on a machine whose facts name none")


def _without_numbers(row: Row) -> dict[str, Any]:
    """A row's content for the check of its texts, without the numbers that are most of it."""
    requests = [msgspec.structs.replace(request, token_ns=[]) for request in row.requests]
    less = {"samples_ns": [], "warmup_ns": [], "prefill_ns": [], "series": {name: [] for name in row.series}}
    return dict(msgspec.to_builtins(msgspec.structs.replace(row, requests=requests, **less)))


def _check_bounds(row: Row) -> None:
    """Check every number of a row, and of all that it is made of, against BOUNDS."""
    for name in row.__struct_fields__:
        if name != "cell":
            _check_numbers(name, getattr(row, name))
    for name, value in columns(row.cell).items():
        _check_numbers(name, value)


def _check_numbers(name: str, value: Any) -> None:
    if isinstance(value, msgspec.Struct):
        for part in value.__struct_fields__:
            _check_numbers(part, getattr(value, part))
        return
    several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    if numbers := [item for item in several if type(item) in (int, float)]:
        low, high = BOUNDS[name]
        for number in (min(numbers), max(numbers)):
            check(low <= number <= high, f"{name} is {number:.6g}, and may be {low:.6g} to {high:.6g}")
    for item in several:
        if isinstance(item, msgspec.Struct | dict | list | tuple):
            _check_numbers(name, item)


def _check_place(row: Row) -> None:
    """Check that a row is the one process of its cell in its block, or a repeat of it, as a sweep numbers them."""
    gate = isinstance(row.cell, Gate)
    check((row.block < 0) == gate, "a gate in a block, or another cell in none")
    check(row.replicate % REPEAT == max(row.block, 0), "a second replicate of one cell in a block")


def _check_results(row: Row) -> None:
    """Check that no time exceeds the worker's, that answers come in order, and that no rate exceeds any machine's."""
    times = [*chain(*row.samples_ns), *row.warmup_ns, *row.prefill_ns, row.load_ns]
    times += [at for request in row.requests for at in (request.arrived_ns, *request.token_ns)]
    check(max(times) <= row.elapsed_ns, "a time longer than the row took")
    in_parts = isinstance(row.cell, Relay)  # a file alone saves and loads nothing
    fastest = min((time for time in chain(*row.samples_ns) if time or not in_parts), default=0) / 1e9
    for amount, most in ((row.n_bytes, MOST_BYTES_S), (row.n_flops, MOST_FLOPS_S)):
        check(not amount or row.status != "ok" or amount <= most * fastest, "faster than any machine")
    for request in row.requests:
        check(request.token_ns == sorted(request.token_ns), "tokens that came before others of their answer")


def _check_samples(row: Row) -> None:
    """Check that the samples that every machine times have the form their workload gives them."""
    cell, samples = row.cell, row.samples_ns
    if isinstance(cell, Relay):
        _check_relay(row, cell)
    else:
        check(all(time > 0 for time in chain(*samples, row.prefill_ns)), "a pass that took no time")
    if isinstance(cell, Read | MatMul | Prefill | Decode | Naive | Depth):
        check(samples and all(samples), "a pass that was not timed")
    if isinstance(cell, Read | MatMul):
        check(columns(cell)["size"] > 0 and row.n_bytes + row.n_flops > 0, "a ceiling of nothing")
    if isinstance(cell, Naive):
        check(len(samples) == 2, "not two ways to generate")
    if isinstance(cell, Depth) and not cell.text:
        depths = [row.series.get(name, []) for name in ("part_depth", "step_depth")]
        check(list(map(len, depths)) == list(map(len, samples)), "times without their depths")


def _check_relay(row: Row, cell: Relay) -> None:
    """Check that every request was read and written, and that a state moved exactly where another file wrote."""
    if row.status != "ok":
        return
    check(row.samples_ns and all(len(parts) == 4 for parts in row.samples_ns), "a request without its four parts")
    for read, save, load, write in row.samples_ns:
        check(read > 0 and write > 0, "a pass that took no time")
        moved = load > 0 and (save > 0 or cell.overlaps)
        check(moved if cell.writer else save == load == 0, "a state that moved in no time, or to nobody")
    check(len(row.series.get("resident", [])) == len(cell.files) + 1, "memory of other files")


def _check_texts(value: Any, name: bool = True, series: bool = False) -> None:
    """Check that names are plain, and that sentences are bounded and free of control characters."""
    if isinstance(value, str):
        check(len(value) <= (MOST_NAME if name else MOST_TEXT), "a text without end")
        check(value.replace("\n", " ").replace("\t", " ").isprintable(), "a text with control characters")
        check(not name or facts.plain(value) == value, f"a name that is no plain text: {value[:40]!r}")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not (series and PAIR.fullmatch(key)):
                _check_texts(key)
            _check_texts(item, name and key not in SENTENCES, series=key == "series")
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, (str, dict, list)):
                _check_texts(item, name)
