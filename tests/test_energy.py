"""Energy: meters are read as their systems tell them, idle power is taken off, and nothing is made up where none is."""

import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from llama_meter.cells import Idle
from llama_meter.measure import energy, machine, watch
from llama_meter.rows import Evidence
from llama_meter.workloads import phases
from plamo_study.arithmetic import energy as analysis
from plamo_study.plans.phase_asymmetry import phase_asymmetry
from plamo_study.read.recording import read


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """No meter but those that a test brings, on whatever machine."""
    for module in (energy, machine):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    energy.meters.cache_clear()
    yield
    energy.meters.cache_clear()


def zone(folder, number, name, joules, limit_w=65, wraps_j=262_143):
    path = folder / f"intel-rapl:{number}"
    path.mkdir(parents=True)
    told = {"name": name, "energy_uj": round(joules * 1e6), "max_energy_range_uj": round(wraps_j * 1e6)}
    if limit_w:  # held for long, and in a burst
        told |= {f"constraint_{n}_power_limit_uw": round(watts * 1e6) for n, watts in enumerate((limit_w / 2, limit_w))}
    for file, content in told.items():
        (path / file).write_text(f"{content}\n")
    return path / "energy_uj"


@pytest.fixture
def powercap(tmp_path, monkeypatch):
    """A processor with a package and memory, as Linux tells of it."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    zone(tmp_path, "0:0", "core", 1.0)
    zone(tmp_path, "0:1", "dram", 5.0, limit_w=None)
    return zone(tmp_path, "0", "package-0", 100.0)


def test_packages_and_memory_are_read_with_their_limits_and_cores_are_not_counted_twice(powercap, monkeypatch):
    there = machine.facts()
    assert energy.counted() == {"RAPL package-0": 100.0, "RAPL dram-0": 5.0}
    assert energy.limits() == {"RAPL package-0": 65.0}
    assert energy.missing() == ""
    asked = phase_asymmetry("mini")
    idle = [cell for cell in asked.cells[: asked.needed] if isinstance(cell, Idle)]
    assert [cell.seconds for cell in idle] == [10], "its idle power is measured beside the phases"
    monkeypatch.setattr(energy, "POWERCAP", powercap.parent / "nothing")
    energy.meters.cache_clear()
    assert energy.counted() == {}
    assert "no meter is shown here" in energy.missing()
    assert not [cell for cell in phase_asymmetry("mini").cells if isinstance(cell, Idle)]
    assert machine.facts() == there, "a meter makes no other machine of this one"


def test_a_counter_that_began_anew_is_no_negative_energy(powercap):
    powercap.write_text("262140000000")
    before = energy.counted()
    powercap.write_text("7000000")
    after = energy.counted()
    assert energy.between(before, after, 60) == {"RAPL package-0": pytest.approx(10.0), "RAPL dram-0": 0.0}
    assert energy.between(before, after, 5000) == {"RAPL dram-0": 0.0}, "262 kJ at 65 W: it may have wrapped twice"
    (powercap.parent / "max_energy_range_uj").unlink()
    energy.meters.cache_clear()
    assert energy.between(before, after, 60) == {"RAPL dram-0": 0.0}, "nobody says where it begins anew"


def test_a_counter_for_root_alone_is_named_with_the_command_that_opens_it(powercap, monkeypatch):
    usual = type(powercap).read_text

    def refused(self, *args, **how):
        if self.name == "energy_uj":
            raise PermissionError(self)
        return usual(self, *args, **how)

    monkeypatch.setattr(type(powercap), "read_text", refused)
    assert energy.meters() == ()
    assert "sudo chmod a+r" in energy.missing()


def test_a_meter_that_stops_answering_leaves_its_part_without_joules_and_ends_nothing(powercap):
    before = energy.counted()
    powercap.write_text("counter lost\n")
    after = energy.counted()
    assert after == {"RAPL dram-0": 5.0}
    assert energy.between(before, after, 60) == {"RAPL dram-0": 0.0}
    with watch.timed():
        pass
    assert watch._parts.pop().joules == {"RAPL dram-0": 0.0}


def test_boards_are_read_by_nvml_each_as_far_as_it_answers(tmp_path, monkeypatch):
    """The first counts and says its limit, the second counts only, the third does neither."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)

    def answers(most, told):
        def answer(n):
            if n > most:
                raise RuntimeError("not supported")
            return told

        return answer

    boards = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda n: n, nvmlDeviceGetTotalEnergyConsumption=answers(1, 1_500),
        nvmlDeviceGetEnforcedPowerLimit=answers(0, 700_000),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", boards)
    for module in (energy, machine):
        monkeypatch.setattr(module, "find_spec", {"pynvml": "here"}.get)
    assert energy.counted() == {"NVML board-0": 1.5, "NVML board-1": 1.5}
    assert energy.limits() == {"NVML board-0": 700.0}


