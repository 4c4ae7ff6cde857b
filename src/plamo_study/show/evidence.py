"""The evidence before a study's numbers: where rows come from, which models, and whether they were correct."""

import math
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, TypeVar

import pandas as pd
from IPython.display import Markdown

from llama_meter.cells import AnyCell, OnModel
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, REFERENCE
from llama_meter.limits import LEAST_BLOCKS, RIGHT, backend
from llama_meter.models.registry import GIVEN
from llama_meter.stats import Estimate
from plamo_study.arithmetic.ceilings import main_place, of_study, published
from plamo_study.read import processors, usable
from plamo_study.read.frame import build_name
from plamo_study.read.judged import reach
from plamo_study.read.recording import Recording
from plamo_study.read.usable import disturbed_cells, marked_by, model_names
from plamo_study.show.findings import Finding
from plamo_study.show.tables import Table, escaped, scaled
from plamo_study.show.theme import NOTHING, ROWS_KEY

NOT_VALID = {"invalid": "were computed wrong", "failed": "crashed or hung", "ungated": "were not checked"}
DISTURBED_BY = {  # by the mark of rows: `watch.causes`, or their block's drift
    "others": "other programs took {:.0%} of the machine",
    "waited": "the threads waited {:.0%} of the time for a CPU",
    "quota": "a CPU quota held the threads back",
    "starved": "something that the system does not show kept threads from computing",
    "load": "other programs took part of the machine",
    "stopped": "processes were stopped, or the machine slept",
    "battery": "the machine ran on its battery",
    "low power": "the machine saved power",
    "heat": "heat slowed the machine",
    "memory": "the machine ran short of memory",
    "GPU": "other programs used the GPU",
    "drift": "the machine changed its speed by up to {:.0%}",
}
AGAINST = {  # what helps, by the mark; against other programs, an idle machine
    "quota": "Measure again with more whole CPUs, or without the quota of this container.",
    "starved": "Look for a limit on CPUs outside of this system, as a container or a virtual machine has, and measure "
    "again without it.",
    "battery": "Measure again on mains power.",
    "low power": "Measure again without the mode that saves power.",
    "heat": "Measure again when it is cool.",
}
HERE = (
    "**Measured here.** Sentences and titles of this page speak of the reference machine and its full-size files. "
    "Pictures and tables show what was measured here, and the claims at the end set both side by side.\n\n"
)
PER_SECOND = {"read": (1e-9, "GB/s"), "matmul": (1e-9, "GFLOP/s")}
READ_KERNELS = {
    "CPU": "dot product of an array with itself",
    "accelerate": "Accelerate's dot product of an array with itself",
    "GPU": "llama.cpp's matrix-vector product",
}
CEILINGS = {"read": "read bandwidth", "matmul": "matrix throughput"}
WHOLE = 2  # parts of a graph whose layers are all on a GPU
Found = TypeVar("Found")


def provenance(recording: Recording) -> Table:
    """Where the rows come from: machine, engine, files; with what there was no time for."""
    machines, engines = ([i for i in recording.rows[what].unique() if i] for what in ("machine", "engine"))
    entries = []
    for i in machines:
        f, (os,) = recording.facts[i], _of_system(recording, "machine", i, {"os": "os"})
        named = f"{_with_gpus(processors.processor(f), f)}, {processors.cores(f)}"
        entries.append(("machine", f"{named}, {f['memory_bytes'] / 2**30:.0f} GiB, {os}"))
        entries += [("GPU", f"{gpu['chip']}, through {backend(gpu['name'])}") for gpu in f.get("gpus", ())]
    for i in engines:
        names = {"sha256": "engine_sha256", "description": "engine_description"}
        f, (libraries, description) = recording.facts[i], _of_system(recording, "engine", i, names)
        said = f"; {build_name(f)}: {description}" if f.get("corrects") else ""
        entries.append(("engine", f"{f['binding']}, llama.cpp {commit(f)}, libraries {libraries[:12]}{said}"))
    entries += [("cache", said) for said in _caches(recording.rows)]
    entries += [("rows", f"{len(recording.rows)}, {recording.source}, scale {recording.scale}")]
    if recording.left_out:
        entries.append(
            ("no time for", f"{len(recording.left_out)} cells: {', '.join(map(_named, recording.left_out))}")
        )
    return Table(pd.DataFrame(entries, columns=["what", "which"]))


