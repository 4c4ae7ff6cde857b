"""Notebook 13: several machines side by side, and what one says about another."""

import shutil

import numpy as np
import pandas as pd
import pytest

from plamo_study import paths
from plamo_study.analysis.stats import Estimate
from plamo_study.errors import StudyError
from plamo_study.measure import packing
from plamo_study.measure.recording import LOCAL, OTHERS, REFERENCE
from plamo_study.studies import registry
from plamo_study.studies.machines import analysis, gpu

USUAL = {"model": "m*", "dtype": "Q8_0", "phase": "decode", "tokens": 1, "n_seq": 1, "policy": "shared",
         "type_k": "f16", "type_v": "f16", "attention": "on", "read": 1e9}  # fmt: skip


@pytest.fixture(scope="module")
def studies():
    return analysis.recordings("recorded", "shape")


def line(machine, seconds, roof, depth=128.0, **changed):
    measured = Estimate(seconds, seconds * 0.9, seconds * 1.1, 5)
    entry = {"machine": machine, "chip": f"chip {machine}", "depth": depth, "measured": measured, "low": roof}
    return USUAL | entry | {"share": roof / seconds} | changed


def test_a_pair_holds_what_both_forecasts_start_from():
    """The other machine reads half as fast, and its roof is three times as high."""
    found = pd.DataFrame([line("a", 0.10, 0.05), line("b", 0.30, 0.15, read=0.5e9)])
    told = analysis.pairs(found).iloc[0]
    assert (told["known"], told["asked"]) == ("chip a", "chip b")
    assert told["took_known"].value * told["roof_asked"] / told["roof_known"] == pytest.approx(0.30)
    assert told["took_known"].value * told["read_known"] / told["read_asked"] == pytest.approx(0.20)
    assert (told["share_known"], told["share_asked"]) == (pytest.approx(0.5), pytest.approx(0.5))


def test_the_interval_of_a_miss_takes_both_intervals_at_their_worst():
    took, promised = line("b", 0.60, 0.15)["measured"], line("a", 0.30, 0.15)["measured"]
    ratio = analysis.quotient(took, promised)
    assert ratio.value == pytest.approx(2.0)
    assert (ratio.low, ratio.high) == (pytest.approx(2 * 0.9 / 1.1), pytest.approx(2 * 1.1 / 0.9))


def test_machines_that_share_no_pass_make_no_pair():
    found = pd.DataFrame([line("a", 0.1, 0.05), line("b", 0.1, 0.05, n_seq=8)])
    assert analysis.pairs(found).empty
    assert {"took_known", "share_asked", "depth"} <= set(analysis.pairs(found))


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
    told = analysis.pairs(found)
    assert (told["known"] != told["asked"]).all()


def test_a_pass_that_was_timed_twice_foretells_one_pass_and_not_two():
    twice = [line("a", 0.1, 0.05, 128.0), line("a", 0.1, 0.05, 131.0)]
    assert len(list(analysis.common(pd.DataFrame([*twice, line("b", 0.1, 0.05)])))) == 1
    assert len(list(analysis.common(pd.DataFrame([line("b", 0.1, 0.05), *twice])))) == 1


def test_a_pack_that_is_tracked_is_recorded_and_one_that_is_not_is_live_only(tmp_path, monkeypatch):
    source = paths.MEASURED / REFERENCE
    monkeypatch.setattr(paths, "MEASURED", tmp_path / "measured")
    for place, study in ((REFERENCE, "05-context.shape.jsonl"), (LOCAL, "01-phase-asymmetry.shape.jsonl")):
        (paths.MEASURED / place).mkdir(parents=True)
        shutil.copy(source / study, paths.MEASURED / place)
    made = packing.pack(LOCAL, registry.STUDIES)
    path = tmp_path / f"{made.machine}{packing.SUFFIX}"
    path.write_bytes(made.data)
    shutil.rmtree(paths.MEASURED / LOCAL)

    def seen(how):
        return {rows["machine"].iloc[0] for _, rows, _ in analysis.recordings(how, "shape")}

    packing.add(path, registry.STUDIES)
    assert made.machine in seen("live") - seen("recorded")
    packing.add(path, registry.STUDIES, OTHERS)
    assert made.machine in seen("recorded")


