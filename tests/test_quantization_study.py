"""Quantization: files of any type are made, sizes and speeds come out as put in, and every type passes its gate."""

import os
from itertools import product

import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file
from darwin import ENGINE as APPLE
from gguf import GGMLQuantizationType

from plamo_study.analysis import kernel_paths, stats
from plamo_study.analysis.stats import Estimate
from plamo_study.engine import kernels
from plamo_study.errors import StudyError
from plamo_study.measure import files, plan, tolerance
from plamo_study.measure.plan import Plan
from plamo_study.measure.process import work
from plamo_study.measure.recording import Recording
from plamo_study.measure.worker import Job
from plamo_study.models import recipes, registry, tensors
from plamo_study.oracle import weights
from plamo_study.present import sentences
from plamo_study.studies.quantization import (
    analysis as study,
    claims as quantization_claims,
    pareto,
    plan as plan_quantization,
    prediction as arithmetic,
    published as quantization_published,
    show,
)

TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K_M")
READ, COMPUTE = 40e9, 100e9  # bytes and FLOPs a second of every invented kernel
DEPTH, STEPS, TOGETHER = 128, 16, 8


def fact(model, dtype):
    """What a row's file states, from a dry run of the quantizer on the embedded model."""
    source = mini_file(model)
    table = [step.after for step in recipes.plan_sizes(source, recipes.by_name(dtype))]
    sums = files.by_kind(table)
    size, n = (sum(kind[name] for kind in sums.values()) for name in ("n_bytes", "n_elements"))
    shape = files.model_fact(model, "mini", "F16")["shape"]
    about = {"name": model, "scale": "mini", "dtype": dtype, "synthetic": True, "assumptions": [], "sha256": "0" * 64}
    return about | {"file_bytes": size + 1000, "n_params": n, "shape": shape, "tensors": sums}


@pytest.fixture(scope="module")
def facts():
    return {f"{model}/{dtype}": fact(model, dtype) for model, dtype in product((HYBRID, ATTENTION), TYPES)}


def row(**fields):
    base = {"anchor": False, "status": "ok", "verdict": "valid", "drift": 0.0, "n_gpu_layers": 0, "n_threads": 2}
    base |= {
        "machine": "m",
        "size": 1000,
        "n_seq": 1,
        "n_prompt": 0,
        "n_gen": 0,
        "n_bytes": 0,
        "n_flops": 0,
        "label": "",
        "model": "",
        "dtype": "",
    }
    return base | {"prefill_ns": [], "samples_ns": [], "peak_rss_bytes": 2**20, "checks": {}} | fields


def made_up(facts, step, prompt, blocks=5):
    """Rows whose decode steps take step(fact, n_seq) seconds and prompts prompt(fact), times a factor of the block."""
    rows = []
    for block, known in product(range(blocks), facts.values()):
        slower = 1 + 0.05 * block
        for n in (1, TOGETHER):
            fields = {"model": known["name"], "dtype": known["dtype"], "n_seq": n, "n_prompt": DEPTH, "n_gen": STEPS}
            spent = [[int(step(known, n) * slower * 1e9)] * STEPS]
            filled = [int(prompt(known) * slower * 1e9)]
            rows.append(row(workload="decode", block=block, samples_ns=spent, prefill_ns=filled, **fields))
    for block, dtype in product(range(blocks), ("F32", "F16", "Q8_0", "Q6_K", "Q5_0", "Q4_0", "Q4_K")):
        slower = 1 + 0.05 * block
        one = {"n_prompt": 1, "n_bytes": 10**9, "samples_ns": [[int(10**18 / READ * slower)]]}
        many = {"n_flops": 10**9, "samples_ns": [[int(10**18 / COMPUTE * slower)]]}
        rows += [
            row(
                workload="matmul",
                dtype=dtype,
                block=block,
                verdict="n/a",
                label="packed",
                checks={"packed": 0.0},
                **kind,
            )
            for kind in (one, many)
        ]
    return pd.DataFrame(rows)


def from_bytes(known, n_seq):
    """A step of nothing but reading."""
    return arithmetic.roofline.decode_bytes(known, DEPTH + STEPS / 2, n_seq) / READ


@pytest.fixture(scope="module")
def rows(facts):
    return made_up(facts, from_bytes, lambda known: 0.01)


# ---------------------------------------------------------------- sizes, speeds, predictions


