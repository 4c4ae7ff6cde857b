"""Other processes: none takes code from the folder somebody stands in, and none is left when its parent is killed."""

import os
import signal
import subprocess
import time
from contextlib import suppress

import psutil
import pytest
from conftest import HYBRID, mini, mini_file
from misbehaving import as_llama_server

from llama_meter import children
from llama_meter.errors import StudyError
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from llama_meter.serve import server

# ------------------------------------------------------------------ code from the current directory


def test_a_server_loads_no_backends_from_the_folder_one_stands_in(tmp_path, monkeypatch):
    """llama.cpp's tools load every libggml-*.so of their working directory; ours is not theirs."""
    as_llama_server(tmp_path, before=f'pwd >> "{tmp_path}/log"; exit 3')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(server.NAMED, "./llama-server")  # named as a user does
    with pytest.raises(StudyError, match="exit code 3"), server.started(server.Setup(mini_file())):
        pass
    assert set((tmp_path / "log").read_text().splitlines()) == {children.NOWHERE}


# ------------------------------------------------------------------ what is inherited

LEFT_BEHIND = {"LLAMA_API_KEY", "OPENAI_API_KEY", "LLAMA_ARG_CACHE_TYPE_K", "N_CTX", "OMP_DYNAMIC", "OMP_NUM_THREADS"}
LEFT_BEHIND |= {"GOMP_CPU_AFFINITY", "LLAMA_GRAPH_REUSE_DISABLE", "ALL_PROXY"}
PASSED_ON = {"GGML_SCHED_DEBUG": "0", "CUDA_VISIBLE_DEVICES": "0", "GOMP_SPINCOUNT": "10000"}
TELLS = """
import os
from llama_meter.cells import Decode
from llama_meter.rows import Measured

RUNS = {Decode: lambda cell, path, stage: Measured(facts=dict(os.environ))}
"""


@pytest.mark.case(5)
def test_workers_and_servers_inherit_what_was_chosen_and_the_settings_left_are_a_fact_of_the_engine(
    tmp_path, monkeypatch
):
    for name, value in (dict.fromkeys(LEFT_BEHIND, "1") | PASSED_ON).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("GGML_BACKEND_PATH", f"{tmp_path}/")
    worker = work(Job(cell=mini("decode")), 60.0, workload="tells").measured.facts
    for inherited in (worker, server.environment(tmp_path)):
        assert not inherited.keys() & LEFT_BEHIND
        assert inherited.items() >= (PASSED_ON | {"HOME": os.environ["HOME"]}).items()
    settings = [*(f"{name}={value}" for name, value in PASSED_ON.items()), "GGML_BACKEND_PATH="]
    told = work(Job(), 60.0).measured.facts["environment"]
    assert told == sorted(settings, key=lambda each: each.split("=")[0]), "and no folder of this machine"


# ------------------------------------------------------------------ whose parent is killed


def family_of(script, *arguments, of=1):
    """A parent that runs this, and its descendants once there are so many besides their guards."""
    parent = psutil.Popen(children.python("-c", script, *map(str, arguments)), stderr=subprocess.DEVNULL)
    until = time.monotonic() + 90
    while len(found := descendants(parent)) < of and time.monotonic() < until and parent.poll() is None:
        time.sleep(0.02)
    assert len(found) >= of
    time.sleep(0.2)  # a guard that was just forked is still called as its parent
    return parent, descendants(parent)


def descendants(parent):
    with suppress(psutil.Error):
        return [each for each in parent.children(recursive=True) if each.name() != "sh"]
    return []


def all_end(parent, found):
    assert all(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in (parent, *found))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, left = psutil.wait_procs(found, timeout=15)
    for each in left:
        each.kill()
    return not left


STOPPED = {  # two processes of one cell, the second's parent is a stopped one; and a server
    2: (
        "import sys; from llama_meter.measure.process import work; from llama_meter.measure.worker import Job\n"
        "from llama_meter.cells import Shipment\n"
        f"cell = Shipment(model={HYBRID!r}, scale='mini', dtype='F16', n_prompt=48, n_gen=2, repetitions=10_000)\n"
        "work(Job(cell=cell, path=sys.argv[1]), 60.0, workload='plamo_study.studies.latency.work')"
    ),
    1: (
        "import os, sys; from pathlib import Path; from llama_meter.serve import server\n"
        "os.environ[server.NAMED] = f'{sys.argv[2]}/llama-server'\n"
        "with server.started(server.Setup(Path(sys.argv[1]))) as s: s.process.wait()"
    ),
}


@pytest.mark.parametrize("n", STOPPED)
def test_what_a_killed_process_started_ends_even_if_it_was_stopped(n, tmp_path):
    as_llama_server(tmp_path)
    parent, found = family_of(STOPPED[n], mini_file(), tmp_path, of=n)
    for each in found:
        each.suspend()
    assert all_end(parent, found)
