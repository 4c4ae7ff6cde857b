"""Notebook 04 on fragile tensors: sentences, tables and figures around numbers that come from scans."""

from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis.stats import Estimate
from plamo_study.measure.recording import Recording
from plamo_study.present.evidence import escaped, weights_of
from plamo_study.present.figures import Chart, spread
from plamo_study.present.sentences import among
from plamo_study.present.tables import Columns, Table, significant, table
from plamo_study.present.theme import CATEGORIES, INK, MUTED
from plamo_study.studies.fragility import analysis

MILLI = 1e3  # damage is shown in thousandths of a nat
ISSUE = "[llama.cpp issue #24501](https://github.com/ggml-org/llama.cpp/issues/24501)"
BLAMED = "ssm_out"  # by that issue, in files of Q8_0
COLOURS = {
    analysis.FRAGILE: CATEGORIES[1],
    analysis.MORE: CATEGORIES[3],
    analysis.STURDY: CATEGORIES[2],
    analysis.EXPLAINED: CATEGORIES[0],
    analysis.OPEN: MUTED,
}


def finding(recording: Recording) -> Markdown:
    """Which classes and layers are fragile, and which protection is worth most, per scan."""
    scans = analysis.scans(recording.rows)
    lines = [_found(scan, analysis.fragility(scans), analysis.damage(scans)) for scan in scans]
    return Markdown("\n".join(lines) if lines else "No scan was computed right.")


def _found(scan: analysis.Scanned, judged: pd.DataFrame, damages: pd.DataFrame) -> str:
    mine = judged[(judged["model"] == scan.model) & (judged["candidate"] == scan.candidate)]
    shown = mine[mine["verdict"].isin([analysis.FRAGILE, analysis.MORE])].to_dict("records")
    said = "; ".join(_more(line) for line in shown) or (
        f"**nothing is shown to lose more than its size and role explain**. The median test could have found an excess "
        f"of {mine['detectable'].median():.1f} times"
    )
    worth = damages[(damages["model"] == scan.model) & (damages["candidate"] == scan.candidate)]
    return f"- {escaped(scan.model)}, rounded to {scan.candidate} ({len(scan.of('all'))} chunks): {said}. " + _best(
        scan, worth[worth["family"] == "class"]
    )


def _more(line: dict[str, Any]) -> str:
    """One class or layer that loses more than its control: how much, in how many chunks, against which null."""
    needed = f"more than {analysis.MARGIN:g} times"
    beyond = f"It is {needed}" if line["verdict"] == analysis.FRAGILE else f"Whether it is {needed} is open"
    return (
        f"**{line['point']} loses {line['excess']:.2f} times what its size and role explain.** It loses more than its "
        f"control in {line['above']} of {line['n_chunks']} chunks (p = {line['p']:.2g}; {line['p_adjusted']:.2g} "
        f"corrected over {line['tests']} tests). {beyond} (p = {line['p_margin_adjusted']:.2g}, corrected), and only "
        "then would keeping it be worth it for its own sake"
    )


def on_issue(recording: Recording) -> Markdown:
    """What the scan says to a reader of the issue that blames one class of tensors: shown, null, level, model."""
    scans = analysis.scans(recording.rows)
    judged, damages = analysis.fragility(scans), analysis.damage(scans)
    mine = judged[judged["point"] == BLAMED].to_dict("records") if not judged.empty else []
    if not mine:
        return Markdown(f"No scan of {BLAMED} was computed right.")
    line = mine[0]
    scan = next(s for s in scans if (s.model, s.candidate) == (line["model"], line["candidate"]))
    kept = damages[(damages["model"] == scan.model) & (damages["candidate"] == scan.candidate)].set_index("point")
    avoided, bits = kept.loc[BLAMED, "avoided"], 8 * kept.loc[BLAMED, "extra_bytes"] / scan.size("all")[0]
    saved, everything = (significant(2, MILLI)(e) for e in (avoided, scan.mean("all")))
    known = line["verdict"] in (analysis.FRAGILE, analysis.MORE)
    beyond = line["verdict"] == analysis.FRAGILE
    return Markdown(
        f"{ISSUE} blames the quantization of `{BLAMED}`. **What is {'shown' if known else 'not shown'} here**: "
        f"rounding `{BLAMED}` to {scan.candidate} costs {line['excess']:.2f} times what random errors of the same size "
        f"in the same place cost, relative to the other classes (95 % prediction interval). It costs more than they do "
        f"in {line['above']} of {line['n_chunks']} chunks.\n\n"
        f"- **More than chance?** If the rounding were one more draw of random errors, the excess would be 1. That is "
        f"{'rejected' if known else 'not rejected'} at a false-discovery rate of {analysis.LEVEL:.0%}: "
        f"p = {line['p']:.2g}, and {line['p_adjusted']:.2g} after Benjamini-Hochberg over {line['tests']} classes and "
        f"layers of {judged['model'].nunique()} models.\n"
        f"- **Enough to keep it for its own sake?** That would need an excess of {analysis.MARGIN:g}, which is "
        f"{'shown too' if beyond else 'not shown'}: p = {line['p_margin']:.2g}, corrected "
        f"{line['p_margin_adjusted']:.2g}.\n"
        f"- **What keeping it buys**: {bits:.2f} more bits per weight of the whole file avoid {saved} of {everything} "
        f"thousandths of a nat.\n"
        f"- **Of which model**: {_whose(recording, scan)}. The issue is about the released weights in Q8_0 on a Mac; "
        f"this is {scan.candidate} on the CPU. `{BLAMED}` can be the tender spot of this architecture. That does not "
        f"show that rounding breaks the released files: the range of its input is the other candidate, below."
    )


