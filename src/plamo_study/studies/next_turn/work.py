"""A cell of kind "turns": conversations are answered, go on by a move, and the move is answered again from nothing.

Every move has a conversation of its own, so nothing of another move is found again. On a server the answer from nothing
comes from the same process with `cache_prompt` off, which empties the slot before it reads.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from llama_meter.cells import Turns
from llama_meter.engine.high_level import HighLevel
from llama_meter.engine.session import Session, SessionConfig, Tokenizer
from llama_meter.errors import StudyError
from llama_meter.measure import texts, watch
from llama_meter.measure.tolerance import SAME, parting, tolerance
from llama_meter.models import registry
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed
from llama_meter.serve import client, server
from llama_meter.serve.client import Client, Target, clock
from llama_meter.serve.server import Setup
from plamo_study.studies.next_turn.conversation import LAST, MARK, MOVES, Conversation, common, drawn, points
from plamo_study.studies.right_answers import hybrids

TEXT = "python-heldout"
ROOM = 64  # tokens of a slot beside prompts and answers
NEIGHBOUR = (64, 1024)  # tokens of a neighbour's prompt and of its answer, which is broken off
AHEAD_S = 0.5  # before a move, for its neighbours to begin
FIRST_TEXT = 3  # the first token id of a generated vocabulary that is no special one
PROBABILITIES = 2  # likeliest tokens that a server is asked for
NS = 1e9
CLOSED = {"Connection": "close"}  # a server may close a connection that has rested just as it is used again


@dataclass
class Reply:
    """An answer: its tokens, the lead of each over the second likeliest and its log probability (nats).

    `evaluated`: tokens of the prompt that were; `first_ns`: from sending to the first token; `prompt_ms`: the server's.
    `logits`: (n_vocab,) after the prompt, of an engine in this process.
    """

    tokens: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    evaluated: int = 0
    first_ns: int = 0
    prompt_ms: float = 0.0
    logits: np.ndarray | None = None


@dataclass
class Move:
    """A move: tokens of its prompt, how many of them were held, and its answers from what was kept and from nothing."""

    n_next: int
    common: int
    reused: Reply
    fresh: Reply


def run(cell: Turns, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure one cell. It is valid if every answer is the one from nothing, but for near-ties, and so are the logits.

    Series have a number for each of MOVES, in their order: "n_next" tokens of its prompt, "common" of them at the
    beginning of what was held, "evaluated"; "first", "fresh": seconds to the first token, from what was held and from
    nothing; "prompt": seconds for the prompt by the server's own clock; "differs": first token that is another than
    from nothing (-1: none), "gap": the likeliest one's lead there (nats); "moved": largest difference of a log
    probability before it. "bytes": of the process before and after all moves; or of what cannot be cut back, which is a
    checkpoint of llama-server, and of the states that we keep. A server that ended leaves moves out.
    """
    make = {"bindings": _by_bindings, "states": _by_states}.get(cell.reuse, _by_server)
    with _file(cell, path, stage) as file:
        moves, load_ns, sizes, ended = make(cell, file, stage)
    partings = [parting(move.fresh.tokens, move.reused.tokens, move.fresh.leads) for move in moves]
    verdicts = [each.verdict for each in partings]
    checks: dict[str, float | bool] = {"as_fresh": "other" not in verdicts, "alive": not ended}
    checks["near_ties"] = verdicts.count("near-tie")
    checks["from_nothing"] = all(move.fresh.evaluated == move.n_next for move in moves)
    if errors := [error for move in moves if (error := _error(move)) is not None]:
        checks |= {"error": max(errors), "tolerance": tolerance(cell), "logits": max(errors) <= tolerance(cell)}
    same = [
        len(move.fresh.tokens) if each.token < 0 else each.token for move, each in zip(moves, partings, strict=True)
    ]
    series = {
        "n_next": [float(move.n_next) for move in moves],
        "common": [float(move.common) for move in moves],
        "evaluated": [float(move.reused.evaluated) for move in moves],
        "evaluated_fresh": [float(move.fresh.evaluated) for move in moves],
        "first": [move.reused.first_ns / NS for move in moves],
        "fresh": [move.fresh.first_ns / NS for move in moves],
        "prompt": [move.reused.prompt_ms / 1e3 for move in moves],
        "prompt_fresh": [move.fresh.prompt_ms / 1e3 for move in moves],
        "differs": [float(each.token) for each in partings],
        "gap": [SAME if each.lead != each.lead else each.lead for each in partings],
        "moved": [_moved(move, n) for move, n in zip(moves, same, strict=True)],
        "bytes": [float(size) for size in sizes],
    }
    return Measured(
        samples_ns=[[move.reused.first_ns for move in moves]],
        load_ns=load_ns,
        n_evaluated=sum(move.reused.evaluated for move in moves),
        checks=checks,
        series=series,
        valid=passed(checks),
    )


