"""The measurements of a study as one tidy frame: the start of every notebook."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from llama_meter.cells import DISTINCT, ORDER
from llama_meter.errors import StudyError, UnmeasuredError
from llama_meter.measure.request import SOURCES, Request
from llama_meter.measure.tolerance import Parting
from llama_meter.rows import Request as Served
from plamo_study.read import frame
from plamo_study.read.recording import Recording, added, elsewhere, read, recorded, records
from plamo_study.show.evidence import chip
from plamo_study.stats.estimates import NS
from plamo_study.studies import registry

RECORDED = Request()
COMPARED = ("serving", "answers")  # workloads whose requests are held against the answers alone
OF_ROW = ["model", "dtype", "build", "server", "n_prompt", "n_gen", "n_seq", "n_clients", "key"]
VERDICTS = {"same": "as alone", "near-tie": "near-tie", "other": "changed"}
OF_REQUEST = ["answer", "parts", "gap", "begun", "failure", "reached"]
FIRST = ["metric", "value", "unit", "model", "build", "dtype", "file"]
LAST = ["verdict", "judged", "usable", "disturbed", "drift", "failure", "block", "machine", "device", "samples", "key"]
ALWAYS = ["workload", "n_prompt", "depth", "n_gen", "n_seq", "policy", "n_threads", "n_gpu_layers"]
ARRIVING = ["n_arriving", "n_chunk", "way", "kv_unified", "flash_attn"]
OF_KIND = {  # columns that a study with such cells, or of this name, always has
    "serving": ["server", "pattern", "n_clients", "n_requests", "per_second"],
    "arrival": ARRIVING,
    "07-chunked": ARRIVING,
    "service": ["mode", "per_second"],
    "03-replicas": ["n_processes", "policy", "use_mmap", "killed"],
    "traffic": ["rule", "per_second"],
}
CELL = [name for name in ORDER if name not in ("model", "dtype", "scale")]
SPEEDS = {  # of a kind of work that times one thing: metric, unit, and the field that holds the work of one sample
    "read": ("read", "B/s", "n_bytes"),
    "matmul": ("matmul", "FLOP/s", "n_flops"),
    "matvec": ("matvec", "B/s", "n_bytes"),
}


def measurements(study: str, request: Request = RECORDED) -> pd.DataFrame:
    """The measurements of a study, one line per process and metric.

    Parameters
    ----------
    study
        Its name, such as "01-phase-asymmetry", as the `__init__` of a chapter's folder has it.
    request
        What a notebook's parameters request, `Request.of(globals())`: rows of the reference machine at once, or "live",
        measured here first. `Request(scale="mini")`: recorded rows of the embedded models.

    Returns
    -------
    DataFrame
        metric
            "prefill" (a prompt's call), "step" (a decode step), "prompt" (the prefill before decode steps), "read" and
            "matmul" (the machine's ceilings), "matvec" (a matrix-vector product, in bytes of its weights), "memory" (of
            weights, caches and computing; where the engine did not tell, the peak resident size), "none" (crashed or
            hung). What else a kind of cell measures, its chapter's folder says, in `metrics`.
        value, unit
            The median over the process's samples, in s, B/s, FLOP/s, tokens/s or B.
        samples
            All samples of the process, a numpy array in the same unit: `m.samples.map(lambda s: s[:16].sum())` is the
            time of the first sixteen steps.
        model, build, dtype, file
            `file` is model and type. A star marks a model whose shape rests on assumptions; "stock" is the engine as
            released.
        workload, n_prompt, depth, n_gen, n_seq, n_threads, ...
            The cell, by the names of `llama_meter.cells`; fields that say nothing anywhere in the study are left out.
        verdict, judged
            "valid": as the oracle computes it; "consistent": no oracle reads the file, and the engine agrees with
            itself; "invalid": computed, but wrong; "ungated": nothing judged the file; "failed"; "starved"; "n/a". And
            the number of tokens to which the oracle judged the file, on the same build.
        disturbed, drift, usable
            Whether something disturbed the process; the relative drift of the machine's speed in its block; and whether
            its times count: valid, and undisturbed where two blocks of its cell are.
        block, machine, device, key
            The randomised block, within which numbers are compared; the processor; what computed: it or its GPU; the
            row in the journal.

    Raises
    ------
    StudyError
        Unknown study, source, scale or device, a GPU asked for where there is none, or nothing measured or recorded.

    """
    return tidy(recording(study, request))


def measured_elsewhere(study: str, scale: str = "shape") -> pd.DataFrame:
    """The recorded rows of a study from machines other than that of `measurements`, as a frame like it; may be empty.

    Never compare the two: the rows of a block belong to one machine.
    """
    part = read(study, "recorded", scale)
    if not part:
        return tidy()
    return _named_apart(elsewhere(part), [{name: part.facts[name] for name in part.rows["machine"].unique()}])


def measured_added(study: str, scale: str = "shape", board: str = "") -> pd.DataFrame:
    """The rows of a study from the machines in data/measured/others, as a frame like `measurements`; may be empty.

    `board`: only those of the first machine that has this GPU. Never compare them with one another: the rows of a block
    belong to one machine, and each has a name of its own.
    """
    return _named_apart(added(study, scale, board), [frame.facts(records(study, source, scale)) for source in SOURCES])


def _named_apart(recordings: Sequence[Recording], others: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Recordings of further machines as one frame, each under a name that none of the machines of `others` bears."""
    named = frame.distinct_machines(*others, *(part.facts for part in recordings))[len(others) :]
    return tidy(*(replace(part, facts=facts) for part, facts in zip(recordings, named, strict=True)))


def tidy(*recordings: Recording) -> pd.DataFrame:
    """Recordings as one frame like that of `measurements`; what they call their machines is kept apart."""
    frames = [_tidy(part) for part in recordings if len(part.rows)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*FIRST, *CELL, *LAST])


