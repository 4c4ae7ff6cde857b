"""The numeric range (D5): what the probe sees, what backends make of it, planted amplitudes against the prediction."""

import re
import shutil
from itertools import product

import built
import gguf
import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file

from llama_meter.cells import PLANTED, ROTATION
from llama_meter.engine.library import capture_log
from llama_meter.engine.nodes import InputRanges
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.errors import StudyError
from llama_meter.measure import machine, ranges
from llama_meter.measure.checking import check
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from llama_meter.models import casts, tensors
from llama_meter.models.finding import blocking
from llama_meter.oracle.forward import Oracle
from plamo_study.laws import numeric_range as study
from plamo_study.plans import numeric_range as plan_ranges

TOKENS = np.random.default_rng(0).integers(5, 500, 16).astype(np.int32)
HERE = {"machine": "here", "engine": "released", "build": "stock", "n_gpu_layers": 0}
FACTS = {"here": {"architecture": "x86_64"}, "released": {}}


def probe(model, flash_attn="off", watch=True):
    """Every logit of a prompt of 12 tokens and 4 decode steps, and the ranges seen."""
    capture_log([])
    config = SessionConfig(16, n_batch=16, flash_attn=flash_attn)
    with (InputRanges if watch else Session)(mini_file(model), config) as engine:
        logits = [engine.prefill({0: TOKENS[:12]}, every=True)[0]]
        engine.phase = "decode"
        for token in TOKENS[12:].tolist():
            engine.decode({0: token})
            logits.append(engine.logits()[None])
        return np.concatenate(logits), getattr(engine, "found", {})


# ---------------------------------------------------------------- the probe


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_the_probe_sees_every_product_as_the_oracle_does_and_changes_no_logit(model):
    for flash_attn in ("on", "off"):
        with_it, found = probe(model, flash_attn)
        assert found
        assert np.array_equal(with_it, probe(model, flash_attn, watch=False)[0])
    weights = {
        (t.kind, t.layer)
        for t in tensors.tensor_table(mini_file(model))
        if t.layer is not None and len(t.shape) > 1 and not tensors.stays_f32(t.name)
    }
    inside = {(kind, layer) for kind in casts.INSIDE for matrix, layer in weights if matrix == "attn_qkv"}
    for phase in ("prompt", "decode"):
        assert {(kind, layer) for at, kind, layer in found if at == phase} == weights | inside | {("token_embd", -1)}
    oracle, largest = Oracle(mini_file(model)), {}
    linear = oracle._weights.linear

    def noting(x, name, *at):
        largest[name] = float(np.abs(x).max()), float(np.abs(x.reshape(12, -1, 32).sum(axis=-1)).max())
        return linear(x, name, *at)

    oracle._weights.linear = noting
    oracle.logits(TOKENS[:12])
    for name, expected in largest.items():
        if name.startswith("blk."):
            _, layer, kind, _ = name.split(".")
            seen = found["prompt", kind, int(layer)]
            assert (seen.largest, seen.sums[32]) == pytest.approx(expected, rel=0.02), name
            assert not seen.not_finite


