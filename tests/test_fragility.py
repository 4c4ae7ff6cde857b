"""Drop-one and protect-one scans: composed models are written ones; random weights hold nothing fragile, planted do."""

import json

import numpy as np
import pytest
import typer
from conftest import ATTENTION, HYBRID, mini, mini_file
from typer.testing import CliRunner

from llama_meter.engine import kernels, library, swapping
from llama_meter.engine.ggml import TYPES
from llama_meter.engine.session import EngineError, SessionConfig
from llama_meter.engine.swapping import Composer
from llama_meter.errors import StudyError
from llama_meter.measure import machine, quantizing
from llama_meter.models import recipes, registry, synthetic
from llama_meter.workloads import fragility as scan
from plamo_study.cli import scan as cli_scan
from plamo_study.laws import fragility
from plamo_study.laws.fragility import Scanned
from plamo_study.plans import fragility as plan_scan

CONFIG = SessionConfig(n_ctx_seq=64, n_batch=64)
TOKENS = np.arange(5, 69, dtype=np.int32)
OUTLIER = 64.0
F16 = TYPES["F16"]


@pytest.fixture(autouse=True, scope="module")
def _silent():
    library.capture_log([])


def quantized(source, folder, keep=()):
    out = folder / f"{source.stem}.Q4_0{''.join(keep)}.gguf"
    return quantizing.quantize(source, out, recipes.recipe("Q4_0", keep))


def logits(session):
    with session:
        return session.prefill({0: TOKENS}, every=True)[0]


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_a_composed_model_has_the_logits_of_the_written_mixture(model, tmp_path):
    source = mini_file(model)
    mixed = quantized(source, tmp_path, ("ffn_down=F16",))
    composer = Composer(source, quantized(source, tmp_path))
    kept = [name for name in composer.differing if "ffn_down" not in name]
    assert "token_embd.weight" in kept
    composed, whole = logits(composer.compose(CONFIG, kept)), logits(composer.compose(CONFIG))
    assert np.array_equal(composed, logits(swapping.as_plain_file(mixed, CONFIG)))
    assert np.array_equal(whole, logits(swapping.as_plain_file(source, CONFIG)))
    assert not np.array_equal(whole, composed)


def test_what_cannot_be_scanned_is_refused():
    with pytest.raises(EngineError, match="not the same model"):
        Composer(mini_file(HYBRID), mini_file(ATTENTION))
    with pytest.raises(EngineError, match="every tensor in the type"):
        scan.scan(mini("scan"), mini_file(), mini_file(), lambda stage: None)
    with pytest.raises(StudyError, match="no quality to lose"):
        plan_scan.scan("shape")


@pytest.mark.parametrize("dtype", ["Q4_0", "Q8_0", "Q2_K", "Q4_K"])
def test_a_structureless_error_is_the_types_error_on_normal_weights_and_not_moved_by_outliers(dtype):
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((256, 256), dtype=np.float32) * 0.02
    errors = []
    for factor in (1, OUTLIER):
        weights[:, ::32] *= factor
        raw = kernels.encode(weights, F16)
        drawn = kernels.with_structureless_error(raw, F16, TYPES[dtype], rng)
        errors.append(kernels.decode(drawn, F16) - kernels.decode(raw, F16))
        if factor == 1:
            kept = kernels.decode(raw, F16)
            own = kernels.decode(kernels.encode(kept, TYPES[dtype]), TYPES[dtype]) - kept
    assert errors[0].std() == pytest.approx(own.std(), rel=0.05)
    assert abs(np.corrcoef(errors[0], own)[0, 1]) < 0.02
    assert errors[1].std() == pytest.approx(errors[0].std(), rel=0.1)


# ---------------------------------------------------------------- scans of real files


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(chr(c) for c in np.random.default_rng(0).integers(97, 123, 2000)), encoding="utf-8")
    return path


def scanned(source, candidate, text):
    cell = mini("scan", n_prompt=48, n_chunks=8, text=str(text), candidates=("Q4_0",))
    measured = scan.scan(cell, source, candidate, lambda stage: None)
    assert measured.valid, measured.checks
    return Scanned("mini", "F16", "Q4_0", measured.series)


