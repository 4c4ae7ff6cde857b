"""Notebook 03's sentences and tables on right and wrong: the batching law, the operator's three tests, the builds."""

import pandas as pd
from IPython.display import Markdown

from plamo_study.measure.recording import Recording
from plamo_study.present.tables import Columns, Table, table
from plamo_study.studies.batching_law import analysis
from plamo_study.studies.batching_law.grid import TESTS


def finding(recording: Recording) -> Markdown:
    """What the law says of the drawn configurations and what the engine did, in one paragraph."""
    data = analysis.checked(recording.rows, recording.facts)
    stock = data[data["build"] == "stock"]
    hybrid = analysis.of_hybrid(stock, recording.facts)
    counts = hybrid["observed"].value_counts()
    wrong, aborted = counts.get("wrong", 0), counts.get("abort", 0)
    builds = [
        f"With the build `{build}` {(group['observed'] == 'right').sum()} of {len(group)} batches are right."
        for build, group in data[data["build"] != "stock"].groupby("build")
    ]
    judged = stock["exact"] & stock["judged"]
    told = int(hybrid["judged"].sum())
    exact, control = judged[hybrid.index].sum(), judged.drop(hybrid.index).sum()
    return Markdown(
        f"**Of {len(hybrid)} batches of PLaMo 2 the engine as released computed {wrong} silently wrong and aborted in "
        f"{aborted}.** The batching law says beforehand which sequences come out wrong, and in which call a batch "
        f"aborts. It was right about every sequence, up to that call, in {exact} of the {told} of these batches whose "
        f"rows say so much, and in {control} of {len(stock) - len(hybrid)} of PLaMo 3, which has no such defects. "
        f"{' '.join(builds)}"
    )


def confusion(recording: Recording) -> Table:
    """Predicted against observed, per build and model; anything off the diagonal is a finding."""
    data = analysis.confusion(analysis.checked(recording.rows, recording.facts))
    columns: Columns = {
        "build": ("build", ""),
        "model": ("model", ""),
        "predicted": ("the law says", ""),
        "observed": ("the engine did", ""),
        "configurations": ("configurations", ""),
        "exact": ("agree on every sequence", ""),
    }
    return table(data, columns)


def off_diagonal(recording: Recording) -> Markdown:
    """The configurations in which law and engine disagree, or the sentence that there are none."""
    data = analysis.checked(recording.rows, recording.facts)
    off = data[~data["exact"]]
    if off.empty:
        return Markdown(f"Law and engine agree in all {len(data)} configurations, on every sequence.")
    lines = [
        f"- {r.build}, {r.model}, n_batch {r.n_batch}, n_ubatch {r.n_ubatch}, n_seq {r.n_seq}: "
        f"the law says {r.predicted}, the engine {r.observed}; calls {r.calls}"
        for r in off.itertuples()
    ]
    return Markdown("\n".join(lines))


def separation(recording: Recording) -> Table:
    """Where the line between right and wrong lies, and how far both keep from it."""
    data = analysis.separation(analysis.checked(recording.rows, recording.facts))
    columns: Columns = {
        "build": ("build", ""),
        "model": ("model", ""),
        "rounding": ("rounding, at most", ".1e"),
        "limit": ("limit", ".1e"),
        "right": ("sequences the law calls right", ",d"),
        "largest_right": ("largest error", ".1e"),
        "wrong": ("it calls wrong", ",d"),
        "smallest_wrong": ("smallest error", ".1e"),
    }
    return table(data, columns)


def by_seed(recording: Recording) -> Table:
    """Drawn configurations by build and seed: what the engine did, and how many the law foretold to the sequence."""
    data = analysis.by_seed(analysis.checked(recording.rows, recording.facts))
    columns: Columns = {
        "build": ("build", ""),
        "grid": ("seed", ",d"),
        "configurations": ("configurations", ",d"),
        "wrong": ("silently wrong", ",d"),
        "abort": ("aborted", ",d"),
        "exact": ("predicted on every sequence", ",d"),
    }
    return table(data, columns)


def three_tests(recording: Recording) -> Table:
    """Identity, isolation and bystander, per build and model."""
    data = tests(recording)
    columns: Columns = {
        "test": ("test", ""),
        "asks": ("it asks that", ""),
        "build": ("build", ""),
        "model": ("model", ""),
        "error": ("largest relative error", ".1e"),
        "limit": ("limit", ".1e"),
        "verdict": ("verdict", ""),
    }
    return table(data, columns)


def tests(recording: Recording) -> pd.DataFrame:
    """The three tests' errors with what each asks for and its verdict, in the order an operator would ask."""
    data = analysis.three_tests(recording.rows)
    order = {test: place for place, test in enumerate(TESTS)}
    data = data.sort_values(["test", "model", "build"], key=lambda c: c.map(order) if c.name == "test" else c)
    verdict = ["passes" if e <= limit else "FAILS" for e, limit in zip(data["error"], data["limit"], strict=True)]
    return data.assign(asks=[TESTS[test] for test in data["test"]], verdict=verdict)


def first_aborts(recording: Recording) -> Table:
    """The smallest number of packed prompts that aborts, by batch size: law and engine."""
    data = analysis.first_aborts(analysis.checked(recording.rows, recording.facts))
    for column in ("predicted", "observed"):
        data[column] = [
            "none up to 12" if value is None or value != value else f"{value:.0f}" for value in data[column]
        ]
    columns: Columns = {
        "build": ("build", ""),
        "n_batch": ("n_batch", ""),
        "predicted": ("first abort, the law says", ""),
        "observed": ("first abort, the engine", ""),
    }
    return table(data, columns)
