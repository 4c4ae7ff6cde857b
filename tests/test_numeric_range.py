"""The numeric range (D5): what the probe sees, what backends make of it, planted amplitudes against the prediction."""

import csv
import re
import shutil

import gguf
import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file

from plamo_study.engine.library import capture_log
from plamo_study.engine.ranges import InputRanges
from plamo_study.engine.session import SessionConfig
from plamo_study.errors import StudyError
from plamo_study.measure import machine, ranges
from plamo_study.measure.cells import PLANTED, ROTATION
from plamo_study.measure.checking import check
from plamo_study.measure.process import work
from plamo_study.measure.worker import Job
from plamo_study.models import casts, tensors
from plamo_study.models.finding import blocking
from plamo_study.oracle.forward import Oracle
from plamo_study.studies.numeric_range import analysis as study, backends, plan as plan_ranges

TOKENS = np.random.default_rng(0).integers(5, 500, 16).astype(np.int32)
HERE = {"machine": "here", "engine": "released", "build": "stock", "n_gpu_layers": 0}
FACTS = {"here": {"architecture": "x86_64"}, "released": {}}


def probe(model, flash_attn="off", watch=True):
    """Every logit of a prompt of 12 tokens and 4 decode steps, and the ranges seen."""
    capture_log([])
    with InputRanges(mini_file(model), SessionConfig(16, n_gpu_layers=0, flash_attn=flash_attn), watch) as engine:
        engine.evaluate(TOKENS[:12])
        logits = [engine.logits(12)]
        engine.phase = "decode"
        for at in range(12, 16):
            engine.evaluate(TOKENS[at : at + 1])
            logits.append(engine.logits())
        return np.concatenate(logits), engine.found


# ---------------------------------------------------------------- the probe


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_the_probe_leaves_every_logit_the_same_bit_by_bit(model, flash_attn):
    with_it, found = probe(model, flash_attn)
    without, nothing = probe(model, flash_attn, watch=False)
    assert found
    assert not nothing
    assert np.array_equal(with_it, without)


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_every_product_is_seen_in_both_phases(model):
    found = probe(model)[1]
    table = tensors.tensor_table(mini_file(model))
    weights = {
        (t.kind, t.layer) for t in table if t.layer is not None and len(t.shape) > 1 and not tensors.stays_f32(t.name)
    }
    attention = {layer for kind, layer in weights if kind == "attn_qkv"}
    inside = {(kind, layer) for kind in casts.INSIDE for layer in attention}
    for phase in ("prompt", "decode"):
        assert {(kind, layer) for at, kind, layer in found if at == phase} == weights | inside | {("token_embd", -1)}


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_the_largest_inputs_are_those_of_the_oracle(model):
    found = probe(model)[1]
    oracle, largest = Oracle(mini_file(model)), {}
    linear = oracle._weights.linear

    def noting(x, name):
        largest[name] = float(np.abs(x[:12]).max()), float(np.abs(x[:12].reshape(12, -1, 32).sum(axis=-1)).max())
        return linear(x, name)

    oracle._weights.linear = noting
    oracle.logits(TOKENS[:12])
    for name, expected in largest.items():
        if name.startswith("blk."):
            _, layer, kind, _ = name.split(".")
            seen = found["prompt", kind, int(layer)]
            assert (seen.largest, seen.sums[32]) == pytest.approx(expected, rel=0.02), name
            assert not seen.not_finite


