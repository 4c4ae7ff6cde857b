"""The evidence before a study's numbers: where rows come from, which models, and whether they were correct."""

import re
import tomllib
from collections.abc import Mapping
from typing import Any

import pandas as pd
from IPython.display import Markdown

from llama_meter import paths, stats
from llama_meter.cells import named
from llama_meter.limits import LEAST_BLOCKS, RIGHT, backend
from llama_meter.models.registry import FILE_SCALE
from plamo_study.arithmetic.ceilings import main_place, measured, rate
from plamo_study.read import frame
from plamo_study.read.frame import build_name, disturbed_cells, machine_name, marked_by, model_names
from plamo_study.read.recording import Recording, reach
from plamo_study.show.findings import Finding
from plamo_study.show.tables import Table, escaped
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
PER_SECOND = {"read": (1e-9, "GB/s"), "matmul": (1e-9, "GFLOP/s")}
READ_KERNELS = {
    "CPU": "dot product of an array with itself",
    "accelerate": "Accelerate's dot product of an array with itself",
    "GPU": "llama.cpp's matrix-vector product",
}
CEILINGS = {"read": "read bandwidth", "matmul": "matrix throughput"}


def provenance(recording: Recording) -> Table:
    """Where the rows come from: machine, engine, files; with what there was no time for."""
    machines, engines = ([i for i in recording.rows[what].unique() if i] for what in ("machine", "engine"))
    entries = []
    for i in machines:
        fact, system = recording.facts[i], _of_system(recording, "machine", i, "os")
        processor = f"{_with_gpus(frame.processor_name(fact), fact)}, {frame.cores(fact)}"
        entries.append(("machine", f"{processor}, {fact['memory_bytes'] / 2**30:.0f} GiB, {system}"))
        entries += [("GPU", f"{gpu['chip']}, through {backend(gpu['name'])}") for gpu in fact.get("gpus", ())]
    for i in engines:
        fact, libraries = recording.facts[i], _of_system(recording, "engine", i, "sha256")
        of_build = f"; {build_name(fact)}: {_of_system(recording, 'engine', i, 'description')}"
        words = f"{fact['binding']}, llama.cpp {commit(fact)}, libraries {libraries[:12]}"
        entries.append(("engine", words + of_build * bool(fact.get("corrects"))))
    caches = recording.rows[recording.rows["flash_attention"].notna()]  # where the engine told
    caches = caches[["type_k", "type_v", "flash_attention"]].drop_duplicates().itertuples(index=False)
    entries += [("cache", f"keys {k}, values {v}, flash attention {'on' if on else 'off'}") for k, v, on in caches]
    entries.append(("rows", f"{len(recording.rows)}, {recording.source}, scale {recording.scale}"))
    if recording.left_out:
        cells = ", ".join(map(named, recording.left_out))
        entries.append(("no time for", f"{len(recording.left_out)} cells: {cells}"))
    return Table(pd.DataFrame(entries, columns=["what", "which"]))


def _of_system(recording: Recording, what: str, name: str, wanted: str) -> str:
    """What updates change of a machine or an engine: as the systems of its rows have it, or as older facts have it."""
    fact, newer = recording.facts[name], wanted if what == "machine" else f"{what}_{wanted}"
    systems = recording.rows.loc[recording.rows[what] == name, "system"].unique()
    values = [recording.facts[i].get(newer, "") if i else fact.get(wanted, "") for i in systems]
    return ", ".join(dict.fromkeys(str(value) for value in values if value))


def weights_of(fact: dict[str, Any]) -> str:
    """Where a model's weights come from: random, trained here (the embedded models), or a user's file."""
    if fact["scale"] == FILE_SCALE:
        return "a file's"
    return "random" if fact["synthetic"] else "trained"


def ceilings(recording: Recording) -> Table:
    """Both ceilings of this machine at each thread count, best and usual, with the kernel behind each."""
    table, entries = measured([recording.rows]), []
    names = ["n_gpu_layers", "n_threads", "ceiling", "kernel"]
    here = table[(table["machine"] == main_place(recording.rows).machine) & (table["columns"] == 0)]
    here = here.sort_values(names[:3], ascending=[True, True, False], kind="stable")
    for (layers, threads, ceiling, kernel), group in here.groupby(names, sort=False):
        (factor, unit), device, of = PER_SECOND[ceiling], "GPU" if layers else "CPU", rate(group)
        reads = READ_KERNELS.get(kernel, READ_KERNELS[device])
        entries.append(
            {
                "ceiling": CEILINGS[ceiling],
                "measured with": kernel if ceiling == "matmul" else reads,
                "device": device,
                "threads": threads,
                "best": f"{of.best * factor:.1f} {unit}",
                "median of processes": f"{stats.median(of.by_process).scaled(factor):.1f}",
            }
        )
    return Table(pd.DataFrame(entries or [{"": NOTHING}]))


