"""Quality of quantized files: llama-perplexity's figures, chunk by chunk, and what is said of them."""

import shutil
from pathlib import Path

import built
import gguf
import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file

from llama_meter import paths
from llama_meter.cells import Quality
from llama_meter.engine.library import capture_log
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.errors import StudyError
from llama_meter.measure import quantizing, texts
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from llama_meter.models import recipes
from plamo_study.stats import estimates
from plamo_study.studies.quantization import (
    divergence,
    law as quality,
    quality_plan as plan_quality,
    work as continuations,
    work as quality_workload,
)

WORKLOAD = "plamo_study.studies.quantization.work"

CHUNK, CHUNKS = 64, 6
NAN = float("nan")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_bytes(Path(texts.__file__).read_bytes() + "日本語の文です。\n".encode() * 20)
    return str(path.with_suffix(""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The hybrid's F16 file, the same under another name, two quantized ones, and one with a planted NaN."""
    folder = tmp_path_factory.mktemp("files")
    reference = shutil.copy(mini_file(), folder / f"{HYBRID}.mini.F16.gguf")
    shutil.copy(reference, folder / f"{HYBRID}.mini.same.gguf")
    for name in ("Q8_0", "Q2_K"):
        quantizing.quantize(reference, folder / f"{HYBRID}.mini.{name}.gguf", recipes.recipe(name))
    broken = Path(shutil.copy(reference, folder / f"{HYBRID}.mini.broken.gguf"))
    norm = next(tensor for tensor in gguf.GGUFReader(broken).tensors if tensor.name == "output_norm.weight")
    with broken.open("r+b") as file:
        file.seek(norm.data_offset)
        file.write(np.float32(np.nan).tobytes())
    return folder


def cell(text, *candidates, **fields):
    sizes = {"n_ctx": CHUNK, "n_chunks": CHUNKS} | fields
    return mini("quality", text=str(text), candidates=candidates, **sizes)


def reference(folder):
    return folder / f"{HYBRID}.mini.F16.gguf"


def measured(asked, path):
    return built.measured(asked, path, WORKLOAD, right=False)


@pytest.fixture(scope="module")
def found(folder, text):
    return measured(cell(text, "same", "Q8_0", "Q2_K", "broken", n_gen=12, n_seq=3), reference(folder))


def row(measured, asked, model=HYBRID):
    return {
        "workload": "quality",
        "status": "ok",
        "verdict": "valid",
        "model": model,
        "dtype": asked.dtype,
        "text": asked.text,
        "candidates": asked.candidates,
        "series": measured if isinstance(measured, dict) else measured.series,
    }


# ---------------------------------------------------------------- divergence


def test_divergences_are_those_of_probabilities_in_double_precision():
    rng = np.random.default_rng(0)
    p, q = (rng.normal(0, 4, (7, 300)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 300, 7)
    exact_p, exact_q = (np.exp(x.astype(float)) / np.exp(x.astype(float)).sum(1, keepdims=True) for x in (p, q))
    log_p, log_q = divergence.log_softmax(p), divergence.log_softmax(q)
    at = np.arange(7), targets
    assert np.allclose(divergence.nll(log_q, targets), -np.log(exact_q[at]), atol=1e-5)
    assert np.allclose(divergence.kl_divergence(log_p, log_q), (exact_p * np.log(exact_p / exact_q)).sum(1), atol=1e-5)
    assert np.allclose(divergence.delta_p(log_p, log_q, targets), exact_q[at] - exact_p[at], atol=1e-6)
    assert divergence.same_top(log_p, log_q).tolist() == (exact_p.argmax(1) == exact_q.argmax(1)).tolist()


def test_what_is_the_same_diverges_by_nothing_and_what_is_no_number_only_in_its_row():
    logits = np.random.default_rng(1).normal(0, 4, (3, 50)).astype(np.float32)
    logits[:, 9] = -np.inf  # a token that the reference excludes adds nothing
    log_p = divergence.log_softmax(logits)
    assert (divergence.kl_divergence(log_p, log_p) == 0).all()
    broken = logits.copy()
    broken[1, 7] = np.nan
    log_q = divergence.log_softmax(broken)
    assert np.isnan(divergence.kl_divergence(log_p, log_q)).tolist() == [False, True, False]
    assert divergence.same_top(log_p, log_q).tolist() == [True, False, True]


# ---------------------------------------------------------------- texts


def test_chunks_are_cut_as_llama_perplexity_cuts_them():
    tokens = np.arange(100, 170, dtype=np.int32)
    assert texts.chunks(tokens, 16)[:, 0].tolist() == [100, 116, 132, 148]
    cut = texts.chunks(tokens, 16, n_chunks=2, bos=1)
    assert cut.shape == (2, 16)
    assert cut[:, 0].tolist() == [1, 1], "the first token gives way"
    assert cut[1, 1] == 117
    assert tokens[0] == 100
    with pytest.raises(StudyError, match="70 tokens long, one chunk takes 512"):
        texts.chunks(tokens, 512)


class Begins(Session):
    """An engine that begins a text as its file asks."""

    def tokenize(self, text):
        return np.concatenate([[self.bos], super().tokenize(text)])


@pytest.mark.parametrize("engine", [Session, Begins])
def test_every_chunk_begins_as_the_file_asks_and_bytes_add_up_whatever_an_engine_adds(engine):
    asked = Quality(n_ctx=CHUNK, n_chunks=CHUNKS)
    with engine(paths.MODELS / "plamo-2-1b.mini.F16.gguf", SessionConfig(CHUNK)) as session:
        text = texts.read("python-heldout")[: 1 << 12]
        assert (session.tokenize(text)[0] == session.bos) == (engine is Begins), "the locked engine adds nothing"
        chunks, checks = quality_workload._chunks(asked, session, text)
    assert checks == {"bytes_add_up": True}
    assert set(chunks[:, 0].tolist()) == {1}
    assert chunks.shape == (CHUNKS, CHUNK)


def test_prompts_are_whole_lines_from_all_over_the_text():
    lines = [f"line {i}\n".encode() for i in range(100)]
    excerpts = texts.excerpts(b"".join(lines), 4, 8)
    assert excerpts[0] == b"".join(lines[:8])
    assert excerpts[-1] == b"".join(lines[-8:])
    assert len(set(excerpts)) == 4
    with pytest.raises(StudyError, match="has 100 lines"):
        texts.excerpts(b"".join(lines), 99, 8)


# ---------------------------------------------------------------- one row


def test_the_same_file_loses_nothing_fewer_bits_lose_more_and_a_file_with_nan_harms_no_other(found):
    assert found.valid
    assert found.checks["bytes_add_up"]
    assert found.checks["reference_finite"]
    assert found.series["nll/same"] == found.series["nll/F16"]
    assert found.series["same_top/same"] == found.series["tokens"] == [CHUNK - 1 - CHUNK // 2] * CHUNKS
    assert not any(found.series["kld/same"] + found.series["dp2/same"])
    assert found.series["loop/same"] == found.series["loop/F16"]
    assert 0 < sum(found.series["kld/Q8_0"]) < sum(found.series["kld/Q2_K"])
    assert sum(found.series["same_top/Q2_K"]) < sum(found.series["same_top/Q8_0"])
    lost = {name: sum(found.series[f"not_finite/{name}"]) for name in ("F16", "Q8_0", "Q2_K", "broken")}
    assert lost == {"F16": 0, "Q8_0": 0, "Q2_K": 0, "broken": sum(found.series["tokens"])}
    assert found.series["loop/broken"] == [-1] * 3


def test_a_reference_with_nan_invalidates_the_row(folder, text):
    asked = cell(text, "Q8_0", dtype="broken", n_chunks=1)
    assert measured(asked, folder / f"{HYBRID}.mini.broken.gguf").valid is False


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_the_sums_are_those_of_logits_asked_for_one_by_one(model, text):
    capture_log([])
    series = measured(cell(text, model=model), mini_file(model)).series
    with Session(mini_file(model), SessionConfig(CHUNK, n_batch=CHUNK, n_gpu_layers=0)) as session:
        tokens = session.tokenize(texts.read(text))
        chunk = texts.chunks(tokens, CHUNK, CHUNKS, session.bos)[2]
        logits = session.prefill({0: chunk}, every=True)[0]
        pieces = session.piece_bytes(chunk[CHUNK // 2 + 1 :])
    scored = np.arange(CHUNK // 2, CHUNK - 1)
    log_q = divergence.log_softmax(logits)
    assert series["nll/F16"][2] == pytest.approx(-log_q[scored, chunk[scored + 1]].sum(), rel=1e-5)
    assert series["bytes"][2] == pieces.sum()


def test_another_text_than_planned_is_refused_and_a_missing_candidate_named(folder, text):
    outcome = work(Job(cell=cell(text, "Q5_0"), path=str(reference(folder))), 60, workload=WORKLOAD)
    assert (outcome.status, outcome.failure.stage) == ("error", "load Q5_0")
    assert "Q5_0.gguf" in outcome.failure.message
    outcome = work(Job(cell=cell(text, text_sha256="0" * 64), path=str(reference(folder))), 60, workload=WORKLOAD)
    assert outcome.status == "error"
    assert "not the text that was planned" in outcome.failure.message


# ---------------------------------------------------------------- loops


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 0),
        ([9, 1, 2, 1, 2, 1, 2], 2),
        ([1, 2, 1, 2, 1, 2, 3], 0),
        ([1, 2, 1, 2], 0),
        ([7, 7, 7, 7, 7], 0),
        ([7, 7, 7, 7, 7, 7], 2),
        ([5, *[1, 2, 3, 4] * 3], 4),
    ],
)
def test_a_phrase_three_times_at_the_end_is_a_loop(tokens, period):
    assert continuations.loop_period(np.array(tokens)) == period


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_prompts_continued_together_are_continued_as_if_alone(model):
    capture_log([])
    prompts = [np.arange(start, start + length) for start, length in ((10, 9), (200, 17), (300, 5))]
    with Session(mini_file(model), SessionConfig(64, n_batch=64, n_seq_max=3, n_gpu_layers=0)) as session:
        together = continuations.continued(session, prompts, 6)
        alone = [continuations.continued(session, [prompt], 6)[0] for prompt in prompts]
    same = [np.array_equal(a, b) for a, b in zip(together, alone, strict=True)]
    assert sum(same) >= 2, "a near tie may fall otherwise in another kernel, a mixed-up batch differs everywhere"


# ---------------------------------------------------------------- statistics


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(3)
    tokens = np.full(30, 100.0)
    sums = [estimates.ratio_of_sums(100 * rng.normal(0.2, 0.1, 30), tokens) for _ in range(200)]
    assert 0.88 < np.mean([e.low <= 0.2 <= e.high for e in sums]) <= 0.99
    quantiles, values = [], np.linspace(0, 1, len(divergence.GRID)).tolist()
    beyond = estimates.quantile(0.999, [9, 10, 10], [10, 10, 10], divergence.GRID, values)
    assert np.isnan(beyond.low), "a quantile beyond the tokens has no interval"
    for _ in range(200):
        values = rng.exponential(1, (30, 100)) * rng.normal(1, 0.1, (30, 1))
        below = (values <= np.quantile(values, 0.9)).sum(1)
        grid = np.quantile(values, divergence.GRID)
        quantiles.append(estimates.quantile(0.9, below, tokens, divergence.GRID, grid.tolist()))
    assert 0.85 < np.mean([e.low <= np.log(10) <= e.high for e in quantiles]) <= 0.99


def test_tests_and_intervals_are_those_of_scipy_which_takes_too_long_to_load():
    from scipy import stats as distributions  # 0.8 s, in every process of the tests

    rng = np.random.default_rng(3)
    for n in (2, 3, 7, 40):
        values, p = rng.normal(0.3, 1, n), rng.uniform(0, 0.2, n)
        assert estimates.p_value(values) == pytest.approx(distributions.ttest_1samp(values, 0).pvalue)
        expected = distributions.false_discovery_control(p).tolist()
        assert estimates.adjusted([*p, NAN]) == pytest.approx([*expected, NAN], nan_ok=True)
        for successes in (0, 1, n - 1, n):
            exact = distributions.binomtest(successes, n).proportion_ci(0.95, "exact")
            rate = estimates.rate(successes, n)
            assert (rate.low, rate.high) == pytest.approx((exact.low, exact.high))
            tails = [distributions.binomtest(successes, n, 0.2, side).pvalue for side in ("less", "greater")]
            assert rate.p(0.2) == rate.scaled(100).p(20) == pytest.approx(min(1, 2 * min(tails)))
            assert np.isnan(rate.p(0)), "a share that cannot be is no hypothesis"


def test_where_nothing_was_measured_tables_have_their_columns_and_no_lines(found, text):
    rows = pd.DataFrame([row(found, cell(text, "same", "Q8_0", "Q2_K", "broken"))])
    whole, none = quality.table(rows), quality.table(rows[:0])
    assert list(none) == list(whole)
    assert none.empty
    assert not quality.pairs(rows, []).share.size


def test_the_table_says_what_was_lost_and_what_cannot_be_said(found, text):
    table = quality.table(pd.DataFrame([row(found, cell(text, "same", "Q8_0", "Q2_K", "broken"))])).set_index("file")
    assert table.index[0] == "F16"
    assert table["kld"]["same"].value == table["kld"]["same"].high == 0
    assert table["same_top"]["same"].value == 1
    assert table["kld"]["Q2_K"].low > table["kld"]["Q8_0"].high
    assert table["kld"]["Q2_K"].value < table["kld_99"]["Q2_K"].value
    assert table["valid"].to_dict() == {"F16": True, "same": True, "Q8_0": True, "Q2_K": True, "broken": False}
    assert np.isnan(table["perplexity"]["broken"].value)
    assert table["not_finite"]["broken"] == sum(found.series["tokens"])
    assert table["loops"]["F16"].n == 3
    bits = np.log2(table["perplexity"]["F16"].value) * sum(found.series["tokens"]) / sum(found.series["bytes"])
    assert table["bits_per_byte"]["F16"].value == pytest.approx(bits)


def fake(rng, shift, names):
    """Series of 40 chunks of 255 tokens in which every candidate differs from the reference by noise and a shift."""
    tokens = [255] * 40
    series = {"tokens": tokens, "bytes": [800] * 40, "file_bytes": [1.0] * (1 + len(names))}
    base = 255 * rng.normal(2, 0.3, 40)
    series |= {"nll/F16": base, "not_finite/F16": [0] * 40}
    for name in names:
        kld = 255 * np.abs(rng.normal(0.01, 0.002, 40)) * (2 if shift.get(name) else 1)
        sums = {"nll": base + 255 * rng.normal(shift.get(name, 0), 0.02, 40), "kld": kld, "not_finite": [0] * 40}
        sums |= {"same_top": [250] * 40, "dp": [0.1] * 40, "dp2": [0.1] * 40}
        series |= {f"{what}/{name}": values for what, values in sums.items()}
        series |= {f"below/{name}/{q}": [int(255 * q)] * 40 for q in divergence.QUANTILES}
        series[f"quantiles/{name}"] = np.linspace(0.01, 1, len(divergence.GRID)).tolist()
    return {name: np.asarray(values).tolist() for name, values in series.items()}


def test_a_planted_loss_is_found_and_none_where_there_is_none(text):
    rng = np.random.default_rng(5)
    names = ("Q8_0", "Q4_0", "Q2_K", "other")
    frame = pd.DataFrame([row(fake(rng, {"Q2_K": 0.02}, names), cell(text, *names))])
    pairs = quality.pairs(frame, [(HYBRID, "Q2_K", "Q4_0"), (HYBRID, "Q8_0", "Q4_0")])
    assert (pairs["p_adjusted"] < 0.05).tolist() == [True, False]
    assert pairs["share"][0].value == pytest.approx(0.5, rel=0.2)
    apart = [row(fake(rng, {}, names), cell(text, *names)) for names in (("Q8_0",), ("Q4_0", "Q2_K"))]
    assert quality.table(pd.DataFrame(apart))["file"].tolist() == ["F16", "Q8_0", "Q4_0", "Q2_K"], "of two processes"


# ---------------------------------------------------------------- the plan


def test_a_plan_names_its_text_and_holds_every_type_against_the_reference():
    hybrid, attention = (planned := plan_quality.quality("mini")).cells
    assert (hybrid.model, attention.model) == (HYBRID, ATTENTION)
    assert "Q4_0-ssm_out-F16" in hybrid.candidates
    assert "Q4_0-ssm_out-F16" not in attention.candidates
    assert "F16" not in hybrid.candidates + attention.candidates
    assert hybrid.text_sha256 == texts.sha256(texts.read(hybrid.text))
    assert planned.blocks == 1
    with pytest.raises(StudyError, match="random weights"):
        plan_quality.quality("shape")


def test_files_that_do_not_fit_together_are_held_against_the_reference_in_groups(monkeypatch):
    (together,) = plan_quality.groups(HYBRID, "mini")
    monkeypatch.setattr(plan_quality, "MEMORY_SHARE", 0)
    assert plan_quality.groups(HYBRID, "mini") == [(name,) for name in together]


# ---------------------------------------------------------------- llama-perplexity
