"""The words and tables around the gains: what to do next, for whom, and what the sources say of it."""

import tomllib
from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study import paths
from plamo_study.analysis.stats import Estimate
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence
from plamo_study.present.evidence import escaped
from plamo_study.present.sentences import CLOSE
from plamo_study.present.tables import Columns, Table, significant, table
from plamo_study.studies.levers import claims, gains, stacked, traffic as traffics
from plamo_study.studies.levers.gains import Recordings
from plamo_study.studies.levers.traffic import Traffic
from plamo_study.studies.quantization.analysis import simultaneous

VERDICTS = {"holds": "gains", "does not hold": "loses", "inconclusive": "not decided"}
AIMS = {"tokens a second": "For tokens a second", "longest": "For the longest wait"}
MANY = 10  # times from which nobody needs a digit after the point


def published() -> dict[str, Any]:
    """What every lever is and what PLaMo can use of it, and what the source claims."""
    return tomllib.loads((paths.PUBLISHED / "levers.toml").read_text(encoding="utf-8"))


def levers() -> dict[str, dict[str, str]]:
    """The levers by key, as they stand in data/published."""
    return {entry["key"]: entry for entry in published()["lever"]}


def finding(known: Recordings) -> Markdown:
    """The largest gain, what loses, and whether levers multiply."""
    found = _gains(known)
    if found.empty:
        return Markdown("Nothing is measured here yet: `plamo-study study` measures what this page needs.")
    sure = found[[gain.low > 1 for gain in found["gain"]]]
    loses = found[[gain.high < 1 for gain in found["gain"]]]
    parts = [_best(known, found, what, words) for what, words in AIMS.items()]
    if len(loses):
        said = ", ".join(
            f"{row['name']} ({escaped(row['model'])}, {row['gain']:.2f})" for row in loses.to_dict("records")
        )
        parts.append(f"- **These make it worse here**: {said}.")
    n = len(found)
    parts.append(
        f"- Of {n} gains of {found['lever'].nunique()} levers {len(sure)} are shown to help, {len(loses)} to hurt, and "
        f"{n - len(sure) - len(loses)} are not decided."
    )
    pairs = stacked.stacked(known)
    if len(pairs):
        parts.append(
            f"- **Levers do not simply multiply**: beside another lever {int(pairs['close'].sum())} of {len(pairs)} "
            f"gains are within {CLOSE} times of what they are alone."
            if not pairs["close"].all()
            else f"- Levers multiply: beside another lever all {len(pairs)} gains are within {CLOSE} times."
        )
    return Markdown("\n".join(filter(None, parts)))


def _best(known: Recordings, found: pd.DataFrame, what: str, words: str) -> str:
    """The lever that surely gives most of something; its interval holds for all that it was chosen from."""
    group = found[found["what"].str.startswith(what)]
    widened = [simultaneous(gain, len(group)) for gain in group["gain"]]
    group = group.assign(gain=widened, least=[gain.low for gain in widened])
    if group.empty or not group["least"].max() > 1:
        return ""
    best = group.loc[group["least"].idxmax()]
    return (
        f"- **{words}: {best['name']}.** On {escaped(best['model'])} it makes the {best['what']} {times(best['gain'])} "
        f"times as good ({_where(known[best['study']])}; the interval holds for all {len(group)} that it was chosen "
        f"from). Its price: {best['price']}."
    )


def _gains(known: Recordings) -> pd.DataFrame:
    names = levers()
    entries = [vars(gain) | {"name": names[gain.lever]["name"]} for gain in gains.gains(known)]
    return pd.DataFrame(entries, columns=["name", "lever", "model", "what", "gain", "price", "study"])


def _where(recording: Recording) -> str:
    return f"scale {recording.scale}, {evidence.chips(recording)}"


def drawn(known: Recordings) -> pd.DataFrame:
    """What the figure draws: `name`, `model` without its star, `gain`."""
    found = _gains(known)
    return found.assign(model=found["model"].str.rstrip("*"))


def beside(known: Recordings) -> pd.DataFrame:
    """What the second figure draws: gains alone and beside another lever, by the lever's `name`."""
    found = stacked.stacked(known)
    names = {"bits": "another type of weights"}
    return found.assign(name=[names.get(lever) or levers()[lever]["name"] for lever in found["lever"]])


