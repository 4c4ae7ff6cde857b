"""Cells of kinds "traffic" and "service": requests arrive, and the simulator's loop drives the real engine by a policy.

Tokens are drawn beforehand, so every answer can be checked: its last logits must match those of one prefill of all its
tokens. Sequences in use are always the first ones, followed by the prompt being read. The last sequence moves to the
place of one that ends, because the stock engine loses PLaMo 2's states otherwise.

With the policy "parts" no request arrives: the calls that make up traffic are measured one by one.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llama_meter.cells import PARTS, SPLIT, Arrival, Service, Shipment, Traffic
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import proof, watch
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, Request, passed
from plamo_study.studies.latency import chunks, service
from plamo_study.studies.latency.loop import GRAIN, Served, drawn, serve

# Chunk sizes, around flash attention's tiles of 64; the longest prompt is added.
SIZES = (1, 8, 15, 16, 31, 32, 48, 63, 64, 127, 128, 256)
NEIGHBOUR = 64  # tokens of each sequence beside which chunks are read
CHUNKS = {"mini": 3, "shape": 1, "file": 1}  # of each size in a row, at each place
MOVES, WARM_STEPS = 4, 2
NS = 1e9
clock = time.perf_counter_ns


class Live:
    """The engine as the loop's machine. Times are seconds since `began`."""

    def __init__(self, session: Session, tokens: list[np.ndarray]):
        self.session, self.tokens, self.began = session, tokens, clock()
        self.calls: list[tuple[int, int, int, int, int]] = []  # decoding, keys, chunk, before, nanoseconds
        self.moves: list[int] = []  # nanoseconds
        self.token_ns: dict[int, list[int]] = {}
        self.logits: dict[int, np.ndarray] = {}  # of every finished request, after its last token
        self.came: dict[int, np.ndarray] = {}  # logits of the last call, by sequence, where they were copied
        self._ended = self.began

    def wait(self, until: float) -> float:
        """Sleep until the time `until` (s); the time then."""
        left = self.began + int(until * NS) - clock()
        if left > 0:
            time.sleep(left / NS)
        return self.rest()

    def call(self, decoding: list[int], keys: int, reading: int, chunk: int, before: int, slot: int = -1) -> float:
        """One `llama_decode`; its time includes everything since the last call, such as the policy's own work.

        `slot`: the sequence that the prompt is read into, where it is not the one after `decoding`.
        """
        session, began = self.session, self._ended
        due = [(seq, self.tokens[number]) for seq, number in enumerate(decoding)]
        if chunk:
            parts = [(seq, stream[session.n_past[seq] : session.n_past[seq] + 1]) for seq, stream in due]
            parts.append((max(slot, len(decoding)), self.tokens[reading][before : before + chunk]))
            self.came = {seq: rows[-1].copy() for seq, rows in session.evaluate(parts).items()}
        else:
            session.decode({seq: int(stream[session.n_past[seq]]) for seq, stream in due})
            self.came = {}
        now = self.rest()
        for number in decoding:
            self.token_ns.setdefault(number, []).append(self._ended - self.began)
        self.calls.append((len(decoding), keys, chunk, before, self._ended - began))
        return now

    def steps(self, decoding: list[int], keys: int, most: int, until: float) -> list[float]:
        """One step; the time after it."""
        return [self.call(decoding, keys, -1, 0, 0)]

    def leave(self, decoding: list[int], slot: int, reading: int) -> float:
        """Keep a sequence's last logits, remove it, and move the last one to its place."""
        session, last, began = self.session, len(decoding) - 1, clock()
        self.logits[decoding[slot]] = self.came[slot] if self.came else session.logits(slot)
        session.remove_tail(slot, 0)
        if slot != last:
            session.move(last, slot)
        if reading >= 0:
            session.move(last + 1, last)
        now = self.rest()
        if slot != last or reading >= 0:
            self.moves.append((self._ended - began) // ((slot != last) + (reading >= 0)))
        return now

    def rest(self) -> float:
        """Exclude the time since the last call from the next one; the time (s)."""
        self._ended = clock()
        return (self._ended - self.began) / NS

    def start(self) -> None:
        """Start the time at 0, without earlier calls and moves."""
        self.began = self._ended = clock()
        for noted in (self.calls, self.moves, self.token_ns):
            noted.clear()


def run(cell: Traffic | Service, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure one cell by a policy, or with a second process that prefills.

    `samples_ns`: one number per call; `series`, by call: "decoding" (sequences), "keys" (tokens these held), "chunk"
    and "before" (tokens of a prompt in it, and read before it); "moves" (s, each move of a sequence to another place).
    `requests`: arrivals and tokens.
    """
    load, rule = drawn(cell), cell.rule if isinstance(cell, Traffic) else cell.mode
    if rule == SPLIT:
        return service.answered(cell, path, stage)
    start = clock()
    config = SessionConfig.of(cell, cell.n_prompt + cell.n_gen, n_seq_max=cell.n_seq, swa_full=False)
    with Session(path, config) as session:
        load_ns = clock() - start
        lengths = [n_prompt + n_gen - 1 for n_prompt, n_gen in zip(load.prompt, load.output, strict=True)]
        if rule == PARTS:
            lengths = [cell.n_prompt + cell.n_gen] * cell.n_seq
        rng = np.random.default_rng([cell.seed, 2])
        live = Live(session, [rng.integers(FIRST_TOKEN, session.n_vocab, n, dtype=np.int32) for n in lengths])
        stage("warm-up")
        start = clock()
        _warm(cell, session, live)
        warmup = clock() - start
        session.clear()
        stage("serve")
        live.start()
        requests: list[Request] = []
        past = lengths
        with watch.timed():
            if rule == PARTS:
                _parts(cell, session, live)
                past = list(session.n_past)
            else:
                requests = _requests(serve(load, rule, live, cell.n_seq), live)
        stage("alone")
        errors = [
            relative_error(logits, proof.alone(session, 0, live.tokens[n][: past[n]]))
            for n, logits in live.logits.items()
        ]
    checks: dict[str, float | bool] = {"second_path_error": max(errors), "second_path": max(errors) <= tolerance(cell)}
    checks["finite"] = all(bool(np.isfinite(logits).all()) for logits in live.logits.values())
    checks["answered"] = [len(request.token_ns) for request in requests] == (load.output if requests else [])
    named = dict(zip(("decoding", "keys", "chunk", "before"), zip(*live.calls, strict=True), strict=False))
    series = {name: list(map(float, values)) for name, values in named.items()}
    return Measured(
        samples_ns=[[call[-1] for call in live.calls]],
        warmup_ns=[warmup],
        load_ns=load_ns,
        n_evaluated=sum(call[0] + call[2] for call in live.calls),
        checks=checks,
        series=series | {"moves": [ns / NS for ns in live.moves]},
        requests=requests,
        valid=passed(checks),
    )


def _warm(cell: Traffic | Service, session: Session, live: Live) -> None:
    """Warm up with prompts, steps of all sequences but one, and a chunk of a prompt beside them."""
    session.clear()
    others = list(range(min(cell.n_seq, len(live.tokens)) - 1))
    for slot in others:
        live.call([], 0, slot, GRAIN // 2, 0, slot)
    for _ in range(WARM_STEPS if others else 0):
        live.call(others, 0, -1, 0, 0)
    live.call(others, 0, len(others), min(64, len(live.tokens[len(others)])), 0)


def _parts(cell: Traffic | Service, session: Session, live: Live) -> None:
    """Chunks of every size at the beginning, in the middle and at the end of a sequence; steps of every number of
    sequences at two depths, and of one to its end; chunks of every size beside half of the sequences or all but one;
    and moves.

    The last sequences' logits are kept for the proof.
    """
    sizes = sorted({*(size for size in SIZES if size < cell.n_prompt), cell.n_prompt})
    longest, chunks = cell.n_prompt + cell.n_gen, CHUNKS[cell.scale]
    held = _states(session, live, sorted({longest // 2, *(longest - size for size in sizes)}))
    for size in sizes:
        for begin in sorted({0, longest // 2, longest - size}):
            session.clear()
            if begin:
                session.set_state(0, held[begin], begin)
            live.rest()
            for _ in range(chunks):
                if session.n_past[0] + size <= longest:
                    live.call([], 0, 0, size, session.n_past[0])
    for depth in (GRAIN, cell.n_prompt):
        state = _states(session, live, [depth])[depth]
        for slot in range(cell.n_seq):
            if slot:
                session.set_state(slot, state, depth)
            live.rest()
            for _ in range(cell.n_gen // cell.n_seq):
                live.call(list(range(slot + 1)), sum(session.n_past[: slot + 1]), -1, 0, 0)
    _states(session, live, [cell.n_prompt])
    live.rest()
    for _ in range(cell.n_gen):
        live.call([0], session.n_past[0], -1, 0, 0)
    for number, others in enumerate((max(cell.n_seq // 2, 1), cell.n_seq - 1)):
        _beside(session, live, list(range(others)), sizes[number::2], chunks, cell.n_prompt)
    live.logits = dict(live.came)
    for _ in range(MOVES):
        began = clock()
        session.set_state(0, session.read_state(0), session.n_past[0])
        live.moves.append(clock() - began)


def _states(session: Session, live: Live, places: list[int]) -> dict[int, np.ndarray]:
    """States of a sequence by number of tokens, for each of `places`: read once instead of once per chunk size.

    The tokens between two places are read as one chunk, too.
    """
    session.clear()
    states = {}
    for place in places:
        live.rest()
        live.call([], 0, 0, place - session.n_past[0], session.n_past[0])
        states[place] = session.read_state(0)
    return states


def _beside(session: Session, live: Live, others: list[int], sizes: list[int], chunks: int, n_prompt: int) -> None:
    """Measure a prompt's first chunks of each size beside some sequences, which continue from size to size."""
    session.clear()
    live.rest()
    for slot in others:
        live.call([], 0, slot, NEIGHBOUR, 0, slot)
    for size in sizes:
        session.remove_tail(len(others), 0)
        live.rest()
        for before in range(0, min(chunks * size, n_prompt) - size + 1, size):
            live.call(others, sum(session.n_past[: len(others)]), len(others), size, before)


def _requests(served: Served, live: Live) -> list[Request]:
    """Every request with the times of its tokens; the first token comes when the prompt is read."""
    columns = zip(served.load.arrives, served.load.prompt, served.first, strict=True)
    return [
        Request(
            id=str(n),
            n_prompt=n_prompt,
            arrived_ns=int(arrived * NS),
            token_ns=[int(first * NS), *live.token_ns.get(n, [])],
        )
        for n, (arrived, n_prompt, first) in enumerate(columns)
    ]


RUNS = {Arrival: chunks.run, Shipment: service.shipped, Service: run, Traffic: run}