def test_sizes_are_those_of_the_tensors(rows, facts):
    table = study.sizes(study.files(rows, facts)).set_index(["model", "dtype"])
    assert table.loc[(HYBRID, "F16"), "bits"] == pytest.approx(16, abs=0.3)  # norms and convolutions are F32
    assert table.loc[(HYBRID, "Q8_0"), "bits"] == pytest.approx(8.5, abs=0.3)
    assert list(table.loc[HYBRID].index) == ["F16", "Q8_0", "Q4_K_M", "Q4_0"]
    assert table.loc[(HYBRID, "F16"), "smaller"] == 1


def test_a_step_that_only_reads_gains_what_its_bytes_say_and_no_more(rows, facts):
    compared = arithmetic.against_prediction(rows, study.files(rows, facts)).set_index(["model", "dtype", "phase"])
    for model, dtype, phase in product((HYBRID, ATTENTION), TYPES[1:], ("decode", "batch")):
        line = compared.loc[(model, dtype, phase)]
        assert line["measured"].value > 1
        assert line["miss"].value == pytest.approx(1, rel=1e-4)
    assert compared.loc[(HYBRID, "Q4_0", "decode"), "predicted"] > compared.loc[(HYBRID, "Q4_0", "batch"), "predicted"]
    assert compared.loc[(HYBRID, "Q4_0", "prefill"), "measured"].value == 1


def test_equal_kernels_say_what_the_weights_bytes_say(rows, facts):
    known = study.files(rows, facts)
    spent = arithmetic.kernel_seconds(rows, known)
    amounts = arithmetic.by_type(known[HYBRID, "Q4_K_M"])
    assert {"Q4_K", "Q6_K"} <= set(amounts)
    assert spent["decode", HYBRID, "Q4_K_M"][0] == pytest.approx(
        sum(a["bytes"] for a in amounts.values()) / READ, rel=0.02
    )
    flops = 2 * DEPTH * arithmetic.roofline.matmul_weights(known[HYBRID, "Q4_K_M"])
    assert spent["prefill", HYBRID, "Q4_K_M"][0] == pytest.approx(flops / COMPUTE, rel=0.01)


def test_a_slow_kernel_explains_the_miss(facts):
    def step(known, n_seq):
        return from_bytes(known, n_seq) * (2 if known["dtype"] == "Q4_0" else 1)

    rows = made_up(facts, step, lambda known: 0.01)
    slow = (rows["workload"] == "matmul") & rows["dtype"].isin(["Q4_0", "Q6_K"])  # what a Q4_0 file is made of
    rows.loc[slow, "samples_ns"] = rows.loc[slow, "samples_ns"].map(lambda samples: [[2 * samples[0][0]]])
    line = arithmetic.against_prediction(rows, study.files(rows, facts))
    line = line.set_index(["model", "dtype", "phase"]).loc[(ATTENTION, "Q4_0", "decode")]
    assert line["miss"].value == pytest.approx(0.5, rel=1e-4)
    assert 0.8 < line["left"].value < 1.2  # keys, values and states are no kernel's


def test_what_the_kernels_leave_over_is_theirs_and_the_files_of_the_same_block(rows, facts):
    def slowed(name):
        return [_times(times, 2.0**block) for times, block in zip(rows[name], rows["block"], strict=True)]

    uneven = rows.assign(samples_ns=slowed("samples_ns"), prefill_ns=slowed("prefill_ns"))
    known = study.files(rows, facts)
    even, other = (arithmetic.against_prediction(found, known)["left"].dropna().tolist() for found in (rows, uneven))
    assert len(even) > 1
    assert [each.value for each in other] == pytest.approx([each.value for each in even], rel=1e-4)
    assert [each.high for each in other] == pytest.approx([each.high for each in even], rel=1e-4)


def _times(nested, factor):
    return [_times(each, factor) for each in nested] if isinstance(nested, list) else int(nested * factor)


def test_speeds_are_paired_by_block_so_a_slow_block_costs_no_width(rows):
    table = study.speeds(rows).set_index(["model", "dtype", "phase"])
    ratio, rate = table.loc[(HYBRID, "Q4_0", "decode"), ["ratio", "rate"]]
    assert ratio.high / ratio.low < 1.001
    assert rate.high / rate.low > 1.1
    assert table.loc[(HYBRID, "F16", "prefill"), "rate"].value == pytest.approx(DEPTH / 0.011)


