"""Cells of kinds "traffic" and "service": requests arrive, and the simulator's loop drives the real engine by a policy.
Of kind "arrival": sequences decode, and a prompt arrives and is evaluated in pieces between or in their steps.

Tokens are drawn beforehand, so every answer can be checked: its last logits must match those of one prefill of all its
tokens. Sequences in use are always the first ones, followed by the prompt being read. The last sequence moves to the
place of one that ends, because the stock engine loses PLaMo 2's states otherwise.

With the policy "parts" no request arrives: the calls that make up traffic are measured one by one.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from llama_meter.cells import PARTS, SPLIT, Arrival, Calls, Service, Shipment, Traffic
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import proof, watch
from llama_meter.measure.peers import Go, clock
from llama_meter.measure.proof import Prompts
from llama_meter.rows import Measured, Request, passed
from plamo_study.studies.latency import service
from plamo_study.studies.latency.loop import GRAIN, drawn, policy, serve
from plamo_study.studies.latency.metrics import before, calls

# Chunk sizes, around flash attention's tiles of 64; the longest prompt is added.
SIZES = (1, 8, 15, 16, 31, 32, 48, 63, 64, 127, 128, 256)
NEIGHBOUR = 64  # tokens of each sequence beside which chunks are read
CALLS = 3  # at least, of every size alone; at most so many beside others
WARM_STEPS = 2
NS = 1e9

# ------------------------------------------------------------------ the engine as the loop's machine


class Live:
    """The engine as the loop's machine. Times are seconds since `began`."""

    def __init__(self, session: Session, tokens: np.ndarray):
        self.session, self.tokens, self.began = session, tokens, clock()
        self.calls: list[tuple[int, int, int, int, int]] = []  # decoding, keys, chunk, before, nanoseconds
        self.moves: list[int] = []  # nanoseconds
        self.logits: dict[int, np.ndarray] = {}  # of every finished request, after its last token
        self.held: dict[int, int] = {}  # tokens that these come after
        self._ended = self.began

    def start(self) -> None:
        """Start the time at 0."""
        self.began = self._ended = clock()

    def rest(self) -> float:
        """Exclude the time since the last call from the next one; the time (s)."""
        self._ended = clock()
        return (self._ended - self.began) / NS

    def wait(self, until: float) -> float:
        """Sleep until the time `until` (s); the time then."""
        time.sleep(max(self.began + int(until * NS) - clock(), 0) / NS)
        return self.rest()

    def call(self, decoding: list[int], keys: int, reading: int, chunk: int, before: int, slot: int = -1) -> float:
        """One `llama_decode`; its time includes everything since the last call, such as the policy's own work.

        `slot`: the sequence that the prompt is read into, where it is not the one after `decoding`.
        """
        began = self._ended
        if chunk:
            self._read(decoding, self.tokens[reading][before : before + chunk], max(slot, len(decoding)))
        else:
            self._step(decoding)
        now = self.rest()
        self.calls.append((len(decoding), keys, chunk, before, self._ended - began))
        return now

    def _step(self, decoding: list[int]) -> None:
        n_past = self.session.n_past
        self.session.decode({seq: int(self.tokens[number][n_past[seq]]) for seq, number in enumerate(decoding)})

    def _read(self, decoding: list[int], piece: np.ndarray, slot: int) -> None:
        n_past = self.session.n_past
        parts = [(seq, self.tokens[number][n_past[seq] :][:1]) for seq, number in enumerate(decoding)]
        self.session.evaluate([*parts, (slot, piece)])

    def leave(self, decoding: list[int], slot: int, reading: bool) -> float:
        """Keep a sequence's last logits, remove it, and move the last one to its place."""
        session, last, began = self.session, len(decoding) - 1, clock()
        self.keep(decoding[slot], slot)
        session.remove_tail(slot, 0)
        if slot != last:
            session.move(last, slot)
        if reading:
            session.move(last + 1, last)
        now = self.rest()
        if moved := (slot != last) + reading:
            self.moves.append((self._ended - began) // moved)
        return now

    def keep(self, number: int, slot: int) -> None:
        """Keep a sequence's logits of the last call for the proof."""
        self.logits[number], self.held[number] = self.session.logits(slot), self.session.n_past[slot]


class Split(Live):
    """The engine as `Live`, but another process reads prompts, whose states a thread receives during decoding."""

    def __init__(self, session: Session, tokens: np.ndarray, line: Connection):
        super().__init__(session, tokens)
        self.line, thread = line, ThreadPoolExecutor(1)
        self.states: deque[Future[service.Arrived]] = deque(thread.submit(self._receive) for _ in tokens)
        thread.shutdown(wait=False)

    def policy(self, left: int, decoding: int, slots: int) -> int:
        """A prompt is read at once where its state has come, or nobody else is answered."""
        return left if not decoding or self.states[0].done() else 0

    def _receive(self) -> service.Arrived:
        state = service.arrived(self.line)
        self.line.send(Go())
        return state

    def _read(self, decoding: list[int], piece: np.ndarray, slot: int) -> None:
        header, data, _ = self.states.popleft().result()
        self.session.set_state(slot, data, header.n_tokens)
        if decoding:
            self._step(decoding)


# ------------------------------------------------------------------ policies under load


def run(cell: Traffic | Service, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure one cell by a policy, or with a second process that prefills.

    `samples_ns`: one number per call; `series`, by call: "decoding" (sequences), "keys" (tokens these held), "chunk"
    and "before" (tokens of a prompt in it, and read before it); "moves" (s, each move of a sequence to another place).
    `requests`: arrivals and tokens; the first token comes when the prompt is read.
    """
    library.capture_log([])
    load, rule = drawn(cell), cell.rule if isinstance(cell, Traffic) else cell.mode
    n_threads = max(cell.n_threads - service.reading_threads(cell), 1) if rule == SPLIT else cell.n_threads
    times: list[np.ndarray] = []
    start = clock()
    with Session(path, service.config(cell, n_threads)) as session:
        load_ns, start = clock() - start, clock()
        tokens = service.tokens(cell, session.n_vocab)
        stage("warm-up")
        _warm(cell, session, Live(session, tokens))
        session.clear()
        warmup = clock() - start
        with service.started(cell, path) if rule == SPLIT else nullcontext() as line:
            helpers = [line.recv()] if line else []
            live = Split(session, tokens[: cell.n_requests], line) if line else Live(session, tokens)
            stage("serve")
            live.start()
            if line:
                line.send(Go(at_ns=live.began))
            with watch.timed(*helpers):
                if rule == PARTS:
                    _parts(cell, session, live)
                else:
                    way = live.policy if isinstance(live, Split) else policy(rule)
                    times = serve(load, way, live, cell.n_seq)
            if line:
                line.send(Go())
        stage("alone")
        alone = {n: proof.alone(session, 0, tokens[n, :held]) for n, held in live.held.items()}
    evaluated = sum(decoding + chunk for decoding, _, chunk, _, _ in live.calls)
    due = sum(load.prompt) + sum(load.output) - cell.n_requests if times else evaluated
    checks = proof.checks(cell, live.logits, alone, evaluated, due)
    checks["answered"] = [*map(len, times)] == (load.output if times else [])
    named = zip(("decoding", "keys", "chunk", "before"), zip(*live.calls, strict=True), strict=False)
    requests = [
        Request(id=str(n), n_prompt=n_prompt, arrived_ns=int(arrives * NS), token_ns=(of * NS).astype(int).tolist())
        for n, (arrives, n_prompt, of) in enumerate(zip(load.arrives, load.prompt, times, strict=False))
    ]
    return Measured(
        samples_ns=[[call[-1] for call in live.calls]],
        warmup_ns=[warmup],
        load_ns=load_ns,
        n_evaluated=evaluated,
        checks=checks,
        series={name: list(map(float, values)) for name, values in named} | {"moves": [ns / NS for ns in live.moves]},
        requests=requests,
        valid=passed(checks),
    )


def _warm(cell: Traffic | Service, session: Session, live: Live) -> None:
    """Warm up with prompts, steps of all sequences but one, and a chunk of a prompt beside them."""
    others = list(range(cell.n_seq - 1))
    for slot in others:
        live.call([], 0, slot, GRAIN // 2, 0, slot)
    for _ in range(WARM_STEPS if others else 0):
        live.call(others, 0, -1, 0, 0)
    live.call(others, 0, len(others), min(NEIGHBOUR, cell.n_prompt), 0)


def _parts(cell: Traffic | Service, session: Session, live: Live) -> None:
    """Sequences read in chunks of every size; steps of every number of sequences, from a short and from the longest
    prompt on; chunks of every size beside all sequences but one, whose last logits are kept for the proof."""
    sizes = sorted({*(size for size in SIZES if size < cell.n_prompt), cell.n_prompt})
    for size in sizes:
        n_calls = (cell.n_prompt + cell.n_gen) // size
        for _ in range(-(-CALLS // n_calls)):
            session.clear()
            live.rest()
            for number in range(n_calls):
                live.call([], 0, 0, size, number * size)
    for depth in (GRAIN, cell.n_prompt):
        session.clear()
        live.rest()
        live.call([], 0, 0, depth, 0)
        for slot in range(cell.n_seq):
            if slot:
                session.set_state(slot, session.read_state(0), session.n_past[0])
            live.rest()
            for _ in range(cell.n_gen // cell.n_seq):
                live.call(list(range(slot + 1)), sum(session.n_past[: slot + 1]), -1, 0, 0)
    session.clear()
    others = list(range(cell.n_seq - 1))
    for slot in others:
        live.rest()
        live.call([], 0, slot, NEIGHBOUR, 0, slot)
    for size in sizes:
        session.remove_tail(len(others), 0)
        live.rest()
        for done in range(0, cell.n_prompt - size + 1, size)[:CALLS]:
            live.call(others, sum(session.n_past[: len(others)]), len(others), size, done)
    for slot in others:
        live.keep(slot, slot)


# ------------------------------------------------------------------ a prompt that arrives


def arrival(cell: Arrival, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure a prompt that arrives. `samples_ns`: one number per call, in the order of `calls`.

    `requests`: the decoding sequences and the prompt, times since the first timed call.
    """
    library.capture_log([])
    made, first = calls(cell), before(cell)
    totals = Counter({seq: cell.depth for seq in range(cell.n_seq)})
    for call in made:
        totals.update(dict(call))
    n_batch = max(cell.n_batch, *(sum(n for _, n in call) for call in made))
    changes = {"n_seq_max": cell.n_seq + 1, "n_batch": n_batch, "kv_unified": cell.kv_unified, "swa_full": False}
    start = clock()
    with Session(path, SessionConfig.of(cell, max(totals.values()), **changes)) as session:
        load_ns, start = clock() - start, clock()
        rng = np.random.default_rng(cell.seed)
        tokens = {seq: rng.integers(FIRST_TOKEN, session.n_vocab, n, dtype=np.int32) for seq, n in totals.items()}
        stage("warm-up")
        _fill(cell, session, tokens)
        _evaluate(session, tokens, (*made[: min(first, WARM_STEPS)], *made[first : first + 2]))  # the shapes timed
        _fill(cell, session, tokens)
        warmup, started = clock() - start, session.n_evaluated
        stage("arrival")
        with watch.timed():
            stamps, logits = _evaluate(session, tokens, made)
        evaluated = session.n_evaluated - started
        stage("alone")
        alone = {seq: proof.alone(session, seq, stream) for seq, stream in tokens.items()}
    checks = proof.checks(cell, logits, alone, evaluated, sum(n for call in made for _, n in call))
    ends = [stamp - stamps[0] for stamp in stamps]
    token_ns = [[end for call, end in zip(made, ends[1:], strict=True) if seq in dict(call)] for seq in sorted(totals)]
    token_ns[-1] = token_ns[-1][-1 - cell.n_gen :]  # with the last piece of the prompt its first token comes
    requests = [
        Request(id=f"decoding {seq}", n_prompt=cell.depth, arrived_ns=0, token_ns=of)
        for seq, of in enumerate(token_ns[:-1])
    ]
    prompt = Request(id="prompt", n_prompt=cell.n_arriving, arrived_ns=ends[first], token_ns=token_ns[-1])
    return Measured(
        samples_ns=[np.diff(stamps).tolist()],
        warmup_ns=[warmup],
        load_ns=load_ns,
        n_evaluated=evaluated,
        checks=checks,
        requests=[*requests, prompt],
        valid=passed(checks),
    )


def _fill(cell: Arrival, session: Session, tokens: Prompts) -> None:
    """Clear the memory and prefill every decoding sequence's first tokens, each in its own calls."""
    session.clear()
    session.prefill({seq: tokens[seq][: cell.depth] for seq in range(cell.n_seq)})


def _evaluate(session: Session, tokens: Prompts, made: Calls) -> tuple[list[int], dict[int, np.ndarray]]:
    """Run the calls; the times (ns) before the first and after each, and every sequence's last logits."""
    logits: dict[int, np.ndarray] = {}
    stamps = [clock()]
    for call in made:
        parts = [(seq, tokens[seq][session.n_past[seq] :][:n]) for seq, n in call]
        logits |= {seq: rows[-1].copy() for seq, rows in session.evaluate(parts).items()}
        stamps.append(clock())
    return stamps, logits


RUNS = {Arrival: arrival, Shipment: service.shipped, Service: run, Traffic: run}
