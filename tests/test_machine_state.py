"""What a machine did while a row was measured: read as its system says it, judged by the watch, waited for.

The answers of macOS's programs are of the form that public sources print; no Mac has run this.
"""

import os
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from conftest import mini
from test_runner import small_plan
from test_watch import made_up

from llama_meter import journal
from llama_meter.measure import bench, machine, runner, system, watch
from llama_meter.measure.facts import Machine
from llama_meter.measure.process import work
from llama_meter.rows import Conditions, Evidence, State
from plamo_study.cli import report
from plamo_study.read import frame

pytestmark = pytest.mark.timeout(100)
SECOND, PAGE = 10**9, 16384
BATT, MODES, SHORT, PAGES, GPUS = (
    "pmset -g batt",
    "pmset -g",
    "sysctl -n kern.memorystatus_vm_pressure_level",
    "vm_stat",
    " ".join(machine.ACCELERATORS),
)
PRESSURE = f"notifyutil -g {machine.PRESSURE_LEVEL}"
USUAL = State(
    power_source="ac",
    power_mode="automatic",
    thermal="nominal",
    memory_pressure="normal",
    swapped_bytes=400 * PAGE,
    gpu_used=0.03,
)
UNKNOWN = {  # what is left of a fact when this program says nothing
    BATT: {"power_source": "unknown"},
    MODES: {"power_mode": "unknown"},
    PRESSURE: {"thermal": "unknown"},
    SHORT: {"memory_pressure": "unknown"},
    PAGES: {"swapped_bytes": None},
    GPUS: {"gpu_used": None},
}


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    ("command", "said", "told"),
    [
        (
            BATT,
            "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t42%; discharging; 2:11 remaining",
            {"power_source": "battery"},
        ),
        (BATT, "Now drawing from 'UPS Power'", {"power_source": "unknown"}),
        (
            MODES,
            "System-wide power settings:\nCurrently in use:\n standby  1\n powermode            1\n sleep 1",
            {"power_mode": "low"},
        ),
        (MODES, "Currently in use:\n standby              1\n lowpowermode         1", {"power_mode": "low"}),
        (MODES, "Currently in use:\n powermode            2", {"power_mode": "high"}),
        (MODES, "Currently in use:\n hibernatemode        3", {"power_mode": "unknown"}),
        (PRESSURE, f"{machine.PRESSURE_LEVEL} 1", {"thermal": "moderate"}),
        (PRESSURE, f"{machine.PRESSURE_LEVEL} 2", {"thermal": "heavy"}),
        (PRESSURE, f"{machine.PRESSURE_LEVEL} 3", {"thermal": "trapping"}),
        (PRESSURE, f"{machine.PRESSURE_LEVEL} 4", {"thermal": "sleeping"}),
        (PRESSURE, f"{machine.PRESSURE_LEVEL} 30", {"thermal": "unknown"}),  # the levels of iOS
        (PRESSURE, f"{machine.PRESSURE_LEVEL}: Failed with code 4", {"thermal": "unknown"}),
        (SHORT, "2", {"memory_pressure": "warning"}),
        (SHORT, "4", {"memory_pressure": "critical"}),
        (SHORT, "3", {"memory_pressure": "unknown"}),
        (
            PAGES,
            "Mach Virtual Memory Statistics: (page size of 4096 bytes)\nPageins:  9.\nSwapins:  0.\nSwapouts:  0.",
            {"swapped_bytes": 0},
        ),
        (PAGES, "Mach Virtual Memory Statistics: (page size of 4096 bytes)\nPageins:  9.", {"swapped_bytes": None}),
        (
            GPUS,
            '"PerformanceStatistics" = {"Tiler Utilization %"=10,"Device Utilization %"=16}\n'
            '"PerformanceStatistics" = {"Device Utilization %"=97}',
            {"gpu_used": 0.97},
        ),
        (GPUS, '"PerformanceStatistics" = {"recoveryCount"=0}', {"gpu_used": None}),
    ],
)
def test_a_mac_is_in_the_state_that_its_programs_say(command, said, told, mac):
    assert machine.state() == USUAL
    mac.say(command, said)
    assert machine.state() == msgspec.structs.replace(USUAL, **told)


