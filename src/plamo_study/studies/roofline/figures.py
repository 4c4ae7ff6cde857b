"""Notebook 02's figures: intensity against balance, the roofline with every cell, the misses, a batch curve, what if.

A figure takes tidy data, holds none, and reads itself aloud in its description.
"""

from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from plamo_study.analysis.roofline import Ceilings, Model
from plamo_study.present.figures import Chart
from plamo_study.present.theme import CATEGORIES, INK, MUTED
from plamo_study.studies.roofline import every_cell, what_if

LINE_POINTS = 60
LINE_BREAK = "|"
LOG = alt.Scale(type="log", nice=False, padding=8)
BAND = "#a6cbe3"
OF_ENGINE = "llama.cpp's "  # how every kernel's name begins


def intensity(curve: pd.DataFrame, machines: pd.DataFrame, title: str) -> Chart:
    """Intensity against tokens in a pass, one line a model and phase; dashed lines are machines' balance points."""
    x = alt.X("n:Q", title="Tokens of a prompt, or sequences (log)", scale=LOG)
    y = alt.Y("intensity:Q", title="FLOPs per byte (log)", scale=alt.Scale(type="log", nice=False))
    colour = alt.Color("model:N", title=None)
    lines = (
        alt.Chart(curve).mark_line().encode(x=x, y=y, color=colour, strokeDash=alt.StrokeDash("phase:N", title=None))
    )
    marks = machines.assign(label=machines["name"] + ", " + machines["dtype"], n=curve["n"].max())
    rules = alt.Chart(marks).mark_rule(color=MUTED, strokeDash=[2, 3]).encode(y="balance:Q")
    names = alt.Chart(marks).mark_text(align="right", baseline="bottom", dx=-4, fontSize=11).encode(
        x="n:Q", y="balance:Q", text="label:N"
    )  # fmt: skip
    ends = []
    for (model, phase), group in curve.groupby(["model", "phase"]):
        last = group.loc[group["n"].idxmax()]
        ends.append(f"{model}, {phase}: {group['intensity'].min():.3g} to {last['intensity']:.3g} at {last['n']}")
    balances = ", ".join(f"{r.label} {r.balance:.3g}" for r in marks.itertuples())
    words = f"{title}. FLOPs per byte, {'; '.join(ends)}. Balance points: {balances}."
    return alt.layer(rules, names, lines).properties(title=title, description=words, height=340)


def two_passes(passes: pd.DataFrame, fastest: Ceilings, kernel: str, title: str) -> Chart:
    """One prompt and one decode step under the roof of their own kernel and under that of the fastest one.

    `passes` are two lines of `every_cell.cells` of one place with `what` they are; `kernel` names the fastest.
    """
    own = Ceilings(float(passes["read"].max()), float(passes["compute"].max()))
    names = {
        f"roof of the file's own kernel, {passes['dtype'].iloc[0]}": own,
        f"roof of the fastest kernel here, {kernel.removeprefix(OF_ENGINE).replace(' matrix kernel', '')}": fastest,
    }
    ends = passes["intensity"].min() / 2, passes["intensity"].max() * 2
    turns = {name: limit.matmul / limit.read for name, limit in names.items()}
    corners = [(name, at) for name, turn in turns.items() for at in (ends[0], turn, ends[1])]
    roofs = pd.DataFrame(corners, columns=["roof", "intensity"])
    roofs["gflops"] = [min(at * names[name].read, names[name].matmul) / 1e9 for name, at in corners]
    rates = [row["flops"] / row["measured"].value / 1e9 for row in passes.to_dict("records")]
    dots = passes[["what", "intensity"]].assign(gflops=rates)
    x = alt.X("intensity:Q", title="FLOPs per byte moved (log)", scale=LOG, axis=alt.Axis(tickCount=4))
    scale = alt.Scale(type="log", nice=False, domain=[min(rates) / 3, roofs["gflops"].max() * 1.5])
    y = alt.Y("gflops:Q", title="GFLOP/s (log)", scale=scale, axis=alt.Axis(tickCount=4))
    dash = alt.StrokeDash("roof:N", title=None, sort=list(names), legend=alt.Legend(columns=1))
    lines = alt.Chart(roofs).mark_line(color=INK).encode(x=x, y=y, strokeDash=dash)
    points = alt.Chart(dots).mark_point(size=140, filled=True, color=CATEGORIES[1]).encode(x=x, y=y)
    near, far = alt.Chart(dots.nsmallest(1, "intensity")), alt.Chart(dots.nlargest(1, "intensity"))
    labels = [
        near.mark_text(align="left", dx=12, fontSize=13).encode(x=x, y=y, text="what:N"),
        far.mark_text(align="right", dx=8, dy=22, fontSize=13).encode(x=x, y=y, text="what:N"),
    ]
    said = "; ".join(
        f"{row['what']}: {row['flops'] / row['measured'].value / 1e9:,.0f} GFLOP/s at {row['intensity']:.3g} FLOPs per "
        f"byte, {row['share']:.0%} of its own kernel's roof and {row['share_fastest']:.0%} of the fastest kernel's"
        for row in passes.to_dict("records")
    )
    return alt.layer(lines, points, *labels).properties(title=title, description=f"{title}. {said}.", height=320)


