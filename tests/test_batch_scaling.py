"""Curves of batched decode say what was put into them; kernels, builds and the source's table are told apart."""

import numpy as np
import pandas as pd
import pytest
from darwin import ENGINE as APPLE
from test_roofline import fact

from plamo_study.analysis import kernels
from plamo_study.studies.batch_scaling import (
    analysis as study,
    builds,
    prediction as batch_prediction,
)
from plamo_study.studies.batching_law import analysis as law_check

HYBRID, MATCHED, LARGE = "plamo-2-1b", "plamo-3-matched", "plamo-3-nict-2b"
SEQUENCES = (*range(1, 17), 24, 32)
AVX512 = {"build": "CPU : AVX2 = 1 | AVX512 = 1 | LLAMAFILE = 1", "gpu_offload": False}


def made_up(seconds, model=HYBRID, build="stock", blocks=5, noise=0.01, **changes):
    """Decode rows whose steps take `seconds(n_seq)`, times a factor of the block and a little noise."""
    rng = np.random.default_rng(7)
    base = {"workload": "decode", "policy": "shared", "model": model, "build": build, "dtype": "Q8_0", "anchor": False}
    base |= {"verdict": "valid", "drift": 0.0, "status": "ok", "n_prompt": 128, "n_gen": 6, "n_gpu_layers": 0}
    base |= {
        "n_threads": 2,
        "engine": build,
        "machine": "m",
        "failure": "",
        "prefill_ns": [],
        "checks": {"second_path_error": 0.0},
    }
    rows = []
    for block in range(blocks):
        for n in SEQUENCES:
            step = seconds(n) * (1 + 0.05 * block) * rng.lognormal(0, noise)
            row = {
                "block": block,
                "n_seq": n,
                "samples_ns": [[int(step * 1e9)] * 6],
                "peak_rss_bytes": 2**30 + n * 2**20,
            }
            rows.append(base | row | changes)
    return pd.DataFrame(rows)


def ceilings(read=50e9, matmul=300e9, blocks=5):
    base = {
        "model": "",
        "build": "stock",
        "verdict": "n/a",
        "drift": 0.0,
        "anchor": False,
        "status": "ok",
        "policy": "",
        "label": "",
        "n_prompt": 0,
    }
    base |= {
        "n_gpu_layers": 0,
        "n_threads": 2,
        "machine": "m",
        "size": 1000,
        "checks": {},
        "n_seq": 1,
        "engine": "stock",
        "n_bytes": 0,
        "n_flops": 0,
        "dtype": "Q8_0",
    }
    kinds = {"read": {"n_bytes": 10**9, "samples_ns": [[int(1e18 / read)]]}}
    kinds["matmul"] = {"n_flops": 10**9, "samples_ns": [[int(1e18 / matmul)]]}
    return pd.DataFrame([base | {"block": b, "workload": k} | v for b in range(blocks) for k, v in kinds.items()])


# ---------------------------------------------------------------- curves


def test_rates_and_factors_come_out_as_put_in():
    table = study.scaling(made_up(lambda n: 0.03 + 0.01 * n, noise=0)).set_index("n_seq")
    assert table.loc[16, "step"].value == pytest.approx(0.19 * 1.1)
    assert table.loc[16, "rate"].value == pytest.approx(16 / 0.19 / 1.1)
    assert table.loc[16, "each"].value == pytest.approx(1 / 0.19 / 1.1)
    assert table.loc[16, "factor"].value == pytest.approx(16 * 0.04 / 0.19)
    assert table.loc[1, "factor"].value == 1.0
    assert table.loc[4, "memory"] == 2**30 + 4 * 2**20


def test_a_line_is_found_again_and_its_shared_part_amortises():
    fit = study.fits(made_up(lambda n: 0.03 + 0.01 * n)).iloc[0]
    assert fit["each"].low < 0.011 < fit["each"].high * 1.05
    assert fit["amortised"].value == pytest.approx(0.75, abs=0.03)
    assert fit["half"].value == pytest.approx(3.0, rel=0.15)
    assert abs(fit["worst"]) < 0.05


