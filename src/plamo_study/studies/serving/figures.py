"""Notebook 11's figures. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, marks, spread, whiskered

SIDE = 240
BECAME = ["#a6cbe3", "#d55e00", "#4d4d4d"]  # as alone, another answer, none


def contaminated(data: pd.DataFrame, title: str) -> alt.Chart:
    """What became of requests, a bar for each server and number of requests at a time."""
    axis = "Requests (%)"
    names = list(dict.fromkeys(data["became"]))
    colours = alt.Scale(domain=names, range=BECAME[: len(names)])
    y = alt.Y("who:N", title=None, sort=list(dict.fromkeys(data["who"])), axis=alt.Axis(labelLimit=400))
    x = alt.X("share:Q", title=axis, scale=alt.Scale(domain=[0, 100]))
    order = alt.Order("place:Q")
    placed = data.assign(place=[names.index(name) for name in data["became"]])
    bars = alt.Chart(placed).mark_bar(size=14).encode(x=x, y=y, order=order)
    told = "; ".join(
        f"{who}: " + ", ".join(f"{row.share:.0f} % {row.became}" for row in group.itertuples() if row.share)
        for who, group in data.groupby("who", sort=False)
    )
    return bars.encode(color=alt.Color("became:N", title=None, scale=colours)).properties(
        title=title, description=f"{title}. {axis}: {told}.", height=alt.Step(22)
    )


def lengths(data: pd.DataFrame, title: str) -> Chart:
    """Seconds of a request against the tokens of its answer, a line for each prompt, a panel a model."""
    tidy = spread(data[["model", "n_prompt", "n_gen", "whole"]], "whole")
    tidy["prompt"] = [f"{n:,} tokens of prompt" for n in tidy["n_prompt"]]
    names = list(dict.fromkeys(tidy.sort_values("n_prompt")["prompt"]))
    colour, shape = marks("prompt", names)
    axis = "Request (s)"
    base = alt.Chart().encode(x=alt.X("n_gen:Q", title="Tokens of answer", axis=alt.Axis(values=_ticks(tidy))))
    base = base.encode(color=colour)
    layers = whiskered(base, axis, shape=shape)
    chart = alt.layer(*layers, data=tidy).properties(width=250, height=SIDE)
    told = "; ".join(
        f"{model}, {prompt}: " + ", ".join(f"{row.value:.2f} s for {row.n_gen}" for row in group.itertuples())
        for (model, prompt), group in tidy.groupby(["model", "prompt"], sort=False)
    )
    return chart.facet(column=alt.Column("model:N", title=None)).properties(
        title=title, description=f"{title}. {axis} by tokens of answer: {told}."
    )


def _ticks(data: pd.DataFrame) -> list[int]:
    return sorted({int(n) for n in data["n_gen"]})


def loads(data: pd.DataFrame, title: str) -> Chart:
    """Tokens per second, and the first token's wait, against requests at a time; a line a server."""
    names = list(dict.fromkeys(data["who"]))
    panels = [
        _panel(data, "throughput", "Tokens per second, all requests", names),
        _panel(data, "ttft", "First token (ms)", names, 1e3),
    ]
    told = "; ".join(_ends(data[data["who"] == name], name) for name in names)
    return alt.hconcat(*panels).properties(title=title, description=f"{title}. {told}.")


def _ends(data: pd.DataFrame, name: str) -> str:
    said = [
        f"{row.throughput.value:,.0f} tokens a second and {row.ttft.value * 1e3:.0f} ms at {row.n_clients}"
        for row in data.iloc[[0, -1]].itertuples()
    ]
    return f"{name}: {', '.join(dict.fromkeys(said))}"


def _panel(data: pd.DataFrame, column: str, axis: str, names: list[str], factor: float = 1.0) -> Chart:
    tidy = spread(data[["who", "n_clients", column]], column, factor)
    colour, shape = marks("who", names)
    x = alt.X("n_clients:Q", title="Requests at a time", scale=alt.Scale(type="log", base=2, nice=False, padding=10),
              axis=alt.Axis(values=sorted(set(tidy["n_clients"]))))  # fmt: skip
    base = alt.Chart(tidy).encode(x=x, color=colour)
    layers = whiskered(base, axis, shape=shape)
    return alt.layer(*layers).properties(width=250, height=SIDE)


