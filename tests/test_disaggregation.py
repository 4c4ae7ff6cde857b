"""Notebook 09: a state moves whole or not at all, answers do not change by it, and whoever dies takes nothing along."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import msgspec
import numpy as np
import pandas as pd
import psutil
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from plamo_study.analysis.timing import NS
from plamo_study.engine import library
from plamo_study.engine.session import Session
from plamo_study.errors import StudyError
from plamo_study.measure import journal, recording
from plamo_study.measure.cells import Service, Shipment
from plamo_study.measure.process import work
from plamo_study.measure.rows import Request
from plamo_study.measure.worker import Job
from plamo_study.models import registry
from plamo_study.oracle.compare import agreement
from plamo_study.oracle.forward import Oracle
from plamo_study.studies.disaggregation import (
    analysis,
    contexts,
    measures,
    peers,
    plan,
    requests,
    shipment,
    sizes,
    wire,
)
from plamo_study.studies.disaggregation.wire import Reply, State

WORKER = "plamo_study.studies.disaggregation.worker"
MODELS = (HYBRID, ATTENTION)
PAST_WINDOW = 600  # tokens; the mini's window is 256


def shipped(model=HYBRID, **fields):
    usual = {"n_prompt": 48, "n_gen": 2, "flash_attn": "on"}
    return Shipment(model=model, scale="mini", dtype="F16", **usual | fields)


def run(cell):
    outcome = work(Job(cell=cell, path=str(mini_file(cell.model))), 100.0, worker=WORKER)
    assert outcome.status == "ok", outcome.failure
    return outcome.measured


# ------------------------------------------------------------------ identity and bytes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "how", [{"n_prompt": 128, "repetitions": 2}, {"n_prompt": 128, "type_k": "q8_0", "type_v": "q8_0"},
            {"n_prompt": PAST_WINDOW, "flash_attn": "off", "n_threads": 2}]
)  # fmt: skip
def test_an_answer_goes_on_elsewhere_as_if_it_had_stayed(model, how):
    cell = shipped(model, **how)
    measured = run(cell)
    assert measured.valid, measured.checks
    assert measured.checks["identical"] == 1.0
    assert measured.checks["second_path_error"] == 0.0
    assert [len(sample) for sample in measured.samples_ns] == [len(shipment.PHASES)] * cell.repetitions
    spec = registry.spec(model, "mini")
    assert measured.n_bytes == sizes.size(vars(spec), cell.n_prompt, cell.type_k, cell.type_v).total


def test_a_context_that_read_the_prompt_itself_says_the_same():
    cell = shipped()
    with receiving(cell) as receiver, Session(mini_file(), requests.sending(cell)) as sender:
        prompt = requests.tokens(cell, sender.n_vocab)[0]
        told, data = message(sender, receiver, prompt)
        token = told.token
        own = receiver.session
        own.prefill({0: prompt})
        expected = requests.greedy(own, token, 3)
        own.clear()
        receiver.load(0, told, data)
        assert requests.greedy(own, token, 3).tobytes() == expected.tobytes()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n", [1, 255, 257, PAST_WINDOW])
def test_bytes_are_those_of_the_formula(model, n):
    for type_k, type_v in (("f16", "f16"), ("q8_0", "q8_0")):
        cell = shipped(model, n_prompt=n, type_k=type_k, type_v=type_v)
        with Session(mini_file(model), requests.sending(cell)) as session:
            session.prefill({0: requests.tokens(cell, session.n_vocab)[0]})
            assert len(session.get_state(0)) == sizes.size(vars(registry.spec(model, "mini")), n, type_k, type_v).total


def test_the_recurrent_part_is_constant_and_the_window_flattens():
    hybrid, attention = (vars(registry.spec(model, "shape")) for model in MODELS)
    assert sizes.size(hybrid, 1).recurrent == sizes.size(hybrid, 16384).recurrent == 8.375 * 2**20
    assert sizes.size(attention, 4096).sliding == sizes.size(attention, 2048).sliding
    assert sizes.size(attention, 4096).full == 2 * sizes.size(attention, 2048).full


@pytest.mark.parametrize("mode", ["shared", "split"])
@pytest.mark.parametrize("model", MODELS)
def test_every_request_gets_the_answer_that_it_gets_alone(model, mode):
    cell = Service(model=model, scale="mini", dtype="F16", n_prompt=32, n_gen=6, n_seq=3, n_requests=7,
                   per_second=100.0, mode=mode, flash_attn="on")  # fmt: skip
    measured = run(cell)
    assert measured.valid, measured.checks
    assert [request.id for request in measured.requests] == [str(n) for n in range(7)]
    assert [request.arrived_ns for request in measured.requests] == requests.arrivals(cell)
    for request in measured.requests:
        assert len(request.token_ns) == 6
        assert request.arrived_ns < request.token_ns[0]
        assert request.token_ns == sorted(request.token_ns)


# ------------------------------------------------------------------ bad input


@contextmanager
def receiving(cell):
    """A context that takes states, in this process."""
    log = []
    library.capture_log(log)
    with Session(mini_file(cell.model), requests.receiving(cell)) as session:
        yield contexts.Receiver(session, contexts.origin(mini_file(cell.model), session.config), log)


def message(sender, receiver, prompt, **changes):
    """A state as the sender announces it, and its bytes."""
    sender.clear()
    token = int(sender.prefill({0: prompt})[0][-1].argmax())
    data = sender.read_state(0)
    told = {"origin": receiver.own, "n_tokens": len(prompt), "token": token, "n_bytes": data.size,
            "sha256": wire.digest(data), "spent": wire.Spent(prefill=1, save=1, check=1)}  # fmt: skip
    return State(**told | changes), data


@pytest.fixture(scope="module", params=MODELS)
def side(request):
    """A receiver, a good message for it, and what the oracle says of 24 tokens."""
    cell = shipped(request.param)
    with receiving(cell) as receiver, Session(mini_file(cell.model), requests.sending(cell)) as sender:
        prompt = requests.tokens(cell, sender.n_vocab)[0]
        told, data = message(sender, receiver, prompt)
        oracle = Oracle(mini_file(cell.model), round_activations=True).logits(prompt[:24])
        yield receiver, told, data, (prompt[:24], oracle)


def usable_afterwards(receiver, expected):
    """The sequence is empty, and the context agrees with the oracle."""
    session, (tokens, oracle) = receiver.session, expected
    assert session.held(0) == 0
    session.clear()
    assert agreement(session.prefill({0: tokens}, every=True)[0], oracle, 1e-2).ok
    session.clear()


def origin(name, value):
    return lambda told: msgspec.structs.replace(told, origin=msgspec.structs.replace(told.origin, **{name: value}))


ANNOUNCED = {
    "of another model": (origin("model", "0" * 64), "another model"),
    "of another build": (origin("engine", "0" * 64), "another engine"),
    "of another type of keys": (origin("type_k", "q8_0"), "another type_k: q8_0, and here f16"),
    "of another type of values": (origin("type_v", "q8_0"), "another type_v"),
    "of other attention": (origin("flash_attn", "off"), "another flash_attn"),
    "of another n_seq_max": (origin("n_seq_max", 4), "another n_seq_max: 4, and here 1"),
    "of one buffer": (origin("kv_unified", True), "another kv_unified"),
    "of more tokens than there is room": (lambda t: msgspec.structs.replace(t, n_tokens=10**6), "here is room for"),
    "of no tokens": (lambda t: msgspec.structs.replace(t, n_tokens=0), "stands for 0 tokens"),
    "of a terabyte": (lambda t: msgspec.structs.replace(t, n_bytes=1 << 40), "announces 1,099,511,627,776 bytes"),
    "of fewer than no bytes": (lambda t: msgspec.structs.replace(t, n_bytes=-1), "announces -1 bytes"),
    "of a token that is none": (lambda t: msgspec.structs.replace(t, token=-1), "token -1"),
    "of a token beyond the vocabulary": (lambda t: msgspec.structs.replace(t, token=10**9), "token 1000000000"),
    "of a request that nobody made": (lambda t: msgspec.structs.replace(t, request=7), "request 7"),
    "of other bytes than hashed": (lambda t: msgspec.structs.replace(t, sha256="0" * 64), "SHA-256 differs"),
    "of other tokens than announced": (lambda t: msgspec.structs.replace(t, n_tokens=7), "holds 48 tokens"),
}


@pytest.mark.parametrize("what", ANNOUNCED)
def test_a_state_that_does_not_fit_is_refused_and_leaves_nothing(side, what):
    receiver, told, data, expected = side
    spoil, why = ANNOUNCED[what]
    said = []
    offered = wired(lambda peer: said.append(refused(peer, spoil(told), data)))
    with pytest.raises(StudyError, match=why), offered as peer:
        shipment.received(receiver, peer, 0)
    assert re.search(why, said[0]), "the sender is told too"
    usable_afterwards(receiver, expected)


def refused(peer, told, data):
    with pytest.raises(StudyError) as error:
        wire.offer(peer, told, data)
    return str(error.value)


def some(peer, told, data):
    """Announce all of it and send this."""
    wire.send(peer, told)
    wire.receive(peer, Reply)
    wire.push(peer, data)


def cut(peer, told, data):
    some(peer, told, data[: data.size // 2])


def cut_and_announced_so(peer, told, data):
    part = data[: data.size // 2]
    refused(peer, msgspec.structs.replace(told, n_bytes=part.size, sha256=wire.digest(part)), part)


def silent(peer, told, data):
    some(peer, told, data[:1000])
    time.sleep(1.0)


def long_header(peer, told, data):
    peer.sendall(wire.PREFIX.pack(wire.MAGIC, wire.VERSION, 1 << 31))


TOLD = {
    "cut short": (cut, "is gone after"),
    "cut short and announced so": (cut_and_announced_so, "cannot be taken: llama.cpp refused"),
    "never finished": (silent, "is silent"),
    "never begun": (lambda peer, told, data: None, "is gone after 0 of 10 bytes"),
    "of another protocol": (lambda p, t, d: p.sendall(b"GET / HTTP/1.1\r\n\r\n"), "does not begin as version"),
    "of a later version": (lambda p, t, d: p.sendall(wire.PREFIX.pack(wire.MAGIC, 2, 2) + b"{}"), "version 1"),
    "with a header of gigabytes": (long_header, "announces a header of 2147483648 bytes"),
    "without its fields": (lambda p, t, d: p.sendall(wire.PREFIX.pack(wire.MAGIC, 1, 2) + b"{}"), "is no State"),
    "with a pickle": (lambda p, t, d: p.sendall(wire.PREFIX.pack(wire.MAGIC, 1, 4) + b"\x80\x04N."), "is no State"),
}  # fmt: skip


@pytest.mark.parametrize("what", TOLD)
def test_a_message_that_is_broken_is_refused_and_leaves_nothing(side, what):
    receiver, told, data, expected = side
    act, why = TOLD[what]
    with pytest.raises(StudyError, match=why), wired(lambda peer: act(peer, told, data), patience_s=0.3) as peer:
        shipment.received(receiver, peer, 0)
    usable_afterwards(receiver, expected)


def test_a_good_state_is_taken_after_all_of_this(side):
    receiver, told, data, _ = side
    with wired(lambda peer: wire.offer(peer, told, data)) as peer:
        shipment.received(receiver, peer, 0)
        wire.send(peer, Reply())
    assert receiver.session.held(0) == told.n_tokens
    receiver.session.clear()


@contextmanager
def wired(act, patience_s=10.0):
    """A connection over loopback to a thread that does `act` with its end of it and hangs up."""
    near, far = wire.pair(patience_s)
    assert far.getsockname()[0] == "127.0.0.1"

    def peer():
        with wire.ready(far):
            act(far)

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    try:
        with near:
            yield near
    finally:
        thread.join()


def test_a_limited_sender_is_never_faster_than_its_link():
    data, bps = np.zeros(300_000, np.uint8), 10**8
    with wired(lambda peer: (wire.receive(peer, Reply), wire.push(peer, data, bps))) as peer:
        start = wire.clock()
        wire.send(peer, Reply())
        wire.take(peer, data.size)
    assert (wire.clock() - start) / 1e9 >= 8 * data.size / bps


# ------------------------------------------------------------------ whoever dies

KILLS = 12  # and as many more in test_replicas.py and test_runner.py
CELLS = 15
SWEEP = """
import sys
from pathlib import Path
from plamo_study.measure import runner
from plamo_study.measure.cells import Shipment
from plamo_study.measure.plan import MODELS, Plan
if __name__ == "__main__":
    cell = {"model": MODELS[0], "scale": "mini", "dtype": "F16", "n_prompt": 48, "n_gen": 2}
    cells = tuple(Shipment(seed=n, **cell) for n in range(int(sys.argv[2])))
    asked = Plan("97-kills", "mini", cells, (), None, 1, 0, 60.0, worker=sys.argv[3])
    runner.sweep(asked, Path(sys.argv[1]))
