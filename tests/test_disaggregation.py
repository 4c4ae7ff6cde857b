"""Chapter 7: a state moves whole or not at all, answers do not change by it, and whoever dies takes nothing along."""

import os
import random
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing.connection import Pipe

import built
import msgspec
import numpy as np
import psutil
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from test_runner import sweeping

from llama_meter import journal
from llama_meter.cells import PHASES, Service, Shipment
from llama_meter.engine.session import Session
from llama_meter.errors import StudyError
from llama_meter.measure import peers, runner
from llama_meter.measure.peers import Go
from llama_meter.measure.plan import Plan
from llama_meter.models import registry
from llama_meter.oracle.compare import agreement
from llama_meter.oracle.forward import Oracle
from llama_meter.rows import Row
from plamo_study.arithmetic import states
from plamo_study.studies.latency import disaggregation_plan as disaggregation, shipment
from plamo_study.studies.two_files import sender
from plamo_study.studies.two_files.sender import State

WORKLOAD = disaggregation.disaggregation("mini").workload
MODELS = (HYBRID, ATTENTION)
PAST_WINDOW = 600  # tokens; the mini's window is 256


def shipped(model=HYBRID, **fields):
    usual = {"n_prompt": 48, "n_gen": 2, "flash_attn": "on"}
    return Shipment(model=model, scale="mini", dtype="F16", **usual | fields)


def run(cell):
    return built.measured(cell, workload=WORKLOAD)


# ------------------------------------------------------------------ identity and bytes


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    [
        shipped(HYBRID, repetitions=2),
        shipped(HYBRID, n_prompt=PAST_WINDOW, flash_attn="off", n_threads=2),
        shipped(ATTENTION, n_prompt=PAST_WINDOW, type_k="q8_0", type_v="q8_0"),
    ],
    ids=["hybrid", "hybrid without flash attention", "attention in 8 bits"],
)
def test_an_answer_goes_on_elsewhere_as_if_it_had_stayed(cell):
    measured = run(cell)
    assert (measured.checks["identical"], measured.checks["second_path_error"]) == (1.0, 0.0)
    assert [len(sample) for sample in measured.samples_ns] == [len(PHASES)] * cell.repetitions
    shape = vars(registry.spec(cell.model, "mini"))
    assert measured.n_bytes == states.size(shape, cell.n_prompt, cell.type_k, cell.type_v).total


@pytest.mark.long
@pytest.mark.parametrize(("model", "mode"), [(HYBRID, "shared"), (HYBRID, "split"), (ATTENTION, "split")])
def test_every_request_gets_the_answer_that_it_gets_alone(model, mode):
    cell = Service(
        model=model,
        scale="mini",
        dtype="F16",
        n_prompt=32,
        n_gen=6,
        n_seq=3,
        n_requests=7,
        per_second=100.0,
        mode=mode,
        flash_attn="on",
    )
    measured = run(cell)
    assert [request.id for request in measured.requests] == [str(n) for n in range(7)]
    assert [request.arrived_ns for request in measured.requests] == sender.arrivals(cell)
    for request in measured.requests:
        assert len(request.token_ns) == 6
        assert [request.arrived_ns, *request.token_ns] == sorted([request.arrived_ns, *request.token_ns])


# ------------------------------------------------------------------ a state on its way


@pytest.fixture(scope="module", params=MODELS)
def side(request):
    """A receiver, a good message for it, and its prompt."""
    cell = shipped(request.param)
    with (
        shipment.receiving(cell, mini_file(cell.model)) as receiver,
        Session(mini_file(cell.model), sender.sending(cell)) as session,
    ):
        prompt = receiver.tokens[0]
        token = int(session.prefill({0: prompt})[0][-1].argmax())
        data = session.read_state(0)
        told = State(
            n_tokens=len(prompt),
            token=token,
            n_bytes=data.size,
            sha256=sender.digest(data),
            spent=sender.Spent(prefill=1, save=1, check=1),
        )
        yield receiver, told, data, prompt


