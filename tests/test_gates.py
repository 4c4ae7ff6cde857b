"""Gates: a right engine passes them, and every planted fault is seen; the law's limit comes from rounding."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file

from llama_meter import cells, journal
from llama_meter.cells import columns
from llama_meter.engine import library
from llama_meter.engine.nodes import PartSums
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.journal import REFERENCE, journal_path
from llama_meter.limits import ROUNDINGS
from llama_meter.measure import files, phases, plan, proof
from llama_meter.measure.tolerance import part_tolerance, tolerance
from llama_meter.oracle import forward
from llama_meter.oracle.compare import relative_error
from llama_meter.oracle.forward import Oracle
from llama_meter.oracle.judge import HARMLESS, OF_ATTENTION, OF_MAMBA, judge
from plamo_study.measurements import recording
from plamo_study.read import frame, recording as reading
from plamo_study.show import evidence
from plamo_study.studies.context import work as depth
from plamo_study.studies.right_answers import law as law_check

N, MICRO_BATCH = 48, 16
TOKENS = np.random.default_rng(3).integers(5, 500, N)
GATE = {"n_prompt": N, "n_ubatch": MICRO_BATCH}


@pytest.fixture(autouse=True, scope="module")
def _silent():
    library.capture_log([])


@pytest.fixture(scope="module", params=[HYBRID, ATTENTION])
def seen(request):
    """One engine's text, its residual sums and its logits."""
    path = mini_file(request.param)
    with Session(path, SessionConfig(N, n_ubatch=MICRO_BATCH, n_gpu_layers=0)) as session:
        plain = session.prefill({0: TOKENS}, every=True)[0]
        with PartSums(session) as model:
            logits, sums = model.prefill({0: TOKENS}, every=True)[0], model.sums()
    return SimpleNamespace(path=path, plain=plain, logits=logits, sums=sums, cell=mini("gate", request.param, **GATE))


def worst(judged):
    return max(judged.head, *(max(errors) for errors in judged.parts.values()))


# ---------------------------------------------------------------- part by part


def test_a_right_engine_is_right_in_every_part_and_every_planted_fault_is_larger_than_allowed(seen):
    judged, allowed = judge(Oracle(seen.path, "CPU"), TOKENS, seen.sums, seen.logits), part_tolerance(seen.cell)
    assert worst(judged) <= allowed
    for name, errors in judged.faults.items():
        assert (max(errors) <= allowed) if name in HARMLESS else (min(errors) > 2 * allowed), name
    kinds = OF_ATTENTION if seen.cell.model == ATTENTION else OF_ATTENTION | OF_MAMBA
    assert set(judged.faults) == set(kinds)


class FromPosition(Oracle):
    """A fault that begins at position `since`: the last layer skipped, or keys rotated by another base."""

    since, skips = 0, False

    def mixed(self, layer, x, at=None):
        return self._without(layer, super().mixed(layer, x, at), at)

    def fed(self, layer, x, at=None):
        return self._without(layer, super().fed(layer, x, at), at)

    def _without(self, layer, added, at):
        if not self.skips or layer < self.n_layer - 1:
            return added
        positions = np.arange(len(added)) if at is None else at
        return np.where((positions >= self.since)[:, None], np.float32(0), added)

    def _rotated(self, x, theta, at):
        right = super()._rotated(x, theta, at)
        if self.skips or x.shape[1] == max(self._n_head):  # queries
            return right
        return np.where((at >= self.since)[:, None, None], super()._rotated(x, 1.5 * theta, at), right)


DEEP = {"n_prompt": 512, "n_batch": 512, "n_ubatch": 128, "n_gen": 4, "judges": "depth", "flash_attn": "on"}


def gated_here(cell):
    """A gate's verdict in this process, where its oracle may have been replaced."""
    return phases.run(cell, mini_file(cell.model), 0, lambda stage: None)


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
@pytest.mark.parametrize("skips", [True, False], ids=["last layer skipped", "keys rotated otherwise"])
def test_a_gate_at_depth_passes_a_right_engine_and_sees_a_fault_that_begins_late(model, skips, monkeypatch):
    cell = mini("gate", model, **DEEP)
    right = gated_here(cell)
    assert right.valid, right.checks
    assert (right.checks["judged_from"], right.checks["judged_to"]) == (192, 516)
    planted = type("Planted", (FromPosition,), {"since": 256, "skips": skips})
    monkeypatch.setattr(forward, "Oracle", planted)
    wrong = gated_here(cell)
    assert not wrong.valid, wrong.checks
    usual = mini("gate", model, n_prompt=72, n_ubatch=32)
    assert gated_here(usual).valid, "a gate of 72 tokens does not go there"


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_whole_logits_alone_see_a_fault_that_every_part_allows(model, monkeypatch):
    """In each part it is smaller than rounding may be. It grows from part to part, which rounding does not."""

    class Drifting(Oracle):
        def mixed(self, layer, x, at=None):
            return super().mixed(layer, x, at) * np.float32(0.993)

        def fed(self, layer, x, at=None):
            return super().fed(layer, x, at) * np.float32(1.007)

    cell = mini("gate", model, type_k="f32", type_v="f32", flash_attn="off", **GATE)
    assert gated_here(cell).valid
    monkeypatch.setattr(forward, "Oracle", Drifting)
    wrong = gated_here(cell)
    assert {name for name, value in wrong.checks.items() if value is False} >= {"prefill_agrees", "decode_agrees"}
    assert wrong.checks["parts_agrees"]
    assert wrong.checks["watched_agrees"]
    assert wrong.valid is False


