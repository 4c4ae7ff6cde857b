"""Chapter 7: a state moves whole or not at all, answers do not change by it, and whoever dies takes nothing along."""

import os
import random
import re
import socket
import threading
import time
from contextlib import contextmanager, suppress

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
from llama_meter.measure.plan import Plan
from llama_meter.models import registry
from llama_meter.oracle.compare import agreement
from llama_meter.oracle.forward import Oracle
from llama_meter.rows import Row
from llama_meter.workloads import sender, shipment
from llama_meter.workloads.sender import Reply, State
from plamo_study.arithmetic import states
from plamo_study.plans import disaggregation

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
    [shipped(HYBRID, repetitions=2), shipped(HYBRID, n_prompt=PAST_WINDOW, flash_attn="off", n_threads=2),
     shipped(ATTENTION, n_prompt=PAST_WINDOW, type_k="q8_0", type_v="q8_0")],
    ids=["hybrid", "hybrid without flash attention", "attention in 8 bits"],
)  # fmt: skip
def test_an_answer_goes_on_elsewhere_as_if_it_had_stayed(cell):
    measured = run(cell)
    assert (measured.checks["identical"], measured.checks["second_path_error"]) == (1.0, 0.0)
    assert [len(sample) for sample in measured.samples_ns] == [len(PHASES)] * cell.repetitions
    shape = vars(registry.spec(cell.model, "mini"))
    assert measured.n_bytes == states.size(shape, cell.n_prompt, cell.type_k, cell.type_v).total


@pytest.mark.long
@pytest.mark.parametrize(("model", "mode"), [(HYBRID, "shared"), (HYBRID, "split"), (ATTENTION, "split")])
def test_every_request_gets_the_answer_that_it_gets_alone(model, mode):
    cell = Service(model=model, scale="mini", dtype="F16", n_prompt=32, n_gen=6, n_seq=3, n_requests=7,
                   per_second=100.0, mode=mode, flash_attn="on")  # fmt: skip
    measured = run(cell)
    assert [request.id for request in measured.requests] == [str(n) for n in range(7)]
    assert [request.arrived_ns for request in measured.requests] == sender.arrivals(cell)
    for request in measured.requests:
        assert len(request.token_ns) == 6
        assert [request.arrived_ns, *request.token_ns] == sorted([request.arrived_ns, *request.token_ns])


# ------------------------------------------------------------------ a hostile peer


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
        told = State(origin=receiver.own, n_tokens=len(prompt), token=token, n_bytes=data.size,
                     sha256=sender.digest(data), spent=sender.Spent(prefill=1, save=1, check=1))  # fmt: skip
        yield receiver, told, data, prompt


@contextmanager
def wired(act, patience_s=10.0):
    """A connection over loopback to a thread that does `act` with its end of it and hangs up."""
    near, far = peers.pair(patience_s)

    def peer():
        with peers.ready(far):
            act(far)

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    try:
        with near:
            yield near
    finally:
        thread.join()


def offers(change):
    """A sender that offers a state it describes otherwise; it is told why this one is refused."""

    def act(peer, told, data):
        with pytest.raises(StudyError) as error:
            sender.offer(peer, *change(told, data))
        return str(error.value)

    return act


def announces(**fields):
    return offers(lambda told, data: (msgspec.structs.replace(told, **fields), data))


def of_origin(**fields):
    return offers(
        lambda told, data: (msgspec.structs.replace(told, origin=msgspec.structs.replace(told.origin, **fields)), data)
    )