def _caches(rows: pd.DataFrame) -> list[str]:
    """Types of keys and values, and whether flash attention was on where the engine told."""
    said = rows[rows["flash_attention"].notna()] if "flash_attention" in rows else rows.head(0)
    kinds = said[["type_k", "type_v", "flash_attention"]].drop_duplicates().itertuples(index=False)
    return [f"keys {k}, values {v}, flash attention {'on' if flash else 'off'}" for k, v, flash in kinds]


def _of_system(recording: Recording, what: str, name: str, wanted: Mapping[str, str]) -> list[str]:
    """What updates change of a machine or an engine: as their rows' systems have it, or as older facts have it.

    `wanted`: names in older facts, with those in systems. After an update there are several values.
    """
    rows, fact = recording.rows, recording.facts[name]
    systems = rows[rows[what] == name]["system"].unique() if "system" in rows else []
    texts = []
    for older, newer in wanted.items():
        values = [recording.facts[i].get(newer, "") if i else fact.get(older, "") for i in systems]
        values = values or [fact.get(older, "")]
        texts.append(", ".join(dict.fromkeys(str(value) for value in values if value)))
    return texts


def _named(cell: AnyCell) -> str:
    named = f"{getattr(cell, 'model', '')} {getattr(cell, 'dtype', '')}"
    n_seq, n_prompt, n_gen = cell.shape if isinstance(cell, OnModel) else (1, 0, 0)
    tokens = f" {n_prompt}+{n_gen}{f' × {n_seq}' * (n_seq > 1)}" if n_prompt + n_gen else ""
    return f"{named} {cell.workload}{tokens} on {cell.n_threads} threads".strip()


def weights_of(fact: dict[str, Any]) -> str:
    """Where a model's weights come from: random, trained here (the embedded models), or a user's file."""
    if fact["scale"] == GIVEN:
        return "a file's"
    return "random" if fact["synthetic"] else "trained"


def standing(recording: Recording, load: Callable[[str], Found | None]) -> Found | None:
    """The result of `load` from this machine where rows are live, if any, else from the reference machine."""
    return (load(LOCAL) if recording.source == "live" else None) or load(REFERENCE)


def ceilings(recording: Recording) -> Table:
    """Both ceilings of this machine at each thread count, best and usual, with the kernel behind each.

    The note holds an Apple chip's fastest reading against its published bandwidth.
    """
    data = of_study(recording.rows)
    if data.empty:
        return Table(pd.DataFrame({"": [NOTHING]}))
    factors, devices = [PER_SECOND[c] for c in data["ceiling"]], ["GPU" if n else "CPU" for n in data["n_gpu_layers"]]
    shown = pd.DataFrame(
        {
            "ceiling": [CEILINGS[c] for c in data["ceiling"]],
            "measured with": [
                kernel if ceiling == "matmul" else READ_KERNELS.get(kernel, READ_KERNELS[device])
                for ceiling, kernel, device in zip(data["ceiling"], data["kernel"], devices, strict=True)
            ],
            "device": devices,
            "threads": data["n_threads"],
            "best": [f"{best * f:.1f} {unit}" for best, (f, unit) in zip(data["best"], factors, strict=True)],
            "median of processes": [scaled(f, ".1f")(e) for e, (f, _) in zip(data["usual"], factors, strict=True)],
        }
    )
    return Table(shown, _beside_published(recording, data))


def _beside_published(recording: Recording, data: pd.DataFrame) -> str:
    """What the maker says that an Apple chip reads, and the share of it that was reached; empty for other chips."""
    machine = recording.facts.get(main_place(recording.rows).machine)
    said = published(machine) if machine else None
    if machine is None or said is None:
        return ""
    if said.bandwidth is None:
        return f"{machine['chip']}: {said.why}. What was measured stands alone."
    most = data[data["ceiling"] == "read"].groupby(data["n_gpu_layers"] != 0)["best"].max() / said.bandwidth
    shares = [f"the {'GPU' if gpu else 'CPU'} reaches {share:.0%}" for gpu, share in most.sort_index().items()]
    return (
        f"Published for {machine['chip']} with {machine['gpu_cores']} GPU cores: {said.bandwidth / 1e9:g} GB/s "
        f"({said.source}); {' and '.join(shares)} of it."
    )


def disturbed(rows: pd.DataFrame, what: str = "this was") -> str:
    """The warning before a finding that uses disturbed rows, `what` was measured; empty where none are used."""
    cells, every = disturbed_cells(rows)
    if not cells:
        return ""
    cause, met = _what_disturbed(rows)
    return (
        f"**Disturbed: {met} while {what} measured.** Of {every} cells {cells} "
        f"{'has' if cells == 1 else 'have'} fewer than {LEAST_BLOCKS} undisturbed processes, and "
        f"{'its' if cells == 1 else 'their'} numbers are a disturbed machine's. "
        f"{AGAINST.get(cause, 'Measure again when it is idle.')}\n\n"
    )