def roofline(table: pd.DataFrame, title: str) -> Chart:
    """Every usable pass under the roof of its kernels, a panel for each roof; the band: from full overlap to none.

    `table` is that of `every_cell.cells`; the roof drawn is the best of all studies in a panel.
    """
    tidy = _tidy(table)
    order = tidy["panel"].value_counts().index.tolist()
    roofs = pd.concat([_roof(group) for _, group in tidy.groupby("panel")])
    x = alt.X("intensity:Q", title="FLOPs per byte (log)", scale=LOG, axis=alt.Axis(tickCount=4))
    y = alt.Y("gflops:Q", title="GFLOP/s (log)", scale=alt.Scale(type="log", nice=False), axis=alt.Axis(tickCount=4))
    data = pd.concat([roofs.assign(part="roof"), tidy.assign(part="cell")], ignore_index=True)
    kinds = alt.Scale(domain=sorted(tidy["kind"].unique()))
    roof = alt.Chart().transform_filter("datum.part == 'roof'")
    band = roof.mark_area(color=BAND, opacity=0.6).encode(x=x, y=alt.Y("none:Q", title=""), y2="gflops:Q")
    edge = roof.mark_line(color=INK).encode(x=x, y=y)
    dots = alt.Chart().transform_filter("datum.part == 'cell'").mark_point(size=45, opacity=0.75).encode(
        x=x, y=y, color=alt.Color("kind:N", title=None, scale=kinds, legend=alt.Legend(columns=2)),
        tooltip=["study:N", "model:N", "kind:N", "n_prompt:Q", "n_seq:Q"],
    )  # fmt: skip
    shares = "; ".join(f"{kind} {group['share'].median():.0%}" for kind, group in tidy.groupby("kind"))
    words = f"{title}. {len(tidy)} cells; median share of its own kernels' roof that is reached: {shares}."
    chart = alt.layer(band, edge, dots, data=data).properties(width=165, height=140)
    header = alt.Header(labelExpr=f"split(datum.label, '{LINE_BREAK}')")
    panels = chart.facet(alt.Facet("panel:N", title=None, sort=order, header=header), columns=3)
    return panels.properties(title=title, description=words)


