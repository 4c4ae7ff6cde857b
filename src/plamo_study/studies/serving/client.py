"""One streamed request to an OpenAI-compatible server: when each chunk arrived, and its text.

All times are from one monotonic clock, taken when bytes leave the socket. A chunk is not a token: an answer's token
count is the server's own. Errors are reported in the answer's `failure`; nothing is raised.

An answer given under load is compared with the one that its prompt gets alone. Both are greedy, so their texts should
match. But batches of different shapes round differently, and between two nearly equally likely tokens rounding
decides: such a difference proves nothing. If the server gives log probabilities, the gap of the two at the first
differing token reveals it.
"""

import asyncio
import select
import selectors
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import httpx2
import msgspec

from plamo_study.errors import StudyError
from plamo_study.foreign import parsed
from plamo_study.measure.tolerance import near_tie

Api = Literal["completions", "chat/completions"]
MOST_BYTES = 16 << 20  # of a body; no answer requested here comes close
MOST_LINE = 1 << 20  # bytes of one event
MOST_TOLD = 4 << 20  # bytes of a model list or of metrics
MOST_MORE = 1 << 14  # tokens that a server may count beyond those requested
QUIET_S = 60.0  # without a byte: hung
PATIENCE_S = 600.0  # for a whole answer
SAID = 160  # characters of an error's text that are kept
UNREACHED = "ConnectError"  # how the failure of a request begins that found no server
clock = time.perf_counter_ns
Found = TypeVar("Found")


class Exact(selectors.DefaultSelector):  # type: ignore[misc, valid-type] # a class of the platform's
    """Sleeps exactly, and watches any number of connections.

    epoll rounds a sleep up to a millisecond, half a token's time. select does not, but takes no descriptor above 1023,
    so it waits on epoll's own descriptor alone. kqueue is exact by itself.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Connections that are ready within `timeout` seconds; None waits without limit."""
        if timeout and timeout > 0 and hasattr(select, "epoll"):
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return list(super().select(timeout))


def run(work: Coroutine[Any, Any, Found]) -> Found:
    """Run a coroutine to its end in an event loop with exact sleeps."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Exact())) as runner:
        return runner.run(work)


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class Usage(msgspec.Struct):
    """Tokens by the server's count."""

    prompt_tokens: Count
    completion_tokens: Count


class Likely(msgspec.Struct):
    """One of the likeliest tokens."""

    logprob: float


class Token(msgspec.Struct):
    """A token of an answer, and the likeliest tokens at its position."""

    token: str
    top_logprobs: list[Likely] | None = None


class Logs(msgspec.Struct):
    """Log probabilities: `content` in the newer format, `tokens` and `top_logprobs` in the older one."""

    content: list[Token] | None = None
    tokens: list[str] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class Said(msgspec.Struct):
    """Text or reasoning of a chat message."""

    content: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None


class Choice(msgspec.Struct):
    """A piece of an answer: text of a completion, `delta` of a streamed chat, `message` of a whole one."""

    text: str | None = None
    delta: Said | None = None
    message: Said | None = None
    logprobs: Logs | None = None


