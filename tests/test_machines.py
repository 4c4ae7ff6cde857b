"""Chapter 2: several machines side by side, what one says about another, and the names that pages give them."""

import pandas as pd
import pytest

from llama_meter import journal, paths
from llama_meter.errors import StudyError
from llama_meter.journal import REFERENCE
from llama_meter.stats import Estimate
from plamo_study.read import frame, recording
from plamo_study.studies.roofline import machines

USUAL = {
    "model": "m*",
    "dtype": "Q8_0",
    "phase": "decode",
    "tokens": 1,
    "n_seq": 1,
    "policy": "shared",
    "type_k": "f16",
    "type_v": "f16",
    "attention": "on",
    "read": 1e9,
}


@pytest.fixture(scope="module")
def studies():
    return machines.recordings("recorded", "shape")


def line(machine, seconds, roof, depth=128.0, **changed):
    measured = Estimate(seconds, seconds * 0.9, seconds * 1.1, 5)
    entry = {"machine": machine, "chip": f"chip {machine}", "depth": depth, "measured": measured, "low": roof}
    return USUAL | entry | {"share": roof / seconds} | changed


def test_a_pair_holds_what_both_forecasts_start_from():
    """The other machine reads half as fast, and its roof is three times as high."""
    found = pd.DataFrame([line("a", 0.10, 0.05), line("b", 0.30, 0.15, read=0.5e9)])
    told = machines.pairs(found).iloc[0]
    assert (told["known"], told["asked"]) == ("chip a", "chip b")
    assert told["took_known"].value * told["roof_asked"] / told["roof_known"] == pytest.approx(0.30)
    assert told["took_known"].value * told["read_known"] / told["read_asked"] == pytest.approx(0.20)
    assert (told["share_known"], told["share_asked"]) == (pytest.approx(0.5), pytest.approx(0.5))


def test_only_the_same_pass_of_two_machines_is_compared_and_of_several_depths_the_nearest():
    def common(*lines):
        return list(machines.common(pd.DataFrame(lines)))

    first, other = line("a", 0.1, 0.05), line("b", 0.1, 0.05)
    assert len(common(first, other)) == len(common(first, other | {"depth": 190.0})) == 1
    for changed in (
        {"depth": 200.0},
        {"dtype": "Q4_0"},
        {"n_seq": 8},
        {"phase": "prefill"},
        {"attention": "off"},
        {"machine": "a"},
    ):
        assert not common(first, other | changed), changed
    assert {"took_known", "share_asked", "depth"} <= set(machines.pairs(pd.DataFrame([first])))
    ((known, asked),) = common(line("a", 0.1, 0.05, 100.0), line("a", 0.2, 0.05, 130.0), other)
    assert (known.depth, asked.depth) == (130.0, 128.0)
    twice = line("a", 0.1, 0.05, 131.0)
    assert len(common(first, twice, other)) == len(common(other, first, twice)) == 1, "one pass that was timed twice"


@pytest.mark.long
def test_the_recorded_machines_share_passes_and_reach_part_of_their_ceilings(studies):
    found = machines.passes(studies)
    assert found["machine"].nunique() >= 3
    on_gpu = found["machine"].str.endswith(machines.ON_GPU)
    assert found[~on_gpu]["share"].between(0.1, 1.1).all()
    assert found[on_gpu]["share"].between(0, 1).all(), "operators that go back to the processor take most of a pass"
    assert set(machines.machines(found)["machine"]) == set(found["machine"])
    told = machines.pairs(found)
    assert (told["known"] != told["asked"]).all()


def test_what_cannot_be_shown_is_refused_with_what_to_do(monkeypatch, tmp_path):
    for wrong in (("elsewhere", "shape"), ("recorded", "huge")):
        with pytest.raises(StudyError, match="known"):
            machines.recordings(*wrong)
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    with pytest.raises(StudyError, match="plamo-study run 01 --scale mini"):
        machines.recordings("live", "mini")


# ---------------------------------------------------------------- names


def test_a_machine_is_named_by_what_its_fact_says_and_no_more():
    for chip, name in {
        "AMD EPYC (family 25)": "AMD EPYC, 2 cores",
        "AMD EPYC 9R14 (family 25)": "AMD EPYC 9R14, 2 cores",
        "Intel(R) Xeon(R) Platinum 8488C (family 6)": "Intel Xeon Platinum 8488C, 2 cores",
        "aarch64 (family ?)": "aarch64, 2 cores",
        "Apple M4 Pro": "Apple M4 Pro",
    }.items():
        assert frame.machine_name({"chip": chip, "performance_cores": 2}) == name


def test_a_second_machine_of_one_name_bears_a_part_of_its_id_and_a_recorded_one_its_letter():
    chip = {"chip": "Intel(R) Xeon(R) Gold (family 6)", "performance_cores": 2}
    facts = {name * 16: chip | {"last_level_cache_bytes": size} for size, name in enumerate("abc")}
    names = [frame.machine_name(fact) for fact in frame.told_apart(facts)[0].values()]
    assert names == [f"Intel Xeon Gold, 2 cores{mark}" for mark in ("", " (bbbbbbbb)", " (cccccccc)")]
    recorded = recording.read("01-phase-asymmetry", "recorded", "shape")
    (fact,) = {name: recorded.facts[name] for name in recorded.rows.machine.unique()}.values()
    assert frame.machine_name(fact) == "AMD EPYC Zen 5, 2 vCPUs (host A)"


def test_every_recorded_machine_has_a_letter_of_its_own():
    records = [each for path in journal.journals(paths.MEASURED / REFERENCE) for each in journal.read(path)]
    ids = {record.id for record in records if getattr(record, "what", "") == "machine"}
    assert ids <= frame.HOSTS.keys()
    assert len({letter for letter, _ in frame.HOSTS.values()}) == len(frame.HOSTS)
