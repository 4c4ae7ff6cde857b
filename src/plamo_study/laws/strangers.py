"""A pack of rows from a stranger's machine: what it must not claim, and the text that introduces it.

`packing` looks at one row at a time. Here the rows of a pack are held against one another: no pass may be faster than
the ceilings that the same machine measured, and no time may come from a file that nothing judged.
"""

from collections.abc import Sequence
from itertools import chain

import pandas as pd

from llama_meter import journal
from llama_meter.errors import StudyError
from llama_meter.packs import Pack
from llama_meter.rows import Fact
from llama_meter.stats import Estimate
from plamo_study.laws import machines
from plamo_study.laws.machines import Studies
from plamo_study.read import frame, processors
from plamo_study.show.labels import table
from plamo_study.show.tables import escaped

FULL_SIZE = ("shape", "weights")  # small files lie in caches, which are faster than memory
SHOWN = 12  # passes in the text, those of the most processes first
UNGATED = "ungated"
VERDICTS = {"verified": "valid", "wrong": "invalid"}  # heading -> verdict; others did not end, or had no gate
MEND = "measure again with `plamo-study study` or `plamo-study measure STUDY`, which do both"


def check(pack: Pack) -> None:
    """Raise StudyError for a pack whose own rows contradict what some of them claim, or that no analysis can read.

    Either a pass was faster than its roof, the time that its machine's best measured ceilings allow, with its whole
    interval; or a timed row has no verdict, because its file and build have no gate in the same journal.
    """
    try:
        _check(pack)
    except StudyError:
        raise
    except Exception as error:  # whatever an analysis does not expect of rows, no page would expect either
        why = f"its rows cannot be analysed ({type(error).__name__}: {error})"
        raise StudyError(f"the rows of machine {pack.machine}", why[:500], MEND) from error


def _check(pack: Pack) -> None:
    for name, rows, _ in _studies(pack):
        timed = rows[(rows["status"] == "ok") & (rows["model"] != "") & rows["samples_ns"].map(len).astype(bool)]
        bare = timed[(timed["verdict"] == UNGATED) & ~timed["anchor"]]
        if len(bare):
            first = bare.iloc[0]
            why = f"{len(bare)} timed rows have no verdict: no gate judged {first['model']} in {first['dtype']}"
            raise StudyError(f"{name}, row {first['key']}", why, MEND)
    for scale in FULL_SIZE:
        beyond = passes(pack, scale)
        beyond = beyond[[low > took.high for low, took in zip(beyond["low"], beyond["measured"], strict=True)]]
        if len(beyond):
            first = beyond.iloc[0]
            took = f"{1e3 * first['measured'].value:.3g} ms, at most {1e3 * first['measured'].high:.3g}"
            why = f"a {first['phase']} of {first['model']} in {first['dtype']} took {took}"
            why += f", where the machine's own ceilings allow {1e3 * first['low']:.3g} ms or more"
            raise StudyError(f"{first['study']}.{scale}", why, MEND)


def passes(pack: Pack, scale: str) -> pd.DataFrame:
    """The passes of a pack at a scale as notebook 13 shows them; empty where it has none with ceilings."""
    studies = [study for study in _studies(pack, (scale,)) if len(study[1])]
    try:
        return machines.passes(studies) if studies else pd.DataFrame(columns=["low", "measured"])
    except StudyError:  # no ceiling or no pass: nothing to hold
        return pd.DataFrame(columns=["low", "measured"])


def text(pack: Pack, file: str, command: str) -> str:
    """Markdown that introduces a pack, to paste as the text of a pull request; everything from rows is escaped.

    `command`: the command that made it.
    """
    facts = [record for record in chain(*pack.journals.values()) if isinstance(record, Fact)]
    engines = [fact.data for fact in facts if fact.what == "engine"]
    builds = dict.fromkeys(f"{e['binding']}, llama.cpp {e['commit']}, build {frame.build_name(e)}" for e in engines)
    counts = pd.DataFrame([_counted(name, rows) for name, rows, _ in _studies(pack)])
    judged, verified, disturbed = (int(counts[name].sum()) for name in ("judged", "verified", "disturbed"))
    machine = processors.machine(pack.facts)
    fact = pack.facts
    systems = [record.data["os"] for record in facts if record.what == "system"] or [fact["os"]]
    system = ", ".join(dict.fromkeys(systems))
    parts = [
        f"# Rows of {escaped(machine)}",
        f"- Machine: {escaped(machine)}, {fact['memory_bytes'] / 2**30:.0f} GiB, {escaped(system)}, "
        f"id `{pack.machine}`",
        *(f"- Engine: {escaped(build)}" for build in builds),
        f"- Verified: {_share(verified, judged)} of the rows that are judged; disturbed: {_share(disturbed, judged)}",
        f"- File: `{escaped(file)}`, made with `{escaped(command)}`",
        "- What else ran, and how the machine was powered and cooled: (please fill in)",
        "",
        "## Studies",
        "",
        table(counts, list(counts))._repr_markdown_(),
    ]
    figures = pd.concat([_figures(pack, scale) for scale in (*FULL_SIZE, "mini")])
    if len(figures):
        note = "Tokens per second with their intervals; share: of what the machine's own ceilings allow."
        parts += ["", "## Main figures", "", table(figures, list(figures), note)._repr_markdown_()]
    return "\n".join(parts) + "\n"


def _studies(pack: Pack, scales: Sequence[str] = ()) -> Studies:
    """A frame for each journal, with its facts; of some scales, or of all."""
    made = []
    for name, records in pack.journals.items():
        study, _, scale = name.rpartition(".")
        if not scales or scale in scales:
            facts = frame.facts(records)
            made.append((study if scales else name, frame.frame(journal.latest_rows(records), facts), facts))
    return made


def _counted(name: str, rows: pd.DataFrame) -> dict[str, object]:
    judged = rows[(rows["model"] != "") & (rows["workload"] != "gate") & ~rows["anchor"] & (rows["verdict"] != "n/a")]
    entry = {"study": name, "rows": len(rows), "judged": len(judged)}
    entry |= {what: int((judged["verdict"] == verdict).sum()) for what, verdict in VERDICTS.items()}
    return entry | {"disturbed": int(judged["disturbed"].sum())}


def _figures(pack: Pack, scale: str) -> pd.DataFrame:
    """Rates of the passes with the most processes."""
    own = passes(pack, scale)
    if own.empty:
        return pd.DataFrame()
    own = own.assign(n=[took.n for took in own["measured"]]).sort_values("n", ascending=False, kind="stable")
    leading = own.drop_duplicates(["model", "dtype", "phase", "tokens", "n_seq", "chip"]).head(SHOWN)
    work = leading["tokens"] * leading["n_seq"]
    rate = [_rate(tokens, took) for tokens, took in zip(work, leading["measured"], strict=True)]
    shown = leading[["chip", "model", "dtype", "phase", "tokens", "n_seq"]]
    return shown.assign(**{"tokens a second": rate, "share": leading["share"], "scale": scale})


def _rate(work: float, took: Estimate) -> Estimate:
    """Work per second of a time, with its interval."""
    return Estimate(work / took.value, work / took.high, work / took.low, took.n)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else "none"
