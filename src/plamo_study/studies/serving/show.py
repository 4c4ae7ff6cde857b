"""Notebook 11's sentences and tables: the words around numbers that come from rows, never the other way round."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import stats
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.usable import of_cell, usable
from plamo_study.measure.defects import build_name
from plamo_study.measure.plan import DTYPE
from plamo_study.measure.recording import Recording, read
from plamo_study.present import evidence, sentences
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.tables import NOT_AVAILABLE, Columns, Table, scaled, significant, table
from plamo_study.studies.serving import analysis, beside as besides, endurance, knee, trial
from plamo_study.studies.serving.plan import LLAMA, PYTHON, SLOTS

MS = 1e3
STOCK = "stock"
CORRECTED = build_name(("D2", "D3"))
SPOKEN = (128, 64)  # tokens of the request that the finding speaks of
ALIKE = 0.05  # of our figure


def finding(recording: Recording) -> Markdown:
    """Whose answer one gets, what a server adds to the engine, what load does, and where the knee is."""
    rows = recording.rows
    lines = [*_contamination(rows), *endurance.stuck(recording), *_crowded(rows), *_added(rows), *_queue(rows)]
    lines += [*_loaded(rows), *_knees(recording)]
    text = evidence.disturbed(rows) + "\n".join(f"- {line}" for line in lines) + f"\n\n({condition(recording)})"
    return Markdown(text)


def _contamination(rows: pd.DataFrame) -> list[str]:
    found = analysis.answers(rows)
    found = found[(found["server"] == LLAMA) & (found["n_clients"] > 1) & (found["n_seq"] == SLOTS)]
    said = []
    found = found.sort_values(["model", "build"], ascending=[True, False])  # as released, then corrected
    for (model, build), group in found.groupby(["model", "build"], sort=False):
        parts = []
        for row in group.sort_values("n_clients").itertuples():
            other = row.differ - row.near_ties
            text = f"{row.n_clients} at a time, {other} of {row.answers} answers are others than alone"
            text += f" (and {row.near_ties} at near-ties)" if row.near_ties else ""
            parts.append(f"{text}, {row.died} of {row.runs} servers died")
        said.append(f"{escaped(str(model))}, {_build(str(build))}: {'; '.join(parts)}")
    if not said:
        return []
    return ["**A neighbour's request changes your answer, and can end the server.** " + ". ".join(said) + "."]


def _crowded(rows: pd.DataFrame) -> list[str]:
    """What those who wait cost those who are answered, at the largest crowd."""
    said = []
    for (model, _), group in analysis.waiting(rows).groupby(["model", "build"]):
        few, row = group.sort_values("n_clients").iloc[[0, -1]].to_dict("records")
        if few["waits"] or row["ratio"].value != row["ratio"].value:
            continue
        ratio, both = sentences.quotient(row["ratio"], row["token"].scaled(MS), few["token"].scaled(MS), "ms", ".3g")
        said.append(
            f"{escaped(str(model))}, {row['n_seq']} slots: with {row['waits']} requests waiting a further token takes "
            f"{ratio} as long as with none {both}, by the server's own clock{sentences.unless(row['ratio'])}"
        )
    return ["**Whoever waits slows down whoever is answered.** " + ". ".join(said) + "."] if said else []


def _build(build: str) -> str:
    return {STOCK: "`llama-server` as released", CORRECTED: "with the patches of our report"}.get(build, build)


def _added(rows: pd.DataFrame) -> list[str]:
    found, lines = analysis.predicted(rows), []
    found = found[(found["n_clients"] == 1) & (found["n_prompt"] == SPOKEN[0])]
    for server, group in found.groupby("server", sort=False):
        parts = []
        for what, lines_of in group.groupby("what", sort=False):
            spoken = lines_of[lines_of["n_gen"] == SPOKEN[1]]
            of = (spoken if len(spoken) else lines_of).sort_values(["model", "n_seq"]).drop_duplicates("model")
            for row in of.to_dict("records"):
                ratio, both = sentences.quotient(
                    row["ratio"], row["measured"].scaled(MS), row["engine"].scaled(MS), "ms"
                )
                text = f"{what} of {escaped(row['model'])} takes {ratio} as long as in the engine {both}"
                parts.append(text + sentences.unless(row["ratio"]))
        lines.append(f"**What {server} adds.** " + _capital("; ".join(parts)) + ".")
    return lines


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _queue(rows: pd.DataFrame) -> list[str]:
    """What waiting in line does, where one request is answered at a time."""
    found = analysis.table(rows)
    found = found[(found["server"] == PYTHON)]
    lines = []
    for model, group in found.groupby("model", sort=False):
        many = group[group["n_clients"] > 1]
        for row in many.to_dict("records"):
            same = (group["n_prompt"] == row["n_prompt"]) & (group["n_gen"] == row["n_gen"])
            one = group[same & (group["n_clients"] == 1)].to_dict("records")
            if one:
                lines.append(
                    f"{escaped(str(model))}: first token after {_ms(row['ttft'])} with {row['n_clients']} at a time, "
                    f"after {_ms(one[0]['ttft'])} alone"
                )
    return [f"**`{PYTHON}` answers one request at a time.** " + "; ".join(lines) + "."] if lines else []


def _ms(seconds: Estimate) -> str:
    return f"{significant(3, MS)(seconds)} ms"


def _loaded(rows: pd.DataFrame) -> list[str]:
    lines = []
    for who, group in load_curves(rows).groupby("who", sort=False):
        best = max(group.to_dict("records"), key=lambda row: row["throughput"].value)
        best = best | {"throughput": stats.selected(best["throughput"], len(group))}
        shown = {row["n_clients"]: row for row in (group.iloc[0].to_dict(), group.iloc[-1].to_dict(), best)}
        if len(shown) > 1:
            told = [f"{significant(3)(row['throughput'])} with {n} at a time" for n, row in sorted(shown.items())]
            told[sorted(shown).index(best["n_clients"])] += f" ({sentences.among(best['throughput'], 'loads')})"
            lines.append(f"{escaped(str(who))}: {', '.join(told)}")
    return ["**What load buys**, tokens a second: " + "; ".join(lines) + "."] if lines else []


def _searches(recording: Recording) -> Recording:
    """Where knees were sought: by themselves, where such rows are recorded, else among the page's own cells."""
    apart = read("11-knees", recording.source, recording.scale) if recording.source == "recorded" else None
    return apart or recording


