"""What `make study` measures here: three processes a cell, one proof, a gate of parts, and pages that set it beside."""

import shutil
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from plamo_study import measurements, paths
from plamo_study.analysis.estimates import compare
from plamo_study.errors import StudyError
from plamo_study.measure import frame, journal, plan, recording, runner
from plamo_study.measure.cells import Decode, Prefill
from plamo_study.measure.rows import Conditions, Evidence, Row
from plamo_study.models import recipes
from plamo_study.present.page_claims import Claims
from plamo_study.studies import at_hand, registry as studies

HYBRID, ATTENTION = plan.MODELS


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A lean plan of small models, measured with far more time than it needs."""
    base = Prefill(model=HYBRID, scale="mini", dtype="F16", n_prompt=16)
    cells = (base, plan.change(base, workload="decode", depth=8, n_gen=4, n_seq=2, policy="shared"))
    path = tmp_path_factory.mktemp("lean") / "01-core.mini.jsonl"
    return runner.sweep(plan.lean("01-core", "mini", cells), path, minutes=30), path


def test_a_lean_plan_is_three_processes_a_cell_of_which_the_first_proves_all(swept):
    rows = recording.framed(*swept)[0]
    assert not rows.anchor.any()
    timed = rows[rows.workload != "gate"]
    assert timed.groupby("workload").size().to_dict() == {"prefill": 3, "decode": 3}
    assert [("second_path" in checks) for checks in timed.checks] == [n == 0 for n in timed.replicate]
    assert set(timed.verdict) == {"valid"}


@pytest.mark.parametrize(("ended", "verdict"), [("wrong", "invalid"), ("crashed", "ungated"), ("not there", "ungated")])
def test_without_its_proof_no_process_of_a_cell_is_right(swept, ended, verdict):
    summary, path = swept
    ends = {"wrong": {"valid": False}, "crashed": {"status": "abort", "valid": None, "samples_ns": []}}
    first = next(row for row in summary.rows if row.replicate == 0 and isinstance(row.cell, Decode))
    changed = [row for row in summary.rows if row is not first]
    changed += [msgspec.structs.replace(first, **ends[ended])] if ended in ends else []
    rows = frame.frame(changed, frame.facts(journal.read(path)))
    assert set(rows[(rows.workload == "decode") & (rows.replicate > 0)].verdict) == {verdict}
    assert set(rows[rows.workload == "prefill"].verdict) == {"valid"}


def test_released_weights_are_measured_instead_where_they_were_fetched(tmp_path, monkeypatch):
    assert set(at_hand.asked()) == {(name, "shape") for name in at_hand.STUDIES}
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    (tmp_path / recipes.model_path(ATTENTION, "weights", "Q8_0").name).touch()
    assert ("03-core", "weights") in at_hand.asked()
    assert {cell.model for cell in studies.STUDIES["03-core"].plan("weights").cells} == {ATTENTION}
    assert {cell.model for cell in studies.STUDIES["03-core"].plan("shape").cells} == {HYBRID}
    assert ("04-core", "weights") not in at_hand.asked()


def test_a_full_disk_is_said_with_what_is_needed_before_a_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    planned = [studies.STUDIES[name].plan(scale) for name, scale in at_hand.asked()]
    sizes = at_hand.missing(planned)
    assert 7.5e9 < sum(sizes.values()) < 8.6e9
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 3 << 30}))
    with pytest.raises(StudyError, match="SCALE=mini"):
        at_hand.missing(planned)
    assert not list(Path(tmp_path).iterdir())


def test_the_forecast_knows_what_is_twice_as_fast_and_judges_no_file_twice():
    planned = studies.STUDIES["03-core"].plan("shape")
    slow, fast = (at_hand.Pace(read=n * 1e10, matmul=n * 1e11) for n in (1, 2))
    assert at_hand.measuring_s(planned, fast, set()) < at_hand.measuring_s(planned, slow, set())
    gated = set()
    first, again = (at_hand.measuring_s(planned, slow, gated) for _ in range(2))
    assert again < first


# ---------------------------------------------------------------- on a page


@pytest.fixture
def own(swept, tmp_path, monkeypatch):
    """The lean rows as this machine's own."""
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    target = recording.journal_path("01-core", "shape", recording.LOCAL)
    target.parent.mkdir(parents=True)
    shutil.copy(swept[1], target)
    return measurements.measured_here("01-core")