@pytest.fixture
def nothing_else(mac, monkeypatch):
    """The Mac, with no programs but those that it was told of: this machine may be a Mac itself."""
    for each in ("cat", "dirname", "basename", "sleep"):
        (mac.folder / each).symlink_to(shutil.which(each))
    monkeypatch.setenv("PATH", str(mac.folder))
    return mac


def without(program):
    """The usual state without what this program says."""
    gone = [left for command, left in UNKNOWN.items() if command.split()[0] == program]
    return msgspec.structs.replace(USUAL, **{name: value for left in gone for name, value in left.items()})


@pytest.mark.parametrize("program", sorted({command.split()[0] for command in UNKNOWN}))
def test_what_a_missing_program_would_say_is_absent_and_the_rest_is_told(program, nothing_else):
    (nothing_else.folder / program).unlink()
    found = machine.state()
    assert found == without(program)
    assert not {b"unknown", b"null"} & set(msgspec.json.encode(found).split(b'"')), "nor is it written"


def test_a_program_that_does_not_answer_holds_nothing_up_for_long(nothing_else, monkeypatch):
    monkeypatch.setattr(machine, "STATE_S", 4.0)
    (nothing_else.folder / "pmset").write_text("#!/bin/sh\nexec sleep 600\n")
    assert machine.state() == without("pmset")


@pytest.mark.case(1)
def test_linux_says_what_its_kernel_counts_and_nothing_where_it_does_not(tmp_path, monkeypatch):
    for name, folder in (("PROC", tmp_path / "proc"), ("SYS", tmp_path / "sys")):
        monkeypatch.setattr(system, name, folder)
    monkeypatch.setattr(machine, "MACOS", False)
    assert machine.state() == State()
    assert (machine.counters().stalled_ns, machine.counters().hot) == (None, None)
    for name, said in (
        ("proc/vmstat", "pgpgin 99\npswpin 3\npswpout 4\npgfault 7\n"),
        ("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=12\nfull avg10=0.00 total=7\n"),
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
        ("sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", "5\n"),
        ("sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count", "2\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(said)
    found = machine.counters()
    assert (found.stalled_ns, found.hot) == (12_000, 7)
    assert machine.state() == State(power_mode="powersave", swapped_bytes=7 * os.sysconf("SC_PAGE_SIZE"))
    assert msgspec.json.encode(State()) == b"{}"


@pytest.mark.parametrize(("plugged", "source"), [(True, "ac"), (False, "battery"), (None, "unknown")])
def test_a_battery_is_said_as_far_as_it_is_known_who_feeds_it(plugged, source, monkeypatch):
    monkeypatch.setattr(machine, "MACOS", False)
    battery = SimpleNamespace(power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert machine.state().power_source == source
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert machine.state().power_source == "unknown"


@pytest.mark.case(1)
def test_a_clock_of_a_cpu_that_is_off_is_no_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "SYS", tmp_path)
    monkeypatch.setattr(system, "PROC", tmp_path)
    assert system.mhz() is None
    (tmp_path / "cpuinfo").write_text("cpu MHz\t: unknown\ncpu MHz\t: 1800.5\n")
    assert system.mhz() == 1800.5
    for cpu, said in enumerate(("2400000\n", "", "<unknown>\n", "3000000\n")):
        (tmp_path / f"devices/system/cpu/cpu{cpu}/cpufreq").mkdir(parents=True)
        (tmp_path / f"devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq").write_text(said)
    (tmp_path / "devices/system/cpu/cpu4/cpufreq/scaling_cur_freq").mkdir(parents=True)  # it cannot be read
    assert system.mhz() == 2400.0


@pytest.mark.case(1)
@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("model name\t: AMD EPYC\ncpu family\t: 26\n\nmodel name\t: other\n", "AMD EPYC (family 26)"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "implementer 0x41, part 0xd0c (family ?)"),
        ("processor\t: 0\nuarch\t\t: sifive,u74-mc\n", "sifive,u74-mc (family ?)"),
        ("processor\t: 0\nmodel name\t:\n", "unknown processor (family ?)"),
        (None, "unknown processor (family ?)"),
    ],
)
def test_a_processor_that_the_kernel_does_not_name_is_a_fact_all_the_same(said, name, tmp_path, monkeypatch):
    monkeypatch.setattr(system, "PROC", tmp_path)
    if said is not None:
        (tmp_path / "cpuinfo").write_text(said)
    assert system.chip() == name