def test_wrong_computations_have_no_speed_but_a_line(rows, facts):
    bad = rows.assign(
        verdict=["invalid" if dtype == "Q4_0" else v for dtype, v in zip(rows["dtype"], rows["verdict"], strict=True)]
    )
    table = study.table(bad, facts).set_index(["model", "dtype"])
    assert pd.isna(table.loc[(HYBRID, "Q4_0"), "decode"])
    assert table.loc[(HYBRID, "Q4_0"), "verdict"] == "10 invalid"
    assert table.loc[(HYBRID, "Q8_0"), "verdict"] == "valid"


def test_claims_hold_for_a_machine_that_only_reads_and_fail_for_one_that_only_computes(rows, facts):
    def verdict(rows, claim):
        found = quantization_claims.claims(rows, facts)
        return set(found[found["claim"].str.contains(claim)]["verdict"])

    assert verdict(rows, "Q8_0 decodes as fast as its bytes say") == {"holds"}
    assert verdict(made_up(facts, lambda known, n: 0.01, lambda known: 0.01), "as its bytes say") == {"does not hold"}
    assert verdict(rows, "prefills as fast as F16") == {"holds"}
    assert verdict(rows, "1.87 for INT8 prefill") == {"does not hold"}


# ---------------------------------------------------------------- the front


def test_the_front_keeps_what_nobody_beats():
    points = pd.DataFrame({"bits": [16, 8, 4, 5, 4], "speed": [1.0, 2, 3, 2.5, 1], "loss": [0, 1e-4, 1e-2, 2e-2, 3e-2]})
    assert pareto.front(points, {"bits": "less", "speed": "more", "loss": "less"}) == [True, True, True, False, False]


def test_intervals_that_overlap_beat_nobody_and_missing_values_are_no_part_of_it():
    near = [Estimate(2.0, 1.8, 2.2, 5), Estimate(2.1, 1.9, 2.3, 5), None]
    points = pd.DataFrame({"speed": pd.Series(near, dtype=object), "loss": [1.0, 1.0, 0.1]})
    assert pareto.front(points, {"speed": "more", "loss": "less"}) == [True, True, False]
    apart = pd.DataFrame({"speed": [near[0], Estimate(2.5, 2.4, 2.6, 5)], "loss": [1.0, 1.0]})
    assert pareto.front(apart, {"speed": "more", "loss": "less"}) == [False, True]


def test_quality_of_another_scale_stands_beside_speed(rows, facts):
    losses = {"Q8_0": 1e-4, "Q4_0": 2e-2, "Q4_K_M": 1e-2}
    exact = [(d, Estimate(v, v * 0.9, v * 1.1, 8)) for d, v in losses.items()]
    unknown = Estimate(np.nan, np.nan, np.nan, 0)
    quality = pd.DataFrame([{"model": HYBRID, "file": d, "kld": e, "ppl_ratio": e, "loops": e} for d, e in exact])
    first = {"model": HYBRID, "file": "F16", "kld": unknown, "ppl_ratio": unknown, "loops": unknown}
    quality = pd.concat([pd.DataFrame([first]), quality], ignore_index=True)
    table = study.with_quality(study.table(rows, facts), quality).set_index(["model", "dtype"])
    assert table.loc[(HYBRID, "F16"), "kld"].value == 0
    assert table.loc[HYBRID, "front"].to_dict() == {"F16": True, "Q8_0": True, "Q4_K_M": True, "Q4_0": True}
    assert not table.loc[ATTENTION, "front"].any()


# ---------------------------------------------------------------- files


