"""What differs on macOS, on a thin one (`darwin.py`): what is refused there is an error, and nothing hangs."""

import os
import subprocess
import sys

import psutil
import pytest

from plamo_study.measure import machine

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
