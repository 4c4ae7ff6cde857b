"""One streamed request to an OpenAI-compatible server: when each chunk arrived, and its text.

All times are from one monotonic clock, taken when bytes leave the socket. A chunk is not a token: an answer's token
count is the server's own, if it gives one. Reasoning is made of tokens as the answer is. Errors are reported in the
answer's `failure`; nothing is raised. What llama-server, vLLM, SGLang, Ollama and mlx-lm stream is read, and no more.

Servers are asked directly: no proxy or other setting of the environment, no redirect, nothing compressed, as each would
change what is timed or take a key elsewhere.
"""

import asyncio
import select
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import httpx2
import msgspec

from llama_meter.disk import printable
from llama_meter.errors import StudyError
from llama_meter.measure.tolerance import Parting, parting

Api = Literal["completions", "chat/completions"]
Client = httpx2.AsyncClient
PATIENCE_S, QUIET_S = 600.0, 60.0  # for a whole answer; without a byte: hung
SHOWN = 160  # characters of an error's text that are kept
NAN = float("nan")
# Answers have the requested length and no prefix is cached between requests, so every time is the server's own work.
# Servers ignore fields that they do not know.
FIELDS = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
clock = time.perf_counter_ns
Result = TypeVar("Result")


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


class Delta(msgspec.Struct):
    """A piece of a chat's answer: content, or reasoning, which some servers send under two names at once."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """A piece of an answer: `text` of a completion, or `delta` of a chat."""

    text: str | None = None
    delta: Delta | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def words(self) -> str:
        """What the model wrote, its reasoning included."""
        if not self.delta:
            return self.text or ""
        return (self.delta.reasoning_content or self.delta.reasoning or "") + (self.delta.content or "")


class Usage(msgspec.Struct):
    """A server's own count of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


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
    """Outcome of a request; times in ns of `clock`: due, sent, first byte of the body, each chunk with words, end.

    `n_prompt` and `n_gen` are the server's own counts, 0 where it gives none. `gaps`: per token, the likeliest one's
    lead over the second in nats, NaN where not given. `timings`: llama-server's own. `status`: of HTTP where it tells
    of a failure, else 0.
    """

    prompt: Prompt
    due_ns: int
    sent_ns: int = 0
    byte_ns: int = 0
    ended_ns: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    n_prompt: int = 0
    n_gen: int = 0
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    timings: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    status: int = 0

    @property
    def text(self) -> str:
        """All that was written."""
        return "".join(self.texts)

    @property
    def refused(self) -> bool:
        """Whether the server refused the request: it computed nothing, right or wrong."""
        return 400 <= self.status < 500

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


