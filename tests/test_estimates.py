"""The grammar of notebooks: estimates, comparisons paired by block, claims, tables, charts, and rows that count."""

import math

import numpy as np
import pandas as pd
import pytest

from llama_meter import stats
from llama_meter.errors import StudyError
from llama_meter.stats import Estimate
from plamo_study.measurements import measured_added, measurements, recording
from plamo_study.read import frame
from plamo_study.show.findings import question, questions
from plamo_study.stats.estimates import claim, compare, estimate, family, ratio_of_sums

NAN = float("nan")


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


@pytest.fixture
def ratio(steps):
    return compare(steps, of="n_seq == 2", to="n_seq == 1", by="model")


# ---------------------------------------------------------------- one quantity, a ratio, a crossing


@pytest.mark.parametrize(("n", "level"), [(3, 0.75), (5, 0.9375), (6, 0.95), (9, 0.95)])
def test_an_interval_of_few_processes_carries_its_own_level(n, level):
    found = stats.median([float(i) for i in range(1, n + 1)])
    assert found.level == pytest.approx(level)
    assert (f"; {level:.0%}]" in f"{found:.1f}") == (level < 0.95)
    assert found.per(2.0).level == found.scaled(3.0).level == found.level
    seven = stats.median([1.0, 2, 3, 4, 5, 6, 7])
    assert 1 < seven.low < 2 < 6 < seven.high < 7, "between the two order statistics around 95 %"


def test_one_process_gives_a_value_and_two_their_range_and_neither_decides():
    one, pair = stats.median([3.0]), stats.ratio([1.8, 2.2], [1.0, 1.0])
    estimates = [one, stats.median([1.8, 2.2]), pair, stats.selected(pair, 3)]
    estimates.append(stats.crossing([0, 1], [[0.5, 0.6], [2, 3]]))
    assert all(np.isnan([each.low, each.high]).all() for each in estimates)
    assert f"{one:.1f}" == "3.0 (n = 1)"
    assert f"{pair:.2f}" == "1.80 to 2.20 (2 processes)" == f"{pair.scaled(2).scaled(0.5):.2f}"
    assert f"{stats.median([2.0, 4.0]).per(1):.2f}" == "0.25 to 0.50 (2 processes)"
    assert pair.above(1.0) == pair.below(3.0) == one.above(1.0) == "inconclusive"


def test_a_ratio_is_the_median_of_the_pairs_ratios_where_their_medians_say_the_contrary():
    drafted, plain = [0.92, 0.9, 2.04, 0.93, 1.88, 2.76, 3.1], [1.0, 1.0, 2.2, 1.0, 2.0, 3.0, 3.0]
    assert np.median(drafted) / np.median(plain) < 0.95
    slower = [*drafted[:3], 1.02 * np.median(plain), *drafted[4:]]  # one that wins is the middle one by chance
    found = stats.ratio(slower, plain)
    assert found.value == pytest.approx(np.median([a / b for a, b in zip(slower, plain, strict=True)]))
    assert found.value == pytest.approx(1 / stats.ratio(plain, slower).value)
    paired = stats.ratio([2 * x for x in (1.0, 2.0, 4.0, 8.0, 16.0)], [1.0, 2.0, 4.0, 8.0, 16.0])
    assert (paired.low, paired.value, paired.high) == pytest.approx((2.0, 2.0, 2.0)), "a slow block costs no width"


def test_the_largest_of_several_gets_an_interval_and_a_p_value_that_hold_for_all_of_them():
    rng, missed, alone = np.random.default_rng(4), 0, 0
    for _ in range(300):
        ratios = [stats.ratio(np.exp(0.05 * rng.standard_normal(7)).tolist(), [1.0] * 7) for _ in range(6)]
        best = max(ratios, key=lambda each: each.value)
        chosen = stats.selected(best, len(ratios))
        missed += chosen.within(1.0, 1.0) == "does not hold"
        alone += best.within(1.0, 1.0) == "does not hold"
        assert chosen.low <= best.low <= best.value == chosen.value <= best.high <= chosen.high
        assert chosen.p(1.0) == pytest.approx(min(1.0, 6 * best.p(1.0)))
        assert stats.selected(stats.selected(best, 2), 3) == chosen
    assert missed < 0.05 * 300 < 0.06 * 300 < alone
    for other in (Estimate(1.0, 0.9, 1.1, 5), ratio_of_sums([1.0, 2.0, 4.0], [1.0] * 3)):
        assert np.isnan(stats.selected(other, 3).low), "what cannot be widened has no bounds once it is selected"


@pytest.mark.parametrize("n", [3, 7])
def test_a_crossing_is_found_where_the_curves_cross_with_wider_bounds_where_it_was_selected(n):
    rng, x = np.random.default_rng(5), np.array([0.0, 1000.0, 2000.0, 4000.0, 8000.0])
    ratios = np.exp(0.4 * (x[:, None] - 2500) / 8000 + 0.002 * rng.standard_normal((5, n)))
    found, chosen = (stats.crossing(x.tolist(), ratios, among=among) for among in (1, 6))
    assert chosen.low < found.low < found.value == chosen.value < found.high < chosen.high
    assert found.value == pytest.approx(2500, rel=0.15)
    noisy = np.array([[0.99, 1.2, 0.8], [1.1, 0.9, 0.95], [1.0, 1.05, 0.97], [1.2, 0.9, 1.02]])
    assert np.isinf(stats.crossing([0.0, 1.0, 2.0, 3.0], noisy).high)
    assert np.isnan(stats.crossing([0.0, 1.0, 2.0, 3.0], np.full((4, 3), 1.3)).value)