def misses(table: pd.DataFrame, title: str) -> Chart:
    """Measured time over the roof's time against intensity over balance: all cells in one picture, none left out.

    1 is the roof; the band reaches up to where compute and memory hide nothing of one another.
    """
    tidy = _tidy(table).assign(over=1 / table["share"].to_numpy())
    tidy["place"] = tidy["intensity"] / (tidy["compute"] / tidy["read"])
    at = np.geomspace(tidy["place"].min() / 1.2, tidy["place"].max() * 1.2, LINE_POINTS)
    grid = pd.DataFrame({"place": at, "roof": 1.0, "none": 1 + np.minimum(at, 1 / at)})
    x = alt.X(
        "place:Q", title="FLOPs per byte over balance point (log); left of 1 the pass waits for memory", scale=LOG
    )
    y = alt.Y("over:Q", title="Measured time / time at the roof (log)", scale=alt.Scale(type="log", nice=False))
    band = alt.Chart(grid).mark_area(color=BAND, opacity=0.6).encode(x=x, y=alt.Y("roof:Q"), y2="none:Q")
    dots = alt.Chart(tidy).mark_point(size=45, opacity=0.75).encode(
        x=x, y=y, color=alt.Color("kind:N", title=None, legend=alt.Legend(columns=2)),
        tooltip=["study:N", "model:N", "kind:N", "n_prompt:Q", "n_seq:Q", alt.Tooltip("over:Q", format=".2f")],
    )  # fmt: skip
    off, counted = every_cell.off(table), every_cell.counts(table)
    words = (
        f"{title}. {len(tidy)} passes. The blue band is the prediction: {counted['inside']} lie inside it, "
        f"{counted['above']} above and {counted['below']} below; {counted['near']} within {every_cell.NEAR:g} times "
        f"its nearer edge, the median at {off.median():.2f} times, the worst at {off.max():.2f}."
    )
    return alt.layer(band, dots).properties(title=title, description=words, height=340)


def batch_curve(curve: pd.DataFrame, printed: pd.DataFrame, title: str) -> Chart:
    """Upper bounds on a model's decode rate by batch, and what a source prints beside them.

    `curve` as `source_tables.batch_curve` gives it; `printed` has columns sequences, rate and what.
    """
    names = {"weights": "weights alone", "compute": "compute alone", "cache": "weights, cache and compute"}
    tidy = curve.melt(id_vars="sequences", value_vars=list(names), var_name="bound", value_name="rate")
    tidy["bound"] = tidy["bound"].map(names)
    x = alt.X("sequences:Q", title="Sequences (log)", scale=LOG, axis=alt.Axis(values=curve["sequences"].tolist()))
    y = alt.Y("rate:Q", title="Tokens per second (log)", scale=alt.Scale(type="log", nice=False))
    lines = alt.Chart(tidy).mark_line().encode(x=x, y=y, color=alt.Color("bound:N", title=None))
    dots = alt.Chart(printed).mark_point(size=110, color=INK, shape="diamond").encode(x=x, y=y)
    labels = alt.Chart(printed).mark_text(align="left", dx=10, dy=8).encode(x=x, y=y, text="what:N")
    said = "; ".join(f"{r.what} at {r.sequences}: {r.rate:,.0f}" for r in printed.itertuples())
    ends = curve.iloc[-1]
    words = (
        f"{title}. Bounds at {ends['sequences']:.0f} sequences: weights {ends['weights']:,.0f}, compute "
        f"{ends['compute']:,.0f}, with the cache {ends['cache']:,.0f} tokens per second. Printed: {said}."
    )
    return alt.layer(lines, dots, labels).properties(title=title, description=words)