MUTE = """
import os, psutil
from pathlib import Path
from llama_meter.measure import system

def refused(*args, **how):
    raise FileNotFoundError("no such fact")

put = monkeypatch.setattr if "monkeypatch" in globals() else setattr
for where, name in (
    (psutil, "cpu_times"), (psutil, "virtual_memory"), (psutil, "sensors_battery"), (psutil.Process, "cpu_times"),
    (psutil.Process, "status"), (psutil.Process, "children"), (os, "getloadavg"), (system, "schedstat"),
):
    put(where, name, refused if name != "schedstat" else lambda pid: {})
usual = psutil.cpu_count
put(psutil, "cpu_count", lambda logical=True: usual() if logical else refused())
put(system, "PROC", Path("/no/such/folder"))
put(system, "SYS", Path("/no/such/folder"))
"""


@pytest.mark.case(1)
def test_a_system_that_says_nothing_of_itself_gives_rows_in_which_nothing_is_known_and_nothing_is_marked(
    tmp_path, monkeypatch
):
    """No power supplies, clocks, names, counters, pressure, control groups or loads; in the workers neither."""
    (tmp_path / "sitecustomize.py").write_text(MUTE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(machine, "MACOS", False)
    exec(compile(MUTE, "mute", "exec"), {"monkeypatch": monkeypatch})
    summary = runner.sweep(planned(blocks=1, extra_blocks=0), tmp_path / "j.jsonl")
    assert {row.status for row in summary.rows} == {"ok"}, [row.failure for row in summary.rows]
    assert watch.causes(summary.rows) == {}
    facts = frame.facts(journal.read(tmp_path / "j.jsonl"))
    for row in summary.rows:
        conditions = row.conditions
        assert conditions.before == State(**{name: getattr(conditions, name) for name in State.__struct_fields__})
        assert conditions.before == State(gpu_used=conditions.gpu_used, gpu_mhz=conditions.gpu_mhz)
        assert conditions.load_1min is None
        whole = conditions.whole
        counted = (whole.waited_ns, whole.others_ns, whole.stolen_ns, whole.pressure_ns, whole.mhz, whole.throttled_ns)
        assert counted == (None,) * 6
        facts_of_machine = msgspec.convert(facts[row.machine], Machine)
        assert facts_of_machine.cores is None
        assert facts_of_machine.memory_bytes > 0
    assert frame.frame(summary.rows, facts)["others"].isna().all()


# ---------------------------------------------------------------- what marks a row


def judged(cell, before=USUAL, after=USUAL, **counted):
    found = Evidence(cpus=2, **{"wall_ns": SECOND, "others_ns": 0, "waited_ns": 0} | counted)
    conditions = Conditions(load_1min=0.0, before=before, timed=found, whole=found, **msgspec.structs.asdict(after))
    row = made_up(cell, conditions)
    assert msgspec.convert(msgspec.to_builtins(row), type(row)) == row
    return watch.causes([row]).get("k", "")


def test_the_boards_of_a_linux_machine_say_how_busy_and_how_fast_they_are_as_far_as_they_answer(monkeypatch):
    def rates(board):
        if board > 1:
            raise RuntimeError("not supported")
        return SimpleNamespace(gpu=(3, 90)[board])

    boards = SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda n: n,
        nvmlDeviceGetUtilizationRates=rates,
        nvmlDeviceGetClockInfo=lambda board, which: (1980, 345)[board],
    )
    monkeypatch.setattr(machine, "MACOS", False)
    monkeypatch.setitem(sys.modules, "pynvml", boards)
    monkeypatch.setattr(machine, "find_spec", {"pynvml": "here"}.get)
    assert (machine.state().gpu_used, machine.state().gpu_mhz) == (0.9, 345.0), "the third does not answer"
    boards.nvmlDeviceGetCount = lambda: rates(2)
    assert machine.state().gpu_used is None
    monkeypatch.setattr(machine, "find_spec", {}.get)
    assert machine.state().gpu_mhz is None