def disturbed(rows: pd.DataFrame) -> str:
    """The warning before a finding that uses disturbed rows; empty where none are used."""
    cells, every = disturbed_cells(rows)
    if not cells:
        return ""
    cause, met = _what_disturbed(rows)
    return (
        f"**Disturbed: {met} while this was measured.** Of {every} cells {cells} "
        f"{'has' if cells == 1 else 'have'} fewer than {LEAST_BLOCKS} undisturbed processes, and "
        f"{'its' if cells == 1 else 'their'} numbers are a disturbed machine's. "
        f"{AGAINST.get(cause, 'Measure again when it is idle.')}\n\n"
    )


def _what_disturbed(rows: pd.DataFrame) -> tuple[str, str]:
    """The most frequent mark of the marked rows that are used all the same, and in words with its size."""
    used = frame.usable(rows[rows["block"] >= 0])
    causes = marked_by(used)
    cause = str(causes[causes != ""].mode().iloc[0])
    met = used.loc[causes == cause, cause] if cause in used else pd.Series(dtype=float)
    return cause, DISTURBED_BY[cause].format(met.max() if cause == "drift" else met.median())


def chips(recording: Recording) -> str:
    """The machines that the rows were measured on."""
    return " and ".join(chip(recording.facts[i]) for i in recording.rows["machine"].unique())


def chip(machine: dict[str, Any]) -> str:
    """A machine by its processor, the cores used and, where the engine found some, its GPUs."""
    return _with_gpus(machine_name(machine), machine)


def _with_gpus(name: str, machine: dict[str, Any]) -> str:
    names = [name, *(gpu["chip"] for gpu in machine.get("gpus", ()))]
    return " + ".join(dict.fromkeys(names))  # a chip that is CPU and GPU is named once


def _shared(recording: Recording) -> str:
    """What computed on machines that have a GPU: "GPU", "CPU", or "GPU and CPU"; "" on others."""
    if not any(recording.facts[i].get("gpus") for i in recording.rows["machine"].unique()):
        return ""
    offloaded = set(recording.rows["n_gpu_layers"] != 0)
    return " and ".join(name for name, gpu in (("GPU", True), ("CPU", False)) if gpu in offloaded)


def answer(recording: Recording, *lines: str, otherwise: str = "") -> Finding:
    """A chapter's first output: a band that says whose machine measured, and its answer in a line or two.

    `otherwise`: what is shown where there is no line: the command that measures it.
    """
    starred = any(r"\*" in line for line in lines)
    return Finding(lines, otherwise, band(recording, starred) + disturbed(recording.rows), {ROWS_KEY: about(recording)})


def band(recording: Recording, starred: bool = False) -> str:
    """Whose machine measured, its letter a link to the table of hosts.

    `starred`: whether what follows names a file whose shape is partly assumed.
    """
    whose = "Measured here" if recording.source == "live" else "Not your machine"
    machines = re.sub(r"\((host \w)\)", r"([\1](A-methods.ipynb#The-hosts))", chips(recording))
    star = r" · \* part of its shape is assumed" * starred
    return f"> **{whose}:** {machines}{star}\n\n"


def of_rows(recording: Recording, of: str = "", judged: str = "") -> Markdown:
    """One line: how many rows were correct, their machine and files; `of`: whose rows, where the page draws others too.

    `judged`: how many were right, for rows whose verdicts are made from several of them.
    """
    rows, facts = recording.rows, recording.facts
    if rows.empty:
        return Markdown(f"No rows{of and f' of {of}'}: {recording.lacks or 'nothing was measured'}.")
    kinds = [weights_of(facts[name]) for name in model_names(rows) if name in facts]  # else no file was written
    threads, counts = int(rows["n_threads"].max()), rows[rows["model"] != ""]["dtype"].value_counts()
    types = counts.index[0] if 2 * counts.max() >= counts.sum() > 0 else f"{len(counts)} types"
    where = ", ".join(filter(None, (chips(recording), _shared(recording))))
    size = "files given by path" if recording.scale == FILE_SCALE else f"scale {recording.scale}"
    words = (
        f"{judged or computed(rows, of)} {depths(rows)}{where}, {threads} thread{'s' * (threads > 1)}; "
        f"{size} ({' and '.join(dict.fromkeys(kinds)) or 'no'} weights, {types})."
    )
    return Markdown(f"{disturbed(rows)}*{words}*", metadata={ROWS_KEY: about(recording)})