"""


def started(path):
    command = [sys.executable, "-c", SWEEP, str(path), str(CELLS), WORKER]
    return psutil.Popen(command, stderr=subprocess.DEVNULL)


def found(runner, whom):
    """The runner, its receiving worker, or that one's sender; None where there is none now."""
    if whom == "runner":
        return runner
    for child in descendants(runner):
        try:
            if f"disaggregation.{whom}" in " ".join(child.cmdline()):
                return child
        except psutil.Error:
            continue
    return None


def descendants(runner):
    try:
        return runner.children(recursive=True)
    except psutil.Error:
        return []


def ports(processes):
    """Where these processes listen."""
    held = []
    for each in processes:
        try:
            held += [c.laddr.port for c in each.net_connections("tcp4") if c.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
    return held


@pytest.mark.timeout(600)
def test_nothing_is_lost_doubled_or_left_whoever_is_killed(tmp_path):
    path, rng, runner, seen, held = tmp_path / "kills.jsonl", random.Random(9), None, set(), set()
    killed = 0
    for number in range(KILLS):
        if runner is None or runner.poll() is not None:
            runner = started(path)
        whom = ("sender", "worker", "runner")[number % 3]
        victim = None
        while victim is None and runner.poll() is None:
            victim = found(runner, whom if whom != "runner" or number % 2 else "worker")
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.6))
        family = descendants(runner)
        seen |= {each.pid for each in family}
        held |= set(ports(family))
        victim = runner if whom == "runner" else victim
        if victim and victim.is_running():
            victim.send_signal(signal.SIGKILL)
            killed += 1
        if whom == "runner":
            runner.wait()
            _, left = psutil.wait_procs(family, timeout=20)
            assert not left, "children outlive the runner"
            runner = None
    assert killed > KILLS / 2
    runner = runner or started(path)
    while runner.poll() is None:
        family = descendants(runner)
        seen |= {each.pid for each in family}
        time.sleep(0.2)
    if runner.returncode:
        assert started(path).wait() == 0
    rows = journal.latest_rows(journal.read(path))
    every = [record for record in journal.read(path) if hasattr(record, "key")]
    assert len(every) == len({row.key for row in every}) == CELLS == len(rows)
    assert {row.status for row in rows} <= {"ok", "error", "killed"}
    assert any(row.status == "ok" and row.valid for row in rows)
    for row in rows:
        assert row.status == "ok" or row.failure.message or row.failure.signal == "SIGKILL", row.failure
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in seen if psutil.pid_exists(pid)], timeout=20)
    assert not [each for each in left if "disaggregation" in " ".join(each.cmdline())]
    assert not held, "nobody listens, so nobody else can call"


