"""What differs on macOS, on a thin one (`darwin.py`): what is refused there is an error, and nothing hangs."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pandas as pd
import psutil
import pytest
from conftest import HYBRID, mini, mini_file
from darwin import LEVELS
from misbehaving import as_llama_server

from llama_meter import journal, paths
from llama_meter.engine import builds
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, REFERENCE, journal_path
from llama_meter.measure import machine, plan, runner
from llama_meter.measure.request import DEVICES, Request
from llama_meter.rows import Row
from llama_meter.serve import server
from llama_meter.serve.server import Setup
from plamo_study import live, measurements
from plamo_study.read.recording import of_device, read
from plamo_study.show import evidence

pytestmark = pytest.mark.timeout(100)


def test_a_mac_is_what_its_own_tools_say_and_what_only_linux_counts_is_unknown(mac):
    facts, found = machine.facts(), machine.counters()
    assert (facts["chip"], facts["performance_cores"], facts["gpu_cores"]) == ("Apple M4 Pro", 8, 20)
    unknown = {"waited_ns", "stolen_ns", "hot", "throttled_ns"}
    assert {name for name, count in found.items() if count is None} == unknown
    assert found["busy_ns"] > 0
    told = "import os\nfrom llama_meter.measure import machine\nprint(machine.MACOS, hasattr(os, 'posix_fadvise'))"
    said = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "True False", "it is one for children too"
    for cell in plan.ceilings("mini", gpu=True, threads=(8,)):  # an Ultra's cache, which no sysctl tells of
        assert cell.workload != "read" or cell.array_bytes >= 4 * (96 << 20)


MAC = {"chip": "Apple M4 Pro", "gpu_cores": 20}
MAC_GPUS = {"gpus": [{"name": "MTL0", "chip": "Apple M4 Pro", "memory_bytes": 1 << 34}]}


def on_a_mac(recording):
    """A recording as if a Mac's two halves had measured it: the same rows on its CPU and, all layers, on its GPU."""
    rows, (fact,) = recording.rows, recording.rows["machine"].unique()
    offloaded = rows.assign(n_gpu_layers=-1, key=rows["key"] + " GPU")
    both = pd.concat([rows, offloaded], ignore_index=True)
    return replace(recording, rows=both, facts=recording.facts | {fact: recording.facts[fact] | MAC | MAC_GPUS})


def test_a_mac_s_rows_say_which_half_computed_them(monkeypatch):
    found = on_a_mac(live.collect("01-phase-asymmetry", Request()))
    monkeypatch.setattr(measurements, "recording", lambda *asked: found)
    lines = measurements.measurements("01-phase-asymmetry")
    assert lines.groupby("device").size().to_dict() == dict.fromkeys(
        ("Apple M4 Pro, CPU", "Apple M4 Pro, GPU"), len(lines) / 2
    )
    assert (lines["device"].str.endswith("GPU") == (lines["n_gpu_layers"] != 0)).all()
    assert set(lines["machine"]) == {"Apple M4 Pro"}
    assert ["GPU", "Apple M4 Pro, through Metal"] in evidence.provenance(found).frame.to_numpy().tolist()
    said = evidence.of_rows(found).data
    assert "Apple M4 Pro, GPU and CPU, 2 threads" in said


def test_as_many_processes_run_beside_one_another_as_cores_and_memory_allow(mac, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9 << 30))
    assert (machine.at_once(1, 1 << 20), machine.at_once(4, 1 << 20)) == (8, 2)
    assert (machine.at_once(1, 4 << 30), machine.at_once(1, 1 << 40)) == (2, 1)
    assert (runner.at_once(mini("gate")), runner.at_once(mini("prefill"))) == (8, 1)


def test_a_mac_at_work_may_darken_its_display(mac, tmp_path):
    keeper = mac.folder / "caffeinate"
    keeper.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/kept\n')
    planned = plan.Plan("small", "mini", (mini("prefill"),), (), None, 1, 0, 60.0)
    runner.sweep(planned, tmp_path / "j.jsonl")
    options = (tmp_path / "kept").read_text().split()[0]
    assert "d" not in options
    assert {*"ims"} <= {*options}


