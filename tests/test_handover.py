"""A prompt read by one file and written by another: states that are taken, and states that must not pass."""

import msgspec
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from llama_meter.cells import Handover
from llama_meter.engine.library import capture_log
from llama_meter.engine.session import Session
from llama_meter.engine.states import CACHE, CONVOLUTION, PARTS, RECURRENT, parts, spliced
from llama_meter.errors import StudyError
from llama_meter.measure import files
from llama_meter.measure.request import sweep
from llama_meter.models import recipes, registry
from plamo_study.arithmetic import roofline
from plamo_study.studies.quantization import work as quality
from plamo_study.studies.two_files import law, plan as plan, work as handover

CELL = Handover(
    model=HYBRID,
    scale="mini",
    dtype="F16",
    n_ctx=48,
    n_gen=16,
    n_chunks=2,
    n_threads=1,
    text=plan.TEXT,
    stranger=ATTENTION,
    candidates=("Q4_K_M",),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both models' files, each beside its quantized one."""
    folder = tmp_path_factory.mktemp("pairs")
    for model in (HYBRID, ATTENTION):
        own = folder / f"{model}.mini.F16.gguf"
        own.symlink_to(mini_file(model))
        files.quantize(own, folder / f"{model}.mini.Q4_K_M.gguf", recipes.by_name("Q4_K_M"))
    return folder


def measured(cell, folder):
    own, stranger = (folder / f"{model}.mini.F16.gguf" for model in (cell.model, cell.stranger))
    return handover.run(cell, own, lambda _: None, stranger)


@pytest.mark.parametrize(("model", "stranger"), [(HYBRID, ATTENTION), (ATTENTION, HYBRID)])
def test_every_pair_is_measured_and_every_planted_state_is_seen(model, stranger, folder):
    found = measured(msgspec.structs.replace(CELL, model=model, stranger=stranger), folder)
    assert found.valid
    refused = ("stranger_refused", "other_cache_refused", "truncated_refused")
    assert all(found.checks[name] for name in ("state_identical", *refused))
    kld = {pair: sum(found.series[f"kld/{pair}"]) for pair in ("F16>F16", "F16>Q4_K_M", "Q4_K_M>F16", "Q4_K_M>Q4_K_M")}
    assert kld["F16>F16"] < 0.01 * min(kld[pair] for pair in kld if pair != "F16>F16")
    assert kld["Q4_K_M>F16"] < kld["Q4_K_M>Q4_K_M"]
    assert len(found.series["distance/Q4_K_M>F16"]) == CELL.n_gen // law.STEP
    assert sum(found.series["distance/Q4_K_M>F16"]) * law.STEP == pytest.approx(kld["Q4_K_M>F16"] / CELL.n_chunks)


def read_by(dtype, tokens, folder, model=HYBRID):
    capture_log([])
    with Session(folder / f"{model}.mini.{dtype}.gguf", quality.config(CELL, 64)) as session:
        return handover.read(session, tokens)


TOKENS = np.arange(10, 50, dtype=np.int32)


def test_parts_are_as_large_as_the_model_s_shape_says_and_cover_what_differs(folder):
    own, other = (read_by(dtype, TOKENS, folder) for dtype in ("F16", "Q4_K_M"))
    spec = registry.spec(HYBRID, "mini")
    sizes = {name: sum(part.stop - part.start for part in where) for name, where in parts(own).items()}
    expected, inner = roofline.stored(vars(spec), len(TOKENS)), spec.mamba_heads * spec.mamba_head_dim
    mamba = (spec.layers + 1) // 2
    assert sizes[CACHE] == expected.full
    assert sizes[CONVOLUTION] == 4 * mamba * inner * (spec.d_conv - 1)
    assert sizes[RECURRENT] == 4 * mamba * inner * spec.d_state
    assert sum(sizes.values()) + expected.described == len(own)
    inside = np.zeros(len(own), bool)
    for part in (part for where in parts(own).values() for part in where):
        inside[part] = True
    differs = np.frombuffer(own, np.uint8) != np.frombuffer(other, np.uint8)
    assert differs[inside].any()
    assert not differs[~inside].any()
    assert spliced(own, other, PARTS) == other
    assert spliced(own, other, ()) == own
    assert len({own, other, *(spliced(own, other, (part,)) for part in PARTS)}) == 2 + len(PARTS)


def test_parts_of_a_state_add_up_to_about_the_whole(folder):
    found = measured(msgspec.structs.replace(CELL, compares="parts"), folder)
    assert found.valid
    kld = {part: sum(found.series[f"kld/Q4_K_M>F16/{part}"]) for part in ("none", "all", *PARTS)}
    assert kld["none"] < 0.01 * kld["all"]
    assert 0 < min(kld[part] for part in PARTS) < max(kld[part] for part in PARTS) < 1.5 * kld["all"]


def test_a_free_answer_of_the_reference_is_its_own_to_the_end(folder):
    found = measured(msgspec.structs.replace(CELL, compares="free"), folder)
    assert found.valid
    assert found.series["same/F16>F16"] == [CELL.n_gen] * CELL.n_chunks
    assert all(0 <= same <= CELL.n_gen for same in found.series["same/Q4_K_M>Q4_K_M"])


def other_tokens(session, prompt):
    session.clear()
    session.prefill({0: prompt[::-1]})
    return session.get_state(0)


@pytest.mark.parametrize(
    ("compares", "name", "planted", "missed"),
    [
        ("parts", "spliced", lambda own, other, names: own, {"all_is_other", "other_convolution"}),
        ("", "read", other_tokens, {"undivided"}),
        ("", "refuses", lambda *_: False, {"other_cache_refused", "truncated_refused", "stranger_refused"}),
    ],
)
def test_a_state_that_is_not_what_it_is_for_makes_the_row_wrong(compares, name, planted, missed, monkeypatch, folder):
    monkeypatch.setattr(handover, name, planted)
    found = measured(msgspec.structs.replace(CELL, compares=compares), folder)
    assert not found.valid
    assert not any(found.checks[each] for each in missed)


def test_two_files_of_one_model_are_paired_as_they_are_given_and_others_refused(folder, monkeypatch):
    monkeypatch.setattr(registry, "FILES", {})  # another test may have named the same model otherwise
    paths = [folder / f"{HYBRID}.mini.{dtype}.gguf" for dtype in ("F16", "Q4_K_M")]
    asked = sweep(files=[*map(str, paths)], n_prompt="48", n_gen="16")
    (cell,) = plan.pairs("shape", sweep=asked).cells
    assert (cell.candidates, cell.n_ctx, cell.n_gen, cell.stranger) == (("Q4_K_M",), 48, 16, "")
    found = handover.run(msgspec.structs.replace(cell, n_chunks=2, n_threads=1), paths[0], lambda _: None, paths[1])
    assert found.valid
    assert "stranger_refused" not in found.checks
    for named, why in (([paths[0], mini_file(ATTENTION)], "2 models"), (paths[:1], "two are needed")):
        with pytest.raises(StudyError, match=why):
            plan.pairs("mini", sweep=sweep(files=[*map(str, named)]))
    with pytest.raises(StudyError, match="--scale mini"):
        plan.pairs("shape")
