"""Drop-one and protect-one scans: composed models are written ones; random weights hold nothing fragile, planted do."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from conftest import ATTENTION, HYBRID, mini, mini_file
from typer.testing import CliRunner

from plamo_study.cli import scan as cli_scan
from plamo_study.engine import library, rounding, swapping
from plamo_study.engine.session import EngineError, SessionConfig
from plamo_study.engine.swapping import Composer
from plamo_study.errors import StudyError
from plamo_study.measure import machine, quantizing
from plamo_study.models import recipes, registry, synthetic
from plamo_study.studies.fragility import analysis as fragility, plan as plan_scan, workload as scan
from plamo_study.studies.fragility.analysis import Scanned

F16, Q4_0, Q8_0, Q2_K, Q4_K = 1, 2, 8, 10, 12  # ggml.h, enum ggml_type
CONFIG = SessionConfig(n_ctx_seq=64, n_batch=64, n_gpu_layers=0)
TOKENS = np.arange(5, 69, dtype=np.int32)
OUTLIER = 64.0


@pytest.fixture(autouse=True, scope="module")
def _silent() -> None:
    library.capture_log([])


def quantized(source: Path, folder: Path, name: str, keep: tuple[str, ...] = ()) -> Path:
    return quantizing.quantize(source, folder / f"{source.stem}.{name}{''.join(keep)}.gguf", recipes.recipe(name, keep))


def logits(session: swapping.Composed) -> np.ndarray:
    with session:
        return session.prefill({0: TOKENS}, every=True)[0]


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_a_composed_model_has_the_logits_of_the_written_mixture(model: str, tmp_path: Path) -> None:
    source = mini_file(model)
    mixed = quantized(source, tmp_path, "Q4_0", ("ffn_down=F16",))
    composer = Composer(source, quantized(source, tmp_path, "Q4_0"))
    kept = [name for name in composer.differing if "ffn_down" not in name]
    assert "token_embd.weight" in kept
    assert np.array_equal(logits(composer.compose(CONFIG, kept)), logits(swapping.as_plain_file(mixed, CONFIG)))
    assert np.array_equal(logits(composer.compose(CONFIG)), logits(swapping.as_plain_file(source, CONFIG)))
    assert not np.array_equal(logits(composer.compose(CONFIG)), logits(composer.compose(CONFIG, kept)))


def test_files_of_two_models_cannot_be_composed() -> None:
    with pytest.raises(EngineError, match="not the same model"):
        Composer(mini_file(HYBRID), mini_file(ATTENTION))


@pytest.mark.parametrize("dtype", [Q4_0, Q8_0, Q2_K, Q4_K])
def test_a_structureless_error_is_the_types_error_on_normal_weights(dtype: int) -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((256, 256), dtype=np.float32) * 0.02
    raw = rounding.encode(weights, F16)
    kept = rounding.decode(raw, F16)
    own = rounding.decode(rounding.encode(kept, dtype), dtype) - kept
    drawn = rounding.decode(rounding.with_structureless_error(raw, F16, dtype, rng), F16) - kept
    assert drawn.std() == pytest.approx(own.std(), rel=0.05)
    assert abs(np.corrcoef(drawn, own)[0, 1]) < 0.02


def test_a_structureless_error_is_not_moved_by_outliers() -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((256, 256), dtype=np.float32) * 0.02
    with_outliers = weights.copy()
    with_outliers[:, ::32] *= OUTLIER
    errors = []
    for values in (weights, with_outliers):
        raw = rounding.encode(values, F16)
        disturbed = rounding.decode(rounding.with_structureless_error(raw, F16, Q4_0, rng), F16)
        errors.append(np.std(disturbed - rounding.decode(raw, F16)))
    assert errors[1] == pytest.approx(errors[0], rel=0.1)


# ---------------------------------------------------------------- scans of real files


def scanned(source: Path, candidate: Path, text: Path) -> Scanned:
    cell = mini("scan", n_prompt=48, n_chunks=8, text=str(text), candidates=("Q4_0",))
    measured = scan.scan(cell, source, candidate, lambda stage: None)
    assert measured.valid, measured.checks
    assert measured.n_evaluated % (48 * 8) == 0
    return Scanned("mini", "F16", "Q4_0", measured.series)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(chr(c) for c in np.random.default_rng(0).integers(97, 123, 2000)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def random_scan(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Scanned:
    folder = tmp_path_factory.mktemp("random")
    source = synthetic.write(registry.spec(HYBRID, "mini"), "F16", folder / "random.F16.gguf", seed=1)
    return scanned(source, quantized(source, folder, "Q4_0"), text)


def test_random_weights_hold_nothing_fragile(random_scan: Scanned) -> None:
    judged = fragility.fragility([random_scan])
    assert len(judged) == 9 + 4
    assert not set(judged["verdict"]) & {fragility.FRAGILE, fragility.MORE, fragility.STURDY}


def test_in_random_weights_damage_per_byte_differs_significantly_all_the_same(random_scan: Scanned) -> None:
    damages = fragility.damage([random_scan]).set_index("point")
    assert (damages["p_harm"] < 0.05).all()
    per_byte = [e.value / b for e, b in zip(damages["dropped"], damages["extra_bytes"], strict=True)]
    assert max(per_byte) > 20 * min(per_byte)


def plant(path: Path, kind: str, feeding: str) -> None:
    """Outlier columns in every tensor of a kind, undone in the rows of the one that feeds it."""
    places = Composer(path, path).reference
    for name, place in places.items():
        if f".{kind}." in name:
            _scale(path, place, (slice(None), slice(None, None, 32)), OUTLIER)
        if f".{feeding}." in name:  # the second half of ffn_up is multiplied with the first, after its activation
            _scale(path, place, (slice(place.shape[0] // 2, None, 32), slice(None)), 1 / OUTLIER)


def _scale(path: Path, place: swapping.Place, where: tuple[slice, slice], factor: float) -> None:
    values = np.memmap(path, dtype=np.float16, mode="r+", offset=place.offset, shape=place.shape)
    values[where] *= np.float16(factor)
    values.flush()


def test_a_planted_fragile_class_is_found_and_nothing_else(tmp_path: Path, text: Path) -> None:
    source = synthetic.write(registry.spec(ATTENTION, "mini"), "F16", tmp_path / "planted.F16.gguf", seed=2)
    plant(source, "ffn_down", "ffn_up")
    found = scanned(source, quantized(source, tmp_path, "Q4_0"), text)
    judged = fragility.fragility([found]).set_index("point")
    assert set(judged[judged["verdict"] == fragility.FRAGILE].index) == {"ffn_down"}
    assert judged.loc["ffn_down", "excess"].value > 4
    path = fragility.frontier([found])
    assert path["damage"].iloc[-1].value == 0  # everything protected: the reference
    assert path["bytes"].is_monotonic_increasing


# ---------------------------------------------------------------- statistics


def drawn(rng: np.random.Generator, planted: float = 1.0, n_points: int = 9, n_chunks: int = 16) -> Scanned:
    """A scan under the null: roles differ a thousandfold, every rounding is a draw, chunks differ."""
    series: dict[str, list[float]] = {"all": [3.0] * n_chunks, "size all": [1e6, 2e6, 6e5]}
    series["floor"] = [1e-7] * n_chunks
    chunks = rng.normal(0, 0.3, n_chunks)
    for i in range(n_points):
        role, spread = np.exp(rng.uniform(-7, 0)), rng.choice([0.02, 0.1, 0.4])
        draws = rng.normal(0, spread, fragility.DRAWS)[np.arange(n_chunks) % fragility.DRAWS]
        noise = rng.normal(0, 0.02, (3, n_chunks))
        own = np.log(planted if i == 0 else 1.0) + rng.normal(0, spread)
        series[f"drop p{i}"] = (role * np.exp(own + chunks + noise[0])).tolist()
        series[f"control p{i}"] = (1.5 * role * np.exp(draws + chunks + noise[1])).tolist()
        series[f"protect p{i}"] = (3.0 - role * np.exp(chunks + noise[2])).tolist()
        series[f"size p{i}"] = [1e5, 2e5, 6e4]
    return Scanned("drawn", "F16", "Q4_0", series)


def test_false_discoveries_stay_within_their_rate_and_true_ones_are_made() -> None:
    rng = np.random.default_rng(0)
    null = [fragility.fragility([drawn(rng)]) for _ in range(100)]
    found = [(t["p_adjusted"] < fragility.LEVEL).any() for t in null]
    assert np.mean(found) <= 0.08  # 5 %, and what 100 draws may lie above it
    planted = [fragility.fragility([drawn(rng, planted=12.0)]).iloc[0] for _ in range(40)]
    assert np.mean([line["verdict"] == fragility.FRAGILE for line in planted if line["detectable"] < 12]) > 0.8


def quiet(planted: float) -> Scanned:
    """A scan whose draws differ by 5 %, so that a small excess can be seen: that of p0 is `planted`."""
    rng, found = np.random.default_rng(7), drawn(np.random.default_rng(7))
    for i in range(9):
        spread = rng.normal(0, 0.05, fragility.DRAWS)[np.arange(16) % fragility.DRAWS]
        found.series[f"control p{i}"] = np.exp(spread).tolist()
        found.series[f"drop p{i}"] = [planted if i == 0 else 1.0] * 16
    return found


@pytest.mark.parametrize(
    ("planted", "verdict"),
    [(1.0, fragility.EXPLAINED), (1.35, fragility.MORE), (3.0, fragility.FRAGILE), (0.5, fragility.STURDY)],
)
def test_more_than_explained_and_worth_keeping_are_two_answers(planted: float, verdict: str) -> None:
    line = fragility.fragility([quiet(planted)]).set_index("point").loc["p0"]
    assert line["verdict"] == verdict
    assert line["p_margin"] >= line["p"]
    assert line["n_chunks"] == 16
    assert line["above"] == (16 if planted > 1.3 else line["above"])


class Dealing:
    """A scan under way in which a chunk's control damage is e to the number of the draw that it is evaluated with."""

    config, points = None, {"p": ()}
    composer = SimpleNamespace(compose=lambda config, replaced: replaced)

    def __init__(self) -> None:
        self.series: dict[str, list[float]] = {}

    def add(self, name: str, draw: int, chunks: np.ndarray, expected: list[None]) -> None:
        self.series.setdefault(name, []).extend([float(np.exp(draw))] * len(chunks))


