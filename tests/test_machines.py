"""Notebook 13: several machines side by side, and what one says about another."""

import shutil

import pandas as pd
import pytest

from plamo_study import paths
from plamo_study.analysis.stats import Estimate
from plamo_study.errors import StudyError
from plamo_study.measure import packing
from plamo_study.measure.recording import LOCAL, OTHERS, REFERENCE
from plamo_study.studies import registry
from plamo_study.studies.machines import analysis, show

USUAL = {"model": "m*", "dtype": "Q8_0", "phase": "decode", "tokens": 1, "n_seq": 1, "policy": "shared",
         "type_k": "f16", "type_v": "f16", "attention": "on"}  # fmt: skip


@pytest.fixture(scope="module")
def studies():
    return analysis.recordings("recorded", "shape")


def line(machine, seconds, roof, depth=128.0, **changed):
    measured = Estimate(seconds, seconds * 0.9, seconds * 1.1, 5)
    entry = {"machine": machine, "chip": f"chip {machine}", "depth": depth, "measured": measured, "low": roof}
    return USUAL | entry | {"share": roof / seconds} | changed


def test_machines_that_reach_the_same_share_foretell_one_another_exactly():
    found = pd.DataFrame([line("a", 0.10, 0.05), line("b", 0.30, 0.15)])
    told = analysis.predicted(found).iloc[0]
    assert told["promised"].value == pytest.approx(0.30)
    assert told["ratio"].value == pytest.approx(1.0)
    assert told["ratio"].low == pytest.approx(0.9 / 1.1)
    assert (told["same"], told["roof"]) == (pytest.approx(3.0), pytest.approx(2.0))


def test_a_machine_twice_as_far_from_its_ceiling_is_missed_by_two():
    found = pd.DataFrame([line("a", 0.10, 0.05), line("b", 0.60, 0.15)])
    assert analysis.predicted(found)["ratio"].iloc[0].value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("changed", "pairs"),
    [
        ({}, 1),
        ({"depth": 190.0}, 1),
        ({"depth": 200.0}, 0),
        ({"dtype": "Q4_0"}, 0),
        ({"n_seq": 8}, 0),
        ({"phase": "prefill"}, 0),
        ({"attention": "off"}, 0),
        ({"machine": "a"}, 0),
    ],
)
def test_only_the_same_pass_of_two_machines_is_compared(changed, pairs):
    found = pd.DataFrame([line("a", 0.1, 0.05), line("b", 0.1, 0.05) | changed])
    assert len(list(analysis.common(found))) == pairs


def test_of_several_depths_the_nearest_one_foretells():
    found = pd.DataFrame([line("a", 0.1, 0.05, 100.0), line("a", 0.2, 0.05, 130.0), line("b", 0.1, 0.05, 128.0)])
    (known, asked), = analysis.common(found)  # fmt: skip
    assert (known["depth"], asked.depth) == (130.0, 128.0)


def test_the_recorded_machines_share_passes_and_reach_part_of_their_ceilings(studies):
    found = analysis.passes(studies)
    assert found["machine"].nunique() >= 3
    assert found["share"].between(0.1, 1.1).all()
    assert set(analysis.machines(studies, found)["machine"]) == set(found["machine"])
    told = analysis.predicted(found)
    assert (told["known"] != told["asked"]).all()
    drawn = show.shared(found)
    assert set(drawn.groupby("name")["chip"].nunique()) >= {2}


def test_a_pass_that_was_timed_twice_foretells_one_pass_and_not_two():
    twice = [line("a", 0.1, 0.05, 128.0), line("a", 0.1, 0.05, 131.0)]
    assert len(list(analysis.common(pd.DataFrame([*twice, line("b", 0.1, 0.05)])))) == 1
    assert len(list(analysis.common(pd.DataFrame([line("b", 0.1, 0.05), *twice])))) == 1


def test_a_machine_alone_says_how_to_add_another(studies):
    first = studies[0][1]["machine"].iloc[0]
    alone = [(name, rows, facts) for name, rows, facts in studies if rows["machine"].iloc[0] == first]
    assert "plamo-study rows add FILE" in show.finding(analysis.passes(alone), "shape").data


def test_a_pack_that_is_tracked_is_recorded_and_one_that_is_not_is_live_only(tmp_path, monkeypatch):
    source = paths.MEASURED / REFERENCE
    monkeypatch.setattr(paths, "MEASURED", tmp_path / "measured")
    for place, study in ((REFERENCE, "05-context.shape.jsonl"), (LOCAL, "01-phase-asymmetry.shape.jsonl")):
        (paths.MEASURED / place).mkdir(parents=True)
        shutil.copy(source / study, paths.MEASURED / place)
    machine, packed = packing.pack(LOCAL)
    path = tmp_path / f"{machine}{packing.SUFFIX}"
    path.write_bytes(packed)
    shutil.rmtree(paths.MEASURED / LOCAL)

    def seen(how):
        return {rows["machine"].iloc[0] for _, rows, _ in analysis.recordings(how, "shape")}

    packing.add(path, registry.STUDIES)
    assert machine in seen("live") - seen("recorded")
    packing.add(path, registry.STUDIES, OTHERS)
    assert machine in seen("recorded")


def test_what_cannot_be_shown_is_refused_with_what_to_do(monkeypatch, tmp_path):
    for wrong in (("elsewhere", "shape"), ("recorded", "huge")):
        with pytest.raises(StudyError, match="known"):
            analysis.recordings(*wrong)
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    with pytest.raises(StudyError, match="plamo-study run 01 --scale mini"):
        analysis.recordings("live", "mini")