def _whose(recording: Recording, scan: analysis.Scanned) -> str:
    fact = next(
        (f for f in recording.facts.values() if f.get("name") == scan.model.rstrip("*") and "n_params" in f), {}
    )
    kind = weights_of(fact) if fact else "unknown"
    words = {"trained": "a small model of this architecture that was trained here, not PLaMo's weights"}
    size = f" ({fact['n_params'] / 1e6:.1f} M parameters)" if fact else ""
    return f"{escaped(scan.model)}, {words.get(kind, f'{kind} weights')}{size}"


def _best(scan: analysis.Scanned, classes: pd.DataFrame) -> str:
    """The class whose protection avoids most damage per byte, of those that avoid some."""
    sure = classes[classes["p_avoided"] < analysis.LEVEL]
    if sure.empty:
        return "No class avoids damage beyond doubt when it alone is kept."
    best = sure.loc[sure["per_megabyte"].map(lambda e: e.value).idxmax()]
    bits = significant(2)(8 * best["extra_bytes"] / scan.size("all")[0])
    avoided = scan.avoided(best["point"], len(classes))
    saved, everything = (significant(2, MILLI)(e) for e in (avoided, scan.mean("all")))
    return (
        f"Per byte, {best['point']} is the best class to keep in {scan.reference} ({among(avoided, 'classes')}): "
        f"{bits} more bits per weight avoid {saved} of the {everything} thousandths of a nat that quantizing "
        f"everything costs."
    )


def _price(price: Estimate) -> str:
    """Bits per weight for 0.01 nats; unbounded where keeping the point may avoid nothing."""
    return significant(3, 0.01)(price) if np.isfinite(price.value) else "nothing avoided"


def points(recording: Recording) -> Table:
    """Damage of every class and layer quantized alone, its control, the excess, and the verdict."""
    columns: Columns = {
        "model": ("model", ""),
        "candidate": ("type", ""),
        "point": ("quantized alone", ""),
        "dropped": ("KLD (0.001 nats)", significant(3, MILLI)),
        "control": ("control (0.001 nats)", significant(3, MILLI)),
        "excess": ("excess over the others", ".2f"),
        "p_adjusted": ("p that it is 1, adjusted", ".2g"),
        "verdict": ("verdict", ""),
    }
    return table(analysis.fragility(analysis.scans(recording.rows)), columns)


def worth(recording: Recording) -> Table:
    """What keeping each class or layer in the reference's type costs and avoids, cheapest bits per damage first."""
    data = analysis.damage(analysis.scans(recording.rows))
    data = data.assign(cost=data["price"].map(lambda e: e.value)).sort_values(["model", "candidate", "family", "cost"])
    columns: Columns = {
        "model": ("model", ""),
        "candidate": ("type", ""),
        "point": ("kept", ""),
        "extra_bytes": ("extra bytes", ",.0f"),
        "share": ("alone, share of all damage", ".2f"),
        "avoided": ("KLD avoided (0.001 nats)", significant(3, MILLI)),
        "p_avoided": ("adjusted p", ".2g"),
        "price": ("bits per weight per 0.01 nats", _price),
    }
    return table(data, columns)