def test_parts_of_an_apple_chip_are_read_where_they_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    told = SimpleNamespace(cpu_total_mj=4_000, gpu_mj=500, dram_mj=None)
    monitor = SimpleNamespace(get_cumulative_energy=lambda: told)
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", SimpleNamespace(AppleEnergyMonitor=lambda: monitor))
    for module in (energy, machine):
        monkeypatch.setattr(module, "find_spec", {"zeus_apple_silicon": "here"}.get)
    assert energy.counted() == {"IOReport CPU": 4.0, "IOReport GPU": 0.5}
    assert energy.limits() == {}


def test_what_is_timed_counts_its_joules_and_parts_add_up(powercap, monkeypatch):
    """A processor that takes 50 W, whatever it does; what it took between the timed parts counts for none."""
    monkeypatch.setattr(watch, "_parts", [])

    def burn(seconds):
        powercap.write_text(str(int(powercap.read_text()) + round(50e6 * seconds)))

    monkeypatch.setattr(phases.time, "sleep", burn)
    for _ in range(2):
        measured = phases.run(Idle(seconds=1), None, 0, lambda stage: None)
        burn(7)
    assert measured.samples_ns == [[10**9]]
    found = watch.collected()
    assert found.joules == {"RAPL package-0": pytest.approx(100.0), "RAPL dram-0": 0.0}
    assert found.limits_w == {"RAPL package-0": 65.0}
    parts = [Evidence(wall_ns=5, cpus=2, joules={"a": 1.0, "b": 2.0}), Evidence(wall_ns=5, cpus=2, joules={"a": 3.0})]
    assert watch.added(parts).joules == {"a": 4.0}, "a meter that missed a part is left out"


# ------------------------------------------------------------------ joules a token

WATTS, IDLE_W = 40.0, 15.0


@pytest.fixture(scope="module")
def rows():
    """Rows of notebook 01 on a machine that takes 40 W at work and 15 W at rest."""
    rows = read("01-phase-asymmetry", "recorded", "shape").rows
    rows = rows[rows["workload"].isin(["prefill", "decode"]) & ~rows["anchor"]]
    seconds = [sum(sum(sample) for sample in samples) / 1e9 for samples in rows["samples_ns"]]
    rows = rows.assign(timed_s=seconds, joules=[{"RAPL package-0": WATTS * each} for each in seconds])
    rest = rows.drop_duplicates(["machine", "block"]).assign(workload="idle", timed_s=10.0, n_prompt=0, n_seq=1)
    rest["joules"] = [{"RAPL package-0": IDLE_W * 10} for _ in range(len(rest))]
    every = pd.concat([rows, rest])
    every["limits_w"] = [{"RAPL package-0": 65.0} for _ in range(len(every))]
    return every


def test_joules_a_token_are_the_power_above_idle_times_its_seconds(rows):
    lines = analysis.per_token(rows)
    assert {"prefill", "decode"} <= set(lines["workload"])
    for line in lines.itertuples():
        assert (line.watts.value, line.idle.value) == (pytest.approx(WATTS), pytest.approx(IDLE_W))
        assert line.most == pytest.approx(2 * line.joules.value, rel=0.05), "50 W of 25"
        own = rows[(rows["model"] == line.model) & (rows["n_threads"] == line.n_threads)]
        if line.workload == "prefill":
            samples = own[(own["workload"] == "prefill") & (own["n_prompt"] == line.n_prompt)]["samples_ns"]
            token_s = [sum(s) / len(s) / 1e9 / line.n_prompt for several in samples for s in several]
        else:
            samples = own[(own["workload"] == "decode") & (own["n_gen"] == line.n_gen)]["samples_ns"]
            token_s = [pd.Series(several[0]).median() / 1e9 for several in samples]
        if line.workload == "prefill" or line.n_gen == 512:
            assert line.joules.value == pytest.approx((WATTS - IDLE_W) * pd.Series(token_s).median(), rel=0.1)
    again = rows[rows["workload"] == "idle"].assign(replicate=9)
    twice = analysis.per_token(pd.concat([rows, again]))
    assert [each.n for each in twice["joules"]] == [each.n for each in lines["joules"]], (
        "measured again, it counts once"
    )


def test_a_timed_part_shorter_than_the_meter_s_step_and_one_without_an_idle_row_say_nothing(rows):
    short = rows.assign(timed_s=rows["timed_s"].where(rows["workload"] == "idle", 0.01))
    assert analysis.per_token(short).empty
    assert analysis.per_token(rows[rows["workload"] != "idle"]).empty
