"""Statistics that say how sure they are, and byte counts that match known shapes."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from plamo_study.analysis import claims, clustered, coverage, memo, roofline, stats, usable
from plamo_study.analysis.coverage import by_size
from plamo_study.analysis.stats import Estimate
from plamo_study.models import registry, tensors
from plamo_study.present import tables
from plamo_study.present.tables import table
from plamo_study.studies.phase_asymmetry import analysis as study

NAN = float("nan")


def fact(name, dtype="Q8_0"):
    spec = registry.spec(name, "shape")
    kinds = {}
    for tensor in tensors.planned_table(spec, dtype):
        kind = kinds.setdefault(tensor.kind, {"type": tensor.dtype, "count": 0, "n_elements": 0, "n_bytes": 0})
        kind["count"] += 1
        kind["n_elements"] += tensor.n_elements
        kind["n_bytes"] += tensor.n_bytes
    shape = {k: v for k, v in vars(spec).items() if isinstance(v, int | float | str)}
    return {"name": name, "dtype": dtype, "shape": shape, "tensors": kinds, "assumptions": [], "synthetic": True}


# ---------------------------------------------------------------- statistics


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    draws = [stats.ratio(rng.lognormal(0.3, 0.1, 12).tolist(), [1.0] * 12) for _ in range(200)]
    covered = np.mean([draw.low <= np.exp(0.3) <= draw.high for draw in draws])
    assert 0.88 <= covered <= 1.0


def test_one_process_gives_a_value_and_no_interval():
    estimate = stats.median([3.0])
    assert (estimate.value, estimate.n) == (3.0, 1)
    assert np.isnan(estimate.low)
    assert estimate.above(1.0) == "inconclusive"
    assert f"{estimate:.1f}" == "3.0 (n = 1)"


def test_estimates_are_the_same_every_time():
    assert stats.median([1.0, 2.0, 4.0, 8.0, 16.0]) == stats.median([1.0, 2.0, 4.0, 8.0, 16.0])


def test_a_rate_is_moved_little_by_one_slow_process():
    assert stats.rate(100, [1.0, 1.01, 0.99, 1.02, 9.0]).value == pytest.approx(100 / 1.01)


def test_a_ratio_is_the_median_of_the_pairs_ratios_where_their_medians_say_the_contrary():
    drafted, plain = [0.92, 0.9, 2.04, 0.93, 1.88, 2.76, 3.1], [1.0, 1.0, 2.2, 1.0, 2.0, 3.0, 3.0]
    assert np.median(drafted) / np.median(plain) < 0.95
    slower = [*drafted[:3], 1.02 * np.median(plain), *drafted[4:]]  # one that wins is the middle one by chance
    ratio = stats.ratio(slower, plain)
    assert ratio.value == pytest.approx(np.median([a / b for a, b in zip(slower, plain, strict=True)]))
    assert ratio.value == pytest.approx(1 / stats.ratio(plain, slower).value)


@pytest.mark.parametrize("n", range(2, 13))
@pytest.mark.parametrize("among", [1, 2, 6, 40])
def test_an_interval_holds_its_own_value_without_being_stretched_to_it(n, among):
    rng = np.random.default_rng(n)
    for scale in (0.01, 0.1):
        skewed = np.exp(scale * rng.standard_exponential((300, n)) ** 2)
        for values in skewed:
            found = stats.selected(stats.ratio(values.tolist(), [1.0] * n), among)
            assert found.low * (1 - 1e-9) <= found.value <= found.high * (1 + 1e-9)


def test_the_largest_of_several_gets_an_interval_and_a_p_value_that_hold_for_all_of_them():
    rng, missed, alone = np.random.default_rng(4), 0, 0
    for _ in range(300):
        ratios = [stats.ratio(np.exp(0.05 * rng.standard_normal(7)).tolist(), [1.0] * 7) for _ in range(6)]
        best = max(ratios, key=lambda ratio: ratio.value)
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


def test_the_lowest_of_several_crossings_lies_in_a_wider_interval():
    x, rng = [0.0, 0.5, 1.0], np.random.default_rng(2)
    ratios = np.exp(np.array([-0.4, 0.0, 0.4])[:, None] + 0.02 * rng.standard_normal((3, 7)))
    alone, chosen = (stats.crossing(x, ratios, among=among) for among in (1, 6))
    assert chosen.low < alone.low < alone.value == chosen.value < alone.high < chosen.high
    assert chosen.among == 6


@pytest.mark.parametrize(("n", "level"), [(2, 0.5), (3, 0.75), (5, 0.9375), (6, 0.95), (9, 0.95)])
def test_an_interval_of_few_processes_carries_its_own_level(n, level):
    estimate = stats.median([float(i) for i in range(1, n + 1)])
    assert estimate.level == pytest.approx(level)
    assert (f"; {level:.0%}]" in f"{estimate:.1f}") == (level < 0.95)
    assert estimate.per(2.0).level == estimate.scaled(3.0).level == estimate.level


def test_a_seven_process_interval_lies_between_the_two_order_statistics_around_95_percent():
    low, high = (getattr(stats.median([1.0, 2, 3, 4, 5, 6, 7]), side) for side in ("low", "high"))
    assert 1 < low < 2
    assert 6 < high < 7


@pytest.mark.parametrize("n", [3, 5, 7])
def test_a_crossing_is_found_where_the_curves_cross_and_its_bounds_hold_it(n):
    rng, x = np.random.default_rng(5), np.array([0.0, 1000.0, 2000.0, 4000.0, 8000.0])
    ratios = np.exp(0.4 * (x[:, None] - 2500) / 8000 + 0.002 * rng.standard_normal((5, n)))
    found = stats.crossing(x.tolist(), ratios)
    assert found.low < found.value < found.high
    assert found.value == pytest.approx(2500, rel=0.15)


def test_a_crossing_that_noise_hides_is_unbounded_and_none_has_no_number():
    x = [0.0, 1.0, 2.0, 3.0]
    noisy = np.array([[0.99, 1.2, 0.8], [1.1, 0.9, 0.95], [1.0, 1.05, 0.97], [1.2, 0.9, 1.02]])
    assert np.isinf(stats.crossing(x, noisy).high)
    assert np.isnan(stats.crossing(x, np.full((4, 3), 1.3)).value)


def test_a_simulation_of_the_estimators_finds_what_they_promise_and_an_interval_that_is_too_narrow():
    quantity, ratio = (replace(estimator, sizes=(3, 7)) for estimator in coverage.ESTIMATORS[:2])
    assert by_size(pd.DataFrame(coverage.simulate(200, estimators=(quantity, ratio))))["wrong"].sum() == 0
    bold = replace(quantity, estimate=lambda x: replace(stats.median(x[0].tolist()), level=0.95), sizes=(3,))
    assert by_size(pd.DataFrame(coverage.simulate(200, estimators=(bold,))))["wrong"].sum() == len(coverage.JUDGED)


def test_a_simulation_finds_that_a_selected_interval_covers_and_that_its_own_does_not():
    largest = replace(next(each for each in coverage.ESTIMATORS if "largest" in each.name), sizes=(7,))
    assert by_size(pd.DataFrame(coverage.simulate(200, estimators=(largest,))))["wrong"].sum() == 0
    own = replace(largest, estimate=lambda x: max((stats.ratio(x[2 * i], x[2 * i + 1]) for i in range(6)), key=_value))
    assert by_size(pd.DataFrame(coverage.simulate(200, estimators=(own,))))["wrong"].sum() > 0


def _value(estimate):
    return estimate.value


def test_a_family_of_claims_takes_more_than_a_single_one():
    rng = np.random.default_rng(8)
    chance = [claims.above(str(k), "", stats.ratio(rng.lognormal(0, 0.1, 5), np.ones(5)), 1.0) for k in range(200)]
    alone = sum(entry["verdict"] != "inconclusive" for entry in chance)
    assert alone > 3, "some of 200 true null claims fall by chance"
    assert (claims.family(chance)["verdict"] == "inconclusive").all()
    real = claims.above("real", "", stats.ratio([1.31, 1.29, 1.30, 1.30, 1.31], [1.0] * 5), 1.0)
    assert claims.family([real, *chance[:20]])["verdict"].iloc[0] == "holds"


def test_a_ratio_is_paired_by_block():
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0]
    ratio = stats.ratio([2 * x for x in drifting], drifting)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


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


@pytest.mark.parametrize(("q", "n"), [(0.9, 29), (0.95, 59), (0.99, 299)])
def test_a_percentile_needs_its_samples(q, n):
    assert np.isnan(stats.percentile(range(n - 1), q))
    assert stats.percentile(range(n), q) == pytest.approx(q * (n - 1))


# ---------------------------------------------------------------- bytes and FLOPs


@pytest.mark.parametrize(
    ("name", "state_mib", "kv_kib", "layers"),
    [
        ("plamo-2-1b", 8.375, 4, (8, 0, 8)),
        ("plamo-2-8b", 33.5, 32, (16, 0, 16)),
        ("plamo-3-nict-8b", 0, 64, (0, 28, 4)),
    ],
)
def test_state_and_cache_sizes_are_the_known_ones(name, state_mib, kv_kib, layers):
    model = fact(name)
    mamba, sliding, full = roofline.layers(model)
    assert (mamba, sliding, full) == layers
    assert roofline.state_bytes(model) / 2**20 == state_mib
    assert roofline.kv_bytes_per_token(model) * (sliding + full) / 2**10 == kv_kib


def test_a_decode_step_reads_every_weight_once_and_the_cache_grows_with_depth():
    model = fact("plamo-3-nict-8b")
    weights = sum(t["n_bytes"] for t in model["tensors"].values())
    assert roofline.weight_bytes(model) == weights
    per_layer = roofline.kv_bytes_per_token(model)
    assert roofline.decode_bytes(model, 1000) - weights == per_layer * 32 * 1001
    beyond = roofline.decode_bytes(model, 5000) - roofline.decode_bytes(model, 4000)
    assert beyond == per_layer * 4 * 1000, "past the window only the full layers read more"


def test_state_is_read_and_written_for_every_sequence():
    model = fact("plamo-2-1b")
    grown = roofline.decode_bytes(model, 0, n_seq=3) - roofline.decode_bytes(model, 0, n_seq=1)
    assert grown == 2 * (2 * roofline.state_bytes(model) + 8 * roofline.kv_bytes_per_token(model))


def test_flops_are_two_per_weight_and_token():
    model = fact("plamo-2-1b")
    head = roofline.head_weights(model)
    assert roofline.matmul_weights(model) + head == pytest.approx(1_291_441_920, rel=1e-3)
    assert roofline.decode_flops(model, 0) == pytest.approx(2 * 1.2914e9, rel=0.01)
    attention = roofline.prefill_flops(model, 1024) - 2 * roofline.prefill_flops(model, 512) + 2 * head
    assert attention == pytest.approx(4 * 16 * 128 * 8 * 512**2, rel=1e-6), "the quadratic part"


def test_the_band_lies_between_full_overlap_and_none():
    band = roofline.Band(compute=3.0, memory=1.0)
    assert (band.low, band.high, band.bound) == (3.0, 4.0, "compute")


# ---------------------------------------------------------------- the study, on rows made up to a known answer


def made_up(prefill_s=0.5, step_s=0.01, blocks=5):
    """Rows of one model with 2 and 1 threads: prefill and matmul gain 2.0 from threads, decode and reading gain 1.0."""
    counts = dict.fromkeys(("n_gpu_layers", "n_prompt", "n_gen", "n_bytes", "n_flops"), 0)
    base = counts | {
        "model": "plamo-2-1b",
        "anchor": False,
        "verdict": "valid",
        "drift": 0.0,
        "status": "ok",
        "n_seq": 1,
        "machine": "m",
        "dtype": "Q8_0",
        "size": 1000,
        "checks": {},
    }
    entries = []
    for block in range(blocks):
        wobble = 1 + 0.01 * block
        for threads, slow in ((2, 1.0), (1, 2.0)):
            at = base | {"block": block, "n_threads": threads}
            for n in (128, 512, 2048):
                seconds = prefill_s * n / 512 * slow * wobble
                entries.append(at | {"workload": "prefill", "n_prompt": n, "samples_ns": [[int(seconds * 1e9)]] * 3})
            for n in (32, 512):
                entries.append(
                    at
                    | {
                        "workload": "decode",
                        "n_prompt": 128,
                        "n_gen": n,
                        "samples_ns": [[int(step_s * wobble * 1e9)] * n],
                    }
                )
            flops = {
                "workload": "matmul",
                "model": "",
                "n_prompt": 0,
                "label": "",
                "n_flops": 10**9,
                "samples_ns": [[int(5e6 * slow)]],
            }
            read = {
                "workload": "read",
                "model": "",
                "n_prompt": 0,
                "label": "",
                "n_bytes": 10**9,
                "samples_ns": [[int(6e6)]],
            }
            entries += [at | {"verdict": "n/a"} | flops, at | {"verdict": "n/a"} | read]
    return pd.DataFrame(entries)


def test_the_gpu_is_set_against_the_cpu_where_there_is_one():
    rows = made_up()
    assert study.offload(rows).empty
    faster = rows[(rows["model"] != "") & (rows["n_threads"] == 2)]
    quick = [[[t // 4 for t in steps] for steps in samples] for samples in faster["samples_ns"]]
    both = pd.concat([rows, faster.assign(samples_ns=quick, n_gpu_layers=-1)], ignore_index=True)
    gains = study.offload(both[(both["n_gpu_layers"] == 0) & (both["n_gen"] != 512) | (both["n_gpu_layers"] != 0)])
    assert [gain.value for gain in gains["gain"]] == pytest.approx([4.0, 4.0])


def test_drifted_blocks_are_left_out_while_two_others_remain():
    rows = made_up()
    rows.loc[rows["block"] >= 2, "drift"] = 0.5
    assert usable.drifted(rows) == (3, 5)
    assert set(usable.usable(rows)["block"]) == {0, 1}
    rows = rows.copy()
    rows.loc[rows["block"] >= 1, "drift"] = 0.5
    assert set(usable.usable(rows)["block"]) == {0, 1, 2, 3, 4}, "better a wide interval than none"


# ---------------------------------------------------------------- what is computed once a frame


def test_what_a_frame_comes_to_is_computed_once_and_each_caller_gets_a_copy_of_its_own():
    calls = []

    @memo.once_a_frame
    def doubled(rows, by=2):
        calls.append(by)
        return {"table": rows * by, "column": rows["x"] * by}

    one, other = pd.DataFrame({"x": [1, 2]}), pd.DataFrame({"x": [1, 2]})
    table, column = doubled(one).values()
    table["y"], column.iloc[0] = 0, 9
    again = doubled(one)
    assert (list(again["table"]), again["column"].tolist(), calls) == (["x"], [2, 4], [2])
    doubled(one, 3), doubled(other)
    assert calls == [2, 3, 2]


def test_a_frame_or_a_mapping_is_never_taken_for_one_that_is_gone():
    @memo.once_a_frame
    def largest(rows, known=None):
        return int(rows["x"].max()) * (known or {"factor": 1})["factor"]

    assert [largest(pd.DataFrame({"x": [n]})) for n in range(50)] == list(range(50))
    one = pd.DataFrame({"x": [1]})
    assert [largest(one, {"factor": n}) for n in range(50)] == list(range(50))


def test_a_table_shows_the_quotient_of_two_numbers_beside_a_ratio_that_is_far_from_it_and_says_once_why():
    line = {"ratio": Estimate(4.4, 4.1, 5.1, 7), "a": Estimate(100, 90, 110, 7), "b": 25.0}
    lines = [line, line | {"b": 23.0}, line | {"b": None}, line | {"ratio": None}]
    columns = {"a": ("a", ".0f"), "ratio": ("times", ".1f")}
    shown = table(pd.DataFrame(lines, dtype=object), columns, "A note.", {"ratio": ("a", "b")})
    assert shown.frame["times"].tolist() == ["4.4 [4.1, 5.1] (4.0)", "4.4 [4.1, 5.1]", "4.4 [4.1, 5.1]", "n/a"]
    assert shown.notes == [f"A note. {tables.PAIRED}"]
    near = table(pd.DataFrame(lines[1:], dtype=object), columns, "A note.", {"ratio": ("a", "b")})
    assert near.notes == ["A note."]