def frontier(recording: Recording) -> Table:
    """Class after class kept in the reference's type, most damage avoided per byte first."""
    data = analysis.frontier(analysis.scans(recording.rows))
    columns: Columns = {
        "model": ("model", ""),
        "candidate": ("type", ""),
        "step": ("classes kept", ""),
        "point": ("the last of them", lambda name: name or "none"),
        "bits_per_weight": ("bits per weight", ".2f"),
        "damage": ("KLD (0.001 nats)", significant(3, MILLI)),
    }
    return table(data, columns)


def damage_figure(
    recording: Recording, title: str = "What each class and each layer costs when it alone is quantized"
) -> Chart:
    """Damage of each point quantized alone, with its interval, and its control; one panel a scan."""
    return damages(analysis.fragility(analysis.scans(recording.rows)), title)


def frontier_figure(recording: Recording, title: str = "What protection buys: class after class kept") -> Chart:
    """Damage against the size of the file while class after class is protected."""
    return frontiers(analysis.frontier(analysis.scans(recording.rows)), title)


def damages(data: pd.DataFrame, title: str) -> Chart:
    """Dots are damages coloured by verdict, whiskers their intervals, ticks the controls; logarithmic."""
    tidy = spread(data.assign(control=[e.value * MILLI for e in data["control"]]), "dropped", MILLI)
    tidy = tidy.drop(columns="excess").assign(scan=tidy["model"] + ", " + tidy["candidate"])
    colour = alt.Color("verdict:N", title=None, scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())))
    x = alt.X("value:Q", title="KL divergence (0.001 nats, log)", scale=alt.Scale(type="log", nice=False, padding=12))
    y = alt.Y("point:N", title=None, sort=None)
    base = alt.Chart().encode(y=y)
    tips = ["point:N", alt.Tooltip("value:Q", format=".3~g"), alt.Tooltip("control:Q", format=".3~g")]
    layers = [
        base.mark_tick(color=INK, thickness=2, height=12).encode(x="control:Q"),
        base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q", color=colour),
        base.mark_point().encode(x=x, color=colour, tooltip=tips),
    ]
    words = "; ".join(f"{scan}: {_listed(group)}" for scan, group in tidy.groupby("scan"))
    description = f"{title}. Dots are measured, ticks are errors of the same size without structure. {words}."
    return _beside(layers, tidy, width=280).properties(title=title, description=description)


def _beside(layers: list[alt.Chart], tidy: pd.DataFrame, **size: int) -> alt.HConcatChart:
    """One panel a scan. Not facets: Vega doubts independent scales of their layers, and says so on every page."""
    groups = tidy.groupby("scan", sort=False)
    return alt.hconcat(*(alt.layer(*layers, data=data).properties(title=scan, **size) for scan, data in groups))


def _listed(group: pd.DataFrame) -> str:
    return ", ".join(f"{r.point} {r.value:.3g} ({r.verdict})" for r in group.itertuples())


def frontiers(data: pd.DataFrame, title: str) -> Chart:
    """One line a scan from the candidate up to the last step that still costs something, each step labelled."""
    tidy = spread(data, "damage", MILLI)
    tidy = tidy[tidy["value"] > 0].assign(scan=data["model"] + ", " + data["candidate"])
    tidy = tidy.assign(label=["+ " + r.point if r.point else r.candidate for r in tidy.itertuples()])
    x = alt.X("bits_per_weight:Q", title="Bits per weight of the file", scale=alt.Scale(zero=False, padding=16))
    y = alt.Y("value:Q", title="KL divergence (0.001 nats, log)", scale=alt.Scale(type="log", nice=False, padding=12))
    layers = [
        alt.Chart().mark_rule(strokeWidth=2, color=CATEGORIES[0]).encode(x=x, y="low:Q", y2="high:Q"),
        alt.Chart().mark_line(color=CATEGORIES[0]).encode(x=x, y=y, order="step:Q"),
        alt.Chart().mark_point(color=CATEGORIES[0]).encode(x=x, y=y),
        *(
            alt.Chart()
            .transform_filter(f"datum.step {which} 0")
            .mark_text(align="left", dx=7, dy=dy, fontSize=10, color=INK)
            .encode(x=x, y=y, text="label:N")
            for which, dy in (("==", 9), (">", -6))  # the first two can lie on one another
        ),
    ]
    words = "; ".join(
        f"{scan}: " + ", ".join(f"{r.label} {r.value:.3g} at {r.bits_per_weight:.2f} bits" for r in group.itertuples())
        for scan, group in tidy.groupby("scan")
    )
    chart = _beside(layers, tidy, width=330, height=260)
    return chart.properties(title=title, description=f"{title}. {words}.")
