"""What differs on macOS, on a thin one (`darwin.py`): what is refused there is an error, and nothing hangs."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
from conftest import mini

from plamo_study.measure import durations, machine, plan, watch
from plamo_study.measure.rows import Evidence
from plamo_study.models import recipes
from plamo_study.present import evidence
from plamo_study.studies.machines import analysis as machines

pytestmark = pytest.mark.timeout(60)


def child(code):
    """What a Python process started from here prints of the machine module."""
    told = f"import os\nfrom plamo_study.measure import machine\nprint({code})"
    return subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.strip()


def test_the_facts_of_a_mac_are_what_its_own_tools_say(mac):
    facts = machine.facts()
    assert (facts["chip"], facts["performance_cores"]) == ("Apple M4 Pro", 8)
    assert machine.power()["power_source"] == "ac"
    mac.say("pmset -g batt", "Now drawing from 'Battery Power'")
    assert machine.power()["power_source"] == "battery"


def test_a_process_started_on_a_mac_is_on_one_too(mac):
    assert child("(machine.MACOS, hasattr(os, 'posix_fadvise'))") == "(True, False)"


def test_what_the_kernel_of_linux_counts_is_unknown_on_a_mac(mac):
    found = machine.counters()
    assert (found.waited_ns, found.stolen_ns, found.pressure_ns, found.hot) == (None, None, None, None)
    assert found.busy_ns > 0
    assert machine.threads(os.getpid()) is None
    with pytest.raises(psutil.AccessDenied):
        psutil.Process(os.getppid()).memory_full_info()


@pytest.mark.parametrize("setting", ["powermode", "lowpowermode"])
def test_a_mac_that_saves_power_says_so_by_either_name_of_the_setting(mac, setting):
    assert machine.power()["power_mode"] == "automatic"
    mac.say("pmset -g", f"System-wide power settings:\nCurrently in use:\n standby  1\n {setting}         1")
    assert machine.power()["power_mode"] == "low"


def test_heat_is_told_by_the_pressure_the_governor_acts_on(mac):
    asked = f"notifyutil -g {machine.PRESSURE_LEVEL}"
    assert machine.power()["thermal"] == "nominal"
    mac.say(asked, f"{machine.PRESSURE_LEVEL} 2")
    assert machine.power()["thermal"] == "heavy"
    mac.say(asked, f"{machine.PRESSURE_LEVEL}: Failed with code 4")
    assert machine.power()["thermal"] == "unknown"


def test_nothing_is_calm_on_a_mac_that_is_hot(mac, monkeypatch):
    monkeypatch.setattr(watch, "OTHERS_LIMIT", 2.0)  # whatever else runs here: ticks of 10 ms may count more than all
    assert watch.calm()
    mac.say(f"notifyutil -g {machine.PRESSURE_LEVEL}", f"{machine.PRESSURE_LEVEL} 1")
    assert not watch.calm()


def test_a_mac_tells_how_busy_its_gpu_is_and_which_of_a_name_it_is(mac):
    assert machine.gpu_used() == pytest.approx(0.03)
    assert machine.facts()["gpu_cores"] == 20
    mac.say("ioreg -r -d 1 -w 0 -c IOAccelerator", "")
    assert machine.gpu_used() is None
    assert "gpu_cores" not in machine.facts()


def test_ceilings_are_read_from_more_than_the_cache_no_sysctl_tells_of(mac):
    largest = 96 << 20  # of an Ultra, which CPU and GPU share
    for cell in plan.ceilings("mini", gpu=True, threads=(8,)):
        if cell.workload == "read":
            assert cell.n_bytes >= 4 * largest


def test_a_starved_worker_stays_one_at_every_look(mac):
    """What it ran before the last look is not what it ran since."""
    busy = Evidence(wall_ns=10**8, cpus=2, others_ns=2 * 10**8)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as worker:
        onlooker = watch.Onlooker(worker.pid)
        while psutil.Process(worker.pid).cpu_times().user < 0.5:
            pass
        worker.send_signal(signal.SIGSTOP)
        looks = [onlooker._crowded(busy) for _ in range(2)]
        worker.kill()
    assert looks[1]


def test_a_worker_that_ended_and_was_not_waited_for_ends_no_sweep(mac):
    with subprocess.Popen(["true"]) as worker:
        while psutil.Process(worker.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert machine.threads(worker.pid) is None
        assert not watch.Onlooker(worker.pid).held(1.0)
        assert watch.Onlooker(worker.pid).starved(1.0) in (True, False)


def test_a_chip_that_is_processor_and_gpu_is_named_once_and_its_halves_apart():
    fact = {"chip": "Apple M4 Pro", "gpus": [{"name": "MTL0", "chip": "Apple M4 Pro", "memory_bytes": 1 << 34}]}
    other = {"chip": "EPYC", "gpus": [{"name": "CUDA0", "chip": "H100", "memory_bytes": 1 << 36}]}
    assert evidence.chip(fact) == "Apple M4 Pro"
    assert evidence.chip(other) == "EPYC + H100"
    passes = pd.DataFrame([{"machine": "m", "chip": "Apple M4 Pro", "n_gpu_layers": layers} for layers in (0, -1)])
    assert machines._apart(passes, {"m": fact})["chip"].nunique() == 2
    assert machines._apart(passes.tail(1), {"m": other})["chip"].item() == "H100"


def test_as_many_processes_run_beside_one_another_as_cores_and_memory_allow(mac, monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9 << 30))
    assert (machine.at_once(1, 1 << 20), machine.at_once(4, 1 << 20)) == (8, 2)
    assert (machine.at_once(1, 4 << 30), machine.at_once(1, 1 << 40)) == (2, 1)
    large = tmp_path / "large.gguf"
    large.touch()
    os.truncate(large, 2 << 30)
    monkeypatch.setattr(recipes, "model_path", lambda *file: large)
    assert durations.at_once(mini("gate")) == 2
    large.unlink()
    assert durations.at_once(mini("gate")) == 8
    assert durations.at_once(mini("prefill")) == 1