def _knees(recording: Recording) -> list[str]:
    searches = _searches(recording)
    found = analysis.knee_of(searches.rows)
    if found.empty:
        return []
    said = [
        f"{escaped(str(row.model))} ({_build(str(row.build))}): {row.knee:.2g} requests a second"
        for row in found.itertuples()
    ]
    if any(math.isnan(row.knee.low) for row in found.itertuples()):
        said[-1] += ". Every server was asked by the same arrivals, so no interval holds"
    if set(searches.rows["machine"]) != set(recording.rows["machine"]):
        said[-1] += f" ({evidence.chips(searches)}, another machine than the rest of the page)"
    wanted = knee.OBJECTIVES[recording.scale]
    how = f"{knee.ENOUGH:.0%} of requests get their first token within {wanted.ttft_s * MS:.0f} ms and, "
    how += f"in the mean, a further one every {wanted.tpot_s * MS:.0f} ms"
    return [f"**The knee**, the rate up to which {how}: " + "; ".join(said) + "."]


def contaminated(recording: Recording) -> pd.DataFrame:
    """What the first figure draws: `who` was asked how (and by how many requests), what these `became`, their `share`
    (%)."""
    found = analysis.answers(recording.rows)
    found = found[(found["n_clients"] > 0) & ((found["server"] == PYTHON) | (found["n_seq"] == SLOTS))]
    entries = []
    in_order = {"by": ["model", "server", "build", "n_clients"], "ascending": [True, True, False, True]}
    for row in found.sort_values(**in_order).itertuples():
        alike = row.requests - row.other - row.unanswered
        became = {analysis.ALIKE: alike, analysis.OTHER: row.other, analysis.UNANSWERED: row.unanswered}
        who = f"{_who(row)}, {row.n_clients} at a time ({row.requests})"
        entries += [{"who": who, "became": name, "share": 100 * n / row.requests} for name, n in became.items()]
    return pd.DataFrame(entries, columns=["who", "became", "share"])


