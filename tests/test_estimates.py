"""The small grammar of notebooks: estimates of groups, comparisons paired by block, claims, tables."""

import math

import nbformat
import numpy as np
import pandas as pd
import pytest

from plamo_study import paths
from plamo_study.analysis import stats
from plamo_study.analysis.estimates import compare, estimate
from plamo_study.errors import StudyError
from plamo_study.measurements import measurements, recording
from plamo_study.present import charts, page_claims, theme
from plamo_study.present.page_claims import Claims


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


def test_a_claim_holds_only_beyond_its_threshold_and_is_stated_once_however_often_its_cell_runs(ratio):
    claim = Claims("01-phase-asymmetry", "recorded")
    for _ in range(3):
        claim("takes longer", ratio, above=1.2)
    claim("takes twice as long", ratio, above=2)
    claim("is about half more", ratio, between=(1.4, 1.6))
    claim("nothing changed", True)
    claim("was measured", ratio.head(0), above=1.2)
    said = ["holds"] * 2 + ["does not hold"] * 2 + ["holds"] * 3 + ["inconclusive"]
    assert [line["verdict"] for line in claim.checked()] == said


def test_one_claim_of_many_needs_more_than_its_own_p_value():
    """Six blocks that lean to one side: alone it is a finding, as the best of forty it is none."""
    one, other = (stats.ratio(each, [1.0] * 6) for each in (
        [1.02, 1.1, 1.01, 1.12, 1.03, 1.09], [0.9, 1.1, 0.95, 1.06, 1.02, 0.98]))  # fmt: skip
    lean = pd.DataFrame({"model": ["a"], "estimate": [one]})
    null = pd.DataFrame({"model": [f"m{k}" for k in range(39)], "estimate": [other] * 39})
    alone, crowd = Claims("", "recorded"), Claims("", "recorded")
    alone("leans", lean, above=1)
    crowd("leans", lean, above=1)
    crowd("is null", null, above=1)
    assert [line["verdict"] for line in alone.checked()] == ["holds"]
    assert crowd.checked()[0]["verdict"] == "inconclusive"


def test_a_claim_takes_exactly_one_threshold(ratio):
    claim = Claims("", "recorded")
    with pytest.raises(StudyError, match="2 thresholds"):
        claim("both", ratio, above=1, below=2)
    with pytest.raises(StudyError, match="0 thresholds"):
        claim("none", ratio)


def test_a_reader_s_own_rows_stand_beside_the_reference_machine(ratio):
    path = next(path for path in sorted(paths.NOTEBOOKS.glob("*.ipynb")) if page_claims.stated(nbformat.read(path, 4)))
    known = page_claims.stated(nbformat.read(path, 4))[0]
    claim = Claims(path.stem, "live")
    claim(known["claim"], ratio.assign(model=known["of"].replace("*", "")).head(1), above=1.2)
    shown = claim.table().frame
    assert shown["reference machine"].tolist() == [known["figure"]]
    assert shown["on this machine"].str.startswith("1.5").all()


def test_a_fact_has_to_hold_of_every_line_and_of_none_nothing_is_claimed():
    claim = Claims("", "recorded")
    true, false = pd.Series([True, True]), pd.Series([True, False])
    cases = ((true, None), (false, None), (true[:0], None), (True, [1]), (True, []), (None, [1]))
    for number, (holds, of) in enumerate(cases):
        claim.fact(f"sentence {number}", holds, of)
    verdicts = [line["verdict"] for line in claim.checked()]
    assert verdicts == ["holds", "does not hold", "inconclusive", "holds", "inconclusive", "does not hold"]


CLAIMING = [path for path in sorted(paths.NOTEBOOKS.glob("*.ipynb")) if "Claims(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", CLAIMING, ids=lambda path: path.stem)  # others ask questions, with any answer
def test_every_claim_of_a_committed_page_holds(path):
    assert [line for line in page_claims.stated(nbformat.read(path, 4)) if line["verdict"] != "holds"] == []


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
            "plamo-2-1b*": charts.BLUE, "plamo-3-nict-2b*": charts.VERMILION}  # fmt: skip


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
    m = measurements("03-source-table")
    failed = m[m.verdict == "failed"]
    assert len(failed)
    assert failed.value.isna().all()
    assert not failed.usable.any()
