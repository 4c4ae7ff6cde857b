"""Notebook 07's sentences and tables: the words around numbers that come from rows, never the other way round."""

from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.usable import disturbed_cells
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence, sentences
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.sentences import CLOSE, is_close
from plamo_study.present.tables import Columns, Table, scaled, significant, table
from plamo_study.studies.replicas import analysis

MS, MB = 1e3, 1e-6
SOME = 0.1  # of the file: weights elsewhere that are more than what an engine always keeps
UNFAIR = (
    "Beside other programs the comparison is not fair, and no interval mends that: many processes get more of the "
    "cores from whoever else computes than one does."
)


def usual(rows: pd.DataFrame, total: int = 0) -> pd.DataFrame:
    """The arrangements of `total` sequences (0: as many as most cells have) of the main type, weights mapped."""
    found = analysis.table(rows)
    found = found[found["use_mmap"] & (found["policy"] == "per_sequence") & (found["dtype"] == _own_type(rows))]
    found = found[found["total"] == (total or found["total"].max())].dropna(subset=["rate"])
    return found.assign(arrangement=_arrangement(found)).sort_values(["model", "n_processes"])


def _own_type(rows: pd.DataFrame) -> str:
    """The type that is measured in more arrangements than others."""
    return str(rows[rows["workload"] == "replicas"]["dtype"].mode().iloc[0])


def _arrangement(found: pd.DataFrame) -> list[str]:
    return [f"{p} × {n}" for p, n in zip(found["n_processes"], found["n_seq"], strict=True)]


def finding(recording: Recording) -> Markdown:
    """Whether a process for each sequence writes more than one for all, what a crash takes, what memory it costs."""
    rows = recording.rows
    disturbed, unfair = evidence.disturbed(rows), _unfair(rows)
    lines = [_wins(group, not unfair, _cores(rows)) for _, group in usual(rows).groupby("model")]
    lines += [UNFAIR] if unfair else []
    lines += [_died(rows), _copies(recording)]
    text = "\n".join(f"- {line}" for line in lines if line)
    return Markdown(f"{disturbed}{text}\n\n({condition(recording)})")


def _cores(rows: pd.DataFrame) -> int:
    return int(rows["n_threads"].max())


def _unfair(rows: pd.DataFrame) -> bool:
    """Whether arrangements were measured beside other programs, and their comparison is of no use."""
    return disturbed_cells(rows[rows["workload"] == "replicas"])[0] > 0


def _wins(group: pd.DataFrame, decided: bool, cores: int) -> str:
    """One process for all against one for each, and against those between; `decided`: whether intervals may decide."""
    found = {row["n_processes"]: row for row in group.to_dict("records")}
    one, total = found.get(1), int(group["total"].iloc[0])
    each = found.get(total)
    if one is None or each is None:
        return ""
    ratio: Estimate = each["against_one"]
    said = {
        "holds": "a process for each sequence writes faster than one process for all",
        "does not hold": "one process for all sequences writes faster than a process for each",
        "inconclusive": "whether one process for all or one for each writes faster is not decided",
    }[ratio.above(1.0) if decided else "inconclusive"]
    times, both = sentences.quotient(ratio, each["rate"], one["rate"], "tokens per second")
    others = {n: row["against_one"] for n, row in found.items() if n not in (1, total)}
    between = [f"{n} processes {ratio:.2f} times" for n, ratio in others.items() if ratio.n > 1]
    also = f" On {cores} cores the threads of so many take turns." if total > cores else ""
    also += f" Of those between, {' and '.join(between)}." if between else ""
    model = escaped(str(group["model"].iloc[0]))
    return f"**{model}: {said}**. {total} processes write {times} as many tokens as one {both}, prompts included.{also}"


def _died(rows: pd.DataFrame) -> str:
    """What the death of one replica did to the requests of the others."""
    found = analysis.crashes(rows)
    if found.empty:
        return ""
    n, lost, finished = int(found["n_processes"].iloc[0]), int(found["lost"].sum()), int(found["finished"].sum())
    well = int(((found["verdict"] == "valid") & found["right"]).sum())
    return (
        f"**A crash takes one replica.** One of {n} processes was killed in the middle of its answers, {len(found)} "
        f"times: {lost} requests were lost with it, {finished} others finished. In {well} of {len(found)} runs all "
        "others finished, with the last logits that they get alone."
    )