def changes(models: Mapping[str, Model], limit: Ceilings, title: str, factor: float = 2.0) -> Chart:
    """What a factor on compute, bandwidth or bytes does to each pass; on a page a slider sets the factor.

    The two ends of a line are the two ends of the band: compute and memory overlap, or they do not.
    """
    passes = what_if.passes(models, limit)
    rows = pd.concat([passes.assign(change=change) for change in what_if.CHANGES], ignore_index=True)
    slider = alt.param(
        name="factor", value=factor, bind=alt.binding_range(min=1, max=8, step=0.25, name="By which factor? ")
    )
    chosen = alt.selection_point(fields=["change"], bind="legend", name="chosen")
    colour = alt.Color("change:N", title=None, scale=alt.Scale(domain=list(what_if.CHANGES), range=CATEGORIES[:3]))
    base = _after(alt.Chart()).encode(
        y=alt.Y("pass:N", title=None, sort=None),
        yOffset=alt.YOffset("change:N", sort=list(what_if.CHANGES)),
        color=colour,
        opacity=alt.condition(chosen, alt.value(1.0), alt.value(0.15)),
    )
    x = alt.X(
        "overlap:Q",
        title="Times faster (diamond: with overlap)",
        scale=alt.Scale(zero=False),
        axis=alt.Axis(tickCount=5),
    )
    line = base.mark_rule(strokeWidth=2).encode(x=x, x2="sum:Q")
    ends = [
        base.mark_point(shape="diamond", size=80).encode(x=x, tooltip=["model:N", "pass:N", "change:N", "overlap:Q"]),
        base.mark_point(size=40).encode(x=alt.X("sum:Q")),
    ]
    said = "; ".join(
        f"{r['model']}, {r['pass']}, {r['change']}: {r['sum']:.2f} and {r['overlap']:.2f}"
        for r in what_if.gains(models, limit, factor).to_dict("records")
    )
    words = f"{title}. Drawn for a factor of {factor:g}; times faster without overlap and with it: {said}."
    chart = alt.layer(line, *ends, data=rows).properties(width=300, height=230)
    return (
        chart.facet(column=alt.Column("model:N", title=None))
        .add_params(slider, chosen)
        .properties(title=title, description=words)
    )


def _after(chart: alt.Chart) -> alt.Chart:
    """The gains computed in the chart itself, so that the slider can change them."""
    compute, bandwidth, _ = (f"datum.change == '{change}'" for change in what_if.CHANGES)
    return chart.transform_calculate(
        before="datum.weights + datum.rest",
        compute_after=f"{compute} ? datum.compute / factor : datum.compute",
        memory_after=f"{compute} ? datum.weights + datum.rest : {bandwidth} ? (datum.weights + datum.rest) / factor"
        " : datum.weights / factor + datum.rest",
    ).transform_calculate(
        overlap="max(datum.compute, datum.before) / max(datum.compute_after, datum.memory_after)",
        sum="(datum.compute + datum.before) / (datum.compute_after + datum.memory_after)",
    )


def _tidy(table: pd.DataFrame) -> pd.DataFrame:
    """Cells as numbers and words a chart can take."""
    shown = table[["study", "model", "n_prompt", "n_seq", "intensity", "share", "compute", "read"]].copy()
    shown["kind"] = [every_cell.kind(row) for row in table.to_dict("records")]
    shown["gflops"] = [row["flops"] / row["measured"].value / 1e9 for row in table.to_dict("records")]
    shown["panel"] = [
        f"{row['dtype']}, {row['n_threads']} thread{'s' * (row['n_threads'] > 1)}"
        f"{', offloaded' * (row['n_gpu_layers'] != 0)}{LINE_BREAK}{row['chip']}"
        for row in table.to_dict("records")
    ]
    return shown


def _roof(group: pd.DataFrame) -> pd.DataFrame:
    """The roof of a panel in GFLOP/s over intensities: `gflops` with full overlap, `none` without any."""
    limit: dict[str, Any] = {"compute": group["compute"].max(), "read": group["read"].max()}
    at = np.geomspace(group["intensity"].min() / 1.3, group["intensity"].max() * 1.3, LINE_POINTS)
    memory, compute = at * limit["read"] / 1e9, limit["compute"] / 1e9
    both = 1 / (1 / memory + 1 / compute)
    roof = {"intensity": at, "gflops": np.minimum(memory, compute), "none": both}
    return pd.DataFrame({"panel": group["panel"].iloc[0], **roof})
