"""Notebook 04's tables, figure and sentences on the numeric range (half-precision overflow, D5).

The paragraph on llama.cpp issue #24501 is written here, from rows: what they show, what follows for the released
weights if the hypothesis holds, and the command that settles it.
"""

import altair as alt
import numpy as np
import pandas as pd
from IPython.display import Markdown

from plamo_study.measure.recording import Recording
from plamo_study.models import casts
from plamo_study.present.tables import Columns, Table, significant, table
from plamo_study.studies.numeric_range import analysis
from plamo_study.studies.numeric_range.backends import Backend, on_half_precision

ISSUE = "[llama.cpp issue #24501](https://github.com/ggml-org/llama.cpp/issues/24501)"
TENSOR, HYBRID = "ssm_out", "plamo-2-1b"
SHOWN = ("CPU x86", "Metal", "CUDA")
PROMPT = "printf '# Fibonacci with memoization\\ndef fibonacci(n, memo=None):\\n' > p.txt"
ENDS = {"finite": "#a6cbe3", "wrong": "#e69f00", "not finite": "#d55e00"}  # of a planted amplitude, and its colour
NAMED = 4  # kinds of product that the figure tells apart
WORDS = {"mat-vec": "one column", "mat-mul": "many columns"}


def cast_table() -> Table:
    """What each backend casts activations to, per weight type and path, with the limit and where it is written."""
    data = pd.DataFrame(
        [
            {
                "backend": cast.backend,
                "types": ", ".join(cast.types),
                "path": f"{cast.path} ({cast.columns})",
                "cast": cast.cast,
                "limit": f"{cast.of} ≤ {cast.limit:,.0f}" if np.isfinite(cast.limit) else "none",
                "source": cast.source,
            }
            for cast in casts.load()
        ]
    )
    columns: Columns = {
        "backend": ("backend", ""),
        "types": ("weights", ""),
        "path": ("path (columns)", ""),
        "cast": ("input becomes", ""),
        "limit": ("finite while", ""),
        "source": ("ggml/src/", ""),
    }
    return table(data, columns)


def largest_inputs(recording: Recording) -> Table:
    """Per model and kind of product the largest input, in prompt and decode, and the limit it comes closest to."""
    found = analysis.probed(recording.rows)
    return table(_by_kind(found, analysis.judged(found)), _columns())


def for_file(series: analysis.Series) -> Table:
    """The same for one file's probe."""
    found = analysis.ranges(series).assign(model="")
    columns = {name: how for name, how in _columns().items() if name != "model"}
    return table(_by_kind(found, analysis.judged(found)), columns)


def _by_kind(found: pd.DataFrame, judgements: pd.DataFrame) -> pd.DataFrame:
    largest = found.pivot_table(index=["model", "kind"], columns="phase", values="largest", aggfunc="max").reset_index()
    worst = analysis.closest(judgements, ["model", "kind"])
    where = [f"{r.backend}, {WORDS[r.path]}, {r.dtype.removeprefix('KV-')}: {r.cast}" for r in worst.itertuples()]
    worst = worst.assign(where=where)[["model", "kind", "layer", "where", "factor", "verdict"]]
    merged = largest.merge(worst, on=["model", "kind"])
    for phase in analysis.PHASES:
        merged[phase] = merged.get(phase, np.nan)
    return merged.sort_values(["model", "factor"], ascending=[True, False])


def _columns() -> Columns:
    return {
        "model": ("model", ""),
        "kind": ("product with", ""),
        "prompt": ("largest input, prompt", significant()),
        "decode": ("largest input, decode", significant()),
        "where": ("closest limit", ""),
        "layer": ("layer", "d"),
        "factor": ("input / limit", ".2g"),
        "verdict": ("verdict", ""),
    }


