"""Depth, caches and the loop without one: the engine's part on real processes, the arithmetic on known curves."""

import shutil
from dataclasses import replace
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file

from llama_meter import journal
from llama_meter.cells import FEW, LADDER, WALK, WHOLE_WINDOW, Naive
from llama_meter.engine import library, states
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.errors import StudyError
from llama_meter.measure import plan, runner
from llama_meter.measure.files import model_fact
from llama_meter.measure.request import sweep
from llama_meter.models import registry
from llama_meter.oracle.compare import relative_error
from plamo_study.read import frame
from plamo_study.studies.context import law, plan as context, work

PART = 32
TOKENS = np.random.default_rng(1).integers(5, 500, 4 * PART)
CELL = {"n_ctx": 4 * PART, "n_ubatch": PART, "n_gen": 2, "flash_attn": "on"}


@pytest.mark.parametrize(("model", "whole", "type_kv"), [(HYBRID, True, "q8_0"), (ATTENTION, False, "f16")])
def test_a_filled_memory_goes_on_by_steps_as_in_one_call_and_is_as_large_as_arithmetic_says(model, whole, type_kv):
    log, kind = [], f"on/{type_kv}/{type_kv}"
    library.capture_log(log)
    library._buffers.clear()
    config = SessionConfig(n_ctx_seq=16 * PART, n_ubatch=PART, n_gpu_layers=0, swa_full=whole, flash_attn="on")
    with Session(mini_file(model), replace(config, type_k=type_kv, type_v=type_kv)) as session:
        session.prefill({0: TOKENS[:PART]})
        state, cells = session.get_state(0), states.cells(log)
        assert states.filled(session, state, PART, cells) == state
        deep = states.filled(session, state, 10 * PART, cells)
        session.clear()
        session.set_state(0, deep, 10 * PART)
        for token in TOKENS[:4]:
            session.decode({0: int(token)})
        stepped = session.logits()
        session.clear()
        session.set_state(0, deep, 10 * PART)
        assert relative_error(stepped, session.prefill({0: TOKENS[:4]})[0][-1]) < 0.02
    expected = law.reserved(model_fact(model, "mini", "F16"), kind, 16 * PART, PART, whole)
    taken = [sum(library.buffers(kind).values()) for kind in ("KV", "RS")]
    assert taken == pytest.approx([expected["kv"], expected["state"]], rel=0.05)


def test_depths_types_and_settings_reach_every_cell_and_what_no_file_holds_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "FILES", {})
    varied = sweep(files=str(mini_file()), n_depth="600,0,4096", type_k="q8_0", n_threads="1")
    cells = [cell for cell in context.context("shape", sweep=varied).cells if cell.files]
    assert {(cell.files, cell.type_k, cell.n_threads) for cell in cells} == {(varied.files, "q8_0", 1)}
    assert work.depths(cells[0]) == (0, 600, 4096)
    for depths, why in (("0", "start of every ladder"), ("9999", "more than the context")):
        with pytest.raises(StudyError, match=why):
            context.context("mini", sweep=sweep(files=str(mini_file()), n_depth=depths))


@pytest.mark.long
def test_every_kind_of_cell_is_measured_and_counted(tmp_path):
    base = mini("depth", **CELL)
    few = plan.change(base, model=ATTENTION, ladder=FEW, n_ctx=16 * PART, flash_attn="off")
    cells = (
        base,
        plan.change(base, ladder=WALK, n_ctx=4 * PART),
        plan.change(base, model=ATTENTION, n_ctx=5 * PART, rungs=(PART + 3,)),
        few,
        plan.change(few, ladder=WHOLE_WINDOW),
        plan.of_kind(Naive, base, n_prompt=16, n_gen=8),
    )
    gates = tuple(mini("gate", model, n_prompt=16) for model in (HYBRID, ATTENTION))
    worker, path = context.memory("mini").workload, tmp_path / "05.jsonl"
    summary = runner.sweep(plan.Plan("06-context", "mini", cells, gates, None, 1, 0, 60.0, workload=worker), path)
    assert not summary.failed
    rows = frame.frame(summary.rows, frame.facts(journal.read(path)))

    found = law.samples(rows)
    ladder, walked = (found[(found["ladder"] == way) & (found["model"] == HYBRID)] for way in (LADDER, WALK))
    at = [0, PART, 2 * PART, 4 * PART]
    assert [sorted(ladder[ladder["phase"] == phase]["depth"]) for phase in law.PHASES] == [at, at]
    rungs = found[(found["ladder"] == LADDER) & (found["model"] == ATTENTION) & (found["phase"] == "decode")]
    assert rungs["depth"].tolist() == [0, PART + 3, 5 * PART]
    assert sorted(walked[walked["phase"] == "prefill"]["depth"]) == [0, PART, 2 * PART, 3 * PART]
    assert walked[walked["phase"] == "decode"]["depth"].tolist() == [4 * PART]
    kinds = law.kinds(rows[rows["ladder"].isin([FEW, WHOLE_WINDOW])]).set_index("whole")
    assert kinds.loc[True, "kv"] > kinds.loc[False, "kv"], "a window that keeps everything reserves more"
    (loop,) = rows[rows["workload"] == "naive"].itertuples()
    assert (loop.n_evaluated, [len(taken) for taken in loop.samples_ns]) == (sum(range(16, 24)) + 23, [8, 8])


@pytest.mark.long
def test_a_build_that_claims_a_window_it_has_not_is_found_out(tmp_path):
    liar = tmp_path / "liar"
    shutil.copytree(Path(llama._base_path), liar, symlinks=True)
    (liar / "engine.toml").write_text('description = "a copy"\ncorrects = ["window"]\nwindow = 16\n')
    cell = mini("prefill", n_prompt=16)
    planned = plan.Plan("06-context", "mini", (cell,), (mini("gate", n_prompt=32),), cell, 1, 0, 60.0, compared=(cell,))
    summary = runner.sweep(planned, tmp_path / "j.jsonl", beside=[liar])
    table = frame.frame(summary.rows, frame.facts(journal.read(tmp_path / "j.jsonl")))
    verdicts = table[~table["anchor"]].groupby(["model", "workload"])["verdict"].first().to_dict()
    assert verdicts[HYBRID, "gate"] == verdicts[HYBRID, "prefill"] == "valid"
    name = f"{HYBRID} with window"
    assert verdicts[name, "gate"] == verdicts[name, "prefill"] == "invalid"
