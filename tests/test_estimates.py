"""The small grammar of notebooks: estimates of groups, comparisons paired by block, claims, tables."""

import math

import numpy as np
import pandas as pd
import pytest

from llama_meter import stats
from llama_meter.errors import StudyError
from plamo_study.measurements import measurements, recording
from plamo_study.show import charts, theme
from plamo_study.show.findings import question, questions
from plamo_study.stats.estimates import compare, estimate


@pytest.fixture
def steps():
    """Six blocks of steps of 1 and 2 sequences of two models: two sequences take 1.5 times as long."""
    noise = np.random.default_rng(1).normal(1, 0.01, 24)
    lines = [
        {"machine": "here", "block": block, "model": model, "n_seq": n, "n_threads": 2, "value": seconds}
        for block in range(6)
        for model, base in (("a", 0.01), ("b", 0.02))
        for n, seconds in ((1, base), (2, 1.5 * base))
    ]
    return pd.DataFrame(lines).assign(value=lambda d: d.value * noise)


# ---------------------------------------------------------------- estimates and comparisons


def test_an_estimate_is_the_median_over_processes_and_a_rate_is_work_over_it(steps):
    own = steps[(steps.model == "a") & (steps.n_seq == 1)].value.tolist()
    steps.loc[(steps.model == "b") & (steps.n_seq == 2), "value"] = math.nan
    found = estimate(steps, by="model n_seq", times=1e3)
    assert list(zip(found.model, found.n_seq, strict=True)) == [("a", 1), ("a", 2), ("b", 1)], "of nothing, no line"
    assert found.estimate[0] == stats.median(own).scaled(1e3)
    assert (found.value[0], found.low[0], found.n[0]) == (found.estimate[0].value, found.estimate[0].low, 6)
    rates = estimate(steps, by="model n_seq", work="n_seq")
    assert np.allclose(rates.value, 1e3 * rates.n_seq / found.value)
    assert np.allclose(rates.low, 1e3 * rates.n_seq / found.high)


def test_two_different_cells_are_never_mixed_and_the_error_names_what_differs(steps):
    with pytest.raises(StudyError, match="n_seq"):
        estimate(steps, by="model")
    with pytest.raises(StudyError, match="n_seq"):
        compare(steps, of="n_seq > 0", to="n_seq == 1", by="model")


def test_a_block_that_was_measured_again_is_no_other_cell_and_the_error_says_what_to_keep(steps):
    again = pd.concat([steps.assign(usable=True), steps[steps.block == 2].assign(usable=False)])
    with pytest.raises(StudyError, match=r"measured again[\s\S]*m\[m.usable\]"):
        estimate(again, by="model n_seq")
    assert estimate(again[again.usable], by="model n_seq").n.eq(6).all()


def test_a_comparison_is_the_median_of_pairs_of_one_block(steps):
    found = compare(steps, of="n_seq == 2", to="n_seq == 1", by="model")
    wide = steps[steps.model == "a"].pivot(index="block", columns="n_seq", values="value")
    assert found.estimate[0] == stats.ratio(wide[2].tolist(), wide[1].tolist())
    assert 1.4 < found.low[0] < found.high[0] < 1.6
    few = compare(steps[~((steps.block == 0) & (steps.n_seq == 1))], of="n_seq == 2", to="n_seq == 1", by="model")
    assert list(few.n) == [5, 5], "a block that lacks a side is in no pair"
    assert [side.n for side in few["first"]] == [6, 6], "and in the other side's median"
    assert list(compare(steps, of="n_seq == 9", to="n_seq == 1", by="model")) == list(found), "empty, same columns"


# ---------------------------------------------------------------- claims


@pytest.fixture
def ratio(steps):
    return compare(steps, of="n_seq == 2", to="n_seq == 1", by="model")


def test_an_answer_needs_its_whole_interval_beyond_the_threshold(ratio):
    asked = [
        question("Does it take longer?", ratio, above=1.2),
        question("Twice as long?", ratio, above=2),
        question("About half more?", ratio, between=(1.4, 1.6)),
        question("?", ratio[:0], above=1),
    ]
    assert [line["verdict"] for line in questions(*asked).lines] == ["yes"] * 2 + ["no"] * 2 + ["yes"] * 2


def test_one_question_of_many_needs_more_than_its_own_p_value():
    """Six blocks that lean to one side: alone it is a finding, as the best of forty it is none."""
    one, other = (
        stats.ratio(each, [1.0] * 6)
        for each in ([1.02, 1.1, 1.01, 1.12, 1.03, 1.09], [0.9, 1.1, 0.95, 1.06, 1.02, 0.98])
    )
    leans = question("Does it lean?", pd.DataFrame({"model": ["a"], "estimate": [one]}), above=1)
    null = pd.DataFrame({"model": [f"m{k}" for k in range(39)], "estimate": [other] * 39})
    assert questions(leans).lines[0]["verdict"] == "yes"
    assert questions(leans, question("Does this?", null, above=1)).lines[0]["verdict"] == "inconclusive"


def test_a_question_takes_exactly_one_threshold(ratio):
    with pytest.raises(StudyError, match="2 thresholds"):
        question("both", ratio, above=1, below=2)
    with pytest.raises(StudyError, match="0 thresholds"):
        question("none", ratio)


# ---------------------------------------------------------------- charts


def test_a_chart_says_its_numbers_and_draws_every_interval(steps):
    theme.enable()
    chart = charts.lines(estimate(steps, by="model n_seq"), "n_seq", "Two take longer")
    spec = chart.to_dict()
    assert spec["description"].startswith("Two take longer a: 0.0")
    drawn = next(iter(spec["datasets"].values()))
    assert all(line["low"] <= line["value"] <= line["high"] for line in drawn)


def test_a_model_has_one_colour_on_every_chart(steps):
    theme.enable()
    frame = estimate(steps, by="model n_seq").replace({"model": {"a": "plamo-2-1b*", "b": "plamo-3-nict-2b*"}})
    for frame_ in (frame, frame.iloc[::-1]):
        scale = charts.lines(frame_, "n_seq", "t").to_dict()["layer"][1]["encoding"]["color"]["scale"]
        assert dict(zip(scale["domain"], scale["range"], strict=True)) == {
            "plamo-2-1b*": charts.BLUE,
            "plamo-3-nict-2b*": charts.VERMILION,
        }


# ---------------------------------------------------------------- measurements


def test_measurements_are_the_rows_one_process_and_metric_a_line():
    m, rows = measurements("01-phase-asymmetry"), recording("01-phase-asymmetry").rows
    own = rows[~rows.anchor & (rows.workload != "gate")]
    assert set(m.key) == set(own.key)
    assert not m.duplicated(["key", "metric"]).any()
    timed = m[m.metric.isin(["prefill", "step"])]
    assert np.allclose(timed.value, timed.samples.map(np.median))
    assert set(m.unit) == {"s", "B/s", "FLOP/s", "B"}


def test_what_crashed_keeps_a_line_and_has_no_number():
    m = measurements("04-source-table")
    failed = m[m.verdict == "failed"]
    assert len(failed)
    assert failed.value.isna().all()
    assert not failed.usable.any()
