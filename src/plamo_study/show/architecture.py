"""Both architectures as pictures: memory that each layer keeps between tokens, and bytes that one step reads."""

from collections.abc import Mapping

import altair as alt
import pandas as pd

from llama_meter.models.registry import ModelSpec
from plamo_study.arithmetic import roofline
from plamo_study.arithmetic.roofline import Model
from plamo_study.show.theme import CATEGORIES

SHORT, LONG = 256, 4096  # tokens of context in the charts
MAMBA, WINDOW, FULL = "Mamba: a state of fixed size", "attention over a window", "attention over every token"
KINDS = {MAMBA: CATEGORIES[0], WINDOW: CATEGORIES[2], FULL: CATEGORIES[1]}
STATE = "Mamba states"
READ = {  # parts of a step (arithmetic/roofline.py) by their names in the chart
    "weights of the blocks": "weights of the layers",
    "output head": "output head",
    "keys and values read": "keys and values",
    "scan state": STATE,
    "convolution state": STATE,
}


def kept(models: Mapping[str, Model], title: str) -> alt.FacetChart:
    """A bar per layer: MiB it keeps of one sequence after `LONG` tokens; a tick: after `SHORT`."""
    data = pd.DataFrame([line for name, model in models.items() for line in _layers(name, model)])
    base = alt.Chart(data).encode(alt.X("layer:O").title("Layer, in the order a token passes them"))
    kind = alt.Color("kind:N").scale(domain=list(KINDS), range=list(KINDS.values())).title("")
    bars = base.mark_bar().encode(alt.Y("long:Q").title("MiB"), kind)
    ticks = base.mark_tick(thickness=2, color="#1f2328").encode(alt.Y("short:Q"))
    growing = data.groupby("model").apply(lambda group: f"{group.name}: {_counted(group)}", include_groups=False)
    return (
        alt.layer(bars, ticks)
        .properties(height=110)
        .facet(row=alt.Row("model:N").title(""))
        .properties(
            title={
                "text": title,
                "subtitle": f"Of one sequence: bars after {LONG:,} tokens, dark lines after {SHORT}",
            },
            description=f"{title}. {'; '.join(growing)}. Mamba keeps as much after {LONG:,} tokens as after {SHORT}.",
        )
    )


def read(models: Mapping[str, Model], title: str) -> alt.Chart:
    """A bar per model: bytes that one step of one sequence reads at a depth of `LONG` tokens, by kind."""
    entries = []
    for name, model in models.items():
        for part in roofline.parts(model, 1, LONG):
            if part.name in READ:
                passes = 2 if READ[part.name] == STATE else 1  # a state's bytes count reading and writing
                entries.append({"model": name, "what": READ[part.name], "mib": part.bytes / passes / 2**20})
    data = pd.DataFrame(entries).groupby(["model", "what"], sort=False, as_index=False)["mib"].sum()
    order = list(dict.fromkeys(READ.values()))
    data["place"] = data["what"].map(order.index)
    shares = data.assign(share=data["mib"] / data.groupby("model")["mib"].transform("sum"))
    said = [f"{x['model']}: {x['share']:.0%} {x['what']}" for x in shares.to_dict("records") if x["share"]]
    return (
        alt.Chart(data)
        .mark_bar()
        .encode(
            alt.X("mib:Q").title(f"Read in one step, {LONG:,} tokens deep (MiB)"),
            alt.Y("model:N").title(""),
            alt.Color("what:N").title("").scale(domain=order),
            alt.Order("place:Q"),
        )
        .properties(title=title, description=f"{title}. {'; '.join(said)}.", height=36 * len(models))
    )


def _layers(name: str, model: Model) -> list[dict[str, object]]:
    """One line per layer: its kind, and the MiB it keeps of a sequence after few and after many tokens."""
    spec = ModelSpec(name=name, scale=model["scale"], **model["shape"])
    per_token, state = roofline.kv_bytes_per_token(model), roofline.state_bytes(model)
    entries: list[dict[str, object]] = []
    for layer in range(spec.layers):
        if spec.is_mamba(layer):
            kind, sizes = MAMBA, [state / roofline.layers(model)[0]] * 2
        elif spec.is_sliding(layer):
            kind, sizes = WINDOW, [min(n, spec.window) * per_token for n in (SHORT, LONG)]
        else:
            kind, sizes = FULL, [n * per_token for n in (SHORT, LONG)]
        entries.append(
            {"model": name, "layer": layer, "kind": kind, "short": sizes[0] / 2**20, "long": sizes[1] / 2**20}
        )
    return entries


def _counted(group: pd.DataFrame) -> str:
    return ", ".join(f"{n} layers of {kind}" for kind, n in group["kind"].value_counts().items())
