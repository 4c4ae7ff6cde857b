"""Curves of batched decode say what was put into them; kernels, builds and the source's table are told apart."""

import numpy as np
import pandas as pd
import pytest
from darwin import ENGINE as APPLE
from test_roofline import fact

from plamo_study.analysis import kernels
from plamo_study.studies.batch_scaling import analysis as study, builds, prediction

HYBRID, MATCHED, LARGE = builds.HYBRID, builds.MATCHED, builds.LARGE
SEQUENCES = (*range(1, 17), 24, 32)
AVX512 = {"build": "CPU : AVX2 = 1 | AVX512 = 1 | LLAMAFILE = 1", "gpu_offload": False}
USUAL = {
    "build": "stock", "engine": "stock", "machine": "m", "dtype": "Q8_0", "anchor": False, "drift": 0.0, "status": "ok",
    "n_threads": 2, "n_gpu_layers": 0, "failure": "", "type_k": "f16", "type_v": "f16",
}  # fmt: skip


def made_up(seconds, model=HYBRID, build="stock", blocks=5, noise=0.01, seed=7, **changes):
    """Decode rows whose steps take `seconds(n_seq)`, times a factor of the block and a little noise."""
    rng = np.random.default_rng(seed)
    base = USUAL | {"workload": "decode", "policy": "shared", "model": model, "build": build, "engine": build}
    base |= {"verdict": "valid", "n_prompt": 128, "n_gen": 6, "prefill_ns": [], "checks": {"second_path_error": 0.0}}
    rows = []
    for block in range(blocks):
        for n in SEQUENCES:
            step = seconds(n) * (1 + 0.05 * block) * rng.lognormal(0, noise)
            row = {"block": block, "n_seq": n, "samples_ns": [[int(step * 1e9)] * 6]}
            rows.append(base | row | {"peak_rss_bytes": 2**30 + n * 2**20} | changes)
    return pd.DataFrame(rows)


def with_ceilings(rows, read=50e9, matmul=300e9):
    base = USUAL | {"model": "", "verdict": "n/a", "policy": "", "label": "", "n_prompt": 0, "n_seq": 1, "checks": {}}
    base |= {"size": 1000, "n_bytes": 0, "n_flops": 0}
    kinds = {"read": {"n_bytes": 10**9, "samples_ns": [[int(1e18 / read)]]}}
    kinds["matmul"] = {"n_flops": 10**9, "samples_ns": [[int(1e18 / matmul)]]}
    limits = [base | {"block": block, "workload": kind} | v for block in range(5) for kind, v in kinds.items()]
    return pd.concat([rows, pd.DataFrame(limits)], ignore_index=True)


def of_one(rows):
    """The curve of rows of one build and model."""
    (curve,) = study.curves(rows).values()
    return curve


def straight(n):
    return 0.03 + 0.01 * n


def in_passes(n):
    return kernels.weight_passes(n, 4) * 0.08 + 0.01 * n


# ---------------------------------------------------------------- curves


def test_steps_and_factors_come_out_as_put_in_and_wrong_rows_are_in_no_curve():
    rows = made_up(straight, noise=0)
    curve = of_one(rows)
    assert curve.loc[16].median() == pytest.approx(0.19 * 1.1)
    assert study.factor(curve, 16).value == pytest.approx(16 * 0.04 / 0.19)
    assert study.factor(curve, 1).value == 1.0
    bad = made_up(lambda n: 1e-6, verdict="invalid")
    assert of_one(pd.concat([rows, bad], ignore_index=True)).equals(curve)


def test_a_line_is_found_again_and_a_lost_row_costs_a_point_and_not_a_block():
    rows = made_up(straight)
    holed = rows[[row.n_seq != row.block + 3 for row in rows.itertuples()]]
    for each in (rows, holed):
        fit = study.fits(study.curves(each)).iloc[0]
        assert fit["each"].low < 0.011 < fit["each"].high * 1.05
        assert fit["amortised"].value == pytest.approx(0.75, abs=0.03)
        assert fit["half"].value == pytest.approx(3.0, rel=0.15)
        assert abs(fit["worst"]) < 0.05
        assert fit["each"].n == 5
    assert {jump.n for jump in study.jumps(study.curves(holed))["jump"]} == {3, 4, 5}


def test_passes_over_the_weights_are_found_again_where_a_line_fails_and_the_better_fit_is_chosen():
    rows = made_up(in_passes)
    passes = study.curves(rows)
    assert abs(study.fits(passes)["worst"].iloc[0]) > 0.2
    fit = study.fits(passes, tile=4).iloc[0]
    assert fit["fixed"].value == pytest.approx(0.08 * 1.1, rel=0.05)
    assert fit["each"].value == pytest.approx(0.01 * 1.1, rel=0.05)
    assert abs(fit["worst"]) < 0.05
    assert study.bends(passes, 4)["gain"].iloc[0] < -6 < study.bends(passes)["gain"].iloc[0], "passes are no bend"
    assert study.jumps(passes, 4)["found"].sum() == 0
    rows = pd.concat([rows, made_up(straight, LARGE)], ignore_index=True)
    both = study.curves(rows)
    chosen = study.chosen_fits(both, 4).set_index("model")
    assert (chosen.loc[HYBRID, "form"], chosen.loc[LARGE, "form"]) == (study.PASSES, study.LINE)
    facts = {HYBRID: fact(HYBRID), LARGE: fact(LARGE), "stock": AVX512}
    turn = prediction.turning(with_ceilings(rows), facts, both).set_index("model")
    assert turn.loc[HYBRID, "measured"] == chosen.loc[HYBRID, "half"]
    assert (study.chosen_fits(both, None)["form"] == study.LINE).all(), "an unknown kernel has no passes"


