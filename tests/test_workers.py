"""Every way a worker can end is an outcome: real engine, real assertions, real hangs, real kills."""

import os
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file

from llama_meter.cells import Decode
from llama_meter.engine.library import capture_log
from llama_meter.engine.session import Session
from llama_meter.measure import phases, watch
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from plamo_study.studies.context import work as context


def outcome(cell, path=None, limit_s=60.0):
    return work(Job(cell=cell, path=str(path or mini_file(cell.model))), limit_s)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "workload", "n_seq", "steps"), [(HYBRID, "prefill", 1, {}), (ATTENTION, "decode", 3, {"n_gen": 8})]
)
def test_a_right_computation_is_valid_counts_its_tokens_and_its_own_memory(model, n_seq, workload, steps):
    ballast = np.ones(2**27)  # 1 GiB
    before = {"depth" if workload == "decode" else "n_prompt": 48}
    found = outcome(mini(workload, model, n_seq=n_seq, repetitions=2, **before, **steps))
    assert (found.status, found.measured.valid) == ("ok", True), found
    assert found.measured.n_evaluated == 2 * n_seq * steps.get("n_gen", 48)
    assert [len(samples) for samples in found.measured.samples_ns] == [steps.get("n_gen", 1)] * 2
    assert found.measured.checks["n_rot"] == 64
    assert found.measured.splits == (1, 1), "the CPU does everything"
    assert 2**24 < found.measured.peak_rss_bytes < ballast.nbytes / 2


def test_packed_prefill_is_found_wrong_on_the_hybrid_and_right_on_attention():
    cells = [mini("prefill", model, n_prompt=64, n_seq=4, policy="packed") for model in (HYBRID, ATTENTION)]
    hybrid, attention = (outcome(cell).measured for cell in cells)
    assert hybrid.valid is False
    assert hybrid.checks["second_path_error"] > 0.3
    assert attention.valid is True


def test_an_assertion_is_an_abort_with_its_text_and_without_the_folder_of_the_build():
    found = outcome(mini("prefill", n_prompt=512, n_seq=6, policy="packed"))
    assert (found.status, found.failure.signal, found.failure.stage) == ("abort", "SIGABRT", "prefill")
    assert "GGML_ASSERT(" in found.failure.message
    assert found.failure.message.startswith("ggml/src/ggml.c:")
    assert not any("/llama.cpp/" in line for line in found.failure.log_tail)


def test_a_file_or_a_context_that_cannot_be_is_an_error_with_its_reason(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\0 not really")
    asked = [
        (mini("prefill"), tmp_path / "none.gguf", "cannot load"),
        (mini("prefill"), tmp_path / "bad.gguf", "load"),
        (mini("decode", n_gen=8, n_seq=257), None, "context"),
    ]
    for cell, path, why in asked:
        found = outcome(cell, path)
        assert (found.status, found.failure.exit_code) == ("error", 1)
        assert why in found.failure.message
        assert not any("Traceback" in line for line in found.failure.log_tail[:1])


FAMILY = """
import os, subprocess, sys, time
from llama_meter.cells import Decode
from llama_meter.rows import Measured

def run(cell, path, stage):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path.write_text(str(child.pid))
    if cell.n_gen == 2:
        os.kill(os.getpid(), 9)
    time.sleep(600 * cell.n_gen)
    return Measured(valid=True)

RUNS = {Decode: run}
"""


@pytest.mark.parametrize(("n_gen", "status"), [(1, "hang"), (2, "killed")])
def test_what_a_worker_started_ends_with_it(tmp_path, monkeypatch, n_gen, status):
    """Of a worker that leaves a process of its own; what ends with a killed runner, test_children.py says."""
    (tmp_path / "family.py").write_text(FAMILY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    job = Job(cell=Decode(n_gen=n_gen), path=str(tmp_path / "pid"))
    found = work(job, 2.0, workload="family")
    assert found.status == status
    if status == "killed":
        assert found.failure.signal == "SIGKILL"
        assert "memory" in str(found.failure)
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


WAIT_S = 0.02  # far longer than a call at mini, so that a clock that is a tenth short misses more than it may


@pytest.mark.parametrize(
    ("workload", "fields", "warm"),
    [
        ("prefill", {"repetitions": 3}, 0),
        ("decode", {"n_gen": 6}, 0),
        ("depth", {"n_ctx": 64, "n_ubatch": 32, "n_gen": 4, "flash_attn": "on"}, context.WARM_STEPS),
    ],
)
def test_a_time_is_no_shorter_than_its_calls_and_no_longer_than_what_surrounds_them(
    workload, fields, warm, monkeypatch
):
    """By another clock, around calls that wait: whatever the machine, an honest time lies between the two."""
    right, timed, calls, parts = Session._run, watch.timed, [], []

    def waiting(self, n_tokens):
        start = time.monotonic_ns()
        right(self, n_tokens)
        time.sleep(WAIT_S)
        calls.append(time.monotonic_ns() - start)

    @contextmanager
    def recorded():
        first = len(calls)
        with timed():
            yield
        parts.append(calls[first:])

    capture_log([])
    monkeypatch.setattr(watch, "_parts", [])
    monkeypatch.setattr(watch, "timed", recorded)
    monkeypatch.setattr(Session, "_run", waiting)
    cell = mini(workload, **fields)
    job = cell, mini_file(), lambda stage: None
    measured = context.run(*job) if workload == "depth" else phases.run(*job[:2], 0, job[2])
    least = sum(sum(part[warm if len(part) > 1 else 0 :]) for part in parts)
    assert 0 < least <= sum(map(sum, measured.samples_ns)) <= watch.collected().wall_ns