def test_what_cannot_be_shown_is_refused_with_what_to_do(monkeypatch, tmp_path):
    for wrong in (("elsewhere", "shape"), ("recorded", "huge")):
        with pytest.raises(StudyError, match="known"):
            analysis.recordings(*wrong)
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    with pytest.raises(StudyError, match="plamo-study run 01 --scale mini"):
        analysis.recordings("live", "mini")


@pytest.fixture(scope="module")
def with_a_gpu(studies):
    """The recorded rows of one machine's studies 01 and 03, and the same ten times as fast on a GPU planted in it."""
    found = []
    for name, rows, facts in studies:
        if name not in (gpu.ASYMMETRY, gpu.BATCHES) or rows["build"].eq("").all():
            continue
        rows = rows[~((rows["workload"] == "decode") & (rows["n_gen"] == 32))]  # one decode a device, as it is planned
        machine = rows["machine"].iloc[0]
        board = {"gpus": [{"name": "CUDA0", "chip": "Board", "memory_bytes": 1 << 37}]}
        facts = facts | {"host": facts[machine] | board, "scan": facts[rows["engine"].iloc[0]]}
        faster = [[[time // 10 for time in sample] for sample in samples] for samples in rows["samples_ns"]]
        offloaded = rows.assign(machine="host", n_gpu_layers=-1, samples_ns=faster)
        scans = offloaded[(offloaded["build"] == gpu.STOCK) & (offloaded["model"] != "")]
        scans = scans.assign(build=gpu.SCAN, engine="scan")
        halved = [[[time // 2 for time in sample] for sample in samples] for samples in scans["samples_ns"]]
        rows = pd.concat([rows.assign(machine="host"), offloaded, scans.assign(samples_ns=halved)], ignore_index=True)
        found.append((name, rows, facts))
    return found


def test_a_gpu_is_held_against_its_own_ceilings_and_not_its_host_s(with_a_gpu):
    found = analysis.passes([each for each in with_a_gpu if each[0] == gpu.ASYMMETRY])
    chips = found.groupby("chip")[["read", "compute"]].max()
    assert len(chips) == 2
    host = next(name for name in chips.index if name != "Board")
    assert chips.loc["Board", "read"] == pytest.approx(10 * chips.loc[host, "read"], rel=0.01)
    assert chips.loc["Board", "compute"] == pytest.approx(10 * chips.loc[host, "compute"], rel=0.01)
    shares = found.groupby("chip")["share"].median()
    assert shares["Board"] == pytest.approx(shares[host], rel=0.01)


def test_a_planted_gpu_is_as_much_faster_as_it_was_planted_and_scored_by_the_forecasts(with_a_gpu):
    (board,) = gpu.boards(with_a_gpu)
    gained = gpu.gains(board)
    assert [gain.value for gain in gained["gain"]] == pytest.approx([10.0] * 4, rel=0.02)
    scored = gpu.scored(board).set_index("key")
    scan = scored.loc["prompt of 512, PLaMo 2: gain of a scan on the GPU"]
    assert (scan["measured"].value, scan["claim"]) == (pytest.approx(2.0, rel=0.01), "does not hold")
    step = scored.loc["step of PLaMo 3: gain of the GPU over the CPU"]
    assert (step["measured"].value, step["claim"]) == (pytest.approx(10.0, rel=0.02), "holds")
    asymmetry = scored.loc["asymmetry of PLaMo 3: tokens a second of a prompt of 512 over those of a step", "measured"]
    prompt, step = board.prompt(gpu.ATTENTION, 512), board.step(gpu.ATTENTION)
    assert asymmetry.value == pytest.approx(_middle(512 * step / prompt), rel=1e-6)
    assert asymmetry.value > 1
    several = scored.loc["step of 16 sequences of PLaMo 3 against a step of one", "measured"]
    many, one = (board.steps(gpu.ATTENTION, n) for n in (16, 1))
    assert several.value == pytest.approx(_middle(many / one), rel=1e-6)
    assert scored.loc["step of PLaMo 3: gain of graphs", "claim"] == "inconclusive", "nothing was measured without"


def _middle(ratios):
    return np.exp(np.log(ratios).median())


def test_every_forecast_names_what_measures_it():
    assert {each["key"] for each in gpu.foretold()} == set(gpu.MEASURES)


def test_no_recorded_machine_has_a_gpu(studies):
    assert not gpu.boards(studies)