# ---------------------------------------------------------------- estimates and comparisons of frames


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


def test_two_different_cells_are_never_mixed_and_a_block_measured_again_is_none(steps):
    with pytest.raises(StudyError, match="n_seq"):
        estimate(steps, by="model")
    with pytest.raises(StudyError, match="n_seq"):
        compare(steps, of="n_seq > 0", to="n_seq == 1", by="model")
    again = pd.concat([steps.assign(usable=True), steps[steps.block == 2].assign(usable=False)])
    with pytest.raises(StudyError, match=r"m\[m.usable\]"):
        estimate(again, by="model n_seq")


def test_a_comparison_is_the_median_of_pairs_of_one_block(steps, ratio):
    wide = steps[steps.model == "a"].pivot(index="block", columns="n_seq", values="value")
    assert ratio.estimate[0] == stats.ratio(wide[2].tolist(), wide[1].tolist())
    assert 1.4 < ratio.low[0] < ratio.high[0] < 1.6
    few = compare(steps[~((steps.block == 0) & (steps.n_seq == 1))], of="n_seq == 2", to="n_seq == 1", by="model")
    assert list(few.n) == [5, 5], "a block that lacks a side is in no pair"
    assert [side.n for side in few["first"]] == [6, 6], "and in the other side's median"
    assert list(compare(steps, of="n_seq == 9", to="n_seq == 1", by="model")) == list(ratio), "empty, same columns"


# ---------------------------------------------------------------- claims


@pytest.mark.parametrize(
    ("low", "high", "above_one", "within"),
    [
        (1.1, 1.2, "holds", "inconclusive"),
        (0.95, 1.05, "inconclusive", "holds"),
        (NAN, NAN, "inconclusive", "inconclusive"),
    ],
)
def test_a_claim_holds_fails_or_stays_open(low, high, above_one, within):
    found = Estimate(1.0, low, high, 5)
    assert found.above(1.0) == above_one
    assert found.within(0.85, 1.15) == within


@pytest.mark.parametrize(("ratio", "nearer"), [(0.9, 0.95), (1.1, 1.05), (0.98, 0.95), (1.02, 1.05)])
def test_whether_a_quantity_lies_in_a_range_depends_on_the_nearer_bound_inside_and_outside(ratio, nearer):
    found = stats.ratio([ratio * (1 + 0.02 * k) for k in (-2, -1, 0, 1, 2)], [1.0] * 5)
    assert claim("", "", found, between=(0.95, 1.05))["p"] == found.p(nearer) > min(found.p(0.95), found.p(1.05))


def test_a_family_of_claims_takes_more_than_a_single_one():
    rng = np.random.default_rng(8)
    chance = [claim(str(k), "", stats.ratio(rng.lognormal(0, 0.1, 5), np.ones(5)), above=1.0) for k in range(200)]
    assert sum(entry["verdict"] != "inconclusive" for entry in chance) > 3, "of true null claims some fall by chance"
    assert (family(chance)["verdict"] == "inconclusive").all()
    real = claim("real", "", stats.ratio([1.31, 1.29, 1.30, 1.30, 1.31], [1.0] * 5), above=1.0)
    assert family([real, *chance[:20]])["verdict"].iloc[0] == "holds"


def test_an_answer_needs_its_whole_interval_beyond_the_threshold(ratio):
    asked = [
        question("Does it take longer?", ratio, above=1.2),
        question("Twice as long?", ratio, above=2, why="a factor of two"),
        question("About half more?", ratio, between=(1.4, 1.6)),
        question("?", ratio[:0], above=1),
    ]
    shown = questions(*asked).frame
    assert shown.answer.tolist() == ["yes"] * 2 + ["no"] * 2 + ["yes"] * 2
    assert (shown.of[1], shown.asked[3]) == ("b", "above 2, a factor of two")
    assert questions(asked[-1]).notes == ["Nothing that a question is about was measured here."]


# ---------------------------------------------------------------- measurements, and rows that count


def test_measurements_are_the_rows_one_process_and_metric_a_line_and_what_crashed_has_no_number():
    m, rows = measurements("01-phase-asymmetry"), recording("01-phase-asymmetry").rows
    own = rows[~rows.anchor & (rows.workload != "gate")]
    assert set(m.key) == set(own.key)
    assert not m.duplicated(["key", "metric"]).any()
    timed = m[m.metric.isin(["prefill", "step"])]
    assert np.allclose(timed.value, timed.samples.map(np.median))
    assert set(m.machine).isdisjoint(measured_added("01-phase-asymmetry").machine), "machines stand apart"
    assert set(m.unit) == {"s", "B/s", "FLOP/s", "B"}
    failed = measurements("04-source-table").query("verdict == 'failed'")
    assert len(failed)
    assert failed.value.isna().all()
    assert not failed.usable.any()


def test_drifted_blocks_are_left_out_while_two_others_remain():
    base = {"model": "m", "machine": "m", "anchor": False, "verdict": "valid", "workload": "decode"}
    rows = pd.DataFrame([base | {"block": block, "drift": 0.5 * (block >= 2)} for block in range(5)])
    assert set(frame.usable(rows)["block"]) == {0, 1}
    rows = rows.assign(drift=rows["drift"].mask(rows["block"] >= 1, 0.5))
    assert set(frame.usable(rows)["block"]) == {0, 1, 2, 3, 4}, "better a wide interval than none"