def test_a_sender_that_dies_is_named_and_nobody_waits_for_it(tmp_path):
    thread = threading.Thread(target=_kill_first_sender, args=(os.getpid(),), daemon=True)
    thread.start()
    outcome = work(Job(cell=shipped(repetitions=500), path=str(mini_file())), 100.0, worker=WORKER)
    assert outcome.status == "error"
    assert "the peer" in outcome.failure.message
    assert "SIGKILL" in outcome.failure.message


def test_the_other_half_of_a_cell_is_waited_for_as_long_as_the_cell_may_take():
    """Reading 2,048 tokens at full size takes more than a minute on a slow machine, and nothing is said meanwhile."""
    with peers.started(shipped(), mini_file()) as (thread, peer):
        peers.called(thread, peer)
        assert peer.gettimeout() >= max(plan.disaggregation(scale).time_limit_s for scale in plan.LENGTHS)


def test_nobody_else_on_the_machine_can_take_part(monkeypatch):
    strangers, listen = [], socket.create_server

    def besieged(*where, **how):
        door = listen(*where, **how)
        strangers.append(socket.create_connection(door.getsockname()))
        return door

    monkeypatch.setattr(wire.socket, "create_server", besieged)
    near, far = wire.pair()
    with near, far, strangers[0] as stranger:
        wire.send(near, Reply(refused="here"))
        assert wire.receive(far, Reply).refused == "here"
        assert stranger.recv(1) == b"", "whoever called first was sent away"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(far.getsockname())


