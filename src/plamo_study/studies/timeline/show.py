"""The operator timeline in figures, tables and sentences: where each phase's time goes, and at what rates.

Every function takes the recording of the study "02-trace".
"""

import altair as alt
from IPython.display import Markdown

from plamo_study.measure.recording import Recording
from plamo_study.present import evidence
from plamo_study.present.evidence import CEILINGS, escaped
from plamo_study.present.tables import Columns, Table, folded, significant, table
from plamo_study.present.theme import CATEGORIES
from plamo_study.studies.timeline import analysis
from plamo_study.studies.timeline.operators import GROUPS

CEILING = {"memory": CEILINGS["read"], "compute": CEILINGS["matmul"]}
LARGEST = 3  # groups named in a sentence
NODE_BY_NODE = (
    "The request was recorded node by node. Each node is computed by itself, so nothing is fused and nothing overlaps. "
    "On the CPU this separates an RMS norm from the product after it; on a GPU it would separate much more. Shares are "
    "of the time in which nodes were computed, without the recorder's own."
)


def shares(recording: Recording, title: str) -> alt.Chart:
    """Share of operator time by group of classes: one bar a phase and model, hybrid beside attention."""
    data = analysis.shares(recording.rows, GROUPS)
    tidy = data.assign(share=[e.value for e in data["share"]], label=data["model"] + ", " + data["phase"])
    tidy["order"] = [list(GROUPS).index(group) for group in tidy["class"]]
    words = [
        f"{label}: " + ", ".join(f"{r.share:.0%} {r['class']}" for _, r in group.iterrows() if r.share >= 0.005)
        for label, group in tidy.groupby("label")
    ]
    labels = [f"{model}, {phase}" for phase in analysis.PHASES for model in sorted(set(tidy["model"]))]
    colour = alt.Scale(domain=list(GROUPS), range=CATEGORIES)
    return (
        alt.Chart(tidy[["label", "class", "share", "order"]])
        .mark_bar()
        .encode(
            x=alt.X("share:Q", stack="normalize", title="Share of operator time", axis=alt.Axis(format=".0%")),
            y=alt.Y("label:N", title=None, sort=labels),
            color=alt.Color("class:N", title=None, scale=colour, legend=alt.Legend(columns=4)),
            order=alt.Order("order:Q"),
            tooltip=["label:N", "class:N", alt.Tooltip("share:Q", format=".1%")],
        )
        .properties(title=title, description=f"{title}. {'; '.join(words)}.", height=160)
    )


def rates(recording: Recording) -> Markdown:
    """Every class: its share, its time, what it moves and computes per second, and how near its ceiling it comes."""
    data = analysis.rates(recording.rows, recording.facts)
    columns: Columns = {
        "model": ("model", ""),
        "phase": ("phase", ""),
        "class": ("class", ""),
        "share": ("share of operator time", ".1%"),
        "us": ("time (us)", significant(3)),
        "read": ("GB/s", significant(3, 1e-9)),
        "compute": ("GFLOP/s", significant(3, 1e-9)),
        "near": ("of the nearer ceiling, best sample", ""),
    }
    near = [f"{row['of_ceiling']:.0%} of {CEILING[row['bound']]}" if row["nodes"] else None
            for row in data.to_dict("records")]  # fmt: skip
    ordered = data.assign(near=near, rank=[analysis.PHASES.index(phase) for phase in data["phase"]])
    shown = table(ordered.sort_values(["model", "rank"], kind="stable"), columns)
    return folded(f"Every class of operators: {len(data)} lines", shown)


def cost(recording: Recording) -> Table:
    """What recording costs, against the same request not recorded; and that everything adds up."""
    columns: Columns = {
        "model": ("model", ""),
        "phase": ("phase", ""),
        "ratio": ("recorded / plain", ".3f"),
        "computing": ("without the callback / plain", ".3f"),
        "callback": ("callback's share", ".1%"),
        "floor": ("callback's share if nodes were empty", ".1%"),
        "adds_up": ("spans miss the wall time by", ".3%"),
        "engine_clock": ("llama.cpp's clock / phases", ".3f"),
    }
    return table(analysis.overhead(recording.rows), columns)


def finding(recording: Recording) -> Markdown:
    """Where the time goes, in one sentence a model and phase, and how it was recorded."""
    data = analysis.shares(recording.rows, GROUPS)
    lines = []
    for (model, phase), group in data.groupby(["model", "phase"], sort=False):
        top = group.assign(value=[e.value for e in group["share"]]).nlargest(LARGEST, "value")
        said = ", ".join(f"{r['value']:.0%} {r['class']}" for r in top.to_dict("records"))
        lines.append((analysis.PHASES.index(phase), f"- **{escaped(str(model))}, {phase}**: {said}."))
    shown = [line for _, line in sorted(lines, key=lambda found: found[0])]
    rest = f"Nodes that belong to no class take at most {analysis.unrecognised(recording.rows):.1%} of it."
    return Markdown("\n".join(shown) + f"\n\n{NODE_BY_NODE} {rest}")


def claims(recording: Recording) -> Table:
    """How near the largest products come to their ceiling."""
    return evidence.claims(analysis.checked_claims(recording.rows, recording.facts))