def planned(*dtypes, model=HYBRID, **fields):
    cells = tuple(mini("decode", model=model, dtype=dtype, n_gen=2, **fields) for dtype in dtypes)
    return Plan("test", "mini", cells, (), cells[0], 1, 0, 60.0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A models folder of its own that holds the embedded F16 file."""
    os.link(mini_file(), tmp_path / mini_file().name)
    monkeypatch.setattr(registry, "MODELS", tmp_path)
    return tmp_path


def test_files_of_any_recipe_are_made_from_the_f16_file_and_stand_until_it_is_newer(folder):
    files.make_models(planned("Q4_0-ssm_out-F16"))
    made = registry.model_path(HYBRID, "mini", "Q4_0-ssm_out-F16")
    types = {tensor.kind: tensor.dtype for tensor in tensors.tensor_table(made)}
    assert (types["ssm_out"], types["ffn_up"]) == ("F16", "Q4_0")
    made.write_bytes(b"stands")
    files.make_models(planned("Q4_0-ssm_out-F16"))
    assert made.read_bytes() == b"stands"
    os.utime(made, (1, 1))
    files.make_models(planned("Q4_0-ssm_out-F16"))
    assert tensors.tensor_table(made)


def test_candidates_of_a_quality_cell_are_needed_too():
    quality = Plan("test", "mini", (mini("quality", candidates=("Q2_K",)),), (), mini("decode"), 1, 0, 60.0)
    assert files.needed(quality) == [(HYBRID, "mini", "F16"), (HYBRID, "mini", "Q2_K")]


@pytest.mark.parametrize("name", ["Q9_0", "q4_0", "Q4_0-ssm_out", "Q4_0-ssm_out-Q9_0", "../Q4_0"])
def test_a_type_nobody_knows_is_one_clear_error(name):
    with pytest.raises(StudyError, match="known: F32, F16, BF16, Q8_0"):
        registry.model_path(HYBRID, "mini", name)


@pytest.mark.parametrize("name", [*recipes.RECIPES, "Q4_0-ffn_up-Q8_0-ssm_in-F16"])
def test_a_recipes_name_names_it(name):
    assert recipes.by_name(name).name == name


@pytest.mark.parametrize("scale", ["mini", "shape", "weights"])
def test_the_plan_can_be_measured_and_leaves_out_what_is_too_large(scale):
    speed = plan_quantization.speed(scale)
    names = {(model, dtype) for cell in speed.cells for model, _, dtype in cell.files}
    assert {(gate.model, gate.dtype) for gate in speed.gates} == names
    assert (HYBRID, "Q4_0-ssm_out-F16") in names
    assert (ATTENTION, "F32") not in names
    assert not any("ssm_out" in dtype for model, dtype in names if model == ATTENTION)
    assert all(registry.spec(m, scale).n_params * 4 <= plan.LARGEST for m, d in names if d == "F32")
    assert {cell.dtype for cell in speed.cells if not cell.files} <= set(kernels.GGML_TYPES)


# ---------------------------------------------------------------- proofs and kernels


@pytest.mark.parametrize(
    ("dtype", "roughest"),
    [("F16", "F16"), ("Q4_K_M", "Q4_K"), ("Q8_0-ssm_out-BF16", "Q8_0"), ("F16-ffn_up-Q2_K", "Q2_K")],
)
def test_a_recipe_is_proved_with_the_tolerance_of_its_roughest_type(dtype, roughest):
    assert tolerance.tolerance(mini("gate", dtype=dtype)) == tolerance.TOLERANCE[roughest]


def test_f16_weights_on_a_gpu_are_judged_by_multiplications_in_f16_and_a_fault_is_still_far_outside():
    whole, exact = {"dtype": "F16"}, {"dtype": "F16", "type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    for fields in (whole, exact):
        offloaded = mini("gate", n_gpu_layers=-1, **fields)
        assert tolerance.tolerance(offloaded) == tolerance.OFFLOADED["F16"] < 0.4 / 2, "of the defects guarded against"
    assert tolerance.part_tolerance(offloaded) == tolerance.OFFLOADED_PART["F16"] < 0.04, "of the fault that hides best"
    eight_bits = mini("gate", dtype="Q8_0", n_gpu_layers=-1)
    assert tolerance.tolerance(eight_bits) == tolerance.TOLERANCE["Q8_0"]


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
@pytest.mark.parametrize("dtype", ["Q6_K", "Q5_0", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K"])
def test_the_oracle_agrees_on_every_type(model, dtype):
    files.make_models(planned(dtype, model=model))
    cell = mini("gate", model=model, dtype=dtype, n_prompt=24, n_gen=4)
    outcome = work(Job(cell=cell, path=str(plan.model_file(cell))), 60.0)
    assert outcome.measured.valid, (outcome.measured.checks, outcome.failure)
    assert outcome.measured.checks["prefill_error"] <= tolerance.tolerance(cell)


def test_activations_rounded_to_q8_k_keep_the_largest_and_lose_half_a_step_at_most():
    x = np.random.default_rng(0).normal(size=(3, 512)).astype(np.float32)
    x[1, 256:] = 0
    rounded = weights.rounded(x, GGMLQuantizationType.Q8_K)
    step = np.abs(x.reshape(3, 2, 256)).max(axis=2, keepdims=True) / 127
    assert (np.abs(rounded - x).reshape(3, 2, 256) <= 0.5001 * step).all()
    assert np.abs(rounded).max() == pytest.approx(np.abs(x).max())
    assert not rounded[1, 256:].any()


def test_kernels_have_names_on_x86_and_packing_displaces_the_tiled_one():
    engine = {"build": "CPU : AVX2 = 1 | AVX512 = 1 | LLAMAFILE = 1 | REPACK = 1", "gpu_offload": False}
    assert kernel_paths.kernels(engine, "Q4_K") == "packed rows for both"
    assert kernel_paths.kernels(engine, "Q4_K", packed=False) == "tiled; dot products"
    assert kernel_paths.kernels(engine, "Q8_0") == "tinyBLAS; dot products"
    assert kernel_paths.kernels(APPLE, "Q8_0") == ""


def test_the_known_packing_is_the_engines():
    engine = work(Job(), 60.0).measured.facts
    if kernel_paths.kernels(engine, "Q8_0"):
        taken = {d: kernels.matmul_times(d, (256, 256, 1), 1, False, 1, packed=True)[1] for d in kernels.GGML_TYPES}
        found = {dtype for dtype, kernel in taken.items() if kernel == "packed"}
        assert found == {d for d in kernels.GGML_TYPES if kernel_paths.kernels(engine, d).startswith("packed")}


@pytest.mark.parametrize("dtype", kernels.GGML_TYPES)
def test_every_type_has_a_kernel_that_takes_time(dtype):
    for packed in (False, True):
        assert min(kernels.matmul_times(dtype, (64, 256, 2), 1, False, 2, packed)[0]) > 0


# ---------------------------------------------------------------- what is said


def test_the_best_of_many_has_an_interval_that_covers_all_of_them():
    rng = np.random.default_rng(0)
    types, missed, alone_missed = 12, 0, 0
    for _ in range(400):
        gains = [stats.ratio(np.exp(rng.normal(0, 0.07, 5)), np.ones(5)) for _ in range(types)]
        best = max(gains, key=lambda gain: gain.value)
        wide = stats.selected(best, types)
        missed += not wide.low <= 1 <= wide.high
        alone_missed += not best.low <= 1 <= best.high
    assert missed <= 0.07 * 400
    assert alone_missed > 0.15 * 400  # what the chosen one's own interval would have claimed


def recording_of(rows, facts, scale):
    told = {name: known | {"scale": scale} for name, known in facts.items()} | {"box": {"chip": "a chip"}}
    return Recording(rows.assign(machine="box"), told, "04-quantization", scale, "live")


@pytest.mark.parametrize(
    ("scale", "synthetic", "words"),
    [("mini", False, "trained weights"), ("shape", True, "random weights"), ("weights", False, "released weights")],
)
def test_the_condition_names_the_weights_of_every_scale_truly(rows, facts, scale, synthetic, words):
    told = {name: known | {"synthetic": synthetic} for name, known in facts.items()}
    said = show.condition(recording_of(rows, told, scale))
    assert f"({words})" in said
    assert sum(kind in said for kind in ("trained", "random", "released")) == 1


def test_the_finding_prints_rates_that_divide_and_says_how_the_best_was_chosen(rows, facts):
    unknown = Estimate(np.nan, np.nan, np.nan, 0)
    lost = pd.DataFrame([{"model": HYBRID, "file": "F16", "kld": unknown, "ppl_ratio": unknown, "loops": unknown}])
    recording = recording_of(rows, facts, "mini")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(show.losses, "table", lambda _: lost)
        said = show.finding(recording, recording).data
    assert len(list(sentences.quotients(said))) == 4  # two models, two phases
    assert not sentences.contradictions(said)
    assert "chosen after measuring" in said


def test_published_figures_say_what_stands_beside_them(rows, facts):
    table = quantization_published.speedups(recording_of(rows, facts, "mini")).frame
    beside = dict(zip(table["theirs"], table["ours, not the same"], strict=True))
    assert beside["decode, batch 128"].endswith(f"decode, batch {TOGETHER}")
    assert beside["prefill of 2048 tokens"].endswith(f"prefill of {DEPTH} tokens")


def test_a_batch_that_gains_less_only_by_its_bytes_is_no_finding(rows, facts):
    found = quantization_claims.claims(rows, facts)
    by_bytes = found[found["claim"].str.contains("by more than bytes say")]
    assert set(by_bytes["verdict"]) == {"inconclusive"}
    worse = made_up(
        facts,
        lambda known, n: from_bytes(known, n) * (3 if (known["dtype"], n) == ("Q4_0", 8) else 1),
        lambda known: 0.01,
    )
    found = quantization_claims.claims(worse, facts)
    assert set(found[found["claim"].str.contains("by more than bytes say")]["verdict"]) == {"holds"}
