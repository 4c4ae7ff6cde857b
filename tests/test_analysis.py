"""Statistics that say how sure they are: estimates, selections, claims, simulated coverage, and which rows count."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from llama_meter import stats
from llama_meter.stats import Estimate
from plamo_study.read import usable
from plamo_study.show import tables
from plamo_study.show.tables import table
from plamo_study.stats import clustered, coverage, estimates as claims
from plamo_study.stats.coverage import by_size

NAN = float("nan")


def value(estimate):
    return estimate.value


def test_one_process_gives_a_value_and_no_interval():
    estimate = stats.median([3.0])
    assert (estimate.value, estimate.n) == (3.0, 1)
    assert np.isnan(estimate.low)
    assert estimate.above(1.0) == "inconclusive"
    assert f"{estimate:.1f}" == "3.0 (n = 1)"


@pytest.mark.parametrize(("n", "level"), [(3, 0.75), (5, 0.9375), (6, 0.95), (9, 0.95)])
def test_an_interval_of_few_processes_carries_its_own_level(n, level):
    estimate = stats.median([float(i) for i in range(1, n + 1)])
    assert estimate.level == pytest.approx(level)
    assert (f"; {level:.0%}]" in f"{estimate:.1f}") == (level < 0.95)
    assert estimate.per(2.0).level == estimate.scaled(3.0).level == estimate.level


def test_a_seven_process_interval_lies_between_the_two_order_statistics_around_95_percent():
    found = stats.median([1.0, 2, 3, 4, 5, 6, 7])
    assert 1 < found.low < 2
    assert 6 < found.high < 7


def test_two_processes_or_pairs_give_their_range_and_decide_nothing():
    pair = stats.ratio([1.8, 2.2], [1.0, 1.0])
    estimates = [stats.median([1.8, 2.2]), pair, stats.selected(pair, 3), stats.crossing([0, 1], [[0.5, 0.6], [2, 3]])]
    assert all(np.isnan([estimate.low, estimate.high]).all() for estimate in estimates)
    assert f"{pair:.2f}" == "1.80 to 2.20 (2 processes)" == f"{pair.scaled(2).scaled(0.5):.2f}"
    assert f"{stats.rate(1, [2.0, 4.0]):.2f}" == "0.25 to 0.50 (2 processes)"
    assert pair.above(1.0) == pair.below(3.0) == "inconclusive"


def test_a_rate_is_moved_little_by_one_slow_process():
    assert stats.rate(100, [1.0, 1.01, 0.99, 1.02, 9.0]).value == pytest.approx(100 / 1.01)


def test_a_ratio_is_the_median_of_the_pairs_ratios_where_their_medians_say_the_contrary():
    drafted, plain = [0.92, 0.9, 2.04, 0.93, 1.88, 2.76, 3.1], [1.0, 1.0, 2.2, 1.0, 2.0, 3.0, 3.0]
    assert np.median(drafted) / np.median(plain) < 0.95
    slower = [*drafted[:3], 1.02 * np.median(plain), *drafted[4:]]  # one that wins is the middle one by chance
    ratio = stats.ratio(slower, plain)
    assert ratio.value == pytest.approx(np.median([a / b for a, b in zip(slower, plain, strict=True)]))
    assert ratio.value == pytest.approx(1 / stats.ratio(plain, slower).value)
    paired = stats.ratio([2 * x for x in (1.0, 2.0, 4.0, 8.0, 16.0)], [1.0, 2.0, 4.0, 8.0, 16.0])
    assert (paired.low, paired.value, paired.high) == pytest.approx((2.0, 2.0, 2.0)), "a slow block costs no width"


@pytest.mark.parametrize("n", [3, 5, 6, 12])
@pytest.mark.parametrize("among", [1, 6, 40])
def test_an_interval_holds_its_own_value_without_being_stretched_to_it(n, among):
    rng = np.random.default_rng(n)
    for scale in (0.01, 0.1):
        for values in np.exp(scale * rng.standard_exponential((60, n)) ** 2):
            found = stats.selected(stats.ratio(values.tolist(), [1.0] * n), among)
            assert found.low * (1 - 1e-9) <= found.value <= found.high * (1 + 1e-9)


def test_the_largest_of_several_gets_an_interval_and_a_p_value_that_hold_for_all_of_them():
    rng, missed, alone = np.random.default_rng(4), 0, 0
    for _ in range(300):
        ratios = [stats.ratio(np.exp(0.05 * rng.standard_normal(7)).tolist(), [1.0] * 7) for _ in range(6)]
        best = max(ratios, key=value)
        chosen = stats.selected(best, len(ratios))
        missed += chosen.within(1.0, 1.0) == "does not hold"
        alone += best.within(1.0, 1.0) == "does not hold"
        assert chosen.p(1.0) == pytest.approx(min(1.0, 6 * best.p(1.0)))
        assert stats.selected(stats.selected(best, 2), 3) == chosen
    assert missed < 0.05 * 300 < 0.06 * 300 < alone


def test_what_cannot_be_widened_has_no_bounds_once_it_is_selected():
    for estimate in (Estimate(1.0, 0.9, 1.1, 5), clustered.ratio_of_sums([1.0, 2.0, 4.0], [1.0] * 3)):
        assert np.isnan(stats.selected(estimate, 3).low)
        assert stats.selected(estimate, 1) == estimate
    sums = [clustered.ratio_of_sums([1.0, 2.0, 4.0], [1.0] * 3, among) for among in (1, 3)]
    assert sums[1].high - sums[1].low > sums[0].high - sums[0].low


@pytest.mark.parametrize("n", [3, 7])
def test_a_crossing_is_found_where_the_curves_cross_with_wider_bounds_where_it_was_selected(n):
    rng, x = np.random.default_rng(5), np.array([0.0, 1000.0, 2000.0, 4000.0, 8000.0])
    ratios = np.exp(0.4 * (x[:, None] - 2500) / 8000 + 0.002 * rng.standard_normal((5, n)))
    found, chosen = (stats.crossing(x.tolist(), ratios, among=among) for among in (1, 6))
    assert chosen.low < found.low < found.value == chosen.value < found.high < chosen.high
    assert found.value == pytest.approx(2500, rel=0.15)


def test_a_crossing_that_noise_hides_is_unbounded_and_none_has_no_number():
    x = [0.0, 1.0, 2.0, 3.0]
    noisy = np.array([[0.99, 1.2, 0.8], [1.1, 0.9, 0.95], [1.0, 1.05, 0.97], [1.2, 0.9, 1.02]])
    assert np.isinf(stats.crossing(x, noisy).high)
    assert np.isnan(stats.crossing(x, np.full((4, 3), 1.3)).value)


def test_a_simulation_finds_what_the_estimators_promise_and_an_interval_that_is_too_narrow():
    def wrong(estimator, **changes):
        found = coverage.simulate(200, estimators=(replace(estimator, **changes),))
        return by_size(pd.DataFrame(found))["wrong"].sum()

    quantity, ratio = coverage.ESTIMATORS[:2]
    largest = next(each for each in coverage.ESTIMATORS if "largest" in each.name)
    assert [wrong(each, sizes=(3, 7)) for each in (quantity, ratio)] == [0, 0]
    assert wrong(largest, sizes=(7,)) == 0
    bold = wrong(quantity, estimate=lambda x: replace(stats.median(x[0].tolist()), level=0.95), sizes=(3,))
    assert bold == len(coverage.JUDGED)
    own = lambda x: max((stats.ratio(x[2 * i], x[2 * i + 1]) for i in range(6)), key=value)  # noqa: E731
    assert wrong(largest, estimate=own, sizes=(7,)) > 0, "the selected one's own interval"


def test_a_family_of_claims_takes_more_than_a_single_one():
    rng = np.random.default_rng(8)
    chance = [claims.above(str(k), "", stats.ratio(rng.lognormal(0, 0.1, 5), np.ones(5)), 1.0) for k in range(200)]
    alone = sum(entry["verdict"] != "inconclusive" for entry in chance)
    assert alone > 3, "some of 200 true null claims fall by chance"
    assert (claims.family(chance)["verdict"] == "inconclusive").all()
    real = claims.above("real", "", stats.ratio([1.31, 1.29, 1.30, 1.30, 1.31], [1.0] * 5), 1.0)
    assert claims.family([real, *chance[:20]])["verdict"].iloc[0] == "holds"


@pytest.mark.parametrize(
    ("low", "high", "above_one", "within"),
    [
        (1.1, 1.2, "holds", "inconclusive"),
        (0.5, 0.8, "does not hold", "does not hold"),
        (0.95, 1.05, "inconclusive", "holds"),
        (0.8, 1.3, "inconclusive", "inconclusive"),
        (NAN, NAN, "inconclusive", "inconclusive"),
    ],
)
def test_a_claim_holds_fails_or_stays_open(low, high, above_one, within):
    estimate = Estimate(1.0, low, high, 5)
    assert estimate.above(1.0) == above_one
    assert estimate.within(0.85, 1.15) == within


@pytest.mark.parametrize(("ratio", "nearer"), [(0.9, 0.95), (1.1, 1.05), (0.98, 0.95), (1.02, 1.05)])
def test_whether_a_quantity_lies_in_a_range_depends_on_the_nearer_bound_inside_and_outside(ratio, nearer):
    estimate = stats.ratio([ratio * (1 + 0.02 * k) for k in (-2, -1, 0, 1, 2)], [1.0] * 5)
    claim = claims.within("", "", estimate, 0.95, 1.05)
    assert claim["p"] == estimate.p(nearer) > min(estimate.p(0.95), estimate.p(1.05))


# ---------------------------------------------------------------- rows and tables


def test_drifted_blocks_are_left_out_while_two_others_remain():
    base = {"model": "m", "machine": "m", "anchor": False, "verdict": "valid", "workload": "decode"}
    rows = pd.DataFrame([base | {"block": block, "drift": 0.5 * (block >= 2)} for block in range(5)])
    assert set(usable.usable(rows)["block"]) == {0, 1}
    rows = rows.assign(drift=rows["drift"].mask(rows["block"] >= 1, 0.5))
    assert set(usable.usable(rows)["block"]) == {0, 1, 2, 3, 4}, "better a wide interval than none"


def test_a_table_shows_the_quotient_of_two_numbers_beside_a_ratio_that_is_far_from_it_and_says_once_why():
    line = {"ratio": Estimate(4.4, 4.1, 5.1, 7), "a": Estimate(100, 90, 110, 7), "b": 25.0}
    lines = [line, line | {"b": 23.0}, line | {"b": None}, line | {"ratio": None}]
    columns = {"a": ("a", ".0f"), "ratio": ("times", ".1f")}
    shown = table(pd.DataFrame(lines, dtype=object), columns, "A note.", {"ratio": ("a", "b")})
    assert shown.frame["times"].tolist() == ["4.4 [4.1, 5.1] (4.0)", "4.4 [4.1, 5.1]", "4.4 [4.1, 5.1]", "n/a"]
    assert shown.notes == [f"A note. {tables.PAIRED}"]
    near = table(pd.DataFrame(lines[1:], dtype=object), columns, "A note.", {"ratio": ("a", "b")})
    assert near.notes == ["A note."]