def depths(rows: pd.DataFrame) -> str:
    """A sentence: how the oracle judged the least judged file of these rows, and how many rows go beyond."""
    of = rows[(rows["model"] != "") & (rows["judged"] > 0)]
    if of.empty:
        return ""
    further = of[reach(of) > of["judged"]]
    least = of["judged_how"].iloc[int(of["judged"].argmin())]
    several = " or more" if of["judged"].nunique() > 1 else ""
    words = f"The oracle judged their files to {least}{several}"
    if further.empty:
        return f"{words}, which no row goes beyond. "
    return f"{words}; {len(further):,} rows go further, to {reach(further).max():,}. "


def commit(engine: Mapping[str, Any]) -> str:
    """The commit of an engine. A build of the pinned sdist calls itself dirty, as it was made outside of a checkout."""
    words = str(engine.get("commit", "unknown"))
    return words.removesuffix("-dirty") if engine.get("pinned", True) else words


def about(recording: Recording) -> dict[str, Any]:
    """Whose rows a page shows, for those who publish it: source, machine, device, engine, first and last day."""
    rows = recording.rows
    engines = [recording.facts[i] for i in rows["engine"].unique() if i]
    days = sorted(str(started)[:10] for started in rows["started"])
    return {
        "source": recording.source,
        "machine": chips(recording),
        "device": _shared(recording),
        "engine": " and ".join(dict.fromkeys(f"llama.cpp {commit(fact)}" for fact in engines)),
        "days": list(dict.fromkeys((*days[:1], *days[-1:]))),
    }


def computed(rows: pd.DataFrame, of: str = "") -> str:
    """How many rows were computed correctly, and which were not and are left out; `of`: whose rows these are."""
    whose = f" of {of}" if of else ""
    judged = rows[rows["model"] != ""]
    wrong = judged[~judged["verdict"].isin(RIGHT)]
    if wrong.empty:
        return f"All {len(judged):,} rows{whose} were computed right."
    words = [
        f"{len(group)} of {escaped(str(model))} ({_cells(group)}) {_ended(str(verdict), group)}"
        for (verdict, model), group in wrong.groupby(["verdict", "model"], sort=False)
    ]
    return (
        f"{len(judged) - len(wrong):,} of {len(judged):,} rows{whose} were computed right. The rest is left out: "
        f"{'; '.join(words)}."
    )


def _ended(verdict: str, group: pd.DataFrame) -> str:
    """How some rows that were not computed right ended: an error that a program reported is no crash."""
    reported = verdict == "failed" and (group["status"] == "error").all()
    return "ended with an error" if reported else NOT_VALID.get(verdict, verdict)


def _cells(group: pd.DataFrame) -> str:
    """The kind of cells of some rows: their workloads, and whether all their prompts shared a call."""
    packed = (group["policy"] == "packed").all()
    return " and ".join(sorted(set(group["workload"]))) + (", prompts that share a call" if packed else "")


def guessed(guess: float, measured: pd.DataFrame) -> Markdown:
    """A guess of a factor, the parameter's, beside the measured one."""
    if measured.empty:
        return Markdown("*What was guessed was not measured here.*")
    ratio = measured["estimate"].iloc[0]
    off = max(guess / ratio.value, ratio.value / guess)
    return Markdown(
        f"The guess: a factor of **{guess:g}** (`-p guess` makes it yours). Measured: **{ratio:.1f}**. "
        f"Off by a factor of {off:.1f}."
    )


def published(name: str) -> Markdown:
    """The publisher of figures of others, their machine, build and weights, and notes for their reading."""
    entry = tomllib.loads((paths.PUBLISHED / "sources.toml").read_text(encoding="utf-8"))[name]
    head = f"Source: *{entry['title']}*, {entry['subject']}; {entry['machine']}; {entry['engine']}; {entry['weights']}."
    return Markdown("\n".join([head, "", *(f"- {note}" for note in entry["notes"])]))
