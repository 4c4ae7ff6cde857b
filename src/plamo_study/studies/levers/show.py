"""The words and tables around the gains: what to do next, for whom, and what the sources say of it."""

import tomllib
from functools import cache
from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study import paths
from plamo_study.analysis import stats
from plamo_study.analysis.stats import Estimate
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence, theme
from plamo_study.present.evidence import escaped
from plamo_study.present.sentences import CLOSE
from plamo_study.present.tables import Columns, Table, table
from plamo_study.studies.batch_scaling.builds import HYBRID
from plamo_study.studies.levers import claims, gains, stacked, traffic as traffics
from plamo_study.studies.levers.gains import Recordings
from plamo_study.studies.levers.traffic import Traffic

SHARING = ("chunked", "split", "replicas")
VERDICTS = {"holds": "gains", "does not hold": "loses", "inconclusive": "not decided"}
AIMS = {gains.TOKENS: "For tokens a second", gains.WAITS: "For the longest wait"}
STARS = (
    "A star means full size with random weights; notebook 05 tells what other values in them change. No star means a "
    "small trained model that fits into the processor's own fast memory: its gains show that a lever works, not how "
    "much it gives on a large one. plamo-3-matched is PLaMo 3 made as large as PLaMo 2."
)
WRONG = (
    "**Right first.** PLaMo 2 answers wrongly when the prompts of two users share a call, and the engine as released "
    "says nothing of it (notebook 03). A `llama-server` lets prompts share calls. So do one of three things before "
    "any lever: build the corrected engine (`plamo-study engine build corrected`), feed prompts one by one (a server "
    "with one slot), or take PLaMo 3. The gains below count only then."
)
MANY = 10  # times from which nobody needs a digit after the point


def times(gain: Estimate) -> str:
    """A gain with two digits after the point, none where it is large."""
    return format(gain, ".0f" if gain.value >= MANY else ".2f")


COLUMNS: Columns = {
    "name": ("lever", ""),
    "model": ("model", ""),
    "what": ("what gets better", ""),
    "gain": ("times", times),
    "verdict": ("it", ""),
    "price": ("what it costs", ""),
    "where": ("notebook and machine", ""),
}


@cache
def published() -> dict[str, Any]:
    """What every lever is and what PLaMo can use of it, and what the source claims."""
    return tomllib.loads((paths.PUBLISHED / "levers.toml").read_text(encoding="utf-8"))


def levers() -> dict[str, dict[str, str]]:
    """The levers by key, as they stand in data/published."""
    return {entry["key"]: entry for entry in published()["lever"]}


def finding(known: Recordings) -> Markdown:
    """The largest gain, what loses, and whether levers multiply."""
    found = _gains(known)
    loses = found[[gain.high < 1 for gain in found["gain"]]]
    parts = [_best(known, found, aim, words) for aim, words in AIMS.items()]
    if len(loses):
        lines = loses.to_dict("records")
        said = ", ".join(f"{line['name']} ({escaped(line['model'])}, {line['gain']:.2f})" for line in lines)
        parts.append(f"- **These make it worse here**: {said}.")
    helps, n = sum(gain.low > 1 for gain in found["gain"]), len(found)
    parts.append(
        f"- Of {n} gains of {found['lever'].nunique()} levers {helps} are shown to help, {len(loses)} to hurt, and "
        f"{n - helps - len(loses)} are not decided."
    )
    pairs = stacked.stacked(known)
    if len(pairs):
        parts.append(f"- **A gain alone does not say what it is beside another lever.** {_by_pair(pairs)}")
    return Markdown("\n".join(filter(None, parts)) + f"\n\n{STARS}")


def _by_pair(pairs: pd.DataFrame) -> str:
    """How many gains beside another lever are far from what they are alone, by which two levers meet."""
    said = [
        f"{row.pair}: {row.off} of {row.n} are more than {CLOSE} times off, {row.turned} change sides"
        for row in stacked.by_pair(pairs).itertuples()
    ]
    return f"{'; '.join(said)}."


def _best(known: Recordings, found: pd.DataFrame, aim: str, words: str) -> str:
    """The lever that surely gives most of something at full size; its interval holds for all it was chosen from."""
    group = found[(found["aim"] == aim) & found["model"].str.endswith("*")]
    widened = [stats.selected(gain, len(group)) for gain in group["gain"]]
    group = group.assign(gain=widened, least=[gain.low for gain in widened])
    if group.empty or not group["least"].max() > 1:
        return ""
    best = group.loc[group["least"].idxmax()]
    return (
        f"- **{words}: {best['name']}.** On {escaped(best['model'])} {times(best['gain'])} times as good: "
        f"{best['what']}. The interval is widened to hold for all {len(group)} gains at full size that this one was "
        f"chosen from ({_where(known[best['study']])}). Others were measured on other days, some on other machines. "
        f"Its price: {best['price']}."
    )


def _gains(known: Recordings) -> pd.DataFrame:
    names = levers()
    entries = [vars(gain) | {"name": names[gain.lever]["name"]} for gain in gains.gains(known)]
    return pd.DataFrame(entries, columns=["name", "lever", "model", "what", "gain", "price", "aim", "study"])