def _tidy(part: Recording) -> pd.DataFrame:
    rows, facts = part.rows, part.facts
    good = set(frame.unrepeated(frame.usable(rows))["key"])
    measured = rows[~rows["anchor"] & (rows["workload"] != "gate")]
    lines = [(at, *line) for at, row in enumerate(measured.to_dict("records")) for line in _metrics(row)]
    whose = np.array([at for at, *_ in lines], int)
    table = measured[[*FIRST[3:6], *CELL, *(name for name in LAST if name in measured)]].iloc[whose]
    table = table.reset_index(drop=True).infer_objects()  # a column of all rows may hold what none of these has
    for at, name in enumerate(("metric", "unit", "value", "samples"), 1):
        table[name] = [line[at] for line in lines]
    table["file"] = (table["model"] + " " + table["dtype"]).where(table["model"] != "", "")
    table["usable"] = table["key"].isin(good)
    on = pd.MultiIndex.from_arrays([table["machine"], table["n_gpu_layers"] != 0])
    table["device"] = on.map({(fact, gpu): frame.device_name(facts[fact], gpu) for fact, gpu in on.unique()})
    table["machine"] = table["machine"].map(lambda fact: chip(facts[fact]))
    kinds = {*table["workload"], part.study}
    always = {*ALWAYS, *(name for kind, names in OF_KIND.items() if kind in kinds for name in names)}
    named = [name for name in CELL if name in always or len(set(map(str, measured[name]))) > 1]
    return table[[*FIRST, *named, *LAST]]


@cache
def recording(study: str, request: Request = RECORDED) -> Recording:
    """The rows of a study and the facts they refer to, read once per notebook: what a chapter's own functions take."""
    return parts((study,), request)[0]


def parts(studies: Sequence[str], request: Request = RECORDED) -> tuple[Recording, ...]:
    """The recordings of a page's studies. One that there was no time for, or that nobody recorded, has no rows.

    Raises UnmeasuredError where none of them was measured, and StudyError as `measurements`.
    """
    if request.source != "live":
        recordings = tuple(_if_recorded(study, request.scale) for study in studies)
        return recordings if any(len(part.rows) for part in recordings) else (recorded(studies[0], request.scale),)
    from plamo_study.live import MORE, collect  # the engine and all that measures come with it

    recordings = tuple(collect(study, request) for study in studies)
    live = [part for part in recordings if part.source == "live"]  # others are shown as recorded
    if live and not any(len(part.rows) for part in live):
        raise UnmeasuredError(" and ".join(studies), f"nothing was measured in {request.minutes:g} minutes", MORE)
    return recordings