class Event(msgspec.Struct):
    """One event of a server's stream, reduced to the fields used here."""

    error: Any = None
    usage: Usage | None = None
    timings: dict[str, Any] | None = None
    choices: list[Choice] | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt: its text, the maximum tokens of its answer, and the `id` that names it in every record."""

    id: str
    text: str
    n_gen: int


@dataclass
class Answer:
    """Outcome of a request; times in ns of `clock`: due, sent, first byte of the body, each chunk with text, end.

    `n_prompt` and `n_gen` are the server's own counts, 0 where it gives none. `thought`: chunks that were reasoning.
    `gaps`: per token, the likeliest one's lead over the second in nats; empty if not requested or not given.
    `timings`: llama-server's own.
    """

    prompt: Prompt
    due_ns: int
    sent_ns: int = 0
    byte_ns: int = 0
    ended_ns: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    thought: int = 0
    n_prompt: int = 0
    n_gen: int = 0
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    timings: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def text(self) -> str:
        """Full text of the answer."""
        return "".join(self.texts)

    @property
    def divided(self) -> bool:
        """Whether some chunks did not hold exactly one token, so that token times are interpolated."""
        return self.n_gen not in (0, len(self.chunk_ns))

    @property
    def token_ns(self) -> list[int]:
        """Arrival time of each token in ns. Several tokens of one chunk are spread evenly over the gap before it."""
        n, chunks = self.n_gen or len(self.chunk_ns), self.chunk_ns
        if n <= len(chunks):
            return chunks[:n]
        if not chunks:
            return []
        stamps, before = [], chunks[0]
        for i, stamp in enumerate(chunks):
            share = n * (i + 1) // len(chunks) - n * i // len(chunks)
            stamps += [before + (stamp - before) * (k + 1) // share for k in range(share)]
            before = stamp
        return stamps


class SpentError(Exception):
    """An allowance is used up."""


@dataclass
class Allowance:
    """What all requests to a target may still cost together: their number, and bytes of their answers."""

    requests: int
    n_bytes: int
    asked: int = 0
    read: int = 0

    def ask(self) -> None:
        """Count a request; SpentError where none is left."""
        if self.asked >= self.requests:
            raise SpentError(f"all {self.requests:,} requests are spent")
        self.asked += 1

    def take(self, size: int) -> None:
        """Count bytes that were read; SpentError where more came than may."""
        self.read += size
        if self.read > self.n_bytes:
            raise SpentError(f"the answers together have more than {self.n_bytes:,} bytes")


@dataclass(frozen=True)
class Target:
    """Destination of requests: the server's address without a path, the model's name, and the API.

    `usual`: fields that every request carries. `key`: sent as a bearer token, and shown nowhere. `allowance`: what all
    requests may cost; None for no limit but that of each.
    """

    url: str
    model: str = ""
    api: Api = "completions"
    usual: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(default="", repr=False)
    allowance: Allowance | None = field(default=None, repr=False, compare=False)

    @property
    def path(self) -> str:
        """URL that requests are posted to."""
        return f"{self.url.rstrip('/')}/v1/{self.api}"

    def body(self, prompt: Prompt, stream: bool, top: int) -> dict[str, Any]:
        """JSON body of a request; `top`: number of log probabilities requested per token."""
        chat = self.api == "chat/completions"
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt.text}]} if chat else {
            "prompt": prompt.text}  # fmt: skip
        asked |= {"max_tokens": prompt.n_gen, "temperature": 0, "stream": stream, **self.usual}
        asked |= {"model": self.model} if self.model else {}
        asked |= {"stream_options": {"include_usage": True}} if stream else {}
        if top:
            asked |= {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}
        return asked


def client(target: Target) -> httpx2.AsyncClient:
    """Connections to a server: as many as are asked for, no proxy, no redirect followed, nothing compressed."""
    headers = {"Accept-Encoding": "identity"}
    headers |= {"Authorization": f"Bearer {target.key}"} if target.key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx2.Timeout(QUIET_S, pool=None)
    tls = not target.url.lower().startswith("http:")  # loading certificates takes longer than most requests
    return httpx2.AsyncClient(
        headers=headers, limits=limits, timeout=timeout, trust_env=False, follow_redirects=False, verify=tls
    )


def over(target: Target, work: Callable[[httpx2.AsyncClient], Awaitable[Found]]) -> Found:
    """Run `work` to its end with connections to a server."""

    async def connected() -> Found:
        async with client(target) as web:
            return await work(web)

    return run(connected())


async def ask(
    web: httpx2.AsyncClient, target: Target, prompt: Prompt, due_ns: int = 0, top: int = 0, quiet_s: float = QUIET_S
) -> Answer:
    """Post one request and read its answer to the end or to the first error."""
    answer = Answer(prompt, due_ns or clock())
    answer.sent_ns = clock()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await _read(web, target, answer, top, quiet_s)
    except TimeoutError:
        answer.failure = f"no end after {PATIENCE_S:g} s"
    except httpx2.TimeoutException:
        answer.failure = f"nothing came for {quiet_s:g} s"
    except httpx2.TransportError as error:
        answer.failure = f"{type(error).__name__}: {error}".rstrip(": ")[:SAID]
    except SpentError as error:
        answer.failure = str(error)
    except (ValueError, OverflowError) as error:
        answer.failure = f"malformed answer: {type(error).__name__}: {error}"[:SAID]
    answer.ended_ns = clock()
    return answer


async def ask_whole(web: httpx2.AsyncClient, target: Target, prompt: Prompt) -> tuple[str, int, int]:
    """Answer without streaming: text, and prompt and answer tokens by the server's count.

    Raises StudyError if the answer or its token count is missing.
    """
    try:
        async with web.stream("POST", target.path, json=target.body(prompt, False, 0)) as reply:
            body = b"".join([part async for part in _bounded(reply)])
            if reply.status_code != 200:
                raise ValueError(_status(reply.status_code, body))
            told: Event = parsed(body, Event)
            if not (told.choices and told.usage):
                raise ValueError("no answer, or no count of its tokens")
            choice = told.choices[0]
            text = choice.message.content if choice.message else choice.text
            return text or "", told.usage.prompt_tokens, told.usage.completion_tokens
    except (httpx2.TransportError, ValueError) as error:
        why = f"{type(error).__name__}: {error}".rstrip(": ")[:SAID]
        raise StudyError(target.path, f"no answer to a plain request ({why})", "look at the server's log") from None


async def look(web: httpx2.AsyncClient, url: str) -> tuple[int, bytes]:
    """Status and body of a GET request. ValueError for a body that is too long or compressed."""
    async with web.stream("GET", url) as reply:
        return reply.status_code, b"".join([part async for part in _bounded(reply, MOST_TOLD)])


async def _read(web: httpx2.AsyncClient, target: Target, answer: Answer, top: int, quiet_s: float) -> None:
    timeout = httpx2.Timeout(quiet_s, pool=None)
    body = target.body(answer.prompt, True, top)
    if target.allowance:
        target.allowance.ask()
    async with web.stream("POST", target.path, json=body, timeout=timeout) as reply:
        if reply.is_redirect:
            answer.failure = "a redirect elsewhere, refused"
            return
        if reply.status_code != 200:
            answer.failure = _status(
                reply.status_code, b"".join([part async for part in _bounded(reply, MOST_LINE, target.allowance)])
            )
            return
        done = False
        async with aclosing(_events(reply, answer, target.allowance)) as events:
            async for stamp, data in events:
                if data == b"[DONE]":
                    done = True
                    break
                told: Event = parsed(data, Event)
                if told.error is not None:
                    answer.failure = f"the server says: {_words(told.error)}"[:SAID]
                    return
                _take(answer, told, stamp)
        if not done:
            answer.failure = "the stream ended before its end"


def _take(answer: Answer, told: Event, stamp: int) -> None:
    """Add one event to an answer, skipping empty texts. ValueError for an impossible token count."""
    if told.usage:
        counted, asked = told.usage.completion_tokens, answer.prompt.n_gen
        if counted > asked + MOST_MORE:
            raise ValueError(f"{counted:,} tokens counted, {asked:,} requested")
        answer.n_prompt, answer.n_gen = told.usage.prompt_tokens, counted
    if told.timings:
        numbers = {name: value for name, value in told.timings.items() if isinstance(value, int | float)}
        answer.timings = {name: float(value) for name, value in numbers.items()}
    for choice in told.choices or ():
        delta = choice.delta
        text = choice.text if delta is None else delta.content
        if delta and not text and (delta.reasoning_content or delta.reasoning):
            answer.thought += 1
        if text:
            answer.chunk_ns.append(stamp)
            answer.texts.append(text)
        for token, gap in _likeliest(choice.logprobs):
            answer.tokens.append(token)
            answer.gaps.append(gap)


def _likeliest(told: Logs | None) -> list[tuple[str, float]]:
    """Text of each token and the likeliest one's lead over the second (nats), from either format."""
    if not told:
        return []
    if told.content:
        return [(each.token, _gap([top.logprob for top in each.top_logprobs or ()])) for each in told.content]
    pairs = zip(told.tokens or (), told.top_logprobs or (), strict=False)
    return [(token, _gap(list(top.values()) if top else [])) for token, top in pairs]