@pytest.mark.whole
def test_random_weights_hold_nothing_fragile_although_damage_per_byte_differs(tmp_path, text):
    source = synthetic.write(registry.spec(HYBRID, "mini"), "F16", tmp_path / "random.F16.gguf", seed=1)
    found = scanned(source, quantized(source, tmp_path), text)
    judged = fragility.fragility([found])
    assert len(judged) == 9 + 4
    assert not set(judged["verdict"]) & {fragility.FRAGILE, fragility.MORE, fragility.STURDY}
    damages = fragility.damage([found]).set_index("point")
    assert (damages["p_harm"] < 0.05).all()
    per_byte = [e.value / b for e, b in zip(damages["dropped"], damages["extra_bytes"], strict=True)]
    assert max(per_byte) > 20 * min(per_byte)


def plant(path, kind, feeding):
    """Outlier columns in every tensor of a kind, undone in the rows of the one that feeds it."""
    for name, place in Composer(path, path).reference.items():
        values = np.memmap(path, dtype=np.float16, mode="r+", offset=place.offset, shape=place.shape)
        if f".{kind}." in name:
            values[:, ::32] *= np.float16(OUTLIER)
        if f".{feeding}." in name:  # the second half of ffn_up is multiplied with the first, after its activation
            values[place.shape[0] // 2 :: 32] *= np.float16(1 / OUTLIER)
        values.flush()


@pytest.mark.whole
def test_a_planted_fragile_class_is_found_and_nothing_else(tmp_path, text):
    source = synthetic.write(registry.spec(ATTENTION, "mini"), "F16", tmp_path / "planted.F16.gguf", seed=2)
    plant(source, "ffn_down", "ffn_up")
    found = scanned(source, quantized(source, tmp_path), text)
    judged = fragility.fragility([found]).set_index("point")
    assert set(judged[judged["verdict"] == fragility.FRAGILE].index) == {"ffn_down"}
    assert judged.loc["ffn_down", "excess"].value > 4
    path = fragility.frontier([found])
    assert path["damage"].iloc[-1].value == 0  # everything protected: the reference
    assert path["bytes"].is_monotonic_increasing


def test_where_nothing_was_scanned_tables_have_columns_and_no_lines():
    for table, columns in ((fragility.fragility([]), {"model", "point", "excess", "verdict", "detectable"}),
                           (fragility.damage([]), {"model", "family", "avoided", "p_avoided"}),
                           (fragility.frontier([]), {"model", "step", "damage"})):  # fmt: skip
        assert table.empty
        assert columns <= set(table)


@pytest.mark.long
def test_the_command_scans_files_that_no_plan_knows(tmp_path, text, monkeypatch):
    monkeypatch.setattr(machine, "performance_cores", lambda: 1)  # tests run beside one another
    source = mini_file(ATTENTION)
    app = typer.Typer()
    app.command()(cli_scan.scan)
    arguments = [str(source), str(quantized(source, tmp_path)), "--text", str(text)]
    result = CliRunner().invoke(app, [*arguments, "--chunk", "32", "--chunks", "2", "--json"])
    assert result.exit_code == 0, result.output
    lines = {line["point"]: line for line in map(json.loads, result.stdout.splitlines())}
    assert {"token_embd", "attn_qkv", "layer 0"} <= set(lines)
    assert lines["attn_qkv"]["dropped"]["value"] > 0
    assert lines["attn_qkv"]["extra_bytes"] > 0


# ---------------------------------------------------------------- statistics


def drawn(rng, planted=1.0, spreads=(0.02, 0.1, 0.4), n_chunks=16):
    """A scan under the null: roles differ a thousandfold, every rounding is a draw, chunks differ."""
    series = {"all": [3.0] * n_chunks, "size all": [1e6, 2e6, 6e5], "floor": [1e-7] * n_chunks}
    chunks = rng.normal(0, 0.3, n_chunks)
    for i in range(9):
        role, spread = np.exp(rng.uniform(-7, 0)), rng.choice(spreads)
        draws = rng.normal(0, spread, fragility.DRAWS)[np.arange(n_chunks) % fragility.DRAWS]
        noise = rng.normal(0, 0.02, (3, n_chunks))
        own = np.log(planted if i == 0 else 1.0) + rng.normal(0, spread)
        series[f"drop p{i}"] = (role * np.exp(own + chunks + noise[0])).tolist()
        series[f"control p{i}"] = (1.5 * role * np.exp(draws + chunks + noise[1])).tolist()
        series[f"protect p{i}"] = (3.0 - role * np.exp(chunks + noise[2])).tolist()
        series[f"size p{i}"] = [1e5, 2e5, 6e4]
    return Scanned("drawn", "F16", "Q4_0", series)


def test_false_discoveries_stay_within_their_rate_and_true_ones_are_made():
    rng = np.random.default_rng(0)
    null = [fragility.fragility([drawn(rng)]) for _ in range(100)]
    assert np.mean([(t["p_adjusted"] < fragility.LEVEL).any() for t in null]) <= 0.08  # 5 %, and what 100 draws add
    planted = [fragility.fragility([drawn(rng, planted=12.0)]).iloc[0] for _ in range(40)]
    assert np.mean([line["verdict"] == fragility.FRAGILE for line in planted if line["detectable"] < 12]) > 0.8


@pytest.mark.parametrize(
    ("planted", "verdict"),
    [(1.0, fragility.EXPLAINED), (1.35, fragility.MORE), (3.0, fragility.FRAGILE), (0.5, fragility.STURDY)],
)
def test_more_than_explained_and_worth_keeping_are_two_answers(planted, verdict):
    rng, found = np.random.default_rng(7), drawn(np.random.default_rng(7))
    for i in range(9):  # draws that differ by 5 %, so that a small excess can be seen
        spread = rng.normal(0, 0.05, fragility.DRAWS)[np.arange(16) % fragility.DRAWS]
        found.series[f"control p{i}"] = np.exp(spread).tolist()
        found.series[f"drop p{i}"] = [planted if i == 0 else 1.0] * 16
    del found.series["drop p3"]  # its numbers were not finite
    judged = fragility.fragility([found]).set_index("point")
    assert judged.loc["p0", "verdict"] == verdict
    assert judged.loc["p0", "p_margin"] >= judged.loc["p0", "p"]
    assert "p3" not in judged.index


def test_chunks_are_dealt_to_draws_alike_by_rows_and_statistics(monkeypatch):
    class Dealing:
        """A scan under way in which a chunk's control damage is e to the number of the draw it is evaluated with."""

        def __init__(self):
            self.config, self.points, self.series, self.composer = None, {"p": ()}, {}, self

        def compose(self, config, replaced):
            return replaced

        def add(self, name, draw, chunks, expected):
            self.series.setdefault(name, []).extend([float(np.exp(draw))] * len(chunks))

    monkeypatch.setattr(scan, "_draw", lambda composer, names, seed, draw: draw)
    dealing, start = Dealing(), 0
    for n in (5, 20, 11):  # groups of chunks that fit in memory together
        scan._control(dealing, "p", np.arange(n), [None] * n, start, 0)
        start += n
    series = dealing.series | {"drop p": [1.0] * start}
    by_draw = -fragility._log_quotients(Scanned("dealt", "F16", "Q4_0", series), "p")
    np.testing.assert_allclose(by_draw, np.arange(fragility.DRAWS), atol=1e-12)


def test_what_protection_costs_is_bits_per_weight_per_nat():
    line = fragility.damage([drawn(np.random.default_rng(4))]).iloc[0]
    assert line["extra_bytes"] == 140_000
    assert line["price"].value == pytest.approx(8 * 0.14 / line["avoided"].value)
    assert line["price"].low <= line["price"].value <= line["price"].high
    assert line["per_megabyte"].value == pytest.approx(line["avoided"].value / 0.14)