@contextmanager
def wired(act):
    """A connection to a thread that does `act` with its end of it and hangs up."""
    near, far = Pipe()

    def peer():
        with far, suppress(EOFError, OSError):
            act(far)

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    with near:
        yield near
    thread.join()


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"sha256": "0" * 64}, "SHA-256 differs"), ({"n_tokens": 7}, "holds 48 tokens")],
    ids=["other bytes than sent", "other tokens than announced"],
)
def test_a_state_that_is_not_what_was_announced_is_refused_and_leaves_nothing(side, fields, why):
    receiver, told, data, _ = side
    wrong = msgspec.structs.replace(told, **fields)
    with pytest.raises(StudyError, match=why), wired(lambda peer: sender.offer(peer, wrong, data)) as peer:
        receiver.received(peer)
    assert receiver.session.held(0) == 0


def test_a_state_is_taken_and_goes_on_as_the_prompt_read_here(side):
    receiver, told, data, prompt = side
    session = receiver.session
    session.clear()
    model = HYBRID if session.is_recurrent else ATTENTION
    oracle = Oracle(mini_file(model), rounds_as="CPU").logits(prompt[:24])
    assert agreement(session.prefill({0: prompt[:24]}, every=True)[0], oracle, 1e-2).ok
    session.clear()
    session.prefill({0: prompt})
    expected = sender.greedy(session, told.token, 2)
    session.clear()
    with wired(lambda peer: sender.offer(peer, told, data)) as peer:
        receiver.received(peer)
        peer.send(Go())
    assert session.held(0) == told.n_tokens
    assert sender.greedy(session, told.token, 2).tobytes() == expected.tobytes()


def test_a_limited_sender_is_never_faster_than_its_link():
    data, bps = np.zeros(300_000, np.uint8), 10**8
    with wired(lambda peer: (peer.recv(), peers.push(peer, data, bps))) as peer:
        start = peers.clock()
        peer.send(Go())
        peers.take(peer, data.size)
    assert (peers.clock() - start) / 1e9 >= 8 * data.size / bps


# ------------------------------------------------------------------ whoever dies

SMALL = Plan("97-kills", "mini", tuple(shipped(seed=n) for n in range(5)), (), None, 1, 0, 60.0, workload=WORKLOAD)


def child_of(parent, module):
    """A process below another that runs this module, as soon as there is one; None where the other ended before."""
    while parent.status() != psutil.STATUS_ZOMBIE:
        with suppress(psutil.Error):
            for child in parent.children(recursive=True):
                if module in child.cmdline():
                    return child
        time.sleep(0.01)
    return None


@pytest.mark.long
def test_nothing_is_lost_doubled_or_left_whoever_is_killed(tmp_path):
    path, rng, n_rows = tmp_path / "kills.jsonl", random.Random(9), 0
    for whom in (sender.__name__, WORKLOAD, "runner"):
        runs = psutil.Process(sweeping(SMALL, path))
        victim = child_of(runs, sender.__name__ if whom == "runner" else whom)
        time.sleep(rng.uniform(0.0, 0.4))
        if whom != "runner":
            with suppress(psutil.NoSuchProcess):
                victim.kill()
            end = time.monotonic() + 30
            while len(journal.latest_rows(journal.read(path))) <= n_rows and time.monotonic() < end:
                time.sleep(0.02)
        family = runs.children(recursive=True)
        runs.kill()
        os.waitpid(runs.pid, 0)
        assert not psutil.wait_procs(family, timeout=20)[1], "children outlive the runner"
        n_rows = len(journal.latest_rows(journal.read(path)))
    runner.sweep(SMALL, path)
    rows = [record for record in journal.read(path) if isinstance(record, Row)]
    assert len(rows) == len({row.key for row in rows}) == len(SMALL.cells)
    assert {row.status for row in rows} <= {"ok", "error", "killed"}
    assert any(row.status == "ok" and row.valid for row in rows)
    for row in rows:
        assert row.status == "ok" or row.failure.message or row.failure.signal == "SIGKILL", row.failure


def test_a_sender_that_dies_is_named_and_nobody_waits_for_it():
    def stage(name):
        if name == "ship":
            child_of(psutil.Process(), sender.__name__).kill()

    with pytest.raises(StudyError, match=r"the sender: ended by itself: SIGKILL"):
        shipment.run(shipped(), mini_file(), stage)