def test_rows_and_statistics_deal_chunks_to_draws_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_draw", lambda composer, names, seed, draw: draw)
    dealing, start = Dealing(), 0
    for n in (5, 20, 11):  # groups of chunks that fit in memory together
        scan._control(dealing, "p", np.arange(n), [None] * n, start, 0)
        start += n
    series = dealing.series | {"drop p": [1.0] * start}
    by_draw = -fragility._log_quotients(Scanned("dealt", "F16", "Q4_0", series), "p")
    np.testing.assert_allclose(by_draw, np.arange(fragility.DRAWS), atol=1e-12)


def test_few_weights_make_a_wide_interval_whatever_the_number_of_chunks() -> None:
    rng = np.random.default_rng(3)
    scans = [drawn(rng, n_chunks=160)]
    table = fragility.fragility(scans)
    widths = np.array([e.high / e.low for e in table["excess"]])
    assert widths.min() > 1.04
    assert table["detectable"].between(1, 100).all()


def test_what_protection_costs_is_bits_per_weight_per_nat() -> None:
    line = fragility.damage([drawn(np.random.default_rng(4))]).iloc[0]
    assert line["extra_bytes"] == 140_000
    assert line["price"].value == pytest.approx(8 * 0.14 / line["avoided"].value)
    assert line["price"].low <= line["price"].value <= line["price"].high
    assert line["per_megabyte"].value == pytest.approx(line["avoided"].value / 0.14)


