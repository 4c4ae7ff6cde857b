"""Chapter 7: a state moves whole or not at all, answers do not change by it, and whoever dies takes nothing along."""

import time
from contextlib import suppress
from threading import Thread

import built
import numpy as np
import psutil
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from llama_meter.cells import PHASES, Service, Shipment
from llama_meter.errors import StudyError
from llama_meter.measure import peers
from llama_meter.models import registry
from plamo_study.arithmetic import roofline
from plamo_study.studies.latency import loop, plan, service

WORKLOAD = plan.disaggregation("mini").workload
PAST_WINDOW = 600  # tokens; the mini's window is 256


def shipped(model=HYBRID, **fields):
    usual = {"n_prompt": 48, "n_gen": 2, "flash_attn": "on"}
    return Shipment(model=model, scale="mini", dtype="F16", **usual | fields)


def run(cell):
    return built.measured(cell, workload=WORKLOAD)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    [shipped(HYBRID, repetitions=2), shipped(ATTENTION, n_prompt=PAST_WINDOW, type_k="q8_0", type_v="q8_0")],
    ids=["hybrid", "attention in 8 bits"],
)
def test_an_answer_goes_on_elsewhere_as_if_it_had_stayed(cell):
    measured = run(cell)
    assert (measured.checks["identical"], measured.checks["second_path_error"]) == (1.0, 0.0)
    assert [len(sample) for sample in measured.samples_ns] == [len(PHASES)] * cell.repetitions
    shape = vars(registry.spec(cell.model, "mini"))
    assert measured.n_bytes == roofline.stored(shape, cell.n_prompt, cell.type_k, cell.type_v).total


@pytest.mark.long
@pytest.mark.parametrize(("model", "mode"), [(HYBRID, "shared"), (ATTENTION, "split")])
def test_every_request_gets_the_answer_that_it_gets_alone(model, mode):
    usual = {"n_prompt": 32, "n_gen": 6, "n_seq": 3, "n_requests": 7, "per_second": 100.0, "flash_attn": "on"}
    cell = Service(model=model, scale="mini", dtype="F16", mode=mode, **usual)
    measured = run(cell)
    assert [request.arrived_ns for request in measured.requests] == [int(1e9 * at) for at in loop.drawn(cell).arrives]
    for request in measured.requests:
        assert len(request.token_ns) == 6
        assert [request.arrived_ns, *request.token_ns] == sorted([request.arrived_ns, *request.token_ns])


def test_a_state_that_is_not_what_was_announced_is_refused():
    state, (near, far) = np.zeros(300_000, np.uint8), peers.Pipe()
    header = service.State(n_tokens=48, token=1, n_bytes=state.size, sha256="0" * 64, spent={"check": 1})
    peer = Thread(target=lambda: (far.send(header), far.recv(), peers.push(far, state)))
    peer.start()
    with near, pytest.raises(StudyError, match="SHA-256 differs"):
        service.arrived(near)
    peer.join()


def child_of(parent, module):
    """A process below another that runs this module, as soon as there is one; None where the other ended before."""
    while parent.status() != psutil.STATUS_ZOMBIE:
        with suppress(psutil.Error):
            for child in parent.children(recursive=True):
                if module in child.cmdline():
                    return child
        time.sleep(0.01)
    return None


def test_a_sender_that_dies_is_named_and_nobody_waits_for_it():
    def stage(name):
        if name == "ship":
            child_of(psutil.Process(), service.__name__).kill()

    with pytest.raises(StudyError, match=r"the sender: ended by itself: SIGKILL"):
        service.shipped(shipped(), mini_file(), stage)
