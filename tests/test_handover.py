"""A prompt read by one file and written by another: states that are taken, and states that must not pass."""

import msgspec
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from llama_meter.cells import Handover
from llama_meter.engine.library import capture_log
from llama_meter.engine.session import Session
from llama_meter.errors import StudyError
from llama_meter.measure import quantizing
from llama_meter.models import recipes
from llama_meter.workloads import handover, quality
from plamo_study.plans import handover as plan
from plamo_study.plans.quality import TEXT

CELL = Handover(model=HYBRID, scale="mini", dtype="F16", n_ctx=48, n_gen=16, n_chunks=2, n_threads=1, text=TEXT,
                stranger=ATTENTION, candidates=("Q4_K_M",))  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both models' files, each beside its quantized one."""
    folder = tmp_path_factory.mktemp("pairs")
    for model in (HYBRID, ATTENTION):
        own = folder / f"{model}.mini.F16.gguf"
        own.symlink_to(mini_file(model))
        quantizing.quantize(own, folder / f"{model}.mini.Q4_K_M.gguf", recipes.recipe("Q4_K_M"))
    return folder


def measured(cell, folder):
    own, stranger = (folder / f"{model}.mini.F16.gguf" for model in (cell.model, cell.stranger))
    return handover.run(cell, own, lambda _: None, stranger)


@pytest.mark.parametrize(("model", "stranger"), [(HYBRID, ATTENTION), (ATTENTION, HYBRID)])
def test_every_pair_is_measured_and_every_planted_state_is_seen(model, stranger, folder):
    found = measured(msgspec.structs.replace(CELL, model=model, stranger=stranger), folder)
    assert found.valid
    assert found.checks["state_identical"]
    assert found.checks["stranger_refused"]
    assert found.checks["truncated_refused"]
    kld = {pair: sum(found.series[f"kld/{pair}"]) for pair in ("F16>F16", "F16>Q4_K_M", "Q4_K_M>F16", "Q4_K_M>Q4_K_M")}
    assert kld["F16>F16"] < 0.01 * min(kld[pair] for pair in kld if pair != "F16>F16")
    assert kld["Q4_K_M>F16"] < kld["Q4_K_M>Q4_K_M"]
    assert all(
        len(values) == CELL.n_gen // handover.STEP for name, values in found.series.items() if "distance/" in name
    )


def test_a_state_that_is_not_handed_over_makes_the_row_wrong(monkeypatch, folder):
    monkeypatch.setattr(handover, "read", lambda session, prompt: lost(session, prompt[::-1]))
    found = measured(CELL, folder)
    assert not found.checks["undivided"]
    assert not found.valid


def lost(session, prompt):
    """The state of other tokens."""
    session.clear()
    session.prefill({0: prompt})
    return session.get_state(0)


def test_a_state_that_the_engine_takes_though_it_should_not_makes_the_row_wrong(monkeypatch, folder):
    monkeypatch.setattr(handover, "refuses", lambda *_: False)
    assert not measured(CELL, folder).valid


def test_a_whole_state_is_not_refused():
    capture_log([])
    with Session(mini_file(), quality.config(CELL, 64)) as session:
        state = handover.read(session, np.arange(10, 30, dtype=np.int32))
        assert not handover.refuses(session, state, 20)
        assert handover.refuses(session, state[:-1], 20)


def test_random_weights_are_refused():
    with pytest.raises(StudyError, match="--scale mini"):
        plan.pairs("shape")