@pytest.mark.parametrize(
    ("levels", "cores"),
    [
        ([("Super", 2), ("Performance", 4), ("Efficiency", 6)], 6),
        ([], os.cpu_count()),
    ],
)
def test_every_core_but_the_efficient_ones_gets_a_thread(levels, cores, mac):
    lines = [
        f"hw.perflevel{n}.name: {name}\nhw.perflevel{n}.physicalcpu: {own}" for n, (name, own) in enumerate(levels)
    ]
    mac.say(LEVELS, "\n".join(lines))
    assert machine.performance_cores() == cores


# ---------------------------------------------------------------- workers


@pytest.mark.parametrize(("layers", "words"), [(0, "-ngl 0 -dev none"), (-1, "-ngl -1 --cache-ram")])
def test_a_server_on_the_cpu_leaves_the_gpu_alone(layers, words, tmp_path, monkeypatch):
    monkeypatch.setenv(server.NAMED, str(as_llama_server(tmp_path, before='echo "$*"; exit 3')))
    setup = Setup(mini_file(HYBRID), libraries=builds.installed_libraries(), n_gpu_layers=layers)
    with pytest.raises(StudyError, match=words), server.started(setup):
        pass


# ---------------------------------------------------------------- the device


@pytest.fixture
def engine(monkeypatch):
    """What the engine says it can do; it is forgotten before and after."""
    live._offloads.cache_clear()
    said = {"gpu_offload": True}
    monkeypatch.setattr(runner, "engine_facts", lambda: said)
    yield said
    live._offloads.cache_clear()


@pytest.mark.parametrize(("device", "offloaded"), [("auto", {0, -1}), ("gpu", {0, -1}), ("cpu", {0})])
def test_a_plan_takes_the_gpu_unless_told_otherwise(device, offloaded, engine):
    assert {cell.n_gpu_layers for cell in live.build("01-phase-asymmetry", "mini", device).every_cell} == offloaded


def test_live_rows_of_a_page_are_those_of_the_device_asked_for(monkeypatch, tmp_path):
    records = journal.read(journal_path("01-phase-asymmetry", "shape", REFERENCE))
    rows = [record for record in records if isinstance(record, Row)]
    facts = [record for record in records if not isinstance(record, Row)]
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    path = journal_path("01-phase-asymmetry", "shape", LOCAL)
    path.parent.mkdir(parents=True)

    def shown(device, kept):
        path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in (*facts, *kept)))
        found = read("01-phase-asymmetry", "live", "shape", device=device)
        return set(found.rows["n_gpu_layers"]) if found else set()

    offloaded = [
        msgspec.structs.replace(row, key=row.key[::-1], cell=msgspec.structs.replace(row.cell, n_gpu_layers=-1))
        for row in rows
        if hasattr(row.cell, "n_gpu_layers")
    ]
    assert [shown(device, [*rows, *offloaded]) for device in DEVICES] == [{0, -1}, {0}, {0, -1}]
    assert [shown(device, rows) for device in DEVICES] == [{0}, {0}, set()]
    simulated = [msgspec.structs.replace(row, engine="", model="") for row in rows]
    assert of_device(simulated, "gpu") == simulated, "a simulation ran on neither"


def test_a_device_that_the_engine_lacks_is_refused_and_so_is_a_build_for_a_gpu_that_finds_none(engine):
    engine["gpu_offload"] = False
    with pytest.raises(StudyError, match="no GPU backend"):
        live.build("01-phase-asymmetry", "mini", "gpu")
    engine["options"] = [next(iter(live.ON_GPU))]
    with pytest.raises(StudyError, match="finds no GPU"):
        live.build("01-phase-asymmetry", "mini")
    assert {cell.n_gpu_layers for cell in live.build("01-phase-asymmetry", "mini", "cpu").every_cell} == {0}
    options = {name: set(said.get("options", [])) for name, said in builds.definitions().items()}
    assert {name for name in options if live.ON_GPU & options[name]} >= {"cuda", "vulkan"}