def test_a_row_is_marked_by_the_state_before_it_as_by_the_state_after_it():
    timed, offloaded = mini("decode", n_gen=4), mini("decode", n_gen=4, n_gpu_layers=-1)
    for change, why in (
        ({"power_source": "battery"}, watch.BATTERY),
        ({"power_mode": "low"}, watch.LOW_POWER),
        ({"power_mode": "high"}, ""),
        *(({"thermal": level}, watch.HEAT) for level in ("moderate", "heavy", "trapping", "sleeping")),
        ({"memory_pressure": "warning"}, watch.MEMORY),
        ({"memory_pressure": "critical"}, watch.MEMORY),
        ({"gpu_used": 0.2}, ""),
    ):
        other = msgspec.structs.replace(USUAL, **change)
        for cell in (timed, offloaded):
            assert judged(cell, before=other) == judged(cell, after=other) == why, change
        assert judged(mini("gate"), before=other, after=other) == ""
    assert judged(timed, State(), State()) == judged(timed, None) == "", "what nobody says marks nothing"


def test_a_gpu_that_was_busy_before_a_row_marks_it_and_its_own_use_does_not():
    timed, offloaded = mini("decode", n_gen=4), mini("decode", n_gen=4, n_gpu_layers=-1)
    busy = msgspec.structs.replace(USUAL, gpu_used=0.9)
    assert (judged(offloaded, before=busy), judged(offloaded, after=busy)) == (watch.GPU, "")
    assert (judged(timed, before=busy), judged(timed, after=busy)) == (watch.GPU, watch.GPU)