def every(known: Recordings) -> Table:
    """Every lever and model: what gets better by how much, what it costs, and where that was measured."""
    found = _gains(known)
    found["verdict"] = [VERDICTS[gain.above(1.0)] for gain in found["gain"]]
    found["where"] = [f"{row['study'][:2]}, {_where(known[row['study']])}" for row in found.to_dict("records")]
    columns: Columns = {
        "name": ("lever", ""),
        "model": ("model", ""),
        "what": ("what gets better", ""),
        "gain": ("times", times),
        "verdict": ("verdict", ""),
        "price": ("what it costs", ""),
        "where": ("notebook and machine", ""),
    }
    left = [f"{levers()[lever]['name']} ({' and '.join(studies)})" for lever, studies in gains.lacking(known).items()]
    note = f"Nothing is recorded yet of: {'; '.join(left)}." if left else ""
    return table(found, columns, note)


def times(gain: Estimate) -> str:
    """A gain with two digits after the point, none where it is large."""
    return format(gain, ".0f" if gain.value >= MANY else ".2f")


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


def for_you(known: Recordings, model: str, traffic: Traffic, objective: str) -> Table | Markdown:
    """Levers for this traffic by predicted gain."""
    if not traffics.models(known):
        return Markdown(
            "It takes the rows of notebooks 03 and 05 to say what a request is made of: measure these first."
        )
    found = traffics.ranked(known, model, traffic, objective)
    found["name"] = [_named(lever) for lever in found["lever"]]
    found["verdict"] = [VERDICTS[gain.above(1.0)] for gain in found["gain"]]
    found["from"] = [f"{study[:2]}, {_where(known[study])}" for study in found["study"]]
    aim = {"tokens": "tokens a second", "wait": "times as short, the longest wait"}[objective]
    columns: Columns = {
        "name": ("lever", ""),
        "over": ("instead of", ""),
        "gain": (f"{aim}, predicted", times),
        "verdict": ("verdict", ""),
        "where": ("measured with", ""),
        "from": ("notebook and machine", ""),
    }
    return table(found, columns, _share(known, model, traffic))


def _named(lever: str, kind: str = "") -> str:
    """A lever's name, a type's by the type."""
    key, _, dtype = lever.partition(": ")
    if key == "bits":
        return f"weights in {dtype or kind}"
    return f"{levers()[key]['name']}, {kind}" if kind else levers()[key]["name"]


def _share(known: Recordings, model: str, traffic: Traffic) -> str:
    full = next(name for name in traffics.models(known) if name.rstrip("*") == model.rstrip("*"))
    share = traffics.reading_share(known, full, traffic)
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
    }
    n = int(found["close"].sum())
    return table(found, columns, f"{n} of {len(found)} are within {CLOSE} times.")


def order(known: Recordings) -> Table:
    """Whether the types that are best for one answer are best for a batch."""
    found = stacked.order(stacked.stacked(known))
    columns: Columns = {
        "model": ("model", ""),
        "n": ("types", ""),
        "pairs": ("pairs that a batch tells apart", ""),
        "kept": ("of these in the order of one answer", ""),
        "tau": ("Kendall's tau of all", significant(2)),
    }
    return table(found, columns)


def claimed(known: Recordings) -> Table:
    """What the source claims, and what the rows say."""
    said = {entry["key"]: entry["said"] for entry in published()["claim"]}
    entries = [
        {"said": said[each.claim], "found": each.found, "verdict": f"{each.verdict}",
         "from": f"{each.study[:2]}, {_where(known[each.study])}"}
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
    return table(pd.DataFrame(entries, columns=["said", "found", "verdict", "from"]), columns, note)


def sources(known: Recordings) -> Table:
    """The rows behind this page."""
    entries = [
        {"study": study, "scale": each.scale, "rows": len(each.rows), "machine": evidence.chips(each),
         "computed": evidence.computed(each.rows)}
        for study, each in known.items()
    ]  # fmt: skip
    columns: Columns = {name: (name, "") for name in ("study", "scale", "rows", "machine", "computed")}
    return table(pd.DataFrame(entries), columns)