def test_planted_jumps_and_bends_are_found_where_they_are_and_noise_has_none():
    jumps = study.jumps(study.curves(made_up(lambda n: straight(n) * (1.3 if n > 8 else 1.0), noise=0.003)))
    assert list(jumps[jumps["found"]]["n_seq"]) == [8]
    assert jumps.set_index("n_seq").loc[8, "jump"].value == pytest.approx(1.3, rel=0.03)
    bend = study.bends(study.curves(made_up(lambda n: 0.03 + 0.005 * n + 0.02 * max(n - 8, 0)))).iloc[0]
    assert (bend["gain"] > 6, bend["at"].value) == (True, 8)
    assert bend["steeper"].value == pytest.approx(5, rel=0.15)
    noise, one_block = (study.curves(made_up(straight, **how)) for how in ({"noise": 0.02}, {"blocks": 1}))
    assert study.jumps(noise)["found"].sum() == 0
    assert study.bends(noise)["gain"].iloc[0] < 6
    assert study.jumps(one_block).empty
    (curve,) = one_block.values()
    assert np.isnan(study.factor(curve, 4).low)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_decomposition_multiplies_to_the_whole_in_every_block_also_with_a_lost_row(noise):
    """From the large attention model to the hybrid as released."""
    steps = {
        ("stock", LARGE): lambda n: 0.06 + 0.02 * n,
        ("stock", MATCHED): straight,
        ("corrected-projections", HYBRID): lambda n: 0.04 + 0.012 * n,
        ("corrected", HYBRID): lambda n: 0.03 + 0.02 * n,
        ("stock", HYBRID): lambda n: 0.03 + 0.02 * n,
    }
    curves = enumerate(steps.items())
    rows = pd.concat([made_up(f, *curve[::-1], noise=noise, seed=seed) for seed, (curve, f) in curves])
    rows = rows[~((rows["build"] == "corrected") & (rows["n_seq"] == 8) & (rows["block"] == 2))]
    table = study.decomposed(study.curves(rows), builds.chain(rows)).set_index("n_seq", drop=False)
    parts = [builds.SIZE, builds.ARCHITECTURE, builds.PROJECTIONS, builds.OTHERS]
    assert list(table["n_seq"]) == list(SEQUENCES)
    assert (table.loc[8, "whole"].n, table.loc[9, "whole"].n) == (4, 5)
    for row in table.to_dict("records"):
        assert np.sum([row[part].units for part in parts], axis=0) == pytest.approx(row["whole"].units)
        assert row["product"] == pytest.approx(np.prod([row[part].value for part in parts]))
    if not noise:
        expected = (0.38 / 0.19, 0.19 / 0.232, 0.232 / 0.35, 1.0)
        assert [table.loc[16, part].value for part in parts] == pytest.approx(list(expected))


# ---------------------------------------------------------------- prediction and kernels


def test_a_step_moves_the_weights_once_and_each_sequence_s_own_bytes():
    facts = {HYBRID: fact(HYBRID), "stock": AVX512}
    rows = with_ceilings(made_up(straight))
    known = study.curves(rows)
    table = prediction.prediction(rows, facts, known).set_index("n_seq")
    own = table.loc[2, "bytes"] - table.loc[1, "bytes"]
    assert table.loc[16, "bytes"] == pytest.approx(table.loc[1, "bytes"] + 15 * own)
    assert own == pytest.approx(2 * 8.375 * 2**20 + 4096 * 132, rel=1e-3)
    assert list(table.loc[[1, 4, 5, 8, 9, 16], "passes"]) == [1, 1, 2, 1, 2, 1]
    assert (table["low"] <= table["high"]).all()
    turn = prediction.turning(rows, facts, known).iloc[0]
    assert list(table.loc[[int(turn["predicted"]), int(turn["predicted"]) + 1], "bound"]) == ["memory", "compute"]
    assert turn["measured"].value == pytest.approx(3.0, rel=0.15)
    assert turn["miss"].value == pytest.approx(turn["measured"].value / turn["predicted"])
    kept = prediction.memory(rows, facts).iloc[0]
    assert kept["tokens"] == 256, "134 tokens, as llama.cpp rounds them"
    assert (kept["state"] / 2**20, kept["cache"] / 2**20, kept["grown"]) == (8.375, 1.0, 2**20)
    assert kept["state"] + kept["cache"] + kept["rest"] == kept["grown"]


def test_passes_and_switches_are_those_of_kernels_that_are_known():
    for tile, two in ((4, {5, 6, 7, 9, 10, 11, 13, 14, 15}), (2, {3, 5, 7, 9, 11, 13, 15})):
        assert {n for n in range(1, 17) if kernels.weight_passes(n, tile) == 2} == two
    assert [switch.n_seq for switch in kernels.switches(AVX512, "Q8_0", 16)] == [1, 4, 7, 8, 11, 12, 15]
    assert [switch.n_seq for switch in kernels.switches(APPLE, "Q8_0", 16, on_gpu=True)] == [1, 8]
    assert kernels.switches(AVX512, "F16", 16) == kernels.switches(AVX512, "Q8_0", 16, on_gpu=True) == []
    assert kernels.switches(APPLE, "Q8_0", 16) == []  # its processor's kernels are others
