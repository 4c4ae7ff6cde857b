"""How many threads fit: CPU quotas of control groups, affinity, siblings and core types; and rows that a quota held."""

import os
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from conftest import mini, mini_file
from test_watch import LIMIT_S, SECOND, made_up

from llama_meter import journal, paths
from llama_meter.cells import Read
from llama_meter.measure import machine, process, system, watch
from llama_meter.measure.worker import Job
from llama_meter.rows import Conditions, Evidence, Row
from plamo_study.live import collect
from plamo_study.show import evidence
from plamo_study.studies.phase_asymmetry.plan import phase_asymmetry


class Linux:
    """A Linux of a test: files of its kernel, CPUs that this process may use, and control groups that hold it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch, self.mounts = folder, monkeypatch, ""
        monkeypatch.setattr(machine, "MACOS", False)
        monkeypatch.setattr(system, "PROC", folder / "proc")
        monkeypatch.setattr(system, "SYS", folder / "sys")

    def write(self, path, said):
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(f"{said}\n")

    def cpus(self, siblings, capacities=None, allowed=None):
        """CPUs by the lists of threads that share their cores; without a list a CPU says nothing of it."""
        for n, threads in enumerate(siblings):
            self.write(f"sys/devices/system/cpu/cpu{n}/uevent", "")
            if threads:
                self.write(f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list", threads)
            if capacities:
                self.write(f"sys/devices/system/cpu/cpu{n}/cpu_capacity", capacities[n])
        allowed = set(range(len(siblings))) if allowed is None else allowed
        self.monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
        self.monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: len(siblings))

    def held(self, version, path, root="/"):
        """This process is in a control group; `root`: the group that is mounted. The folder of the mount."""
        place = self.folder / f"cgroup{version}"
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,cpu,cpuacct")
        self.mounts += f"32 31 0:29 {root} {place} rw,nosuid shared:9 - {kind} {kind} {options}\n"
        self.write("proc/self/mountinfo", f"22 1 8:1 / / rw - ext4 /dev/root rw\n{self.mounts}")
        lines = f"0::{path}\n" if version == 2 else f"5:cpuset:/elsewhere\n4:cpu,cpuacct:{path}\n0::/\n"
        self.write("proc/self/cgroup", lines)
        return place.name


@pytest.fixture
def linux(tmp_path, monkeypatch):
    found = Linux(tmp_path, monkeypatch)
    found.cpus(["0", "1", "2", "3"])
    return found


def of_group(version, quota_us, period_us=100_000):
    if version == 2:
        return {"cpu.max": f"{'max' if quota_us < 0 else quota_us} {period_us}"}
    return {"cpu.cfs_quota_us": quota_us, "cpu.cfs_period_us": period_us}


# ---------------------------------------------------------------- threads


@pytest.mark.case(6)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("quotas_us", "threads"),
    [
        ({"": -1, "pod": -1, "pod/box": 100_000}, 1),
        ({"": -1, "pod": 250_000, "pod/box": -1}, 2),
        ({"": -1, "pod": 300_000, "pod/box": 150_000}, 1),
        ({"": -1, "pod": 50_000, "pod/box": 200_000}, 1),
        ({"": -1, "pod": 800_000, "pod/box": -1}, 4),
        ({"": -1, "pod": -1, "pod/box": -1}, 4),
        ({}, 4),
    ],
)
def test_threads_are_the_whole_cpus_of_the_tightest_quota_above_this_process(version, quotas_us, threads, linux):
    place = linux.held(version, "/pod/box")
    for group, quota_us in quotas_us.items():
        for name, said in of_group(version, quota_us).items():
            linux.write(f"{place}/{group}/{name}", said)
    assert machine.performance_cores() == threads
    assert machine.at_once(1, 1) == threads


@pytest.mark.case(6)
@pytest.mark.parametrize(
    ("path", "root", "inside"),
    [
        ("/docker/box", "/docker/box", ""),  # the host's path, in a container that mounts its own group
        ("/docker/box/job", "/docker/box", "job"),
        ("/", "/", ""),  # a container with a name space of its own
        ("/../../elsewhere", "/", ""),  # outside of the name space
    ],
)
def test_a_container_s_own_group_is_where_its_file_system_shows_it(path, root, inside, linux):
    place = linux.held(1, path, root)
    for name, said in of_group(1, 200_000).items():
        linux.write(f"{place}/{inside}/{name}", said)
    assert machine.performance_cores() == 2


@pytest.mark.case(6)
@pytest.mark.parametrize(
    ("cpus", "threads"),
    [
        ({"siblings": ["0-1", "0-1", "2-3", "2-3"]}, 2),
        ({"siblings": ["0-1", "0-1", "2-3", "2-3"], "allowed": {0, 1}}, 1),
        ({"siblings": ["0,2", "1,3", "0,2", "1,3"], "allowed": {0, 1, 2}}, 2),
        ({"siblings": [""] * 4}, 4),
        ({"siblings": ["0", "1", "2", "3"], "capacities": [1024, 1024, 380, 380]}, 2),
        ({"siblings": ["0", "1", "2", "3"], "capacities": [1024, 720, 720, 250]}, 3),
        ({"siblings": ["0", "1", "2", "3"], "capacities": [1024, 1024, 380, 380], "allowed": {2, 3}}, 2),
    ],
)
def test_threads_are_allowed_performance_cores_and_siblings_share_one(cpus, threads, linux):
    linux.cpus(**cpus)
    assert machine.performance_cores() == threads


def test_a_hybrid_s_efficiency_cores_get_no_thread_and_weigh_a_third_among_what_others_take(linux, monkeypatch):
    linux.cpus(["0-1", "0-1", "2", "3"])
    linux.write("sys/devices/cpu_core/cpus", "0-1")
    linux.write("sys/devices/cpu_atom/cpus", "2-3")
    linux.write("sys/devices/system/cpu/online", "0-1,3")
    assert (machine.performance_cores(), machine.slow_cpus()) == (1, {2, 3})
    times = psutil.cpu_times()._replace(**dict.fromkeys(psutil.cpu_times()._fields, 0.0))
    busy = [0.0, 0.0, 0.0]  # of CPUs 0, 1 and 3: CPU 2 is off

    def counted(percpu=False):
        own = [times._replace(user=each) for each in busy]
        return own if percpu else times._replace(user=sum(busy))

    monkeypatch.setattr(psutil, "cpu_times", counted)
    before = machine.counters()
    busy[:] = [60.0, 0.0, 6.0]
    found = msgspec.structs.replace(watch.since(before, machine.counters()), wall_ns=60 * SECOND, cpu_ns=60 * SECOND)
    assert found.others_slow_ns == 6 * SECOND
    for taken_s, others in ((6, 6 / 3), (9, 3 + 6 / 3)):
        both = Conditions(timed=msgspec.structs.replace(found, others_ns=taken_s * SECOND))
        assert watch.others(both) == pytest.approx(others / (60 * 4))


def test_one_thread_is_compared_with_no_second_one(linux, monkeypatch):
    linux.cpus(["0"])
    monkeypatch.setattr(machine, "MACOS", False)
    planned = phase_asymmetry("mini")
    assert {cell.n_threads for cell in planned.asked} == {1}
    assert not [cell for cell in planned.cells if getattr(cell, "n_gen", 0) == 32], "steps for the comparison alone"
    linux.cpus(["0", "1"])
    assert {cell.n_threads for cell in phase_asymmetry("mini").cells if getattr(cell, "n_gen", 0) == 32} == {1, 2}


# ---------------------------------------------------------------- rows


@pytest.mark.case(6)
@pytest.mark.parametrize(
    ("version", "stat"),
    [
        (1, "nr_periods 40\nnr_throttled {n}\nthrottled_time {ns}"),
        (2, "usage_usec 5\nuser_usec 5\nnr_periods 40\nnr_throttled {n}\nthrottled_usec {us}"),
    ],
)
def test_what_a_quota_took_of_a_timed_part_is_counted_in_both_versions(version, stat, linux):
    place = linux.held(version, "/pod/box")
    assert machine.counters().throttled_ns is None, "nothing counts it"
    for group in ("pod", "pod/box"):
        linux.write(f"{place}/{group}/cpu.stat", stat.format(n=1, ns=3_000, us=3))
    before = machine.counters()
    linux.write(f"{place}/pod/cpu.stat", stat.format(n=9, ns=800_003_000, us=800_003))
    assert watch.since(before, machine.counters()).throttled_ns == 800_000_000


def cause(cell, status="ok", **counted):
    found = Evidence(cpus=4, **{"wall_ns": SECOND, "others_ns": 0, "waited_ns": 0, "cpu_ns": SECOND} | counted)
    return watch.causes([made_up(cell, Conditions(timed=found, whole=found), status)]).get("k", "")


@pytest.mark.case(6)
def test_a_row_that_a_quota_held_says_so_and_not_that_others_computed():
    two, served = mini("decode", n_gen=4, n_threads=2), mini("serving", n_gen=4)
    for cell in (two, mini("decode", n_gen=4, n_gpu_layers=-1), served):
        assert cause(cell, throttled_ns=SECOND // 2, waited_ns=SECOND, cpu_ns=2 * SECOND) == watch.QUOTA
    assert cause(two, throttled_ns=SECOND // 100, cpu_ns=2 * SECOND) == ""
    assert cause(mini("gate"), throttled_ns=SECOND) == ""
    assert cause(two, "starved", throttled_ns=SECOND, waited_ns=SECOND) == watch.QUOTA


def test_threads_that_ran_far_less_than_they_could_are_marked_though_nobody_says_why():
    """Two threads that got one CPU: from a limit that this system does not show, or from other programs."""
    two = mini("decode", n_gen=4, n_threads=2)
    assert cause(two) == watch.STARVED
    assert cause(two, waited_ns=SECOND) == watch.STARVED, "nobody else took what they waited for"
    assert cause(two, waited_ns=SECOND, others_ns=SECOND) == watch.OTHERS
    assert cause(two, waited_ns=SECOND, stolen_ns=SECOND) == watch.OTHERS
    assert cause(two, cpu_ns=SECOND * 19 // 10) == ""
    assert cause(two, wall_ns=SECOND // 10, cpu_ns=SECOND // 10) == "", "too short to tell"
    assert cause(two, waited_ns=None) == "", "on a Mac a library computes prompts while threads sleep"
    for cell in (mini("decode", n_gen=4, n_threads=2, n_gpu_layers=-1), Read(n_threads=2)):
        assert cause(cell) == "", "threads that wait for a GPU or for memory, or have nothing to do"


def test_a_worker_that_a_quota_kept_past_its_limit_is_starved_by_it_and_no_hang(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PLAMO_STUDY_SLEEPING", "1")
    monkeypatch.setattr(process, "MOST_LIMITS", 2)
    monkeypatch.setattr(system, "throttled_ns", time.perf_counter_ns)  # all the time
    cell = mini("prefill")
    outcome = process.work(Job(cell=cell, path=str(mini_file())), LIMIT_S, workload="sleeping")
    assert (outcome.status, outcome.failure.message) == ("starved", process.SILENT["quota"])
    assert watch.causes([made_up(cell, Conditions(whole=outcome.evidence), outcome.status)]) == {"k": watch.QUOTA}


@pytest.mark.case(6)
def test_a_page_says_what_would_help_against_a_quota_and_does_not_ask_for_an_idle_machine():
    recorded = collect.collect("01-phase-asymmetry", "recorded", "shape").rows
    for mark in (watch.QUOTA, watch.STARVED):
        said = evidence.disturbed(recorded.assign(disturbed=True, disturbed_by=mark))
        assert said
        assert "idle" not in said


def test_no_recorded_row_is_marked_by_a_rule_that_came_after_it():
    marks = {}
    for path in (path for place in ("others", "reference") for path in journal.journals(paths.MEASURED / place)):
        marks |= watch.causes([row for row in journal.latest_rows(journal.read(path)) if isinstance(row, Row)])
    assert set(marks.values()) == {watch.OTHERS, watch.WAITED, watch.LOAD}