def _who(row: Any) -> str:
    kind = row.server if row.server == PYTHON or row.build == STOCK else f"{row.server}, corrected"
    return f"{row.model}, {kind}"


def _at_a_time(found: pd.DataFrame) -> list[str]:
    return ["as they come" if n == 0 else f"{n}" for n in found["n_clients"]]


def answers(recording: Recording) -> Table:
    """Answers under load held against those of the same prompts alone, by model, build, server and load."""
    found = analysis.answers(recording.rows)
    found = found.assign(at=_at_a_time(found))
    columns: Columns = {
        "who": ("server", ""),
        "n_seq": ("slots", ""),
        "at": ("at a time", ""),
        "answers": ("answers", ""),
        "differ": ("differ from alone", ""),
        "near_ties": ("of these near-ties", ""),
        "died": ("servers died", ""),
        "runs": ("of", ""),
        "failed": ("requests failed", ""),
        "how": ("how", ""),
    }
    found = found.assign(who=[_who(row) for row in found.itertuples()])
    return table(found, columns, "An answer that broke off is compared up to where it broke off.")


def lengths(recording: Recording) -> pd.DataFrame:
    """What the second figure draws: one request at a time of llama-server, or of the other where there is none."""
    found = analysis.table(recording.rows)
    found = found[found["n_clients"] == 1]
    best = found[(found["server"] == LLAMA) & (found["n_seq"] == SLOTS)]
    best = best if len(best) else found[found["server"] == PYTHON]
    return best.drop_duplicates(["model", "n_prompt", "n_gen"]).sort_values(["model", "n_prompt", "n_gen"])


def by_length(recording: Recording) -> Table:
    """One request at a time: first token, further tokens and the whole, by tokens of prompt and answer."""
    found = analysis.table(recording.rows)
    found = found[(found["n_clients"] == 1)].sort_values(["server", "model", "n_prompt", "n_gen", "n_seq"])
    return table(found.assign(who=[_who(row) for row in found.itertuples()]), _TIMES)


