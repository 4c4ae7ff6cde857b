"""The pictures of several machines. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, marks, on_a_line


def rates(data: pd.DataFrame, title: str) -> Chart:
    """Passes that all machines share, `name`, each machine's `rate` (tokens/s), and its `share` of what it allows."""
    chips = list(dict.fromkeys(data["chip"]))
    colour, shape = marks("chip", chips)
    y = alt.Y("name:N", title=None, sort=list(dict.fromkeys(data["name"])), axis=alt.Axis(labelLimit=260))
    base = alt.Chart(data).mark_point(size=60, filled=True).encode(y=y, color=colour, shape=shape)
    fast = alt.X("rate:Q", title="Tokens per second (log)", scale=alt.Scale(type="log", nice=False, padding=10))
    held = alt.X("share:Q", title="Share of its own ceiling", axis=alt.Axis(format="%"))
    both = [base.encode(x=x).properties(width=230, height=24 * data["name"].nunique()) for x in (fast, held)]
    lines = data.to_dict("records")
    said = "; ".join(f"{row['name']}, {row['chip']}: {row['rate']:.3g} tokens/s, {row['share']:.0%}" for row in lines)
    return alt.hconcat(both[0], both[1].encode(y=y.axis(None))).properties(title=title, description=f"{title}. {said}.")


def predicted(data: pd.DataFrame, title: str) -> Chart:
    """What one machine's rows promise for another against what was measured there, in ms."""
    tidy = pd.DataFrame(
        {
            "machines": data["known"] + " for " + data["asked"],
            "x": [1e3 * each.value for each in data["promised"]],
            "y": [1e3 * each.value for each in data["measured"]],
            "tip": data["model"] + ", " + data["phase"],
        }
    )
    return on_a_line(tidy, ("Predicted, ms (log)", "Measured, ms (log)"), "machines", title)