def test_passes_over_the_weights_are_found_again_where_a_line_fails():
    rows = made_up(lambda n: kernels.weight_passes(n, 4) * 0.08 + 0.01 * n)
    assert abs(study.fits(rows)["worst"].iloc[0]) > 0.2
    fit = study.fits(rows, tile=4).iloc[0]
    assert fit["fixed"].value == pytest.approx(0.08 * 1.1, rel=0.05)
    assert fit["each"].value == pytest.approx(0.01 * 1.1, rel=0.05)
    assert abs(fit["worst"]) < 0.05


def test_the_fit_that_misses_least_is_chosen():
    passes = made_up(lambda n: kernels.weight_passes(n, 4) * 0.08 + 0.01 * n)
    straight = made_up(lambda n: 0.03 + 0.01 * n, LARGE)
    rows = pd.concat([passes, straight], ignore_index=True)
    chosen = study.chosen_fits(rows, 4).set_index("model")
    assert (chosen.loc[HYBRID, "form"], chosen.loc[LARGE, "form"]) == (study.PASSES, study.LINE)
    assert chosen.loc[HYBRID, "half"].value == pytest.approx(8, rel=0.05)
    facts = {HYBRID: fact(HYBRID), LARGE: fact(LARGE), "stock": AVX512}
    turn = batch_prediction.turning(pd.concat([rows, ceilings()], ignore_index=True), facts).set_index("model")
    assert turn.loc[HYBRID, "measured"] == chosen.loc[HYBRID, "half"]
    assert abs(turn.loc[HYBRID, "worst"]) < 0.05
    assert (study.chosen_fits(rows, None)["form"] == study.LINE).all(), "an unknown kernel has no passes"


def test_a_lost_row_costs_a_point_and_not_a_block():
    rows = made_up(lambda n: 0.03 + 0.01 * n)
    holed = rows[[row.n_seq != row.block + 3 for row in rows.itertuples()]]
    fit, jumps = study.fits(holed).iloc[0], study.jumps(holed)
    assert fit["each"].n == 5
    assert fit["half"].value == pytest.approx(3.0, rel=0.15)
    assert {jump.n for jump in jumps["jump"]} == {3, 4, 5}


def test_a_bend_that_passes_explain_is_none():
    rows = made_up(lambda n: kernels.weight_passes(n, 4) * 0.08 + 0.01 * n)
    assert study.bends(rows, 4)["gain"].iloc[0] < -6 < study.bends(rows)["gain"].iloc[0]
    assert study.jumps(rows, 4)["found"].sum() == 0


def test_a_planted_jump_is_found_and_no_other():
    jumps = study.jumps(made_up(lambda n: (0.03 + 0.01 * n) * (1.3 if n > 8 else 1.0), noise=0.003))
    assert list(jumps[jumps["found"]]["n_seq"]) == [8]
    assert jumps.set_index("n_seq").loc[8, "jump"].value == pytest.approx(1.3, rel=0.03)


def test_noise_alone_has_no_jumps_and_no_bend():
    rows = made_up(lambda n: 0.03 + 0.01 * n, noise=0.02)
    assert study.jumps(rows)["found"].sum() == 0
    assert study.bends(rows)["gain"].iloc[0] < 6


def test_a_planted_bend_is_found_where_it_is():
    bend = study.bends(made_up(lambda n: 0.03 + 0.005 * n + 0.02 * max(n - 8, 0))).iloc[0]
    assert bend["gain"] > 6
    assert bend["at"].value == 8
    assert bend["steeper"].value == pytest.approx(5, rel=0.15)


def test_one_block_gives_values_and_finds_nothing():
    rows = made_up(lambda n: 0.03 + 0.01 * n, blocks=1)
    assert study.jumps(rows).empty
    assert np.isnan(study.scaling(rows)["factor"].iloc[3].low)