def _error(move: Move) -> float | None:
    """The relative error of the logits after the prompt against those from nothing; None of a server."""
    if move.reused.logits is None or move.fresh.logits is None:
        return None
    return relative_error(move.reused.logits, move.fresh.logits)


def _moved(move: Move, n: int) -> float:
    """The largest difference of a log probability in the first `n` tokens of an answer."""
    return max((abs(a - b) for a, b in zip(move.reused.logs[:n], move.fresh.logs[:n], strict=True)), default=0.0)


@contextmanager
def _file(cell: Turns, path: Path, stage: Callable[[str], None]) -> Iterator[Path]:
    """The cell's model file, written where it is a generated one."""
    if cell.scale:
        yield path
        return
    stage("write")
    with tempfile.TemporaryDirectory() as folder:
        yield hybrids.write(cell.model, Path(folder))


def _conversations(cell: Turns, path: Path) -> list[Conversation]:
    """A conversation for each move: of a text, or of random tokens for a generated file, whose vocabulary has none."""
    with Tokenizer(path) as tokenizer:
        mark, text = tokenizer.encode(MARK), tokenizer.encode(texts.read(TEXT).decode())
        n_vocab = tokenizer.n_vocab
    rngs = np.random.default_rng(cell.seed).spawn(len(MOVES))
    if not cell.scale:
        text = rngs[0].integers(FIRST_TEXT, n_vocab, 1 << 16).astype(np.int32)
    return [drawn(text, mark, cell.n_prompt, rng) for rng in rngs]


def _room(cell: Turns) -> int:
    """Tokens of a context for a conversation, its answer, the next question and its answer."""
    return cell.n_prompt + 2 * cell.n_gen + LAST + ROOM


# ------------------------------------------------------------------ llama-server


def _setup(cell: Turns, path: Path, folder: str) -> Setup:
    """The server of a cell, which saves slots into a folder."""
    arch = registry.spec(cell.model, cell.scale).arch if cell.scale else cell.model.rpartition("-")[0]
    n_ctx = _room(cell) + (sum(NEIGHBOUR) if cell.n_clients > 1 else 0)
    trained = f"{arch}.context_length=int:{n_ctx}"  # else a slot is cut to it
    reuse = f"--ctx-checkpoints {cell.n_checkpoints} --cache-ram {cell.cache_mib} --override-kv {trained}"
    return Setup.of(cell, path, n_ctx, reuse=(*reuse.split(), "--slot-save-path", folder))


def _by_server(cell: Turns, path: Path, stage: Callable[[str], None]) -> Any:
    """The moves on a server, the time until it listened, its bytes before and after them, and how it ended, if so."""
    stage("start")
    begin = clock()
    moves: list[Move] = []
    with tempfile.TemporaryDirectory() as folder, server.started(_setup(cell, path, folder)) as running:
        load_ns, process = clock() - begin, psutil.Process(running.process.pid)
        before = process.memory_info().rss

        async def every(web: Client) -> None:
            for move, conversation in zip(MOVES, _conversations(cell, path), strict=True):
                stage(move)
                with watch.timed(running.process.pid):
                    moves.append(await _moved_on(cell, web, running.url, move, conversation))

        try:
            client.over(Target(running.url), every)
        except (OSError, ValueError, client.httpx2.TransportError):
            if not (ended := running.ended(1.0)):
                raise
            return moves, load_ns, [before], ended
        return moves, load_ns, [before, process.memory_info().rss], ""