def _where(recording: Recording) -> str:
    return f"scale {recording.scale}, {evidence.chips(recording)}"


def _notebook(known: Recordings, study: str) -> str:
    return f"{study[:2]}, {_where(known[study])}"


def drawn(known: Recordings) -> pd.DataFrame:
    """What the figure draws: `name`, `model` without its star, its `size`, `gain`, and the `aim` of a lever."""
    found = _gains(known)
    size = ["full size" if "*" in model else "small model" for model in found["model"]]
    return found.assign(model=found["model"].str.rstrip("*"), size=size)


def beside(known: Recordings) -> pd.DataFrame:
    """What the second figure draws: gains alone and beside another lever, by the lever's `name`."""
    found = stacked.stacked(known)
    names = {"bits": "another type of weights"}
    return found.assign(name=[names.get(lever) or levers()[lever]["name"] for lever in found["lever"]])


def every(known: Recordings) -> Table:
    """Every lever and model: what gets better by how much, what it costs, and where that was measured."""
    left = [f"{levers()[lever]['name']} ({' and '.join(studies)})" for lever, studies in gains.lacking(known).items()]
    note = f"Nothing is recorded yet of: {'; '.join(left)}." if left else ""
    return table(_told(known), COLUMNS, note)


def _told(known: Recordings) -> pd.DataFrame:
    """Every gain with the words of COLUMNS."""
    found = _gains(known)
    verdicts = [VERDICTS[gain.above(1.0)] for gain in found["gain"]]
    return found.assign(verdict=verdicts, where=[_notebook(known, study) for study in found["study"]])


def status() -> Table:
    """What each lever is, what PLaMo can use of it today, and where that was read."""
    columns: Columns = {
        "name": ("lever", ""),
        "idea": ("idea", ""),
        "status": ("PLaMo today", ""),
        "needs": ("what it needs", ""),
        "as_of": ("as of", ""),
        "read": ("where from", ""),
    }
    return table(pd.DataFrame(levers().values()), columns)


def right_first(model: str, traffic: Traffic) -> Markdown:
    """What has to be right before anything is made faster."""
    hybrid = model.startswith(HYBRID.rpartition("-")[0]) and traffic.n_users > 1
    return Markdown(WRONG if hybrid else f"Nothing is known to be wrong with the released engine here ({model}).")


def for_you(known: Recordings, model: str, traffic: Traffic, objective: str) -> Table | Markdown:
    """Levers for this traffic by predicted gain, with what they do to each phase and what they lose."""
    if not traffics.models(known):
        return Markdown("What a request is made of takes the rows of notebooks 03 and 05: measure these first.")
    found = traffics.ranked(known, model, traffic, objective)
    lost = _lost(known, model)
    found["lost"] = [lost.get(lever.partition(": ")[2], "") for lever in found["lever"]]
    found["name"] = [_named(lever) for lever in found["lever"]]
    found["from"] = [_notebook(known, study) for study in found["study"]]
    columns: Columns = {
        "name": ("lever", ""),
        "over": ("instead of", ""),
        "tokens": ("tokens a second, predicted", times),
        "reading": ("reading, times as fast", _changed),
        "writing": ("writing, times as fast", _changed),
        "lost": ("lost, 0.001 nats", ""),
        "where": ("measured with", ""),
        "from": ("notebook and machine", ""),
    }
    left = "" if traffic.shared else " Keeping what was read is left out, because `shared` is 0."
    left += " So are levers that were measured at one length only: attention, its cache, and looked-up drafts."
    left += " Intervals are each lever's own; that of the sentence above is wider, for it holds for all at once."
    return table(found, columns, f"{_share(known, model, traffic)}{left}")


def _changed(gain: Estimate) -> str:
    return "as before" if gain == traffics.SAME else times(gain)


def _lost(known: Recordings, model: str) -> dict[str, str]:
    """What each type loses, where that was measured: on the embedded model of the same name."""
    loses = gains.lost(known["04-quality"]) if "04-quality" in known else {}
    return {
        dtype: f"{1e3 * kld.value:.2g}" for (name, dtype), kld in loses.items() if name == model.rstrip("*") and kld.n
    }


def advice(known: Recordings, model: str, traffic: Traffic) -> Markdown:
    """The first lever to pull, as arithmetic, and what requests take before it."""
    if not traffics.models(known):
        return Markdown("")
    name = traffics.named(known, model)
    took, best = traffics.spent(known, name, traffic), traffics.best(known, model, traffic)
    rate = traffic.n_gen / (took.reading + took.writing)
    machine = evidence.chips(known["05-context"])
    base = (
        f"By the rows a prompt of {traffic.n_prompt:,} tokens takes {took.reading:.3g} s to read with "
        f"{traffics.in_use(known, traffic)} weights on {machine}. If {traffic.n_users} come at once, the last "
        f"first token comes after {traffic.n_users * took.reading:.3g} s. All answers together get {rate:.3g} tokens a "
        f"second, the time for prompts included."
    )
    if best is None:
        return Markdown(f"{base} No lever is shown to make that better.")
    share = best["share"]
    return Markdown(
        f"{base}\n\n**First: {_named(best['lever'])}.** Requests read for {share:.0%} of their time, which becomes "
        f"{best['reading'].value:.2f} times as fast, and write for {1 - share:.0%}, which becomes "
        f"{best['writing'].value:.2f} times as fast. Together: 1 / ({share:.2f} / {best['reading'].value:.2f} + "
        f"{1 - share:.2f} / {best['writing'].value:.2f}) = {best['tokens']:.2f}."
        f"{_besides(known, model, traffic, best)} "
        f"Its interval is widened to hold for all levers of the list. The times are by rows of {machine}; where the "
        f"list names another machine, a gain is that machine's."
    )