@dataclass(frozen=True)
class Target:
    """Destination of requests: the server's address without a path, the model's name, and the API.

    `key`: sent as a bearer token, and shown nowhere.
    """

    url: str
    model: str = ""
    api: Api = "completions"
    key: str = field(default="", repr=False)

    @property
    def path(self) -> str:
        """URL that requests are posted to."""
        return f"{self.url.rstrip('/')}/v1/{self.api}"

    def connected(self) -> Client:
        """As many connections to it as requests need. StudyError for an SSL_CERT_FILE without certificates."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "llama-meter"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            tls = (
                self.url.startswith("https:") and httpx2.create_ssl_context()
            )  # it takes long, and reads SSL_CERT_FILE
        except OSError as error:
            raise StudyError("SSL_CERT_FILE", f"is no file of certificates ({error})", "name a PEM file") from error
        wait = httpx2.Timeout(QUIET_S, pool=None)
        return Client(headers=headers, limits=limits, timeout=wait, trust_env=False, verify=tls)

    def body(self, prompt: Prompt, top: int) -> dict[str, Any]:
        """JSON body of a request; `top`: number of log probabilities requested per token."""
        chat = self.api == "chat/completions"
        content: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt.text}]} if chat else {"prompt": prompt.text}
        )
        content |= {"max_tokens": prompt.n_gen, "stream": True, "stream_options": {"include_usage": True}, **FIELDS}
        content |= {"model": self.model} if self.model else {}
        if top:
            content |= {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}
        return content


def parted(alone: Answer, answer: Answer) -> Parting:
    """Where an answer parts from the one alone. A broken-off answer is compared as far as it got."""
    text = alone.text[: len(answer.text)] if answer.failure else alone.text
    return parting(text, answer.text, alone.gaps, alone.tokens or alone.texts)


def over(target: Target, work: Callable[[Client], Awaitable[Result]]) -> Result:
    """Run `work` to its end with connections to a server."""

    async def connected() -> Result:
        async with target.connected() as web:
            return await work(web)

    return run(connected())


async def ask(web: Client, target: Target, prompt: Prompt, due_ns: int = 0, top: int = 0) -> Answer:
    """Post one request and read its answer to the end or to the first error."""
    answer = Answer(prompt, due_ns or clock())
    answer.sent_ns = clock()
    try:
        async with asyncio.timeout(PATIENCE_S), web.stream("POST", target.path, json=target.body(prompt, top)) as reply:
            if reply.status_code == httpx2.codes.OK:
                await _read(reply, answer)
            else:
                answer.status = reply.status_code
                answer.failure = f"HTTP {answer.status}: {(await reply.aread()).decode(errors='replace')}"
    except (TimeoutError, httpx2.TransportError, ValueError) as error:
        answer.failure = f"{type(error).__name__}: {error}".rstrip(": ")
    answer.ended_ns = clock()
    answer.failure = printable(" ".join(answer.failure.split()), SHOWN)
    return answer


async def _read(reply: httpx2.Response, answer: Answer) -> None:
    """Take every event of a stream; ValueError for one that is none, or tells of an error, or where none is the last.

    An event arrives with its last byte.
    """
    rest = b""
    async for part in reply.aiter_raw():
        stamp = clock()
        answer.byte_ns = answer.byte_ns or stamp
        *lines, rest = (rest + part).split(b"\n")
        for data in (line[5:].strip() for line in lines if line.startswith(b"data:")):
            if data == b"[DONE]":
                return
            event = msgspec.json.decode(data, type=Event)
            if event.error:
                raise ValueError(f"the server says: {event.error}")
            _take(answer, event, stamp)
    raise ValueError("the stream ended before its end")


def _take(answer: Answer, event: Event, stamp: int) -> None:
    """Add one event to an answer, skipping empty texts."""
    if event.usage:
        answer.n_prompt, answer.n_gen = event.usage.prompt_tokens, event.usage.completion_tokens
    if event.timings:
        numbers = {name: value for name, value in event.timings.items() if isinstance(value, int | float)}
        answer.timings = {name: float(value) for name, value in numbers.items()}
    for choice in event.choices or ():
        words = choice.words
        if words:
            answer.chunk_ns.append(stamp)
            answer.texts.append(words)
        likeliest = _likeliest(choice.logprobs) or ([(words, NAN)] if words else [])
        answer.tokens += [token for token, _ in likeliest]
        answer.gaps += [gap for _, gap in likeliest]


def _likeliest(logs: msgspec.Raw) -> list[tuple[str, float]]:
    """Text of each token and the likeliest one's lead over the second (nats), from either format; [] for another."""
    try:
        probs = msgspec.json.decode(logs, type=Logs | None)
    except ValueError:  # mlx-lm's, whose tokens are numbers
        return []
    if not probs:
        return []
    if probs.content:
        return [(entry.token, _gap([top.logprob for top in entry.top_logprobs or ()])) for entry in probs.content]
    pairs = zip(probs.tokens or (), probs.top_logprobs or (), strict=False)
    return [(token, _gap(list(top.values()) if top else [])) for token, top in pairs]


def _gap(logs: list[float]) -> float:
    ordered = sorted(logs, reverse=True)
    return ordered[0] - ordered[1] if len(ordered) > 1 else NAN


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


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end in an event loop with exact sleeps."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Exact())) as runner:
        return runner.run(work)