def load_curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Right loads of one server by the number of requests at a time; the widest set of slots only."""
    found = analysis.table(rows)
    found = found[(found["server"] == LLAMA) & (found["n_clients"] > 0)]
    if found.empty:
        return found.assign(who=[])
    found = found[found["n_seq"] == found["n_seq"].max()]
    kept = found[found["verdict"] == "valid"].sort_values(["model", "build", "n_clients"])
    return kept.assign(who=[_who(row) for row in kept.itertuples()])


def under_load(recording: Recording) -> Table:
    """Several requests at a time: times, tokens a second, and verdicts; of what was wrong there is no time."""
    found = analysis.table(recording.rows)
    found = found[found["n_clients"] != 1].sort_values(["model", "server", "build", "n_seq", "n_clients"])
    found = found.assign(at=_at_a_time(found))
    columns: Columns = {
        "who": ("server", ""),
        "n_seq": ("slots", ""),
        "at": ("at a time", ""),
        "ttft": ("first token (ms)", significant(3, MS)),
        "itl": ("gap between tokens (ms)", significant(3, MS)),
        "throughput": ("tokens/s", significant(3)),
        "verdict": ("verdict", ""),
        "late": ("client late, of a gap", ".0%"),
        "largest": ("longest gap (ms)", significant(3, MS)),
        "failed": ("requests failed", ""),
    }
    return table(found.assign(who=[_who(row) for row in found.itertuples()]), columns)


def expected(recording: Recording) -> Table:
    """What the engine alone takes for the same prompts and steps, before a server is asked."""
    return table(_predictions(recording), {name: _PREDICTED[name] for name in ("who", "asked", "what", "engine")})


def prediction(recording: Recording) -> Table:
    """The engine beside the server, and where the difference lies: in the server by its own count, or outside."""
    note = "In the server: all that llama-server counts beyond the engine's time: sampling, scheduling, making text, a "
    note += "longer context, neighbours' prompts. Outside: HTTP, the line, and the client. Below zero it is noise."
    return table(_predictions(recording), _PREDICTED, note, {"ratio": ("measured", "engine")})


def _predictions(recording: Recording) -> pd.DataFrame:
    found = analysis.predicted(recording.rows)
    asked = [f"{p}+{g}, {n} of {s} slots" for p, g, n, s in
             zip(found["n_prompt"], found["n_gen"], found["n_clients"], found["n_seq"], strict=True)]  # fmt: skip
    found = found.assign(who=[_who(row) for row in found.itertuples()], asked=asked)
    return found.sort_values(["what", "server", "model", "n_clients", "n_prompt", "n_gen"])


def crowd(recording: Recording) -> pd.DataFrame:
    """What the figure of those who wait draws."""
    return analysis.waiting(recording.rows)


def crowds(recording: Recording) -> Table:
    """What requests that wait cost those that are answered."""
    columns: Columns = {
        "model": ("model", ""),
        "n_seq": ("slots", ""),
        "waits": ("requests waiting", ""),
        "token": ("a further token (ms)", significant(3, MS)),
        "ratio": ("times that with none waiting", ".2f"),
        "wakes": ("threads put on a CPU for each token, at least", significant(3)),
        "throughput": ("tokens/s", significant(3)),
        "late": ("client late, of a gap", ".0%"),
    }
    note = "The time of a token is what llama-server counts itself, of requests that ended while others took their "
    note += (
        "places. The client and the server's threads share the machine's cores. CPU: at least; threads that are gone "
    )
    note += "are not counted."
    found = analysis.waiting(recording.rows)
    keys = ["model", "build", "n_seq"]
    full = found[found["waits"] == 0].set_index(keys)["token"]
    none = [full.get(key) for key in found[keys].itertuples(index=False, name=None)]
    return table(found.assign(none=none), columns, note, {"ratio": ("token", "none")})


def knees(recording: Recording) -> Table:
    """The knee of each server: the highest rate that met the objectives, and the lowest that did not."""
    columns: Columns = {
        "model": ("model", ""),
        "build": ("build", ""),
        "block": ("block", ""),
        "met": ("met at (requests/s)", ".3g"),
        "failed": ("failed at (requests/s)", ".3g"),
        "goodput": ("goodput where it was met", ".3g"),
        "n": ("requests of each rate", ""),
    }
    note = "A line a server. Rates are those asked for; what came may be some per cent off."
    return table(analysis.knees(_searches(recording).rows), columns, note)


def tools(recording: Recording) -> Table:
    """One right load as four tools define its times: where there is one, a load whose requests come as they come."""
    rows = usable(recording.rows)
    rows = rows[(rows["workload"] == "serving") & (rows["n_clients"] != 1)]
    if rows.empty:
        return table(pd.DataFrame(), {})
    cell = rows.sort_values("n_clients", kind="stable").iloc[0]
    same = of_cell(rows, cell, analysis.CELL)
    columns: Columns = {"tool": ("as it is told by", "")}
    columns |= {name: (f"{name.upper()} (ms)", _or_none) for name in ("ttft", "itl", "tpot")}  # type: ignore[operator]
    at = f"{cell['n_clients']} at a time" if cell["n_clients"] else "as they come"
    which = f"{cell['model']} on {cell['server']}, {at}; means, as the tools print them. None was run for this table."
    return table(analysis.tools(same), columns, which)


def _or_none(seconds: float) -> str:
    return f"{seconds * MS:.2f}" if seconds == seconds else NOT_AVAILABLE


def trials(recording: Recording) -> Table:
    """The recorded trial of the probe: its verdicts on servers that are known to be wrong, and to be right."""
    found = evidence.standing(recording, trial.recorded) or []
    entries = [
        {
            "model": each.model,
            "llama-server": _build(each.build).replace("`llama-server` ", ""),
            "probes": each.runs,
            "said": "; ".join(f"{verdict}: {n}" for verdict, n in each.verdicts.items()),
            "requests whose answer differs": f"{each.other} of {each.compared}",
            "near-ties": each.near_ties,
            "servers that died": each.died,
        }
        for each in found
    ]
    return Table(pd.DataFrame(entries or [{"not tried here": ["plamo-study server trial"]}]))


def beside(recording: Recording) -> Table:
    """AIPerf and llama-server itself beside our client, over the same requests to the same server."""
    found = _beside(recording)
    if not found:
        return Table(pd.DataFrame([{"not compared here": besides.INSTALL}]))
    lines = pd.concat([analysis.compared(each) for each in found])
    entries = [_compared(row) for row in lines.to_dict("records")]
    rounds = ", ".join(f"{each.scale}: {len({run.round for run in each.runs})}" for each in found)
    note = f"{found[0].version} and our client in turn, on one server a scale. Rounds at {rounds}. Means over the "
    note += "requests of a run, median over rounds. Times in ms, from when a request is sent. The server is not as "
    note += "fast in one run as in the next. So each client is held against what the server counted in the same run "
    note += "(of `/metrics`: seconds of prompts, seconds of answers, tokens), and the two quotients against each other."
    return table(pd.DataFrame(entries), {name: (name, "") for name in entries[0]}, note)


def later(recording: Recording) -> Table:
    """Where AIPerf and our client part: at the first token, at the last, and from one request to the next."""
    found = _beside(recording)
    if not found:
        return Table(pd.DataFrame([{"not compared here": besides.INSTALL}]))
    lines = pd.concat([analysis.later(each) for each in found])
    lines["load"] = [f"{row.scale}, {row.n_clients} at a time" for row in lines.itertuples()]
    time = significant(2, MS)
    columns: Columns = {
        "load": ("load", ""), "what": ("ms", ""), "ours": ("our client", time), "theirs": ("AIPerf", time),
        "apart": ("AIPerf less ours", time),
    }  # fmt: skip
    note = "The server counts what it reads of a prompt, and not what that prompt waited for others: with several at a "
    return table(lines, columns, f"{note}time that wait is in the first two lines of both clients.")


def _beside(recording: Recording) -> list[besides.Beside]:
    found = (evidence.standing(recording, partial(besides.recorded, scale=scale)) for scale in DTYPE)
    return [each for each in found if each]


def _compared(row: Mapping[str, Any]) -> dict[str, str]:
    shown = significant(3, MS if row["is_time"] else 1.0)
    return {
        "load": f"{row['scale']}, {row['n_clients']} at a time",
        "what": row["what"],
        "our client": shown(row["ours"]),
        "AIPerf": shown(row["theirs"]),
        "AIPerf / ours": format(row["ratio"], ".3f"),
        "our client / server": format(row["ours_of_own"], ".3f"),
        "AIPerf / server": format(row["theirs_of_own"], ".3f"),
        "quotient": f"{row['of_own']:.3f}, within 5 %: {row['of_own'].within(1 - ALIKE, 1 + ALIKE)}",
    }


def client(recording: Recording) -> str:
    """How often the client itself was too late for the gaps that it timed."""
    found = analysis.processes(recording.rows)
    late = found["late"].dropna()
    said = f"In one of twenty looks the client was late by {late.median():.0%} of a gap between two tokens or more "
    said += f"(median over {len(late)} loads). "
    return said + f"In {int(found['binds'].sum())} of {len(found)} loads the client binds: its usual lag is over 5 %."


def clients(recording: Recording) -> Markdown:
    """The sentence on the client."""
    return Markdown(client(recording))


_TIMES: dict[str, tuple[str, Any]] = {
    "who": ("server", ""),
    "n_seq": ("slots", ""),
    "n_prompt": ("prompt", ","),
    "n_gen": ("answer", ""),
    "ttft": ("first token (ms)", significant(3, MS)),
    "tpot": ("each further token (ms)", significant(3, MS)),
    "whole": ("request (ms)", significant(3, MS)),
    "verdict": ("verdict", ""),
    "n": ("servers", ""),
}
_PREDICTED: Mapping[str, tuple[str, Any]] = {
    "who": ("server", ""),
    "asked": ("tokens, at a time", ""),
    "what": ("what", ""),
    "engine": ("engine alone (ms)", significant(3, MS)),
    "measured": ("server (ms)", significant(3, MS)),
    "ratio": ("server / engine", ".2f"),
    "inside": ("in the server (ms)", scaled(MS, ".2f")),
    "outside": ("outside (ms)", scaled(MS, ".2f")),
}
