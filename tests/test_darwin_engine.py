"""What starts processes, servers and the engine on macOS: never with what is not theirs, never waiting for ever."""

import subprocess
import sys
from math import isnan

import pytest
from conftest import HYBRID, mini, mini_file
from crosscheck import llama_bench
from misbehaving import as_llama_server
from test_replicas import replicas, run
from test_workers import outcome

from plamo_study.engine import builds
from plamo_study.errors import StudyError
from plamo_study.measure import server
from plamo_study.measure.server import Setup
from plamo_study.studies.quantization import plan as quantization
from plamo_study.studies.replicas import analysis, replica

pytestmark = pytest.mark.timeout(100)


# ---------------------------------------------------------------- replicas


def test_replicas_look_at_their_own_memory_where_nobody_else_may(mac):
    measured = run(replicas(2, 1))
    assert measured.valid, measured.checks
    assert len(measured.series["private"]) == len(measured.series["before private"]) == 2
    assert "pss" not in measured.series
    memory = analysis._memory(measured.series, own=0.0)
    assert isnan(memory["mapped"]), "how much of the file is in memory is not known there"
    assert memory["rest"] == memory["grown"]


@pytest.mark.parametrize(
    ("name", "mapped"), [("CPU_Mapped", True), ("MTL0_Mapped", True), ("MTL0_Private", False), ("CPU_REPACK", False)]
)
def test_weights_in_the_file_s_pages_are_known_on_every_backend(name, mapped):
    """Names of the locked sources: ggml/src/ggml-backend.cpp, ggml-metal/ggml-metal.cpp, ggml-cpu/repack.cpp."""
    log = f"load_tensors: {name:>12} model buffer size =   512.00 MiB\n"
    assert replica.weights(log) == ((2.0**29, 0) if mapped else (0, 2.0**29))


# ---------------------------------------------------------------- servers


def last_words(folder, monkeypatch, said, **fields):
    """What a foreign llama-server that ends at once says of how it was started."""
    monkeypatch.setenv(server.NAMED, str(as_llama_server(folder, before=f'echo "{said}"; exit 3')))
    setup = Setup("llama-server", mini_file(HYBRID), libraries=builds.installed_libraries(), **fields)
    with pytest.raises(StudyError) as error, server.started(setup):
        pass
    return str(error.value)


def test_a_server_that_was_not_built_here_loads_its_own_libraries(tmp_path, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert "loads '' '' of mine" in last_words(
        tmp_path, monkeypatch, "loads '$LD_LIBRARY_PATH' '$DYLD_LIBRARY_PATH' of mine"
    )


def test_a_server_that_was_not_built_here_is_not_asked_to_run_on_an_engine_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv(server.NAMED, str(as_llama_server(tmp_path)))
    setup = Setup("llama-server", mini_file(HYBRID), libraries=tmp_path)
    with pytest.raises(StudyError, match="was not built here"), server.started(setup):
        pass


def test_a_server_that_merely_is_on_the_path_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.delenv(server.NAMED, raising=False)
    program = as_llama_server(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server.find() != program


@pytest.mark.parametrize(("layers", "told"), [(0, "-ngl 0 -dev none"), (-1, "-ngl -1 --metrics")])
def test_who_computes_on_the_cpu_is_told_to_leave_the_gpu_alone(layers, told, tmp_path, monkeypatch):
    assert told in last_words(tmp_path, monkeypatch, "$*", n_gpu_layers=layers)
    beside = llama_bench._command(tmp_path, tmp_path, mini("prefill", n_gpu_layers=layers))
    assert told.replace(" --metrics", "") in " ".join(beside)
    alone = server.environment("llama_cpp.server", None, layers)
    assert (alone.get("GGML_METAL_DEVICES") == "0") == (layers == 0)


# ---------------------------------------------------------------- workers


def test_an_abort_that_a_study_expects_starts_no_crash_report(mac):
    """The system reports who ends by a signal. An exit code tells as much."""
    code = "import os\nfrom plamo_study.measure import machine\nmachine.report_no_abort()\nos.abort()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode > 0
    found = outcome(mini("prefill", n_prompt=512, n_seq=6, policy="packed"))
    assert (found.status, found.failure.signal, found.failure.exit_code) == ("abort", "SIGABRT", None)
    assert "GGML_ASSERT(" in found.failure.message


def test_a_load_that_cannot_be_made_cold_is_no_row_of_a_cold_one(mac):
    found = outcome(mini("decode", n_gen=4, cold=True))
    assert found.status == "error"
    assert "cold" in found.failure.message
    assert not any(getattr(cell, "cold", False) for cell in quantization.modes("mini").cells)
