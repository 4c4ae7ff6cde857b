"""The picture of all levers. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, marks, on_a_line, spread


def gains(data: pd.DataFrame, title: str) -> Chart:
    """Every gain with its interval, by lever and model, a panel for each aim; full size filled, small models hollow."""
    tidy = spread(data[["name", "model", "size", "aim", "gain"]], "gain")
    tidy["filled"] = (tidy["size"] == "full size").astype(int)
    models = list(dict.fromkeys(tidy["model"]))
    low, high = tidy["low"].min() / 1.1, tidy["high"].max() * 1.1
    panels = [_panel(tidy[tidy["aim"] == aim], str(aim), models, (low, high)) for aim in tidy["aim"].unique()]
    said = "; ".join(f"{row['name']}, {row['model']}: {row['value']:.3g}" for row in tidy.to_dict("records"))
    return alt.vconcat(*panels).properties(title=title, description=f"{title}. {said}.")


def _panel(tidy: pd.DataFrame, aim: str, models: list[str], domain: tuple[float, float]) -> Chart:
    colour, shape = marks("model", models)
    order = list(dict.fromkeys(tidy["name"]))
    axis = alt.Axis(values=[0.2, 0.5, 1, 2, 5, 10, 20, 50, 100])
    x = alt.X(
        "value:Q", title="Times as good as without it (log)", scale=alt.Scale(type="log", domain=domain), axis=axis
    )
    y = alt.Y("name:N", title=None, sort=order, axis=alt.Axis(labelLimit=260))
    base = alt.Chart(tidy).encode(y=y, yOffset=alt.YOffset("model:N", sort=models), color=colour)
    fill = alt.FillOpacity("filled:Q", scale=None)
    layers = [
        alt.Chart(pd.DataFrame({"value": [1.0]})).mark_rule(strokeDash=[4, 4]).encode(x=x),
        base.mark_rule(strokeWidth=2).encode(alt.X("low:Q"), alt.X2("high:Q")),
        base.mark_point(size=50, filled=False).encode(x=x, shape=shape, fill=colour, fillOpacity=fill),
    ]
    return alt.layer(*layers).properties(title=aim, height=26 * len(order))


def stacked(data: pd.DataFrame, title: str) -> Chart:
    """Each gain alone against the same gain beside another lever."""
    tidy = pd.DataFrame(
        {
            "lever": data["name"],
            "x": [each.value for each in data["alone"]],
            "y": [each.value for each in data["measured"]],
            "tip": data["model"] + " " + data["kind"].astype(str) + ", " + data["beside"],
        }
    )
    axes = ("Times as good, alone (log)", "Times as good, beside another lever (log)")
    return on_a_line(tidy, axes, "lever", title)
