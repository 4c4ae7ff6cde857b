"""Every way a worker can end is an outcome: real engine, real assertions, real hangs, real kills."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file

from plamo_study.measure.cells import Decode
from plamo_study.measure.process import work
from plamo_study.measure.worker import Job
from plamo_study.models import registry, synthetic


def outcome(cell, path=None, limit_s=60.0):
    return work(Job(cell=cell, path=str(path or mini_file(cell.model))), limit_s)


@pytest.fixture(scope="module")
def without_rope(tmp_path_factory):
    """A PLaMo 2 file as official conversions write it: head count as an array, layer 0 with none."""
    path = tmp_path_factory.mktemp("defects") / "array.gguf"
    return synthetic.write(registry.spec(HYBRID, "mini"), "F16", path, head_count_array=True)


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize(("workload", "steps"), [("prefill", {}), ("decode", {"n_gen": 8})])
def test_a_right_computation_is_valid_and_counts_its_tokens(model, n_seq, workload, steps):
    found = outcome(mini(workload, model, n_prompt=48, n_seq=n_seq, repetitions=2, **steps))
    assert (found.status, found.measured.valid) == ("ok", True), found
    assert found.measured.n_evaluated == 2 * n_seq * steps.get("n_gen", 48)
    assert [len(samples) for samples in found.measured.samples_ns] == [steps.get("n_gen", 1)] * 2
    assert found.measured.checks["n_rot"] == 64


def test_packed_prefill_is_found_wrong_on_the_hybrid_and_right_on_attention():
    cells = [mini("prefill", model, n_prompt=64, n_seq=4, policy="packed") for model in (HYBRID, ATTENTION)]
    hybrid, attention = (outcome(cell).measured for cell in cells)
    assert hybrid.valid is False
    assert hybrid.checks["second_path_error"] > 0.3
    assert attention.valid is True


def test_the_oracle_gate_opens_for_both_models():
    for model in (HYBRID, ATTENTION):
        found = outcome(mini("gate", model, n_prompt=300, n_gen=8))
        assert found.measured.valid is True, found.measured.checks


def test_an_assertion_is_an_abort_with_its_text():
    found = outcome(mini("prefill", n_prompt=512, n_seq=6, policy="packed"))
    assert found.status == "abort"
    assert found.failure.signal == "SIGABRT"
    assert "GGML_ASSERT(" in found.failure.message
    assert "failed" in found.failure.message
    assert found.failure.stage == "prefill"


def test_five_packed_sequences_do_not_abort_but_are_wrong():
    found = outcome(mini("prefill", n_prompt=512, n_seq=5, policy="packed"))
    assert (found.status, found.measured.valid) == ("ok", False)


def test_a_lost_rope_hangs_the_cpu_and_becomes_a_row(without_rope):
    found = outcome(mini("prefill"), without_rope, limit_s=4.0)
    assert found.status == "hang"
    assert found.failure.stage == "prefill"
    assert "n_rot" not in found.failure.message


def test_a_killed_worker_is_reported_with_its_signal(without_rope):
    def kill():
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for child in psutil.Process().children():
                if "plamo_study.measure.worker" in " ".join(child.cmdline()) and child.cpu_times().user > 0.5:
                    child.kill()
                    return
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    found = outcome(mini("prefill"), without_rope, limit_s=25.0)
    killer.join()
    assert (found.status, found.failure.signal) == ("killed", "SIGKILL")


@pytest.mark.parametrize(("content", "message"), [(None, "cannot load"), (b"GGUF\0 not really", "cannot load")])
def test_a_bad_file_is_an_error_with_its_reason(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    if content:
        path.write_bytes(content)
    found = outcome(mini("prefill"), path)
    assert found.status == "error"
    assert message in found.failure.message
    assert found.failure.exit_code == 1
    assert found.failure.log_tail == [] or "Traceback" not in found.failure.log_tail[0]


def test_a_context_beyond_memory_is_an_error():
    found = outcome(mini("decode", n_prompt=16, n_gen=8, n_seq=257))
    assert found.status == "error"
    assert "context" in found.failure.message


PARENT = """
import sys
from plamo_study.measure.process import work
from plamo_study.measure.worker import Job
sys.path.insert(0, {tests!r})
from conftest import mini
work(Job(cell=mini("prefill"), path={path!r}), 60.0)
"""


def test_a_worker_ends_when_its_parent_is_killed(without_rope):
    script = PARENT.format(tests=str(__file__).rsplit("/", 1)[0], path=str(without_rope))
    parent = psutil.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    workers = []
    while not workers and parent.is_running():
        workers = parent.children()
        time.sleep(0.05)
    parent.kill()
    gone, alive = psutil.wait_procs(workers, timeout=10)
    parent.wait()
    assert gone
    assert not alive


def test_a_row_names_the_engine_s_source_and_not_where_it_was_built():
    outcome = work(Job(cell=mini("prefill", n_prompt=512, n_seq=6, policy="packed"), path=str(mini_file())), 60.0)
    assert outcome.failure.message.startswith("ggml/src/ggml.c:")
    assert not any("/llama.cpp/" in line for line in outcome.failure.log_tail)


def test_a_worker_s_peak_memory_is_its_own_and_not_its_parent_s():
    ballast = np.ones(2**27)  # 1 GiB
    outcome = work(Job(cell=mini("prefill"), path=str(mini_file())), 60.0)
    assert 2**24 < outcome.measured.peak_rss_bytes < ballast.nbytes / 2


FAMILY = """
import subprocess, sys, time
from plamo_study.measure.cells import Decode
from plamo_study.measure.rows import Measured

def run(cell, path, stage):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path.write_text(str(child.pid))
    time.sleep(600 if cell.n_gen else 0)
    return Measured(valid=True)

RUNS = {Decode: run}
"""
RUNNER = """
import sys
from plamo_study.measure.cells import Decode
from plamo_study.measure.process import work
from plamo_study.measure.worker import Job
work(Job(cell=Decode(n_gen=1), path=sys.argv[1]), 60.0, workload="family")
"""


@pytest.fixture
def family(tmp_path, monkeypatch):
    """A worker that starts a process of its own and leaves it; the file that its number is written to."""
    (tmp_path / "family.py").write_text(FAMILY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path / "pid"


def ends(pid_file):
    """Whether the process of that number ends, or is dead and only not yet asked for."""
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(("n_gen", "status", "limit_s"), [(0, "ok", 60.0), (1, "hang", 4.0)])
def test_what_a_worker_started_ends_with_it(family, n_gen, status, limit_s):
    cell = Decode(n_gen=n_gen)
    assert work(Job(cell=cell, path=str(family)), limit_s, workload="family").status == status
    assert ends(family)


def test_what_a_worker_started_ends_with_a_killed_runner(family):
    runner = psutil.Popen([sys.executable, "-c", RUNNER, str(family)], stderr=subprocess.DEVNULL)
    while not family.exists() or not family.read_text():
        assert runner.is_running()
        time.sleep(0.05)
    runner.kill()
    runner.wait()
    assert ends(family)