def _kill_first_sender(pid):
    while not (victim := found(psutil.Process(pid), "sender")):
        time.sleep(0.02)
    time.sleep(1.0)
    victim.kill()


# ------------------------------------------------------------------ laws and plan


def test_a_shipment_is_measured_phase_by_phase_and_its_bytes_once():
    samples = [[10 * NS, 1 * NS, 2 * NS, 3 * NS, 4 * NS, 5 * NS], [30 * NS, 1 * NS, 2 * NS, 3 * NS, 4 * NS, 7 * NS]]
    row = {"samples_ns": samples, "n_bytes": 8, "checks": {"identical": 1.0, "second_path_error": 0.0}}
    found = {name: (unit, value) for name, unit, value, _ in measures.shipment(row)}
    assert found["prefill"] == ("s", 20.0)
    assert found["first step"] == ("s", 6.0)
    assert found["state"] == ("B", 8.0)
    assert found["identical"] == ("", 1.0)


def test_waits_of_requests_are_those_planted():
    asked = [Request(id=str(n), arrived_ns=n * NS, n_prompt=1, token_ns=[(n + at) * NS for at in (2, 3, 7)])
             for n in range(3)]  # fmt: skip
    found = {name: value for name, (value, _) in measures.waits(asked).items()}
    assert found == {"first token": 2.0, "token gap": 2.5, "longest gap": 4.0, "throughput": 1.0, "arrivals": 1.0}


