"""Whole sweeps on a thin macOS: each ends within its limit with a row for every cell, never in a hang."""

import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from conftest import mini, mini_file

from llama_meter.cells import Decode, MatMul, Prefill, Read, Replicas, Service, Serving, Shipment
from llama_meter.measure import process, runner, watch
from llama_meter.measure.plan import Plan, change
from llama_meter.measure.worker import Job
from plamo_study.live import conduct

pytestmark = pytest.mark.timeout(300)
LIMIT_S = 60.0  # of a cell
SMALL = {  # what is measured of each type of cell, with one thread
    Replicas: {"n_prompt": 16, "n_gen": 4, "n_seq": 1, "n_processes": 2},
    Shipment: {"n_prompt": 48, "n_gen": 2, "repetitions": 1, "link_bps": 0},
    Service: {"n_prompt": 16, "n_gen": 4, "n_requests": 3, "per_second": 20.0},
    Serving: {"n_prompt": 16, "n_gen": 4, "n_requests": 3, "n_clients": 2, "pattern": ""},
    Prefill: {"n_prompt": 16, "n_seq": 1, "repetitions": 1},
    Decode: {"depth": 16, "n_gen": 4, "n_seq": 1},
    Read: {"array_bytes": 1 << 24, "repetitions": 2},
    MatMul: {"n_rows": 256, "repetitions": 2},
}
APART = ("killed", "mode", "server")  # fields whose every value is measured
DENIED = ("memory_full_info", "memory_info", "cpu_times", "status", "num_threads", "cmdline")


@pytest.fixture
def one_core(mac):
    """The Mac with one performance core: its processes share this test's core, and threads must not spin there."""
    mac.say("sysctl -n hw.perflevel0.physicalcpu", "1")
    return mac


def small(study):
    """The study's own plan at mini with the first cell of each kind, made small, without gates, in one block."""
    whole = conduct.build(study, "mini")
    first = {(type(cell), *(getattr(cell, name, "") for name in APART)): cell for cell in reversed(whole.cells)}
    cells = tuple(change(cell, **SMALL[type(cell)]) for cell in first.values())
    anchor = change(whole.anchor, depth=16, n_gen=4)
    return replace(whole, cells=cells, gates=(), anchor=anchor, blocks=1, extra_blocks=0, time_limit_s=LIMIT_S)


def swept(planned, tmp_path):
    """The rows of a sweep. Each of its workers has ended, and so has everything that it started."""
    path = tmp_path / "measured" / "local" / f"{planned.study}.mini.jsonl"
    found = runner.sweep(planned, path).rows
    assert not [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert {row.cell for row in found} == {*planned.cells, planned.anchor}
    return found, path


def test_a_system_that_tells_nothing_of_children_gives_rows_all_the_same(one_core, tmp_path, monkeypatch):
    """More than macOS refuses: no look at any child is allowed, of this process or of its workers."""
    (one_core.folder / "denied.py").write_text(DENYING)
    with (one_core.folder / "sitecustomize.py").open("a") as born:
        born.write(f"sys.path.append({str(one_core.folder)!r})\nimport denied\n")
    exec(compile(DENYING, "denied", "exec"), {"monkeypatch": monkeypatch})
    planned = small("03-replicas")
    kept = tuple(cell for cell in planned.cells if isinstance(cell, Replicas) and cell.killed < 0)
    path = tmp_path / "j.jsonl"
    rows = runner.sweep(replace(planned, cells=kept), path).rows
    assert {row.status for row in rows} == {"ok"}, [row.failure for row in rows]


DENYING = f"""
import os, psutil

def denying(name, usual):
    def look(process, *args, **how):
        if process.pid != os.getpid():
            raise psutil.AccessDenied(process.pid, name)
        return usual(process, *args, **how)
    return look

put = monkeypatch.setattr if "monkeypatch" in globals() else setattr
for name in {DENIED}:
    put(psutil.Process, name, denying(name, getattr(psutil.Process, name)))
"""


def test_a_worker_that_never_answers_is_a_hang_at_its_limit_and_one_that_was_stopped_is_not(one_core, monkeypatch):
    monkeypatch.setenv("PLAMO_STUDY_SLEEPING", "1")
    monkeypatch.setattr(watch, "STARVED_LIMIT", 99.0)  # whatever else runs here
    job = Job(cell=mini("prefill"), path=str(mini_file()))
    looks, usual = [], watch.Onlooker.starved
    monkeypatch.setattr(watch.Onlooker, "starved", lambda self, *limit: looks.append(limit) or usual(self, *limit))
    assert process.work(job, 1.5, workload="sleeping").status == "hang"
    assert len(looks) == 1, "it gets no more time"
    monkeypatch.setattr(process, "MOST_LIMITS", 2)
    stopping = [sys.executable, "-c", STOPPING, str(os.getpid())]
    with subprocess.Popen(stopping) as stopper:
        outcome = process.work(job, 3.0, workload="sleeping")
    assert stopper.returncode == 0
    assert (outcome.status, outcome.failure.message) == ("starved", process.SILENT["stopped"])
    assert outcome.evidence.held_ns > 0


STOPPING = """
import os, signal, sys, time, psutil
own = psutil.Process(int(sys.argv[1]))
while not (found := [each for each in own.children() if "llama_meter.measure.worker" in each.cmdline()]):
    time.sleep(0.01)
os.kill(found[0].pid, signal.SIGSTOP)
"""


def test_a_busy_mac_s_rows_are_measured_again_and_the_sweep_ends(one_core, tmp_path, monkeypatch):
    """Heat that passes after the first row: the row is marked with its cause and measured again."""
    plan = Plan("03-replicas", "mini", (mini("prefill"),), (), None, 1, 1, LIMIT_S)
    level = f"notifyutil -g {watch.machine.PRESSURE_LEVEL}"
    usual = (one_core.folder / "answers" / level).read_text().strip()
    one_core.say(level, f"{watch.machine.PRESSURE_LEVEL} 2")
    monkeypatch.setattr(watch, "OTHERS_LIMIT", 2.0)  # other tests run beside this one
    monkeypatch.setattr(runner, "CALM_S", 1.0)
    monkeypatch.setattr(runner, "COOL_S", 1.0)  # it stays hot until a row was measured

    def cooled(progress):
        if progress.row:
            one_core.say(level, usual)

    found = runner.sweep(plan, tmp_path / "j.jsonl", cooled).rows
    assert [row.conditions.thermal for row in found] == ["heavy", "nominal"]
    assert set(watch.causes(found).values()) == {watch.HEAT}