def _copies(recording: Recording) -> str:
    """How often the weights are in memory, by the way they were loaded."""
    found = analysis.weights(recording.rows, recording.facts)
    found = found[found["model"] == found["model"].min()]
    shared = found[found["total"] == found["total"].min()]
    most = shared[shared["n_processes"] == shared["n_processes"].max()]
    if most.empty:
        return ""
    said = [f"{_times(row)} in {row.dtype}, {_loaded(row.use_mmap)}" for row in most.itertuples()]
    return (
        f"**Weights are shared or not by their type and how they are loaded.** {most['n_processes'].iloc[0]} "
        f"processes of {escaped(str(most['model'].iloc[0]))} hold them {'; '.join(said)} (1: as large "
        "as the file; a range: without pages of the file that could be dropped, and with them)."
    )


def _times(row: Any) -> str:
    """How often weights are in memory; where they are in pages of the file too, without these and with them."""
    least = row.own.value / row.file
    return f"{least:.2f} to {row.copies:.2f} times" if row.use_mmap and least > SOME else f"{row.copies:.2f} times"


def _loaded(use_mmap: bool) -> str:
    return "mapped" if use_mmap else "private"


def arrangements(recording: Recording, total: int = 0) -> Table:
    """Every arrangement of the main type: what it writes, how long first tokens, steps and waits take."""
    rows = recording.rows
    found, cores = usual(rows, total), _cores(rows)
    crowded = dict.fromkeys(found[found["n_processes"] > cores]["arrangement"])
    cell = rows[rows["workload"] == "replicas"].iloc[0]
    note = f"Each sequence reads {cell['n_prompt']} tokens and writes {cell['n_gen'] + 1}."
    note += f" More threads than the {cores} cores: {', '.join(crowded)}." if crowded else ""
    return table(found, _MEASURED, note, _OVER_ONE)


def every(recording: Recording) -> Table:
    """Every cell."""
    found = analysis.table(recording.rows).sort_values(analysis.CELL)
    loaded = [_loaded(mapped) for mapped in found["use_mmap"]]
    policy = ["share a call" if each == "packed" else "one by one" for each in found["policy"]]
    found = found.assign(arrangement=_arrangement(found), loaded=loaded, prompts=policy)
    kind = {"model": ("model", ""), "dtype": ("type", ""), "loaded": ("weights", ""), "prompts": ("prompts", "")}
    more: Columns = {"ready": ("ready after (s)", ".2f"), "grown": ("memory (MB)", _middle)}
    return table(found, {**kind, **_MEASURED, **more}, ratios=_OVER_ONE)


def memory(recording: Recording) -> Table:
    """Where the weights are: pages of the file that all processes share, and memory that each has to itself."""
    found = analysis.weights(recording.rows, recording.facts).sort_values(
        ["model", "dtype", "use_mmap", "total", "n_processes"]
    )
    found = found.assign(arrangement=_arrangement(found), loaded=[_loaded(mapped) for mapped in found["use_mmap"]])
    in_mb = significant(3, MB)
    columns: Columns = {
        "model": ("model", ""),
        "dtype": ("type", ""),
        "loaded": ("weights", ""),
        "arrangement": ("processes × sequences", ""),
        "file": ("file (MB)", in_mb),
        "mapped": ("in its pages (MB)", _middle),
        "own": ("elsewhere (MB)", _middle),
        "copies": ("both / file", ".2f"),
        "grown": ("all memory (MB)", _middle),
        "rest": ("not weights (MB)", _middle),
        "against_mapped": ("tokens/s, over mapped", ".2f"),
    }
    return table(found, columns)


def _middle(bytes_: Estimate) -> str:
    """Megabytes without an interval: processes differ by pages."""
    return significant(3, MB)(bytes_.value)


def expected(recording: Recording) -> Table:
    """What each arrangement of the main type should write: by a replica alone, and by the ceilings of all cores."""
    found = _predicted(recording)
    return table(found[found["use_mmap"] & (found["dtype"] == _own_type(recording.rows))], _EXPECTED)


def prediction(recording: Recording) -> Table:
    """What was measured beside both, how many come within CLOSE times, and whether the winner was foretold."""
    found = _predicted(recording)
    several = found[(found["n_processes"] > 1) & found["use_mmap"]]
    near, sure = sentences.closeness(list(several["ratio"].dropna()))
    misses = found["miss"].dropna()
    told = several.dropna(subset=["promised", "against_one"])
    decided = told[[ratio.above(1.0) != "inconclusive" for ratio in told["against_one"]]]
    right = sum((row.promised.value > 1) == (row.against_one.value > 1) for row in decided.itertuples())
    note = (
        f"{near} of {several['ratio'].notna().sum()} arrangements of several processes with mapped weights are within "
        f"{CLOSE} times of a replica alone, {sure}. It foretells whether they write more than one process in {right} "
        f"of {len(decided)} that are decided. {sum(map(is_close, misses))} of {len(misses)} arrangements are within "
        f"{CLOSE} times of what the ceilings allow, {sum(miss < 1 for miss in misses)} above it."
    )
    columns: Columns = {
        "model": ("model", ""),
        "kind": ("weights", ""),
        "arrangement": ("processes × sequences", ""),
        "measured": ("measured", significant(3)),
        "ratio": ("measured / replica alone", ".2f"),
        "miss": ("off the ceilings", ".2f"),
        "promised": ("over one process, by a replica alone", ".2f"),
        "against_one": ("over one process", ".2f"),
    }
    return table(found, columns, note, {"ratio": ("measured", "alone")})


