"""Chapter 5: llama-perplexity's figures, chunk by chunk, what is said of them, and what is planned."""

import shutil
from pathlib import Path

import built
import gguf
import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file

from llama_meter.engine.library import capture_log
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.errors import StudyError
from llama_meter.measure import files, texts
from llama_meter.measure.process import work as outcome
from llama_meter.measure.worker import Job
from llama_meter.models import recipes
from plamo_study.stats import estimates
from plamo_study.studies.quantization import law, work

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
        files.quantize(reference, folder / f"{HYBRID}.mini.{name}.gguf", recipes.by_name(name))
    broken = Path(shutil.copy(reference, folder / f"{HYBRID}.mini.broken.gguf"))
    norm = next(tensor for tensor in gguf.GGUFReader(broken).tensors if tensor.name == "output_norm.weight")
    with broken.open("r+b") as file:
        file.seek(norm.data_offset)
        file.write(np.float32(np.nan).tobytes())
    return folder


def cell(text, *candidates, **fields):
    return mini("quality", text=text, candidates=candidates, **{"n_ctx": CHUNK, "n_chunks": CHUNKS} | fields)


def measured(asked, path):
    return built.measured(asked, path, work.__name__, right=False)


CANDIDATES = ("same", "Q8_0", "Q2_K", "broken")


@pytest.fixture(scope="module")
def found(folder, text):
    return measured(cell(text, *CANDIDATES), folder / f"{HYBRID}.mini.F16.gguf")


def frame(series, *candidates):
    row = {"workload": "quality", "status": "ok", "verdict": "valid", "model": HYBRID, "dtype": "F16"}
    return pd.DataFrame([row | {"candidates": candidates, "series": series}])


