"""What a machine says of itself: its state, its clocks of waiting and quotas, and how many threads fit.

The answers of macOS's programs are of the form that public sources print; no Mac has run this.
"""

import os
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from llama_meter.measure import machine, watch
from llama_meter.rows import State

MODES, SHORT = "pmset -g", "sysctl -n kern.memorystatus_vm_pressure_level"
PRESSURE = f"notifyutil -g {machine.PRESSURE_LEVEL}"
USUAL = State(power_source="ac", power_mode="automatic", thermal="nominal", memory_pressure="normal")


# ---------------------------------------------------------------- its state


@pytest.mark.parametrize(
    ("command", "said", "told"),
    [
        (MODES, "Currently in use:\n standby  1\n powermode            1\n sleep 1", {"power_mode": "low"}),
        (PRESSURE, f"{machine.PRESSURE_LEVEL} 1", {"thermal": "moderate"}),
        (SHORT, "4", {"memory_pressure": "critical"}),
    ],
)
def test_a_mac_is_in_the_state_that_its_programs_say(command, said, told, mac):
    assert machine.state() == USUAL
    mac.say(command, said)
    assert machine.state() == msgspec.structs.replace(USUAL, **told)


class Linux:
    """A Linux of a test: files of its kernel, CPUs that this process may use, and control groups that hold it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        monkeypatch.setattr(machine, "MACOS", False)
        for name, place in (("PROC", "proc"), ("SYS", "sys"), ("GROUPS", "groups")):
            monkeypatch.setattr(machine, name, folder / place)
        self.cpus(["0", "1", "2", "3"])

    def write(self, path, said):
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(f"{said}\n")

    def cpus(self, siblings, allowed=None):
        """CPUs by the lists of threads that share their cores; without a list a CPU says nothing of it."""
        for n, threads in enumerate(siblings):
            self.write(f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list", threads)
        allowed = set(range(len(siblings))) if allowed is None else allowed
        self.monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed, raising=False)
        self.monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: len(siblings))


@pytest.fixture
def linux(tmp_path, monkeypatch):
    return Linux(tmp_path, monkeypatch)


@pytest.mark.case(1)
def test_linux_says_what_its_kernel_counts_and_nothing_where_it_does_not(linux, monkeypatch):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=False), raising=False)
    state, found = machine.state(), machine.counters()
    assert (state.power_source, state.power_mode, state.thermal) == ("battery", "unknown", "unknown")
    assert {found[name] for name in ("hot", "throttled_ns", "waited_ns")} == {None}
    for name, said in (
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave"),
        ("sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", "5"),
        ("sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count", "2"),
        (f"proc/{os.getpid()}/task/7/schedstat", "30 4 5"),
    ):
        linux.write(name, said)
    found = machine.counters()
    assert (found["hot"], found["waited_ns"]) == (7, 4)
    assert machine.state().power_mode == "powersave"


# ---------------------------------------------------------------- how many threads fit


@pytest.mark.case(6)
@pytest.mark.parametrize(
    ("quotas", "threads"),
    [
        ({"pod": "250000", "pod/box": "max"}, 2),
        ({"": "300000"}, 3),  # a container that sees its own group as the top
    ],
)
def test_threads_are_the_whole_cpus_of_the_tightest_quota_above_this_process(quotas, threads, linux):
    linux.write("proc/self/cgroup", "5:cpuset:/elsewhere\n0::/pod/box")
    for group, quota_us in quotas.items():
        linux.write(f"groups/{group}/cpu.max", f"{quota_us} 100000")
    assert machine.performance_cores() == threads
    assert machine.at_once(1, 1) == threads


@pytest.mark.case(6)
def test_what_a_quota_took_is_counted_over_all_groups(linux):
    linux.write("proc/self/cgroup", "0::/pod/box")
    for group in ("pod", "pod/box"):
        linux.write(f"groups/{group}/cpu.stat", "usage_usec 5\nnr_throttled 1\nthrottled_usec 3")
    before = machine.counters()
    linux.write("groups/pod/cpu.stat", "usage_usec 5\nnr_throttled 9\nthrottled_usec 800003")
    assert watch.since(before, machine.counters()).throttled_ns == 800_000_000


@pytest.mark.case(6)
@pytest.mark.parametrize(
    ("siblings", "allowed", "slow", "threads"),
    [
        (["0-1", "0-1", "2-3", "2-3"], {0, 1}, "", 1),
        (["0-1", "0-1", "2", "3"], None, "2-3", 1),  # of a hybrid its performance cores
    ],
)
def test_threads_are_allowed_performance_cores_and_siblings_share_one(siblings, allowed, slow, threads, linux):
    linux.cpus(siblings, allowed)
    if slow:
        linux.write("sys/devices/cpu_atom/cpus", slow)
    assert machine.performance_cores() == threads