def half(told, data):
    part = data[: data.size // 2]
    return msgspec.structs.replace(told, n_bytes=part.size, sha256=sender.digest(part)), part


def says(data):
    return lambda peer, told, _: peer.sendall(data)


def falls_silent(peer, told, data):
    peers.send(peer, told)
    peers.receive(peer, Reply)
    peers.push(peer, data[:1000])
    time.sleep(0.5)


HOSTILE = {
    "of another model": (of_origin(model="0" * 64), "another model"),
    "of another n_seq_max": (of_origin(n_seq_max=4), "another n_seq_max: 4, and here 1"),
    "of more tokens than there is room": (announces(n_tokens=10**6), "here is room for"),
    "of a terabyte": (announces(n_bytes=1 << 40), "announces 1,099,511,627,776 bytes"),
    "of a token beyond the vocabulary": (announces(token=10**9), "token 1000000000"),
    "of a request that nobody made": (announces(request=7), "request 7"),
    "of other bytes than hashed": (announces(sha256="0" * 64), "SHA-256 differs"),
    "of other tokens than announced": (announces(n_tokens=7), "holds 48 tokens"),
    "cut short and announced so": (offers(half), "cannot be taken: llama.cpp refused"),
    "never finished": (falls_silent, "is silent"),
    "of another protocol": (says(b"GET / HTTP/1.1\r\n\r\n"), "does not begin as version"),
    "with a header of gigabytes": (says(peers.PREFIX.pack(peers.MAGIC, 1, 1 << 31)), "a header of 2147483648 bytes"),
    "with a pickle": (says(peers.PREFIX.pack(peers.MAGIC, 1, 4) + b"\x80\x04N."), "is no State"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_state_that_must_not_be_taken_is_refused_and_leaves_nothing(side, what):
    receiver, told, data, _ = side
    act, why = HOSTILE[what]
    said = []
    with pytest.raises(StudyError, match=why), wired(lambda peer: said.append(act(peer, told, data)), 0.3) as peer:
        receiver.received(peer)
    assert said[0] is None or re.search(why, said[0]), "the sender is told too"
    assert receiver.session.held(0) == 0


def mutated(stream, n_header, rng):
    """The stream with a byte changed, dropped or repeated, cut off, or a part of it moved; mostly in its header."""
    at = rng.randrange(n_header if rng.random() < 0.8 else len(stream))
    length = rng.choice((1, 1, 2, 8, 100))
    return rng.choice(
        (
            stream[:at] + bytes(rng.randrange(256) for _ in range(length)) + stream[at + length :],
            stream[:at] + bytes([stream[at] ^ 1 << rng.randrange(8)]) + stream[at + 1 :],
            stream[:at] + stream[at + length :],
            stream[:at] + stream[at : at + length] + stream[at:],
            stream[:at],
        )
    )


def test_of_mutated_messages_nothing_is_taken_but_the_state_that_was_sent(side):
    """A changed time or token may pass, as the protocol cannot know better; a state never does."""
    receiver, told, data, _ = side
    header = msgspec.json.encode(told)
    stream = peers.PREFIX.pack(peers.MAGIC, peers.VERSION, len(header)) + header + data.tobytes()
    rng, n_refused = random.Random(9), 0
    for _ in range(150):
        sent = mutated(stream, peers.PREFIX.size + len(header), rng)

        def act(peer, sent=sent):
            with suppress(OSError):  # the receiver hangs up in the middle of it
                peer.sendall(sent)

        with wired(act) as peer:
            try:
                found, _ = receiver.received(peer)
            except StudyError:
                n_refused += 1
                assert receiver.session.held(0) == 0
            else:
                assert receiver.session.held(0) == found.n_tokens == told.n_tokens
                assert receiver.session.read_state(0).tobytes() == data.tobytes()
                receiver.session.clear()
    assert n_refused > 100


def test_after_all_of_this_a_good_state_is_taken_and_goes_on_as_the_prompt_read_here(side):
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
        peers.send(peer, Reply())
    assert session.held(0) == told.n_tokens
    assert sender.greedy(session, told.token, 2).tobytes() == expected.tobytes()


def test_a_limited_sender_is_never_faster_than_its_link():
    data, bps = np.zeros(300_000, np.uint8), 10**8
    with wired(lambda peer: (peers.receive(peer, Reply), peers.push(peer, data, bps))) as peer:
        start = peers.clock()
        peers.send(peer, Reply())
        peers.take(peer, data.size)
    assert (peers.clock() - start) / 1e9 >= 8 * data.size / bps


def test_nobody_else_on_the_machine_can_take_part(monkeypatch):
    strangers, listen = [], socket.create_server

    def besieged(*where, **how):
        door = listen(*where, **how)
        strangers.append(socket.create_connection(door.getsockname()))
        return door

    monkeypatch.setattr(peers.socket, "create_server", besieged)
    near, far = peers.pair()
    with near, far, strangers[0] as stranger:
        peers.send(near, Reply(refused="here"))
        assert peers.receive(far, Reply).refused == "here"
        assert far.getsockname()[0] == "127.0.0.1"
        assert stranger.recv(1) == b"", "whoever called first was sent away"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(far.getsockname())


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


def test_the_other_half_of_a_cell_is_waited_for_as_long_as_the_cell_may_take():
    """Reading 2,048 tokens at full size takes more than a minute on a slow machine, and nothing is said meanwhile."""
    assert max(disaggregation.disaggregation(scale).time_limit_s for scale in disaggregation.LENGTHS) <= peers.OWN_S