def _gap(logs: list[float]) -> float:
    ordered = sorted(logs, reverse=True)
    return ordered[0] - ordered[1] if len(ordered) > 1 else float("nan")


async def _events(
    reply: httpx2.Response, answer: Answer, allowance: Allowance | None
) -> AsyncGenerator[tuple[int, bytes], None]:
    """Data of each event with the arrival time of its last byte (ns)."""
    rest = b""
    async for part in _bounded(reply, allowance=allowance):
        stamp = clock()
        answer.byte_ns = answer.byte_ns or stamp
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MOST_LINE:
            raise ValueError(f"an event of more than {MOST_LINE:,} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield stamp, line[5:].strip()


async def _bounded(
    reply: httpx2.Response, most: int = MOST_BYTES, allowance: Allowance | None = None
) -> AsyncIterator[bytes]:
    """Bytes of a body as they arrive. ValueError beyond `most` bytes or for a compressed body; SpentError."""
    size = 0
    if (coding := reply.headers.get("Content-Encoding", "identity").lower()) != "identity":
        raise ValueError(f"a body compressed with {coding[:20]}, which was not asked for")
    async for part in reply.aiter_raw():
        size += len(part)
        if size > most:
            raise ValueError(f"a body of more than {most:,} bytes")
        if allowance:
            allowance.take(len(part))
        yield part


def _status(code: int, body: bytes) -> str:
    try:
        said = _words(parsed(body, Event).error or "")
    except ValueError:
        said = body[:SAID].decode(errors="replace")
    return f"HTTP {code}: {said}"[:SAID]


def _words(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


# ------------------------------------------------------------------ two answers to one prompt

SAME = -1.0  # in rows, the first differing token of two answers that do not differ


@dataclass(frozen=True)
class Difference:
    """First differing token of two answers (from 0; -1: none), and the likeliest token's lead there alone, in nats."""

    token: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may decide at that token; False without log probabilities."""
        return bool(near_tie(self.gap))


def difference(alone: Answer, answer: Answer) -> Difference | None:
    """First difference from the answer alone, or None. A broken-off answer is compared as far as it got.

    The gap is NaN where the server gave no log probabilities.
    """
    known, said = alone.text, answer.text
    if answer.failure:
        known = known[: len(said)]
    if known == said:
        return None
    at = next((i for i, (a, b) in enumerate(zip(known, said, strict=False)) if a != b), min(len(known), len(said)))
    token = _token_at(alone.tokens or alone.texts, at)
    return Difference(token, alone.gaps[token] if token < len(alone.gaps) else float("nan"))


def _token_at(pieces: Sequence[str], character: int) -> int:
    """Index of the token that contains a character of the text."""
    length = 0
    for number, piece in enumerate(pieces):
        length += len(piece)
        if character < length:
            return number
    return max(len(pieces) - 1, 0)