def test_a_point_whose_numbers_are_not_finite_is_left_out() -> None:
    found = drawn(np.random.default_rng(5))
    del found.series["drop p3"]
    assert "p3" not in set(fragility.fragility([found])["point"])


# ---------------------------------------------------------------- plan and worker


def test_the_plan_scans_both_models_on_the_text_of_the_quality_study() -> None:
    planned = plan_scan.scan("mini")
    assert {cell.model for cell in planned.cells} == {HYBRID, ATTENTION}
    assert all(len(cell.text_sha256) == 64 and cell.candidates for cell in planned.cells)
    assert all(gate.workload == "gate" for gate in planned.gates)


def test_random_weights_of_full_size_are_not_scanned() -> None:
    with pytest.raises(StudyError, match="no quality to lose"):
        plan_scan.scan("shape")


def test_the_command_scans_files_that_no_plan_knows(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "performance_cores", lambda: 1)  # tests run beside one another
    source = mini_file(ATTENTION)
    arguments = [str(source), str(quantized(source, tmp_path, "Q4_0")), "--text", str(text)]
    app = typer.Typer()
    app.command()(cli_scan.scan)
    result = CliRunner().invoke(app, [*arguments, "--chunk", "32", "--chunks", "2", "--json"])
    assert result.exit_code == 0, result.output
    lines = {line["point"]: line for line in map(json.loads, result.stdout.splitlines())}
    assert {"token_embd", "attn_qkv", "layer 0"} <= set(lines)
    assert lines["attn_qkv"]["dropped"]["value"] > 0
    assert lines["attn_qkv"]["extra_bytes"] > 0


def test_files_of_the_same_types_are_not_scanned() -> None:
    with pytest.raises(EngineError, match="every tensor in the type"):
        scan.scan(mini("scan"), mini_file(), mini_file(), lambda stage: None)