def test_a_file_is_probed_over_a_text_in_a_process_of_its_own(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def range_of(values):\n    return max(values) - min(values)\n" * 20)
    measured = ranges.probe_file(mini_file(), text, n_prompt=32, n_gen=4, n_threads=1)
    assert measured.checks["same_logits"] is True
    assert set(study.ranges(measured.series)["phase"]) == {"prompt", "decode"}
    by_kind = study.by_kind(study.ranges(measured.series).assign(model="")).set_index("kind")
    assert by_kind.loc["ssm_out", "verdict"] == "fits"
    assert by_kind["factor"].is_monotonic_decreasing


def test_a_short_text_is_taken_whole_and_one_that_does_not_do_is_named(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("def one(): return 1")
    assert ranges.probe_file(mini_file(), short, n_threads=1).n_evaluated > 4
    with pytest.raises(StudyError, match="no such file"):
        ranges.probe_file(tmp_path / "absent.gguf", short)
    short.write_text("a")
    with pytest.raises(StudyError, match=r"4 are asked for.*\n.*models check"):
        ranges.probe_file(mini_file(), short, n_threads=1)
    with pytest.raises(StudyError, match="name a UTF-8 text file"):
        ranges.probe_file(mini_file(), tmp_path / "absent.txt")


# ---------------------------------------------------------------- the table


def test_every_backend_says_what_it_does_with_every_type_on_both_paths():
    for dtype in (*casts.known_types(), "KV-F16"):
        for backend in casts.BACKENDS:
            for path in casts.PATHS:
                assert casts.entries(backend, dtype, path), (backend, dtype, path)
        assert casts.entries(casts.BLAS, dtype, "mat-mul") or dtype == "KV-F16"
    assert {"F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_0", "Q3_K", "Q2_K"} <= set(
        casts.known_types()
    )


def test_every_entry_names_file_and_line_and_a_limit_that_f16_gives():
    with casts.TABLE.open(newline="") as file:
        assert all(None not in row and None not in row.values() for row in csv.DictReader(file))
    for cast in casts.load():
        assert re.fullmatch(r"ggml-[\w./-]+\.(c|cpp|h|cu|cuh|metal|comp|glsl):\d+", cast.source), cast
        assert cast.limit in (np.inf, 65504.0, 127 * 65504.0)
        assert np.isfinite(cast.limit) == (cast.of in casts.SERIES), cast


@pytest.mark.parametrize("number", [1.0, 65504.0, 65519.0, 65520.0, 65536.0, 1e8])
def test_the_verdict_on_f16_is_what_a_cast_to_f16_does(number):
    with np.errstate(over="ignore"):
        survives = bool(np.isfinite(np.float32(number).astype(np.float16)))
        block = bool(np.isfinite(np.float32(127 * number / 127).astype(np.float16)))
    assert casts.verdict("CPU x86", "F16", "mat-mul", {"largest": number}).fits == survives
    assert casts.verdict("CPU x86", "Q8_0", "mat-vec", {"largest": 127 * number}).fits == block


def test_the_entry_that_is_passed_furthest_decides():
    numbers = {"largest": 4000.0, "sum of 32": 100_000.0}
    verdict = casts.verdict("CUDA", "Q4_0", "mat-vec", numbers)
    assert (verdict.fits, verdict.cast.of) == (False, "sum of 32")
    assert casts.verdict("CUDA", "Q8_0", "mat-vec", numbers).fits
    assert casts.verdict("CUDA", "IQ1_S", "mat-vec", numbers) is None


# ---------------------------------------------------------------- planted amplitudes


@pytest.fixture(scope="module")
def grid():
    """Rows of planted cells of five types, and one of a worker that died, as a frame has them."""
    rows = []
    for dtype in ("F16", "BF16", "Q8_0", "Q5_1", "Q4_K"):
        cell = mini("ranges", n_prompt=plan_ranges.PLANTED_TOKENS, label=PLANTED + dtype)
        outcome = work(Job(cell=cell, path=str(mini_file())), 100, workload=plan_ranges.WORKLOAD)
        assert outcome.status == "ok", outcome.failure
        row = {"workload": "ranges", "label": cell.mode, "status": "ok", "model": HYBRID, **HERE}
        rows.append(row | {"series": outcome.measured.series, "checks": outcome.measured.checks})
    return pd.DataFrame(rows)


def test_no_planted_amplitude_ends_otherwise_than_predicted(grid):
    facts = FACTS | {"here": {"architecture": machine.facts()["architecture"]}}
    found = study.planted(grid, facts)
    assert found["agrees"].all(), found[~found["agrees"]]
    assert set(found["phase"]) == {"prompt", "decode"}
    ended = study.thresholds(found).set_index(["dtype", "phase"])
    for phase in study.PHASES:
        assert ended.loc[("F16", phase), "finite_up_to"] == pytest.approx(65504 * 0.99, rel=2e-3)
        assert ended.loc[("F16", phase), "not_finite_from"] == pytest.approx(65504 * 1.01, rel=2e-3)
        assert ended.loc[("Q8_0", phase), "not_finite_from"] == pytest.approx(127 * 65504 * 1.01, rel=2e-3)
        assert ended.loc[("Q5_1", phase), "not_finite_from"] < 127 * 65504
        assert ended.loc[["BF16", "Q4_K"]].xs(phase, level="phase")["not_finite_from"].isna().all()


def test_a_cell_off_the_diagonal_and_a_worker_that_died_are_counted(grid):
    series = dict(grid.loc[0, "series"])
    series["finite/prompt"] = [1 - value for value in series["finite/prompt"]]
    series["error/prompt"] = [0.0] * len(series["amplitude"])
    dead = grid.loc[1].copy()
    dead["status"], dead["series"] = "abort", {}
    wrong = grid.loc[0].copy()
    wrong["series"] = series
    found = study.planted(pd.DataFrame([wrong, dead]), FACTS)
    n = len(series["amplitude"])
    assert (~found["agrees"].astype(bool)).sum() == n + 1


def test_finite_logits_far_from_those_before_are_wrong_and_count_as_what_was_foretold(grid):
    facts = FACTS | {"here": {"architecture": "x86_64", "gpus": [{"name": "Vulkan0"}]}}
    row = grid.loc[2].copy()  # Q8_0
    series = dict(row["series"])
    series["finite/prompt"] = series["finite/decode"] = [1.0] * len(series["amplitude"])
    far = [float(study.FAR * (2 if amplitude > 65504 else 0.5)) for amplitude in series["amplitude"]]
    series["error/prompt"], series["error/decode"] = far, [0.0] * len(far)
    row["series"], row["n_gpu_layers"] = series, -1
    found = study.planted(pd.DataFrame([row]), facts)
    assert found["agrees"].all()
    assert set(found["observed"]) == {"finite", "wrong"}
    ended = study.thresholds(found).set_index("phase")
    assert ended.loc["prompt", "how"] == "wrong"
    assert ended.loc["prompt", "not_finite_from"] == pytest.approx(65504 * 1.01, rel=2e-3)
    assert np.isnan(ended.loc["decode", "not_finite_from"])
    series["error/prompt"] = [0.0] * len(far)
    assert not study.planted(pd.DataFrame([row]), facts)["agrees"].all(), "foretold to fail, and did not"


def test_what_was_planted_below_every_limit_changes_no_logit(grid):
    for row in grid.to_dict("records"):
        series = row["series"]
        for phase in study.PHASES:
            finite = [
                error for error, ok in zip(series[f"error/{phase}"], series[f"finite/{phase}"], strict=True) if ok
            ]
            assert max(finite) < study.FAR, (row["label"], phase)


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ({"name": "CUDA0"}, "CUDA"),
        ({"name": "Vulkan1"}, "Vulkan"),
        ({"name": "MTL0"}, "Metal"),
        ({"name": "MTL0", "tensor": False}, "Metal"),
        ({"name": "MTL0", "tensor": True}, casts.TENSOR),
    ],
)
def test_weights_on_a_gpu_are_judged_by_its_backend(device, backend):
    for path in casts.PATHS:
        assert casts.of_engine((), "arm64", path, device) == backend