def _if_recorded(study: str, scale: str) -> Recording:
    try:
        return recorded(study, scale)
    except StudyError as error:
        return Recording(frame.frame([], {}), {}, study, scale, "recorded", lacks=error.why)


def answers(study: str, request: Request = RECORDED) -> pd.DataFrame:
    """The answers of a study's servers, right and wrong ones, one line a request.

    `prompt` numbers the distinct prompts of one length. `answer`: "as alone", the one that the same prompt gets alone,
    as far as it came; "near-tie": it parts from that one where the two likeliest tokens are within 0.25 nats
    (`tolerance.near_tie`), so that rounding may decide; "changed": it parts elsewhere; "lost": no answer, or no whole
    one, and nothing that came is another. `parts`: the first other token (-1: none), `gap`: the likeliest token's lead
    there in nats (-1: unknown). `begun`: a token came. `reached`: a server was there; `failure`: what went wrong.
    `key`: the server that was asked.
    """
    return answers_of(recording(study, request).rows)


def answers_of(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a request of every load in some rows, as `answers` describes it."""
    loads = rows[rows["workload"].isin(COMPARED) & (rows["status"] == "ok") & ~rows["anchor"]]
    loads = loads.assign(server=loads["server"].where(loads["workload"] == "serving", ""))  # or none: the engine itself
    lines = [
        {name: getattr(row, name) for name in OF_ROW}
        | _answer(request, int(token), gap)
        | {"prompt": n % DISTINCT if row.server else request.id}
        for row in loads.itertuples()
        for n, (request, token, gap) in enumerate(
            zip(row.requests, row.series["differs"], row.series["gap"], strict=True)
        )
    ]
    requests = pd.DataFrame(lines, columns=[*OF_ROW, "prompt", *OF_REQUEST]).astype({"begun": bool, "reached": bool})
    return requests.assign(file=requests["model"] + " " + requests["dtype"])


def _answer(request: Served, token: int, gap: float) -> dict[str, Any]:
    """What became of a request: `token` and `gap` as in a row's series."""
    answer = VERDICTS[Parting(token, gap).verdict]
    if request.failure and token < 0:
        answer = "lost"
    return {
        "answer": answer,
        "parts": token,
        "gap": gap,
        "begun": bool(request.token_ns),
        "failure": request.failure,
        "reached": not request.failure.startswith("ConnectError"),
    }


def files(study: str, request: Request = RECORDED) -> dict[str, dict[str, Any]]:
    """The files of a study by model and type, as the column `file` names them, each with its facts."""
    part = recording(study, request)
    lines = part.rows[part.rows["model"] != ""].drop_duplicates("fact")
    return {f"{line.model} {line.dtype}": part.facts[line.fact] for line in lines.itertuples()}


def _metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, str, float, np.ndarray]]:
    """(metric, unit, median, samples) of each metric that a row measured; "none" where it measured nothing."""
    measured = list(_measured(row)) if row["status"] == "ok" else []
    yield from measured or [("none", "", float("nan"), np.empty(0))]


def _measured(row: Mapping[str, Any]) -> Iterator[tuple[str, str, float, np.ndarray]]:
    times = np.array(list(chain(*row["samples_ns"])), float) / NS
    what = row["workload"]
    if what in registry.quantities():
        yield from registry.quantities()[what](row)
    elif len(times):
        middle = float(np.median(times))
        kind = "matvec" if what == "matmul" and not row["n_flops"] else what
        if kind in SPEEDS:
            metric, unit, work = SPEEDS[kind]
            yield metric, unit, row[work] / middle, row[work] / times
        else:
            yield ("step" if what == "decode" else what), "s", middle, times
    if row["prefill_ns"]:
        prompts = np.array(row["prefill_ns"], float) / NS
        yield "prompt", "s", float(np.median(prompts)), prompts
    if row["model"] and (needed := float(row["buffer_bytes"] or row["peak_rss_bytes"])):
        yield "memory", "B", needed, np.array([needed])