def rewrite(change):
    """Let the own rows of 01-core be what `change` makes of them; returns their frame on a page."""
    path = recording.journal_path("01-core", "shape", recording.LOCAL)
    records = journal.read(path)
    facts = [record for record in records if not isinstance(record, Row)]
    rows = change([record for record in records if isinstance(record, Row)])
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in (*facts, *rows)))
    return measurements.measured_here("01-core")


@pytest.mark.parametrize("minutes", [5, 300])
def test_own_rows_are_those_of_the_device_that_ran_a_model_last_and_never_of_two(own, minutes):
    def on_a_gpu(row):
        started = (datetime.fromisoformat(row.started) + timedelta(minutes=minutes)).isoformat()
        faster = [[time // 10 for time in sample] for sample in row.samples_ns]
        cell = msgspec.structs.replace(row.cell, n_gpu_layers=-1)
        return msgspec.structs.replace(row, key=row.key[::-1], cell=cell, started=started, samples_ns=faster)

    both = rewrite(lambda rows: [*rows, *map(on_a_gpu, rows)])
    assert set(both.n_gpu_layers) == {-1}
    assert (both.query("metric == 'step'").value < own.query("metric == 'step'").value.min()).all()
    again = rewrite(lambda rows: [row for row in rows if row.cell.n_gpu_layers == 0])
    assert set(again.n_gpu_layers) == {0}


@pytest.mark.usefixtures("own")
def test_where_own_rows_were_disturbed_a_page_that_shows_them_says_by_what(capsys):
    def shown(**state):
        def disturb(row):
            quiet = Conditions(load_1min=0, whole=Evidence(wall_ns=1), **state)
            return msgspec.structs.replace(row, conditions=quiet)

        capsys.readouterr()
        assert len(rewrite(lambda rows: [disturb(row) for row in rows]))
        return capsys.readouterr().out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurements, "display", lambda said: print(said.data))
        assert shown() == ""
        assert "ran on its battery while your own rows (01-core) were measured" in shown(power_source="battery")
        assert "heat slowed the machine" in shown(thermal="heavy")


def test_own_rows_are_a_frame_as_any_other_and_have_no_lines_where_nobody_asks(own):
    assert set(own.metric) >= {"prefill", "step"}
    empty = measurements.measured_here("01-core", asked=False)
    assert empty.empty
    assert compare(empty, of="metric == 'step'", to="metric == 'prefill'", by="model").empty


def test_a_claim_is_set_beside_what_was_measured_here_and_keeps_its_own_verdict():
    blocks = {"machine": "m", "model": "a", "block": range(6)}
    there = pd.concat([pd.DataFrame(blocks | {"n": n, "value": [n * (1 + b / 100) for b in range(6)]}) for n in (1, 2)])
    here = there[there.block < 3].assign(value=lambda d: d.value.where(d.n == 1, d.value / 2))
    claim = Claims("01-phase-asymmetry", "recorded")
    ratio, own = (compare(d, of="n == 2", to="n == 1", by="model") for d in (there, here))
    claim("two takes longer", ratio, above=1.5, here=own)
    claim("it was not asked here", ratio, above=1.2, here=own.iloc[:0])
    table = claim.table()
    assert [line["verdict"] for line in table.lines] == ["holds", "holds"]
    assert table.frame["claim"].tolist() == ["two takes longer"]
    assert table.frame["verdict"].tolist() == ["does not hold"]