def test_rows_know_to_which_depth_their_file_was_judged_and_say_how_many_go_further():
    rows = recording("06-context").rows
    deep = rows[(rows.workload == "depth") & rows.model.str.startswith(HYBRID) & (rows.build == "stock")]
    assert set(deep.judged) == {plan.DEEP_TOKENS["shape"] + plan.DEEP_STEPS}
    assert f"{len(rows[reading.reach(rows) > rows.judged]):,} rows go further" in evidence.depths(rows)


def test_a_gate_on_the_cpu_does_not_judge_the_rows_of_a_gpu():
    rows, facts = recording("06-context").rows, recording("06-context").facts
    on_gpu = reading.judged(rows.assign(n_gpu_layers=-1), facts, [], "shape")
    assert (rows.judged > 0).any()
    assert set(on_gpu.judged) == {0}


@pytest.mark.parametrize(("flash", "lost"), [("on", 0.04), ("off", 0.02)])
def test_a_row_at_depth_is_allowed_less_than_a_lost_token_costs(flash, lost):
    cell = mini("depth", HYBRID, n_ctx=4096, flash_attn=flash)
    assert tolerance(cell) < lost


def test_a_fault_that_the_logits_of_an_8_bit_file_hide_is_seen_in_its_part(seen):
    class Weaker(Oracle):
        """Layer 1 feeds forward a twentieth less than it should."""

        def fed(self, layer, x):
            return super().fed(layer, x) * np.float32(0.95 if layer == 1 else 1)

    judged = judge(Weaker(seen.path, "CPU"), TOKENS, seen.sums, seen.logits)
    eight_bits = plan.change(seen.cell, dtype="Q8_0")
    assert relative_error(seen.plain, judged.logits) < tolerance(eight_bits)
    assert judged.parts["feed-forward"][1] > part_tolerance(eight_bits)


def test_a_gate_of_parts_refuses_an_engine_that_lost_its_rotation(tmp_path, monkeypatch):
    """The engine made wrong: it is given another file than the oracle, one whose rotary base is another."""
    cell, path = mini("gate", ATTENTION, n_prompt=24, n_ubatch=8, judges="parts"), mini_file(ATTENTION)
    other = tmp_path / "other.gguf"
    data = bytearray(path.read_bytes())
    at = data.index(b"plamo3.rope.freq_base") + len(b"plamo3.rope.freq_base") + 4
    data[at : at + 4] = np.float32(7.0).tobytes()
    other.write_bytes(data)
    with Session(other, SessionConfig(24, n_ubatch=8, n_gpu_layers=0)) as session:
        found = proof.gate(cell, session, [{0: TOKENS[:24]}], path)
    assert found.valid is False
    assert found.checks["parts_agrees"] is False


# ---------------------------------------------------------------- prefill at depth


@pytest.mark.parametrize("ladder", [cells.LADDER, cells.WALK])
@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_a_prompt_that_is_read_wrongly_at_depth_is_invalid(model, ladder, monkeypatch):
    cell = mini("depth", model, n_ctx=256, n_ubatch=64, n_gen=2, flash_attn="on", ladder=ladder)
    assert depth.run(cell, mini_file(model), print).valid
    right = Session.evaluate

    def disordered(self, parts, outputs):
        """Timed parts, whose outputs are listed, are right at depth 0; elsewhere their tokens come in another order."""
        roll = isinstance(outputs, list) and self.n_past[0] > 0
        return right(self, [(seq, np.roll(tokens, int(roll))) for seq, tokens in parts], outputs)

    monkeypatch.setattr(Session, "evaluate", disordered)
    assert depth.run(cell, mini_file(model), print).checks["second_path"] is False


# ---------------------------------------------------------------- the law's limit


def replayed(error, rounding=6e-4, model=ATTENTION, seed=0, calls=(((0, 4),), ((0, 1),))):
    cell = mini("replay", model, calls=calls, n_seq=4, seed=seed)
    row = {"checks": {"0/0": 0.0, "1/0": error, "rounding": rounding}, "status": "ok", "build": "stock", "engine": "e"}
    return columns(cell) | row


FACTS = {HYBRID: {"shape": {"arch": "plamo2"}}, ATTENTION: {"shape": {"arch": "plamo3"}}, "e": {}}


@pytest.mark.parametrize(("error", "exact"), [(0.0, True), (5.9e-4, True), (8e-3, False), (float("nan"), False)])
def test_the_limit_is_rounding_s_so_that_a_fading_wrong_state_is_still_wrong(error, exact):
    rows = pd.DataFrame([replayed(error), replayed(0.0, rounding=1e-5)])
    assert law_check.limit(rows) == pytest.approx(ROUNDINGS * 6e-4)
    assert law_check.checked(rows, FACTS)["exact"].tolist() == [exact, True]


def test_the_recorded_law_is_that_of_the_shipped_models():
    records = journal.read(journal_path("04-batching-law", "mini", REFERENCE))
    facts = frame.facts(records)
    shipped = {files.model_fact(name, "mini", "F16")["sha256"] for name in plan.MODELS}
    assert {facts[row.model]["sha256"] for row in journal.latest_rows(records)} == shipped