def _what_disturbed(rows: pd.DataFrame) -> tuple[str, str]:
    """The most frequent mark of the marked rows that are used all the same, and in words with its size."""
    used = usable.usable(rows[rows["block"] >= 0])
    causes = marked_by(used)
    cause = str(causes[causes != ""].mode().iloc[0])
    met = used.loc[causes == cause, cause] if cause in used else pd.Series(dtype=float)
    return cause, DISTURBED_BY[cause].format(met.max() if cause == "drift" else met.median())


def chips(recording: Recording) -> str:
    """The machines that the rows were measured on."""
    return " and ".join(chip(recording.facts[i]) for i in recording.rows["machine"].unique())


def chip(machine: dict[str, Any]) -> str:
    """A machine by its processor, the cores used and, where the engine found some, its GPUs."""
    return _with_gpus(processors.machine(machine), machine)


def _with_gpus(name: str, machine: dict[str, Any]) -> str:
    names = [name, *(gpu["chip"] for gpu in machine.get("gpus", ()))]
    return " + ".join(dict.fromkeys(names))  # a chip that is CPU and GPU is named once


def devices(rows: pd.DataFrame) -> str:
    """What computed some rows: "GPU", "CPU", or "GPU and CPU"."""
    offloaded = set(rows["n_gpu_layers"] != 0)
    return " and ".join(name for name, gpu in (("GPU", True), ("CPU", False)) if gpu in offloaded)


def returned(rows: pd.DataFrame) -> str:
    """A sentence about rows with every layer on a GPU whose operators went back to the CPU; empty where none did.

    Such a model's graph has two parts: the CPU looks the tokens up, and the GPU does the rest. An operator that the GPU
    lacks cuts it into more. Rows that were recorded before their graphs' parts were counted say nothing.
    """
    whole = rows[(rows["n_gpu_layers"] < 0) & rows["splits"].notna()] if "splits" in rows else rows.head(0)
    cut = whole[whole["splits"].map(lambda parts: max(parts) > WHOLE).astype(bool)]
    if cut.empty:
        return ""
    names, most = " and ".join(escaped(name) for name in model_names(cut)), max(max(parts) for parts in cut["splits"])
    return (
        f"In {len(cut):,} of {len(whole):,} rows of the GPU ({names}) the CPU did operators that the GPU lacks: graphs "
        f"in up to {most} parts, where a GPU that does everything needs {WHOLE}. "
    )


def verified(recording: Recording) -> Markdown:
    """One line under a page's finding: how many rows were correct, and their machine and files.

    For a page whose sentences speak of the reference machine, which it says where its rows are others'.
    """
    here = HERE if recording.source == "live" else ""
    said = f"{disturbed(recording.rows)}{here}{_rows(recording)}"
    return Markdown(said, metadata={ROWS_KEY: about(recording)})


def answer(recording: Recording, *lines: str, otherwise: str = "") -> Finding:
    """A chapter's first output: a band that says whose machine measured, and its answer in a line or two.

    `otherwise`: what is said where there is no line: the command that measures it.
    """
    whose = "Measured here" if recording.source == "live" else "Not your machine"
    star = r" · \* part of its shape is assumed" if any(r"\*" in line for line in lines) else ""
    band = f"> **{whose}:** {chips(recording)}{star}\n\n{disturbed(recording.rows)}"
    return Finding(lines, otherwise, band, {ROWS_KEY: about(recording)})


def of_rows(recording: Recording, of: str = "", judged: str = "") -> Markdown:
    """The same line for a page that is true of any rows; `of`: whose rows, where the page draws others too.

    `judged`: how many were right, for rows whose verdicts are made from several of them.
    """
    return Markdown(f"{disturbed(recording.rows)}{_rows(recording, of, judged)}", metadata={ROWS_KEY: about(recording)})


def _rows(recording: Recording, of: str = "", judged: str = "") -> str:
    rows, facts = recording.rows, recording.facts
    kinds = [weights_of(facts[name]) for name in model_names(rows) if name in facts]  # else no file was written
    threads = rows["n_threads"].max()
    types = _types(rows[rows["model"] != ""]).removesuffix(" of")
    weights = f"{' and '.join(dict.fromkeys(kinds)) or 'no'} weights, {types}"
    shared = any(recording.facts[i].get("gpus") for i in rows["machine"].unique())
    where = chips(recording) + (f", {devices(rows)}" if shared else "")
    size = "files given by path" if recording.scale == GIVEN else f"scale {recording.scale}"
    place = f"{where}, {threads} thread{'s' if threads > 1 else ''}; {size} ({weights})"
    return f"*{judged or computed(rows, of)} {depths(rows)}{returned(rows)}{place}.*"