def range_figure(recording: Recording, title: str = "What enters every matrix product") -> alt.FacetChart:
    """Largest input per layer and kind on a logarithmic axis, one panel a model; rules are the limits of casts."""
    found = analysis.probed(recording.rows)
    data = found.groupby(["model", "kind", "layer"], as_index=False)["largest"].max()
    data = data[data["largest"] > 0].assign(layer=data["layer"].replace(-1, data["layer"].max() + 1))
    limits = sorted({cast.limit for cast in casts.load() if cast.of == "largest" and np.isfinite(cast.limit)})
    named = data.groupby("kind")["largest"].max().nlargest(NAMED).index
    data["shown"] = [kind if kind in named else "other products" for kind in data["kind"]]
    tidy = pd.concat(
        [data.assign(limit=np.nan), *(data[["model"]].drop_duplicates().assign(limit=at) for at in limits)]
    )
    log = alt.Scale(type="log", nice=False, padding=8)
    y = alt.Y("largest:Q", title="Largest |x| (log)", scale=log, axis=alt.Axis(tickCount=8, format="~e"))
    shown = alt.Chart().transform_filter("isValid(datum.largest)")
    colour = alt.Color("shown:N", title=None, sort=[*named, "other products"])
    points = shown.mark_point().encode(
        x=alt.X("layer:O", title="Layer (last: output matrix)"), y=y, color=colour, tooltip=["kind:N", "largest:Q"]
    )
    rules = alt.Chart().transform_filter("isValid(datum.limit)").mark_rule(strokeDash=[4, 4]).encode(y="limit:Q")
    first = data.sort_values("largest", ascending=False).groupby("model").head(1)
    words = "; ".join(
        f"{r.model}: {r.kind} is largest with {r.largest:,.3g}, layer {r.layer}" for r in first.itertuples()
    )
    names = " and ".join(f"{at:,.0f}" for at in limits)
    description = f"{title}. Dashed: {names}, the largest that F16 and blocks of Q8_0 hold. {words}."
    chart = alt.layer(points, rules, data=tidy).properties(width=260, height=260)
    return chart.facet(column=alt.Column("model:N", title=None)).properties(title=title, description=description)


def grid_figure(recording: Recording | Backend, title: str = "Planted amplitudes on the CPU") -> alt.FacetChart:
    """Finite, wrong or not finite, per type and amplitude; a cross where the prediction says otherwise."""
    grid = analysis.planted(recording.rows, recording.facts).dropna(subset=["amplitude"])
    tidy = grid.assign(
        mark=["" if agrees else "x" for agrees in grid["agrees"]], asked=[f"{a:.3g}" for a in grid["amplitude"]]
    )
    order = [f"{a:.3g}" for a in sorted(grid["amplitude"].unique())]
    x = alt.X("asked:O", title="Largest input of ssm_out", sort=order, axis=alt.Axis(labelAngle=-60))
    y = alt.Y("dtype:N", title=None, sort=list(dict.fromkeys(grid["dtype"])))
    ends = [name for name in ENDS if name in set(grid["observed"])]
    scale = alt.Scale(domain=ends, range=[ENDS[name] for name in ends])
    fields = (
        alt.Chart().mark_rect(stroke="white").encode(x=x, y=y, color=alt.Color("observed:N", title=None, scale=scale))
    )
    crosses = alt.Chart().mark_text().encode(x=x, y=y, text="mark:N")
    description = f"{title}. {summary(grid)}"
    chart = alt.layer(fields, crosses, data=tidy).properties(width=300, height=240)
    return chart.facet(column=alt.Column("phase:N", title=None, sort=list(analysis.PHASES))).properties(
        title=title, description=description
    )


def thresholds(recording: Recording) -> Table:
    """Per type and phase where the engine stopped being finite, beside the limit its source states."""
    grid = analysis.planted(recording.rows, recording.facts)
    data = analysis.thresholds(grid)
    columns: Columns = {
        "dtype": ("ssm_out", ""),
        "phase": ("phase", ""),
        "finite_up_to": ("finite up to", significant()),
        "not_finite_from": ("not finite from", significant()),
        "cells": ("cells", "d"),
        "agree": ("as predicted", "d"),
    }
    return table(data, columns)


def summary(grid: pd.DataFrame) -> str:
    """The grid in a sentence: cells, those off the diagonal, and which types broke."""
    first = _first(grid) or "none"
    off = int((~grid["agrees"].astype(bool)).sum())
    wrong = _first(grid, "wrong")
    also = f"; finite and wrong: {wrong}" if wrong else ""
    return f"{len(grid)} cells, {off or 'none'} off the diagonal; not finite: {first}{also}."


def finding(recording: Recording) -> Markdown:
    """Prediction against observation, and what the probe costs, in a paragraph."""
    grid = analysis.planted(recording.rows, recording.facts)
    cost = analysis.overhead(recording.rows)
    off = int((~grid["agrees"].astype(bool)).sum())
    least, most = cost["ratio"].min(), cost["ratio"].max()
    spent = f"{least:.2f} to {most:.2f}" if most > least else f"{most:.2f}"
    same = "leaves the logits the same bit by bit" if cost["same"].all() else "CHANGES the logits"
    broken, types = grid[grid["observed"] == "not finite"]["dtype"].nunique(), grid["dtype"].nunique()
    first = f" The logits stop being finite with {_first(grid)}." if broken else ""
    return Markdown(
        f"**Large inputs break {broken} of {types} weight types, and llama.cpp's source predicted when in "
        f"{len(grid) - off} of {len(grid)} cases.** Each case plants an input of 1e2 to 1e8 in `{TENSOR}`, in prompt "
        f"or decode.{first} The probe that reads the inputs {same} and takes {spent} times as long."
    )