def soak(minutes: pd.DataFrame, title: str) -> Chart:
    """Requests sent and not ended, the wait for the first token, and the memory of client and server, by the minute."""
    memory = pd.concat(
        pd.DataFrame({"minute": minutes["minute"], "line": who, "value": minutes[f"{who}_bytes"] / 2**20})
        for who in ("client", "server")
    )
    waits = pd.concat(
        pd.DataFrame({"minute": minutes["minute"], "line": name, "value": minutes[column] * 1e3})
        for name, column in (("half of the requests", "ttft"), ("nine of ten", "ttft_p90"))
    )
    queue = pd.DataFrame({"minute": minutes["minute"], "line": "at the end of a minute", "value": minutes["waiting"]})
    panels = [
        _minutes(queue, "Requests not ended"),
        _minutes(waits, "First token within (ms)"),
        _minutes(memory, "Memory (MiB)"),
    ]
    told = "; ".join(
        f"minute {row.minute:.0f}: {row.waiting:.0f} requests not ended, client {row.client_bytes / 2**20:.0f} MiB, "
        f"server {row.server_bytes / 2**20:.0f} MiB, first token within {row.ttft * 1e3:.0f} ms for half of the "
        f"requests, {row.ttft_p90 * 1e3:.0f} for nine of ten"
        for row in minutes.iloc[[0, -1] if len(minutes) else []].itertuples()
    )
    both = alt.hconcat(*panels).resolve_scale(color="independent")
    return both.properties(title=title, description=f"{title}. {told}.")


def held(minutes: pd.DataFrame, title: str) -> Chart:
    """Servers that were stopped for a while: requests not ended, answers and failures by the minute of each."""
    panels = []
    for column, axis in (("waiting", "Requests not ended"), ("answered", "Answers a minute"), ("failed", "Failures")):
        data = pd.DataFrame({"minute": minutes["minute"], "line": minutes["server"], "value": minutes[column]})
        panels.append(_minutes(data, axis))
    told = "; ".join(
        f"{row.server}, minute {row.minute:.0f}: {row.waiting:.0f} requests not ended, {row.answered:.0f} answers"
        for row in minutes.groupby("server", sort=False).tail(1).itertuples()
    )
    return alt.hconcat(*panels).properties(title=title, description=f"{title}. At the end: {told}.")


def _minutes(data: pd.DataFrame, axis: str) -> alt.Chart:
    colour, _ = marks("line", list(dict.fromkeys(data["line"])))
    x, y = alt.X("minute:Q", title="Minute"), alt.Y("value:Q", title=axis)
    return alt.Chart(data).mark_line().encode(x=x, y=y, color=colour).properties(width=180, height=SIDE)


def waiting(data: pd.DataFrame, title: str) -> Chart:
    """The time of a token by how many requests wait, and tokens per second; a line a model."""
    names = list(dict.fromkeys(data["model"]))
    panels = [
        _crowd(data, "token", "A further token (ms), by the server", names, 1e3),
        _crowd(data, "throughput", "Tokens per second, all requests", names),
    ]
    told = "; ".join(
        f"{name}: " + ", ".join(f"{row.token.value * 1e3:.2f} ms and {row.throughput.value:,.0f} tokens a second with "
                                f"{row.waits} waiting" for row in of.itertuples())
        for name, of in data.groupby("model", sort=False)
    )  # fmt: skip
    return alt.hconcat(*panels).properties(title=title, description=f"{title}. {told}.")


def _crowd(data: pd.DataFrame, column: str, axis: str, names: list[str], factor: float = 1.0) -> Chart:
    tidy = spread(data[["model", "waits", column]], column, factor)
    colour, shape = marks("model", names)
    base = alt.Chart(tidy).encode(x=alt.X("waits:Q", title="Requests waiting"), color=colour)
    return alt.layer(*whiskered(base, axis, shape=shape)).properties(width=250, height=SIDE)