def test_invalid_and_drifted_rows_are_in_no_curve():
    good = made_up(lambda n: 0.03 + 0.01 * n)
    bad = made_up(lambda n: 1e-6, verdict="invalid")
    assert study.scaling(pd.concat([good, bad], ignore_index=True)).equals(study.scaling(good))


# ---------------------------------------------------------------- architecture, size, engine


STEPS = {
    ("stock", HYBRID): lambda n: 0.03 + 0.02 * n,
    ("stock", MATCHED): lambda n: 0.03 + 0.01 * n,
    ("stock", LARGE): lambda n: 0.06 + 0.02 * n,
    ("corrected", HYBRID): lambda n: 0.03 + 0.02 * n,
    ("corrected-projections", HYBRID): lambda n: 0.04 + 0.012 * n,
}


def all_builds(noise=0.01, changes=None, **more):
    steps = STEPS | (changes or {})
    parts = [made_up(f, model, build, noise=noise, **more) for (build, model), f in steps.items()]
    for seed, part in enumerate(parts):  # noise of their own
        rng = np.random.default_rng(seed)
        part["samples_ns"] = [[[int(t * rng.lognormal(0, noise)) for t in s[0]]] for s in part["samples_ns"]]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_decomposition_multiplies_to_the_whole_in_every_block(noise):
    rows = all_builds(noise=noise)
    table = study.decomposed(rows, builds.chain(rows))
    parts = [builds.SIZE, builds.ARCHITECTURE, builds.PROJECTIONS, builds.OTHERS]
    assert list(table["n_seq"]) == list(SEQUENCES)
    for row in table.to_dict("records"):
        assert np.sum([row[part].units for part in parts], axis=0) == pytest.approx(row["whole"].units)
        assert row["product"] == pytest.approx(np.prod([row[part].value for part in parts]))
    if not noise:
        assert table["product"].tolist() == pytest.approx([whole.value for whole in table["whole"]])
        at_16 = table.set_index("n_seq").loc[16]
        assert at_16[builds.SIZE].value == pytest.approx(0.38 / 0.19)
        assert at_16[builds.ARCHITECTURE].value == pytest.approx(0.19 / 0.232)
        assert at_16[builds.PROJECTIONS].value == pytest.approx(0.232 / 0.35)


def test_a_lost_row_leaves_the_decomposition_whole():
    rows = all_builds(noise=0.05)
    lost = rows[~((rows["build"] == "corrected") & (rows["n_seq"] == 8) & (rows["block"] == 2))]
    row = study.decomposed(lost, builds.chain(rows)).set_index("n_seq").loc[8]
    parts = [builds.SIZE, builds.ARCHITECTURE, builds.PROJECTIONS, builds.OTHERS]
    assert row["whole"].n == 4
    assert np.sum([row[part].units for part in parts], axis=0) == pytest.approx(row["whole"].units)


def test_a_sequence_s_memory_names_its_context_and_what_it_is():
    rows = pd.concat([made_up(lambda n: 0.03 + 0.01 * n), ceilings()], ignore_index=True)
    kept = batch_prediction.memory(rows.assign(type_k="f16", type_v="f16"), {HYBRID: fact(HYBRID)}).iloc[0]
    assert kept["tokens"] == 256, "134 tokens, as llama.cpp rounds them"
    assert (kept["state"] / 2**20, kept["cache"] / 2**20) == (8.375, 1.0)
    assert kept["grown"] == 2**20
    assert kept["state"] + kept["cache"] + kept["rest"] == kept["grown"]


# ---------------------------------------------------------------- prediction and kernels