def _first(grid: pd.DataFrame, how: str = "not finite") -> str:
    """The types that broke in this way, each with the smallest input that broke it."""
    broken = grid[grid["observed"] == how].groupby("dtype", sort=False)["largest"].min()
    return ", ".join(f"{dtype} from {value:,.3g}" for dtype, value in broken.items())


def verdict_on_issue(recording: Recording) -> Markdown:
    """What the rows say about issue #24501, what the hypothesis predicts, and the command that settles it."""
    grid = analysis.planted(recording.rows, recording.facts)
    found = analysis.probed(recording.rows)
    metal = casts.limit("Metal", "Q8_0")
    assert metal is not None
    told = [_shown(grid), on_half_precision(), _measured(found, metal), _predicted(metal), _settled(metal)]
    return Markdown("\n\n".join(filter(None, told)))


def _shown(grid: pd.DataFrame) -> str:
    first = grid[(grid["observed"] == "not finite") & (grid["phase"] == "prompt")].groupby("dtype")["largest"].min()
    limits = ", ".join(f"{name} from {first[name]:,.3g} on" for name in ("F16", "Q8_0") if name in first)
    kept = [name for name in ("BF16", "F32", "Q4_K") if name in set(grid["dtype"]) and name not in first]
    return (
        f"{ISSUE} reports that on a Mac Q8_0 files of PLaMo 2 loop on one reserved token after prompts of several "
        f"lines. BF16 files do not. The issue blames the quantization of {TENSOR}. **Shown here**: such a failure does "
        f"not need rounding, range is enough. On the CPU the very same model stops being finite with {limits}; "
        f"{', '.join(kept)} never do. In llama.cpp's source Metal's matrix kernels hold inputs in F16 tiles for every "
        f"type but BF16."
    )


def _measured(found: pd.DataFrame, metal: casts.Cast) -> str:
    own = found[(found["kind"] == TENSOR) & found["model"].str.startswith(HYBRID)]
    if own.empty:
        return f"**Not shown**: no row holds the range of {TENSOR}."
    largest = own["largest"].max()
    return (
        f"**Not shown**: that the released weights reach such a range. The embedded model's {TENSOR} sees "
        f"{largest:,.3g} at most, {largest / metal.limit:.1g} of Metal's {metal.limit:,.0f}; it is another, much "
        f"smaller model, so this says nothing about the released one. No Metal machine has run these rows, and the "
        f"issue's build is older than the source that was read."
    )


def _predicted(metal: casts.Cast) -> str:
    return (
        f"**If range is the cause, this must hold for the released weights**; if one of it fails, range is not the "
        f"cause:\n\n"
        f"- Over that prompt the largest input of {TENSOR} exceeds {metal.limit:,.0f} in some layer.\n"
        f"- Every type but BF16 fails on Metal as Q8_0 does.\n"
        f"- The same Q8_0 file is right on the CPU, unless the input also exceeds {127 * metal.limit:,.0f}.\n"
        f"- It is right on Metal when the prompt goes in by eight tokens, because up to eight columns take kernels "
        f"that keep F32. (An M5 may differ: its tensor units are handed F32.)"
    )


def _settled(metal: casts.Cast) -> str:
    own = f"{HYBRID}.weights"
    run = f"llama-completion -m data/models/{own}.Q8_0.gguf -n 32 --temp 0 -f p.txt"
    return (
        f"**What settles it**, on a Mac with the released weights, converted here so that none loses rotation (D1):\n\n"
        f"```sh\nplamo-study models fetch {HYBRID} && plamo-study models convert {HYBRID}\n"
        f"plamo-study models quantize data/models/{own}.BF16.gguf --type Q8_0\n{PROMPT}\n"
        f"plamo-study models ranges data/models/{own}.Q8_0.gguf --text p.txt  # {TENSOR} beyond {metal.limit:,.0f}?\n"
        f"{run} -ngl 99        # loops, as the issue says\n"
        f"{run} -ngl 99 -ub 8  # right, if range is the cause\n"
        f"{run} -ngl 0         # right, if range is the cause\n```"
    )