def _besides(known: Recordings, model: str, traffic: Traffic, best: dict[str, Any]) -> str:
    """What may be as good as the first lever, by its widened interval."""
    found = traffics.ranked(known, model, traffic)
    may = found["tokens"].map(lambda gain: gain.value > best["tokens"].low)
    near = found[may & (found["lever"] != best["lever"])]
    return f" As good, it may be: {', '.join(map(_named, near['lever']))}." if len(near) else ""


def as_measured(known: Recordings, model: str) -> Table:
    """Levers on how requests share an engine: as they were measured, not computed for any traffic."""
    found = _told(known)
    found = found[found["lever"].isin(SHARING) & (found["model"].str.rstrip("*") == model.rstrip("*"))]
    return table(found, {name: column for name, column in COLUMNS.items() if name != "model"})


def _named(lever: str, kind: str = "") -> str:
    """A lever's name, a type's by the type."""
    key, _, dtype = lever.partition(": ")
    if key == "bits":
        return f"weights in {dtype or kind}"
    return f"{levers()[key]['name']}, {kind}" if kind else levers()[key]["name"]


def _share(known: Recordings, model: str, traffic: Traffic) -> str:
    share = traffics.reading_share(known, traffics.named(known, model), traffic)
    by = "by a probe" if traffic.reading is not None else "by the rows of notebooks 03 and 05"
    return f"Of this traffic's time {share:.0%} reads prompts and {1 - share:.0%} writes answers, {by}."


def scored(known: Recordings) -> Table:
    """Every gain alone beside the same gain together with another lever, the furthest off first."""
    found = stacked.stacked(known)
    found["name"] = [_named(row["lever"], row["kind"]) for row in found.to_dict("records")]
    found = found.sort_values("ratio", key=lambda ratios: -(ratios.where(ratios > 1, 1 / ratios)))
    columns: Columns = {
        "name": ("lever", ""),
        "model": ("model", ""),
        "beside": ("beside", ""),
        "alone": ("alone", ".2f"),
        "measured": ("beside it", ".2f"),
        "ratio": ("beside it / alone", ".2f"),
        "turned": ("changes sides", lambda turned: "yes" if turned else ""),
    }
    note = f"By pair of levers: {_by_pair(found)} Types all divide by the same rows of {gains.BITS}."
    return table(found, columns, note)


def order(known: Recordings) -> Markdown:
    """Whether the type that is best for one answer is best for a batch."""
    lines = []
    for row in stacked.order(stacked.stacked(known)).itertuples():
        same = row.best == row.best_beside
        said = f"yes, {row.best}" if same else f"no: {row.best} alone, {row.best_beside} in a batch"
        lines.append(
            f"- {escaped(row.model)}: {said}. In {row.pairs} pairs of types one is surely faster than the other in a "
            f"batch; in {row.kept} of these the same one is faster for one answer."
        )
    return Markdown("\n".join(lines) or theme.NOTHING)


def claimed(known: Recordings) -> Table:
    """What the source claims, and what the rows say."""
    said = {entry["key"]: entry["said"] for entry in published()["claim"]}
    entries = [
        {"said": said[each.claim], "found": each.found, "verdict": each.verdict, "from": _notebook(known, each.study)}
        for each in claims.checked(known)
    ]  # fmt: skip
    columns: Columns = {
        "said": ("the source", ""),
        "verdict": ("here it", ""),
        "found": ("what the rows say", ""),
        "from": ("notebook and machine", ""),
    }
    source = published()["source"]
    note = f"Source: {source['name']}, {source['where']}. On other machines a claim may hold: see where it was checked."
    note += " A claim holds, or does not, where the whole interval says so; else it is inconclusive."
    return table(pd.DataFrame(entries, columns=["said", "found", "verdict", "from"]), columns, note)


def sources(known: Recordings) -> Table:
    """The rows behind this page."""
    entries = [
        {"study": study, "scale": each.scale, "machine": evidence.chips(each), "rows": len(each.rows),
         "right": int(each.rows["verdict"].isin(["valid"]).sum())}
        for study, each in known.items()
    ]  # fmt: skip
    columns: Columns = {name: (name, "") for name in ("study", "scale", "machine", "rows")}
    columns = {**columns, "right": ("of them computed right", "")}
    note = "The rest are ceilings, anchors, and computations that came out wrong; those are in no speed here."
    return table(pd.DataFrame(entries), columns, note)