def test_divergences_are_those_of_probabilities_in_double_precision_and_no_number_counts_in_its_row_alone():
    rng = np.random.default_rng(0)
    p, q = (rng.normal(0, 4, (7, 300)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 300, 7)
    exact_p, exact_q = (np.exp(x.astype(float)) / np.exp(x.astype(float)).sum(1, keepdims=True) for x in (p, q))
    log_p, log_q = work.log_softmax(p), work.log_softmax(q)
    assert np.allclose(work.nll(log_q, targets), -np.log(exact_q[np.arange(7), targets]), atol=1e-5)
    assert np.allclose(work.kl_divergence(log_p, log_q), (exact_p * np.log(exact_p / exact_q)).sum(1), atol=1e-5)
    assert work.same_top(log_p, log_q).tolist() == (exact_p.argmax(1) == exact_q.argmax(1)).tolist()
    p[:, 9] = -np.inf  # a token that the reference excludes adds nothing
    log_p = work.log_softmax(p)
    assert (work.kl_divergence(log_p, log_p) == 0).all()
    p[1, 7] = np.nan
    broken = work.log_softmax(p)
    assert np.flatnonzero(np.isnan(work.kl_divergence(log_p, broken))).tolist() == [1]
    assert np.flatnonzero(~work.same_top(log_p, broken)).tolist() == [1]


def test_chunks_are_cut_as_llama_perplexity_cuts_them_and_prompts_are_whole_lines_from_all_over_the_text():
    tokens = np.arange(100, 170, dtype=np.int32)
    assert texts.chunks(tokens, 16)[:, 0].tolist() == [100, 116, 132, 148]
    cut = texts.chunks(tokens, 16, n_chunks=2, bos=1)
    assert (cut.shape, cut[:, 0].tolist(), cut[1, 1]) == ((2, 16), [1, 1], 117), "the first token gives way"
    with pytest.raises(StudyError, match="70 tokens long, one chunk takes 512"):
        texts.chunks(tokens, 512)
    lines = [f"line {i}\n".encode() for i in range(100)]
    excerpts = texts.excerpts(b"".join(lines), 4, 8)
    assert (excerpts[0], excerpts[-1]) == (b"".join(lines[:8]), b"".join(lines[-8:]))
    assert len(set(excerpts)) == 4


def test_the_same_file_loses_nothing_fewer_bits_lose_more_and_a_file_with_nan_harms_no_other(found):
    assert found.valid
    assert found.series["nll/same"] == found.series["nll/F16"]
    assert found.series["same_top/same"] == found.series["tokens"] == [CHUNK - 1 - CHUNK // 2] * CHUNKS
    assert not any(found.series["kld/same"])
    assert 0 < sum(found.series["kld/Q8_0"]) < sum(found.series["kld/Q2_K"])
    assert sum(found.series["same_top/Q2_K"]) < sum(found.series["same_top/Q8_0"])
    lost = {name: sum(found.series[f"not_finite/{name}"]) for name in ("F16", "Q8_0", "Q2_K", "broken")}
    assert lost == {"F16": 0, "Q8_0": 0, "Q2_K": 0, "broken": sum(found.series["tokens"])}
    table = law.table(frame(found.series, *CANDIDATES)).set_index("file")
    assert table.index[0] == "F16"
    assert table["kld"]["same"].value == table["kld"]["same"].high == 0
    assert table["same_top"]["same"].value == 1
    assert table["kld"]["Q2_K"].low > table["kld"]["Q8_0"].high
    assert np.isnan([table["perplexity"]["broken"].value, table["kld"]["broken"].value]).all()
    nll = sum(found.series["nll/F16"]) / sum(found.series["tokens"])
    assert table["perplexity"]["F16"].value == pytest.approx(np.exp(nll))
    assert law.table(frame({})[:0]).columns.tolist() == law.COLUMNS


def test_what_is_not_finite_or_not_there_fails_the_row(folder, text):
    assert measured(cell(text, dtype="broken", n_chunks=1), folder / f"{HYBRID}.mini.broken.gguf").valid is False
    job = Job(cell=cell(text, "Q5_0"), path=str(folder / f"{HYBRID}.mini.F16.gguf"))
    failed = outcome(job, 60, workload=work.__name__)
    assert failed.status == "error"
    assert "Q5_0.gguf" in failed.failure.message


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_the_sums_are_those_of_logits_asked_for_one_by_one(model, text):
    capture_log([])
    series = measured(cell(text, model=model), mini_file(model)).series
    with Session(mini_file(model), SessionConfig(CHUNK, n_batch=CHUNK, n_gpu_layers=0)) as session:
        tokens = session.tokenize(texts.read(text))
        chunk = texts.chunks(tokens, CHUNK, CHUNKS, session.bos)[2]
        log_q = work.log_softmax(session.prefill({0: chunk}, every=True)[0])
    scored = np.arange(CHUNK // 2, CHUNK - 1)
    assert series["nll/F16"][2] == pytest.approx(-log_q[scored, chunk[scored + 1]].sum(), rel=1e-5)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(3)
    tokens = np.full(30, 100.0)
    sums = [estimates.ratio_of_sums(100 * rng.normal(0.2, 0.1, 30), tokens) for _ in range(200)]
    assert 0.88 < np.mean([e.low <= 0.2 <= e.high for e in sums]) <= 0.99


@pytest.mark.parametrize("n", [2, 3, 7, 40])
def test_tests_and_intervals_are_those_of_scipy_which_takes_too_long_to_load(n):
    from scipy import stats as distributions  # 0.8 s, in every process of the tests

    rng = np.random.default_rng(3)
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


def test_a_planted_loss_is_found_and_none_where_there_is_none():
    rng, series = np.random.default_rng(5), {"tokens": [255] * 40}
    for name, times in (("Q8_0", 1), ("Q4_0", 1), ("Q2_K", 2)):
        series |= {f"kld/{name}": 255 * times * np.abs(rng.normal(0.01, 0.002, 40))}
    pairs = law.pairs(frame(series), [(HYBRID, "Q2_K", "Q4_0"), (HYBRID, "Q8_0", "Q4_0")])
    assert (pairs["p_adjusted"] < 0.05).tolist() == [True, False]
    assert pairs["share"][0].value == pytest.approx(0.5, rel=0.2)
    assert law.pairs(frame(series), []).empty