def frame(ratios, lengths=(128, 1024, 8192), blocks=4):
    """Rows whose shipping over a link of 8 Gbit/s takes `ratios` of the time of evaluating again."""
    entries = []
    for n, ratio in zip(lengths, ratios, strict=True):
        for block in range(blocks):
            prefill = n * 10_000 * (1 + block / 100)
            parts = {"prefill": prefill, "save": 0, "check": 0, "send": 1, "load": 0, "step": 1}
            n_bytes = round(ratio * prefill)  # a byte a nanosecond
            entries.append({"workload": "shipment", "status": "ok", "model": "m", "n_prompt": n, "type_k": "f16",
                            "flash_attn": "on", "link_bps": 0, "n_threads": 2, "block": block,
                            "verdict": "valid", "n_bytes": n_bytes,
                            "samples_ns": [[parts[name] for name in shipment.PHASES]], "anchor": False, "drift": 0.0,
                            "checks": {"identical": 1.0, "second_path_error": 0.0}})  # fmt: skip
    return pd.DataFrame(entries)


@pytest.mark.parametrize(
    ("ratios", "outcome", "first"),
    [((4.0, 1.0001, 0.25), "from", 1024), ((0.5, 0.4, 0.3), "always", None), ((3.0, 2.0, 2.0), "never", None)],
)
def test_a_crossing_is_found_where_it_was_planted(ratios, outcome, first):
    row = analysis.crossings(frame(ratios), (8 * 10**9,)).to_dict("records")[0]
    assert row["outcome"] == outcome
    if first:
        assert row["first"].value == pytest.approx(first, rel=0.01)


def test_a_crossing_that_the_interval_does_not_support_is_inconclusive():
    rows = frame((0.9, 0.9, 0.9))
    rows.loc[rows["block"] == 0, "n_bytes"] *= 3
    row = analysis.crossings(rows, (8 * 10**9,)).to_dict("records")[0]
    assert row["outcome"] == "inconclusive"


@pytest.mark.parametrize("scale", ["mini", "shape", "weights"])
def test_the_first_cells_are_what_the_page_needs(scale):
    asked = plan.disaggregation(scale)
    first = asked.cells[: asked.needed]
    assert {(cell.model, cell.n_prompt, cell.link_bps) for cell in first} == {
        (model, n, 0) for model in MODELS for n in (plan.LENGTHS[scale][0], plan.TRAINED)
    }, "a crossing follows from two lengths; what a link does to them is a law"
    lengths = [cell.n_prompt for cell in asked.cells if isinstance(cell, Shipment)]
    assert lengths[-1] == max(lengths), "the longest come last"
    assert {cell.link_bps for cell in asked.cells if isinstance(cell, Shipment)} == {0, *plan.LINKS}


def test_recorded_shipments_have_the_bytes_of_the_formula():
    path = recording.journal_path("09-disaggregation", "mini", recording.REFERENCE)
    for row in journal.latest_rows(journal.read(path)):
        if isinstance(row.cell, Shipment) and row.status == "ok":
            shape = vars(registry.spec(row.cell.model, row.cell.scale))
            assert row.n_bytes == sizes.size(shape, row.cell.n_prompt, row.cell.type_k, row.cell.type_v).total