def depths(rows: pd.DataFrame) -> str:
    """A sentence: how the oracle judged the least judged file of these rows, and how many rows go beyond."""
    of = rows[(rows["model"] != "") & (rows["judged"] > 0)] if "judged" in rows else rows.head(0)
    if of.empty:
        return ""
    further = of[reach(of) > of["judged"]]
    least = of["judged_how"].iloc[int(of["judged"].argmin())]
    several = " or more" if of["judged"].nunique() > 1 else ""
    said = f"The oracle judged their files to {least}{several}"
    if further.empty:
        return f"{said}, which no row goes beyond. "
    return f"{said}; {len(further):,} rows go further, to {reach(further).max():,}. "


def commit(engine: Mapping[str, Any]) -> str:
    """The commit of an engine. A build of the pinned sdist calls itself dirty, as it was made outside of a checkout."""
    said = str(engine.get("commit", "unknown"))
    return said.removesuffix("-dirty") if engine.get("pinned", True) else said


def about(recording: Recording) -> dict[str, Any]:
    """Whose rows a page shows, for those who publish it: source, machine, device, engine, first and last day."""
    rows = recording.rows
    engines = [recording.facts[i] for i in rows["engine"].unique() if i]
    days = sorted(str(started)[:10] for started in rows["started"])
    shared = any(recording.facts[i].get("gpus") for i in rows["machine"].unique())
    return {
        "source": recording.source,
        "machine": chips(recording),
        "device": devices(rows) if shared else "",
        "engine": " and ".join(dict.fromkeys(f"llama.cpp {commit(fact)}" for fact in engines)),
        "days": list(dict.fromkeys((*days[:1], *days[-1:]))),
        "version": metadata.version("plamo-study"),
    }


def _types(rows: pd.DataFrame) -> str:
    """The type of most of these rows, or the number of types."""
    counts = rows["dtype"].value_counts()
    return str(counts.index[0]) if 2 * counts.max() >= len(rows) > 0 else f"{len(counts)} types of"


def computed(rows: pd.DataFrame, of: str = "") -> str:
    """How many rows were computed correctly, and which were not and are left out; `of`: whose rows these are."""
    whose = f" of {of}" if of else ""
    judged = rows[rows["model"] != ""]
    wrong = judged[~judged["verdict"].isin(RIGHT)]
    if wrong.empty:
        return f"All {len(judged):,} rows{whose} were computed right."
    said = [
        f"{len(group)} of {escaped(str(model))} ({_cells(group)}) {_ended(str(verdict), group)}"
        for (verdict, model), group in wrong.groupby(["verdict", "model"], sort=False)
    ]
    return (
        f"{len(judged) - len(wrong):,} of {len(judged):,} rows{whose} were computed right. The rest is left out: "
        f"{'; '.join(said)}."
    )


def _ended(verdict: str, group: pd.DataFrame) -> str:
    """How some rows that were not computed right ended: an error that a program reported is no crash."""
    reported = verdict == "failed" and (group["status"] == "error").all()
    return "ended with an error" if reported else NOT_VALID.get(verdict, verdict)


def _cells(group: pd.DataFrame) -> str:
    """The kind of cells of some rows: their workloads, and whether all their prompts shared a call."""
    packed = (group["policy"] == "packed").all()
    return " and ".join(sorted(set(group["workload"]))) + (", prompts that share a call" if packed else "")


def guessed(guess: float, measured: Estimate | pd.DataFrame) -> Markdown:
    """A guess of a factor, the parameter's, beside the measured one."""
    if isinstance(measured, pd.DataFrame):
        if measured.empty:
            return Markdown("*What was guessed was not measured here.*")
        measured = measured["estimate"].iloc[0]
    if not 0 < guess < math.inf:
        raise StudyError(f"guess {guess:g}", "is no number of times", "-p guess 10")
    off = max(guess / measured.value, measured.value / guess)
    return Markdown(
        f"The guess: a factor of **{guess:g}** (`-p guess` makes it yours). Measured: **{measured:.1f}**. "
        f"Off by a factor of {off:.1f}."
    )