def _predicted(recording: Recording) -> pd.DataFrame:
    found = analysis.predicted(recording.rows, recording.facts)
    found = found[found["policy"] == "per_sequence"].assign(total=found["n_processes"] * found["n_seq"])
    found = found.sort_values(["model", "dtype", "use_mmap", "total", "n_processes"])
    kinds = [f"{dtype}, {_loaded(mapped)}" for dtype, mapped in zip(found["dtype"], found["use_mmap"], strict=True)]
    allowed = [_span(row.slowest, row.fastest) for row in found.itertuples()]
    found = found.assign(arrangement=_arrangement(found), kind=kinds, allowed=allowed)
    measured = analysis.table(recording.rows).set_index(analysis.CELL)["against_one"]
    return found.assign(against_one=[measured.get(key) for key in found[analysis.CELL].itertuples(index=False)])


def _span(low: float, high: float) -> str:
    return "n/a" if low != low else f"{significant(3)(low)} to {significant(3)(high)}"


def takeaway(*recordings: Recording) -> Markdown:
    """In how many comparisons several processes write more or less than one, by whether they crowd the cores."""
    lines = []
    for recording in recordings:
        rows = recording.rows
        found = analysis.table(rows).dropna(subset=["against_one"])
        found = found[(found["n_processes"] > 1) & (found["policy"] == "per_sequence")]
        crowd = found["n_processes"] > _cores(rows)
        said = [
            _verdicts(found[~crowd], "no more threads than cores"),
            _verdicts(found[crowd], "more threads than cores"),
        ]
        unfair = f" {UNFAIR}" if _unfair(rows) else ""
        lines.append(f"- Scale {recording.scale}: {'; '.join(said)}.{unfair}")
    return Markdown("Several processes against one with as many sequences:\n\n" + "\n".join(lines))


def _verdicts(found: pd.DataFrame, which: str) -> str:
    verdicts = [ratio.above(1.0) for ratio in found["against_one"]]
    faster, slower = verdicts.count("holds"), verdicts.count("does not hold")
    left = len(verdicts) - faster - slower
    thin = sum(
        ratio.n == 2 for ratio, said in zip(found["against_one"], verdicts, strict=True) if said != "inconclusive"
    )
    few = f" ({thin} of these decided by two blocks alone)" if thin else ""
    return f"of {len(verdicts)} arrangements with {which} {faster} wrote more, {slower} less, {left} undecided{few}"


def isolation(recording: Recording) -> Table:
    """Prompts that share a call, in one process and in one each: how many runs came out right."""
    found = analysis.table(recording.rows)
    found = found[found["policy"] == "packed"].sort_values("n_processes")
    columns: Columns = {
        "model": ("model", ""), "arrangement": ("processes × sequences", ""), "verdict": ("verdict", ""),
    }  # fmt: skip
    return table(found.assign(arrangement=_arrangement(found)), columns)


def crashes(recording: Recording) -> Table:
    """Every run in which a replica was killed."""
    found = analysis.crashes(recording.rows)
    columns: Columns = {
        "model": ("model", ""),
        "arrangement": ("processes × sequences", ""),
        "block": ("block", ""),
        "had": ("tokens the killed one had of each", ""),
        "lost": ("requests lost", ""),
        "finished": ("requests finished", ""),
        "verdict": ("verdict", ""),
    }
    had = [f"{got} of {of}" for got, of in zip(found["got"], found["of"], strict=True)]
    return table(found.assign(arrangement=_arrangement(found), had=had), columns)


_OVER_ONE = {"against_one": ("rate", "one")}
_MEASURED: Columns = {
    "model": ("model", ""),
    "arrangement": ("processes × sequences", ""),
    "rate": ("tokens/s", significant(3)),
    "against_one": ("against one process", ".2f"),
    "ttft": ("first token (s)", significant(3)),
    "step": ("step of a process (ms)", scaled(MS, ".2f")),
    "longest": ("longest gap (s)", significant(3)),
    "verdict": ("verdict", ""),
}
_EXPECTED: Columns = {
    "model": ("model", ""),
    "kind": ("weights", ""),
    "arrangement": ("processes × sequences", ""),
    "alone": ("replica alone, times all", significant(3)),
    "allowed": ("ceilings", ""),
}