def test_a_file_is_probed_over_a_text_in_a_process_of_its_own_and_what_does_not_do_is_named(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def range_of(values):\n    return max(values) - min(values)\n" * 20)
    measured = ranges.probe_file(mini_file(), text, n_prompt=32, n_gen=4, n_threads=1)
    assert measured.checks["same_logits"] is True
    found = study.ranges(measured.series)
    assert set(found["phase"]) == {"prompt", "decode"}
    by_kind = study.by_kind(found.assign(model="")).set_index("kind")
    assert by_kind.loc["ssm_out", "verdict"] == "fits"
    assert by_kind["factor"].is_monotonic_decreasing
    text.write_text("def one(): return 1")  # shorter than asked for: it is taken whole
    assert ranges.probe_file(mini_file(), text, n_threads=1).n_evaluated > 4
    text.write_text("a")
    for file, of, why in (
        (mini_file(), text, r"4 are asked for.*\n.*models check"),
        (tmp_path / "absent.gguf", text, "no such file"),
        (mini_file(), tmp_path / "absent.txt", "name a UTF-8 text file"),
    ):
        with pytest.raises(StudyError, match=why):
            ranges.probe_file(file, of, n_threads=1)


# ---------------------------------------------------------------- the table


def test_every_backend_says_what_it_does_with_every_type_on_both_paths_and_where_that_stands():
    for dtype in (*casts.known_types(), "KV-F16"):
        for backend, path in product(casts.BACKENDS, casts.PATHS):
            assert casts.entries(backend, dtype, path), (backend, dtype, path)
        assert casts.entries(casts.BLAS, dtype, "mat-mul") or dtype == "KV-F16"
    for cast in casts.load():
        assert re.fullmatch(r"ggml-[\w./-]+\.(c|cpp|h|cu|cuh|metal|comp|glsl):\d+", cast.source), cast
        assert cast.limit in (np.inf, 65504.0, 127 * 65504.0)
        assert np.isfinite(cast.limit) == (cast.of in casts.SERIES), cast


def test_the_verdict_is_that_of_a_cast_and_the_entry_passed_furthest_decides():
    for number in (1.0, 65504.0, 65519.0, 65520.0, 65536.0, 1e8):
        with np.errstate(over="ignore"):
            survives = bool(np.isfinite(np.float32(number).astype(np.float16)))
        assert casts.verdict("CPU x86", "F16", "mat-mul", {"largest": number}).fits == survives
        assert casts.verdict("CPU x86", "Q8_0", "mat-vec", {"largest": 127 * number}).fits == survives
    numbers = {"largest": 4000.0, "sum of 32": 100_000.0}
    verdict = casts.verdict("CUDA", "Q4_0", "mat-vec", numbers)
    assert (verdict.fits, verdict.cast.of) == (False, "sum of 32")
    assert casts.verdict("CUDA", "Q8_0", "mat-vec", numbers).fits
    assert casts.verdict("CUDA", "IQ1_S", "mat-vec", numbers) is None


def test_weights_on_a_gpu_are_judged_by_its_backend_and_tensor_units_apart():
    devices = {"CUDA0": "CUDA", "Vulkan1": "Vulkan", "MTL0": "Metal"}
    for (name, backend), path in product(devices.items(), casts.PATHS):
        assert casts.of_engine((), "arm64", path, {"name": name, "tensor": False}) == backend
    assert casts.of_engine((), "arm64", "mat-mul", {"name": "MTL0", "tensor": True}) == casts.TENSOR
    with pytest.raises(StudyError, match="ROCm0"):
        casts.of_engine((), "x86_64", "mat-mul", {"name": "ROCm0"})
    assert (casts.limit("Metal", "Q8_0").limit, casts.limit(casts.TENSOR, "Q8_0")) == (65504, None)


# ---------------------------------------------------------------- planted amplitudes


@pytest.fixture(scope="module")
def grid():
    """Rows of planted cells of five types, as a frame has them."""
    rows = []
    for dtype in ("F16", "BF16", "Q8_0", "Q5_1", "Q4_K"):
        cell = mini("ranges", n_prompt=plan_ranges.PLANTED_TOKENS, label=PLANTED + dtype)
        measured = built.measured(cell, workload=plan_ranges.WORKLOAD, right=False)
        row = {"workload": "ranges", "label": cell.mode, "status": "ok", "model": HYBRID, **HERE}
        rows.append(row | {"series": measured.series, "checks": measured.checks})
    return pd.DataFrame(rows)


@pytest.mark.whole
def test_no_planted_amplitude_ends_otherwise_than_predicted_or_changes_a_logit_below_its_limit(grid):
    found = study.planted(grid, FACTS | {"here": {"architecture": machine.facts()["architecture"]}})
    assert found["agrees"].all(), found[~found["agrees"]]
    ended = study.thresholds(found).set_index(["dtype", "phase"])
    for phase in study.PHASES:
        assert ended.loc[("F16", phase), "finite_up_to"] == pytest.approx(65504 * 0.99, rel=2e-3)
        assert ended.loc[("F16", phase), "not_finite_from"] == pytest.approx(65504 * 1.01, rel=2e-3)
        assert ended.loc[("Q8_0", phase), "not_finite_from"] == pytest.approx(127 * 65504 * 1.01, rel=2e-3)
        assert ended.loc[("Q5_1", phase), "not_finite_from"] < 127 * 65504
        assert ended.loc[["BF16", "Q4_K"]].xs(phase, level="phase")["not_finite_from"].isna().all()
        for label, series in zip(grid["label"], grid["series"], strict=True):
            ends = zip(series[f"error/{phase}"], series[f"finite/{phase}"], strict=True)
            assert max(error for error, finite in ends if finite) < study.FAR, (label, phase)


def test_what_ended_otherwise_than_foretold_and_a_worker_that_died_are_counted(grid):
    row, dead = grid.loc[0].copy(), grid.loc[1].copy()
    n = len(row["series"]["amplitude"])
    turned = [1 - value for value in row["series"]["finite/prompt"]]
    row["series"] = row["series"] | {"finite/prompt": turned, "error/prompt": [0.0] * n}
    dead["status"], dead["series"] = "abort", {}
    found = study.planted(pd.DataFrame([row, dead]), FACTS)
    assert (~found["agrees"].astype(bool)).sum() == n + 1


def test_finite_logits_far_from_those_before_are_wrong_and_count_as_what_was_foretold(grid):
    facts = FACTS | {"here": {"architecture": "x86_64", "gpus": [{"name": "Vulkan0"}]}}
    row = grid.loc[2].copy()  # Q8_0
    amplitudes = row["series"]["amplitude"]
    finite, near = [1.0] * len(amplitudes), [0.0] * len(amplitudes)
    far = [study.FAR * (2 if amplitude > 65504 else 0.5) for amplitude in amplitudes]
    row["n_gpu_layers"] = -1
    row["series"] = row["series"] | {f"finite/{phase}": finite for phase in study.PHASES}
    row["series"] |= {"error/prompt": far, "error/decode": near}
    found = study.planted(pd.DataFrame([row]), facts)
    assert found["agrees"].all()
    ended = study.thresholds(found).set_index("phase")
    assert ended.loc["prompt", "how"] == "wrong"
    assert ended.loc["prompt", "not_finite_from"] == pytest.approx(65504 * 1.01, rel=2e-3)
    assert np.isnan(ended.loc["decode", "not_finite_from"])
    row["series"] |= {"error/prompt": near}
    assert not study.planted(pd.DataFrame([row]), facts)["agrees"].all(), "foretold to fail, and did not"


@pytest.mark.whole
def test_a_file_without_rotation_never_returns_on_the_cpu():
    cell = mini("ranges", n_prompt=plan_ranges.ROTATED_TOKENS, label=ROTATION)
    outcome = work(Job(cell=cell, path=str(mini_file())), 4, workload=plan_ranges.WORKLOAD)
    assert (outcome.status, outcome.failure.stage) == ("hang", ROTATION)
    assert cell.asks_whether


# ---------------------------------------------------------------- the gate


def planted_file(path, factor):
    """A copy of the hybrid model whose first ssm_out sees `factor` times as large an input."""
    shutil.copy(mini_file(), path)
    for t in gguf.GGUFReader(path, "r+").tensors:
        if t.name.removesuffix(".weight") in ("blk.0.ssm_d", "blk.0.ssm_c_norm"):
            t.data[:] *= np.float32(factor)
    return path


def test_the_gate_names_the_product_that_passes_a_backend_s_limit_or_how_close_it_came(tmp_path):
    all_found = check(planted_file(tmp_path / "huge.gguf", 1e6))
    assert {f.code for f in blocking(all_found)} == {"logits-not-finite"}
    found = [f for f in all_found if f.code == "range"]
    by_backend = {name: f for f in found for name in ("CPU", "Metal", "CUDA") if f" {name}" in f.evidence}
    assert by_backend.keys() == {"CPU", "Metal", "CUDA"}
    assert all(f.severity == "warning" for f in found)
    assert all("ssm_out in layer 0" in f.evidence and "--keep ssm_out=bf16" in f.mend for f in found)
    (passed,) = (f for f in check(mini_file()) if f.code in ("gate", "range"))
    assert "closest to a limit: " in passed.evidence