def test_tensor_units_take_inputs_that_the_tiles_of_older_gpus_overflow():
    assert casts.known_types([each for each in casts.load() if each.backend == casts.TENSOR]) == casts.known_types(
        [each for each in casts.load() if each.backend == "Metal"]
    )
    for dtype in ("F32", "F16", "Q8_0", "Q4_K"):
        assert casts.limit("Metal", dtype).limit == 65504
        assert casts.limit(casts.TENSOR, dtype) is None


def test_a_device_whose_casts_nobody_read_is_named():
    with pytest.raises(StudyError, match="ROCm0"):
        casts.of_engine((), "x86_64", "mat-mul", {"name": "ROCm0"})


def test_a_file_without_rotation_never_returns_on_the_cpu():
    cell = mini("ranges", n_prompt=plan_ranges.ROTATED_TOKENS, label=ROTATION)
    outcome = work(Job(cell=cell, path=str(mini_file())), 4, workload=plan_ranges.WORKLOAD)
    assert (outcome.status, outcome.failure.stage) == ("hang", ROTATION)
    assert cell.asks_whether


def test_the_recorded_backends_are_right_and_wrong_where_it_was_foretold():
    found = backends.verdicts().set_index("backend")
    assert {"CPU", "OpenBLAS", "Vulkan"} <= set(found.index)
    assert (found[["gates", "control", "law", "planted"]] == 1).all(axis=None)
    assert (found["hybrid"] == 0).all()
    assert set(found.loc[["CPU", "OpenBLAS"], "rotation"]) == {"never returns"}
    assert found.loc["Vulkan", "rotation"] == "answers wrongly"
    assert found.loc["Vulkan", "rotation_error"] > 0.5


# ---------------------------------------------------------------- the gate


def planted_file(path, factor):
    """A copy of the hybrid model whose first ssm_out sees `factor` times as large an input."""
    shutil.copy(mini_file(), path)
    for t in gguf.GGUFReader(path, "r+").tensors:
        if t.name.removesuffix(".weight") in ("blk.0.ssm_d", "blk.0.ssm_c_norm"):
            t.data[:] *= np.float32(factor)
    return path


def test_the_gate_names_the_product_that_passes_a_backend_s_limit(tmp_path):
    all_found = check(planted_file(tmp_path / "huge.gguf", 1e6))
    assert {f.code for f in blocking(all_found)} == {"logits-not-finite"}
    found = [f for f in all_found if f.code == "range"]
    by_backend = {name: f for f in found for name in ("CPU", "Metal", "CUDA") if f" {name}" in f.evidence}
    assert by_backend.keys() == {"CPU", "Metal", "CUDA"}
    assert all(f.severity == "warning" for f in found)
    assert all("ssm_out in layer 0" in f.evidence and "--keep ssm_out=bf16" in f.mend for f in found)


def test_the_gate_says_how_close_a_right_file_came(tmp_path):
    (passed,) = (f for f in check(mini_file()) if f.code == "gate")
    assert "closest to a limit: " in passed.evidence
    assert not [f for f in check(mini_file()) if f.code == "range"]