async def _moved_on(cell: Turns, web: Client, url: str, move: str, conversation: Conversation) -> Move:
    """One move of a conversation on a server."""
    answer = np.array((await _ask(cell, web, url, conversation.tokens, cell.n_gen)).tokens, np.int32)
    if cell.reuse == "saved":
        await _slot(web, url, "save")
    if cell.away:
        await _ask(cell, web, url, conversation.spare[::-1][: cell.n_prompt // 2], 1)
    if cell.reuse == "saved":
        await _slot(web, url, "restore")
    prompt = conversation.after(move, answer)
    rng = np.random.default_rng(cell.seed)
    others = [rng.permutation(conversation.spare)[: NEIGHBOUR[0]] for _ in range(cell.n_clients - 1)]
    beside = [asyncio.create_task(_ask(cell, web, url, other, NEIGHBOUR[1])) for other in others]
    if beside:
        await asyncio.sleep(AHEAD_S)
    try:
        reused = await _ask(cell, web, url, prompt, cell.n_gen)
        if any(task.done() for task in beside):
            raise StudyError("a neighbour", "ended before the move", "give it a longer answer")
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    fresh = await _ask(cell, web, url, prompt, cell.n_gen, cache_prompt=False)
    held = np.concatenate([conversation.tokens, answer[:-1]])
    return Move(len(prompt), common(held, prompt), reused, fresh)


async def _slot(web: Client, url: str, action: str) -> None:
    """Save the first slot, or restore it."""
    reply = await web.post(f"{url}/slots/0?action={action}", json={"filename": "slot"}, headers=CLOSED)
    reply.raise_for_status()


async def _ask(cell: Turns, web: Client, url: str, tokens: np.ndarray, n_gen: int, cache_prompt: bool = True) -> Reply:
    """A greedy answer to tokens by llama-server's own API, which streams token ids."""
    marks = [{"role": "user", "delimiter": MARK}] if cell.marked else []
    body = {"prompt": tokens.tolist(), "n_predict": n_gen, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"return_tokens": True, "n_probs": PROBABILITIES, "cache_prompt": cache_prompt, "message_delimiters": marks}
    reply, sent = Reply(), clock()
    async with web.stream("POST", f"{url}/completion", json=body, headers=CLOSED) as stream:
        if stream.is_error:
            raise StudyError(
                "the server", f"refused a prompt: {(await stream.aread()).decode()}", "look at its options"
            )
        async for line in stream.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            reply.first_ns = reply.first_ns or clock() - sent
            reply.tokens += event.get("tokens", ())
            for entry in event.get("completion_probabilities", ()):
                likely = [each["logprob"] for each in entry["top_logprobs"]]
                reply.logs.append(likely[0])
                reply.leads.append(likely[0] - likely[1])
            if timings := event.get("timings"):
                reply.evaluated, reply.prompt_ms = timings["prompt_n"], timings["prompt_ms"]
    return reply


# ------------------------------------------------------------------ the engine itself, and the high-level interface


def _by_states(cell: Turns, path: Path, stage: Callable[[str], None]) -> Any:
    """The moves on the engine: states are kept at `points` of a conversation, and the nearest one is restored."""
    begin = clock()
    with Session(path, SessionConfig.of(cell, _room(cell), swa_full=False)) as session:
        load_ns, moves, sizes = clock() - begin, [], []
        for move, conversation in zip(MOVES, _conversations(cell, path), strict=True):
            stage(move)
            session.clear()
            states: dict[int, np.ndarray] = {}
            before, answer = 0, np.empty(0, np.int32)
            *marks, _ = points(cell.n_prompt, cell.n_gen)
            for at in marks:
                session.prefill({0: conversation.tokens[before:at]})
                states[at], before = session.read_state(0), at
            answer = np.array(_go_on(cell, session, conversation.tokens[before:]).tokens, np.int32)
            held = np.concatenate([conversation.tokens, answer[:-1]])
            states[len(held)] = session.read_state(0)
            sizes = [session.read_state(0, "fixed").nbytes, *(state.nbytes for state in states.values())]
            prompt = conversation.after(move, answer)
            shared = common(held, prompt)
            at = max(n for n in states if n <= min(shared, len(prompt) - 1))
            session.clear()
            with watch.timed():
                sent = clock()
                session.set_state(0, states[at], at)
                reply = _go_on(cell, session, prompt[at - cell.planted :], sent)
            session.clear()
            moves.append(Move(len(prompt), shared, reply, _go_on(cell, session, prompt)))
    return moves, load_ns, sizes, ""


def _go_on(cell: Turns, session: Session, tokens: np.ndarray, sent: int = 0) -> Reply:
    """Evaluate the rest of a prompt and answer it greedily."""
    reply, sent = Reply(evaluated=len(tokens)), sent or clock()
    logits = session.prefill({0: tokens})[0][-1]
    for _ in range(cell.n_gen):
        if reply.tokens:
            session.decode({0: reply.tokens[-1]})
            logits = session.logits()
        _take(reply, logits)
        reply.first_ns = reply.first_ns or clock() - sent
    return reply


def _take(reply: Reply, logits: np.ndarray) -> None:
    """Add the likeliest token to an answer."""
    if reply.logits is None:
        reply.logits = logits.copy()
    second, first = np.sort(np.partition(logits, -2)[-2:])
    reply.tokens.append(int(logits.argmax()))
    reply.leads.append(float(first - second))
    reply.logs.append(-float(np.log(np.exp(logits - first).sum())))


def _by_bindings(cell: Turns, path: Path, stage: Callable[[str], None]) -> Any:
    """The moves on llama-cpp-python's high-level interface, which finds a common beginning by itself."""
    begin = clock()
    model = HighLevel(path, SessionConfig.of(cell, _room(cell)))
    load_ns, moves = clock() - begin, []

    def answered(tokens: np.ndarray) -> Reply:
        reply, sent = Reply(), clock()
        for logits in islice(model.answer(tokens), cell.n_gen):
            reply.first_ns = reply.first_ns or clock() - sent
            reply.evaluated = reply.evaluated or model.evaluated
            _take(reply, logits)
        return reply

    for move, conversation in zip(MOVES, _conversations(cell, path), strict=True):
        stage(move)
        answer = np.array(answered(conversation.tokens).tokens, np.int32)
        prompt = conversation.after(move, answer)
        with watch.timed():
            reused = answered(prompt)
        model.forget()
        held = np.concatenate([conversation.tokens, answer[:-1]])
        moves.append(Move(len(prompt), common(held, prompt), reused, answered(prompt)))
    return moves, load_ns, [], ""


RUNS = {Turns: run}