def test_a_row_is_marked_where_the_machine_swapped_waited_for_memory_or_slowed_a_hot_core():
    timed, swapped = mini("decode", n_gen=4), lambda n: msgspec.structs.replace(USUAL, swapped_bytes=n)
    much = 1 << 30
    assert judged(timed, swapped(0), swapped(much)) == watch.MEMORY
    assert judged(timed, swapped(much), swapped(much + PAGE)) == "", "what was swapped before is not this row's"
    assert judged(timed, swapped(None), swapped(much)) == judged(timed, None, swapped(much)) == ""
    assert judged(timed, stalled_ns=SECOND // 10) == watch.MEMORY
    assert judged(timed, stalled_ns=SECOND // 100) == ""
    assert (judged(timed, hot=1), judged(timed, hot=0)) == (watch.HEAT, "")


def test_a_gpu_is_given_time_to_forget_the_worker_that_ended_just_now(monkeypatch):
    monkeypatch.setattr(watch, "LOOK_S", 0.001)
    told = iter([0.9, 0.5, 0.1])
    monkeypatch.setattr(machine, "state", lambda: State(gpu_used=next(told)))
    assert watch.before_row().gpu_used == 0.1
    monkeypatch.setattr(machine, "state", lambda: State(gpu_used=0.9))
    monkeypatch.setattr(watch, "REST_S", 0.01)
    assert watch.before_row().gpu_used == 0.9, "another program's work does not end"


# ---------------------------------------------------------------- what a sweep does about it


@pytest.fixture
def heat(monkeypatch):
    """A machine without other work that is hot for as many looks at it as the test says."""
    left = [0]

    def state():
        left[0] -= left[0] > 0
        return State(thermal="heavy" if left[0] else "nominal")

    def calm(job, *rest, **how):
        outcome, found = work(job, *rest, **how), Evidence(wall_ns=SECOND, cpus=2, others_ns=0, waited_ns=0)
        return msgspec.structs.replace(
            outcome, evidence=found, measured=msgspec.structs.replace(outcome.measured, evidence=found)
        )

    monkeypatch.setattr(machine, "state", state)
    monkeypatch.setattr(bench, "work", calm)
    monkeypatch.setattr(watch, "calm", lambda: True)
    monkeypatch.setattr(watch, "WARM_LOOK_S", 0.001)
    return left


def planned(blocks=2, extra_blocks=1):
    return replace(small_plan((mini("prefill", n_prompt=16),), blocks=blocks), extra_blocks=extra_blocks)


@pytest.mark.long
def test_a_row_beside_planted_heat_is_marked_and_measured_again_once_the_machine_is_cool(
    heat, tmp_path, monkeypatch, capsys
):
    asked, usual, planted = planned(), bench.work, []

    def heated(job, *rest, **how):
        outcome = usual(job, *rest, **how)
        if job.cell == asked.cells[0] and not planted:
            planted.append(job)
            heat[0] = 6  # the look after this row, those of the cooldown, and then it is cool
        return outcome

    monkeypatch.setattr(bench, "work", heated)
    summary = report.sweep(asked, tmp_path / "j.jsonl")
    rows = [row for row in summary.rows if row.cell == asked.cells[0]]
    assert [(row.block, row.replicate) for row in rows] == [(0, 0), (0, 1000), (1, 1)]
    assert watch.causes(summary.rows) == {rows[0].key: watch.HEAT}
    assert (rows[0].conditions.before.thermal, rows[0].conditions.thermal) == ("nominal", "heavy")
    assert capsys.readouterr().err.count("heat slows this machine") == 1
    table = frame.frame(summary.rows, frame.facts(journal.read(tmp_path / "j.jsonl")))
    assert list(table["disturbed_by"][table["disturbed"]]) == [watch.HEAT]


@pytest.mark.long
def test_a_machine_that_every_row_heats_cools_down_before_the_next_one(heat, tmp_path, monkeypatch):
    cells = tuple(mini("prefill", n_prompt=n) for n in (16, 24))
    asked, usual, events = replace(planned(extra_blocks=0), cells=cells), bench.work, []

    def heated(job, *rest, **how):
        heat[0] = 3 * (job.cell is not None and job.cell.is_timed)  # the look after the row, and two of the cooldown
        return usual(job, *rest, **how)

    monkeypatch.setattr(bench, "work", heated)
    summary = runner.sweep(asked, tmp_path / "j.jsonl", events.append)
    timed = [row for row in summary.rows if row.cell.is_timed]
    assert {row.conditions.before.thermal for row in timed} == {"nominal"}
    assert sum(event.cools_s > 0 for event in events) == len(timed) - 1


@pytest.mark.long
def test_a_cooldown_of_a_mac_ends_at_its_limit_and_what_is_measured_then_is_marked(mac, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "OTHERS_LIMIT", 2.0)  # whatever else runs here
    monkeypatch.setattr(watch, "calm", lambda: True)
    monkeypatch.setattr(runner, "COOL_S", 0.01)
    mac.say(PRESSURE, f"{machine.PRESSURE_LEVEL} 3")
    events = []
    summary = runner.sweep(planned(blocks=2, extra_blocks=0), tmp_path / "j.jsonl", events.append)
    assert [(event.task.block, event.task.anchor) for event in events if event.cools_s] == [(n, True) for n in range(3)]
    timed = [row for row in summary.rows if row.cell.is_timed]
    assert watch.causes(summary.rows) == {row.key: watch.HEAT for row in timed}
    hot = msgspec.structs.replace(USUAL, thermal="trapping")
    after = {name: getattr(timed[-1].conditions, name) for name in State.__struct_fields__}
    assert timed[-1].conditions.before == State(**after) == hot
    assert journal.latest_rows(journal.read(tmp_path / "j.jsonl")) == summary.rows


def test_a_cooldown_takes_no_time_that_the_finding_needs(heat, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "MOST_BLOCKS", 2)
    monkeypatch.setattr(machine, "state", lambda: State(thermal="heavy"))
    waits, asked = [], planned(extra_blocks=0)
    monkeypatch.setattr(watch, "wait_until_cool", waits.append)
    monkeypatch.setattr(runner._Sweep, "_expected_s", lambda self, tasks: 10.0 * len(list(tasks)))
    summary = runner.sweep(asked, tmp_path / "j.jsonl", minutes=1)
    assert summary.lacking == 0
    assert 0 < waits[0] < 60 - 2 * 10, "two processes of its one cell are needed, of 10 s each"
    assert all(wait < 60 for wait in waits)