def test_a_step_moves_the_weights_once_and_each_sequence_s_own_bytes():
    facts = {HYBRID: fact(HYBRID), "stock": AVX512}
    rows = pd.concat([made_up(lambda n: 0.04), ceilings()], ignore_index=True)
    table = batch_prediction.prediction(rows, facts).set_index("n_seq")
    own = table.loc[2, "bytes"] - table.loc[1, "bytes"]
    assert table.loc[16, "bytes"] == pytest.approx(table.loc[1, "bytes"] + 15 * own)
    assert own == pytest.approx(2 * 8.375 * 2**20 + 4096 * 132, rel=1e-3)
    assert list(table.loc[[1, 4, 5, 8, 9, 16], "passes"]) == [1, 1, 2, 1, 2, 1]
    assert (table["low"] <= table["high"]).all()


def test_the_turning_point_is_where_both_times_are_equal():
    facts = {HYBRID: fact(HYBRID), "stock": AVX512}
    rows = pd.concat([made_up(lambda n: 0.03 + 0.01 * n), ceilings()], ignore_index=True)
    turn = batch_prediction.turning(rows, facts).iloc[0]
    table = batch_prediction.prediction(rows, facts).set_index("n_seq")
    assert list(table.loc[[int(turn["predicted"]), int(turn["predicted"]) + 1], "bound"]) == ["memory", "compute"]
    assert turn["measured"].value == pytest.approx(3.0, rel=0.15)
    assert turn["miss"].value == pytest.approx(turn["measured"].value / turn["predicted"])


@pytest.mark.parametrize(("tile", "two"), [(4, {5, 6, 7, 9, 10, 11, 13, 14, 15}), (2, {3, 5, 7, 9, 11, 13, 15})])
def test_columns_left_over_cost_a_second_pass(tile, two):
    assert {n for n in range(1, 17) if kernels.weight_passes(n, tile) == 2} == two


def test_switches_are_named_only_for_kernels_that_are_known():
    found = [switch.n_seq for switch in kernels.switches(AVX512, "Q8_0", 16)]
    assert found == [1, 4, 7, 8, 11, 12, 15]
    assert kernels.switches(AVX512, "F16", 16) == []
    assert kernels.switches(AVX512, "Q8_0", 16, on_gpu=True) == []
    assert [switch.n_seq for switch in kernels.switches(APPLE, "Q8_0", 16, on_gpu=True)] == [1, 8]
    assert kernels.switches(APPLE, "Q8_0", 16) == []  # its processor's kernels are others


# ---------------------------------------------------------------- right, wrong, abort


def test_the_source_s_table_tells_valid_from_wrong_from_abort():
    per_sequence = made_up(lambda n: 0.1, policy="per_sequence", prefill_ns=[10**9])
    wrong = made_up(lambda n: 0.1, policy="packed", verdict="invalid", prefill_ns=[10**9])
    abort = made_up(lambda n: 0.1, policy="packed", verdict="failed", status="abort", failure="decode: GGML_ASSERT")
    rows = pd.concat(
        [per_sequence, wrong[wrong["n_seq"] == 2], abort[abort["n_seq"] == 8].assign(checks=[{}] * 5)],
        ignore_index=True,
    )
    table = study.table_cells(rows).set_index(["policy", "n_seq"])
    assert table.loc[("per_sequence", 8), "outcome"] == "valid"
    assert table.loc[("per_sequence", 8), "prefill"].value == pytest.approx(8 * 128)
    assert (table.loc[("packed", 2), "outcome"], table.loc[("packed", 8), "outcome"]) == ("wrong", "abort")
    assert table.loc[("packed", 8), "rate"] is None
    assert "GGML_ASSERT" in table.loc[("packed", 8), "failure"]


def test_a_build_meets_the_defects_it_does_not_correct():
    hybrid, attention = {"shape": {"arch": "plamo2"}}, {"shape": {"arch": "plamo3"}}
    assert law_check.defects(hybrid, {}) == law_check.Engine(mixes_tokens=True, misplaces_states=True)
    assert law_check.defects(hybrid, {"corrects": ["D2"]}) == law_check.Engine(
        mixes_tokens=False, misplaces_states=True
    )
    assert law_check.defects(attention, {}) == law_check.Engine(mixes_tokens=False, misplaces_states=False)
