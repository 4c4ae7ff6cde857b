"""One streamed request to an OpenAI-compatible server: when each chunk arrived, and its text.

All times are from one monotonic clock, taken when bytes leave the socket. A chunk is not a token: an answer's token
count is the server's own, if it gives one. Reasoning is made of tokens as the answer is. Errors are reported in the
answer's `failure`; nothing is raised. What llama-server, vLLM, SGLang, Ollama and mlx-lm stream is read, and no more.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from llama_meter import http
from llama_meter.disk import parsed
from llama_meter.errors import StudyError
from llama_meter.measure.parting import Parting, parting
from llama_meter.models.finding import printable

Api = Literal["completions", "chat/completions"]
MOST_LINE = 1 << 20  # bytes of one event
MOST_MORE = 1 << 14  # tokens that a server may count beyond those requested
PATIENCE_S = 600.0  # for a whole answer
MOST_REASON = 4096  # characters of a refusal that are searched for the reason
NAN = float("nan")
clock = time.perf_counter_ns
Found = TypeVar("Found")


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
    """What a model wrote: text of a completion, or content and reasoning in a chat."""

    text: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def answer(self) -> str:
        """Text of the answer."""
        return self.text or self.content or ""

    def thought(self) -> str:
        """Reasoning, which some servers send under two names at once."""
        return self.reasoning_content or self.reasoning or ""


class Choice(Said):
    """A piece of an answer: of a completion, or `delta` of a streamed chat, `message` of a whole one."""

    delta: Said | None = None
    message: Said | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def said(self) -> Said:
        """What was written in it."""
        return self.delta or self.message or self


class Usage(msgspec.Struct):
    """A server's own count of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(msgspec.Struct):
    """One event of a server's stream, reduced to the fields used here."""

    error: Any = None
    object: Any = None
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

    `n_prompt` and `n_gen` are the server's own counts, 0 where it gives none. `bursts`: how often chunks came that had
    to be waited for; fewer than chunks where several came at once. `thought`: chunks without text of the answer.
    `gaps`: per token, the likeliest one's lead over the second in nats, NaN where not given. `timings`: llama-server's
    own. `status`: of HTTP where it tells of a failure (404 for a page of the web), else 0; `room`: tokens of the
    context that a refused request exceeded, 0 where not told.
    """

    prompt: Prompt
    due_ns: int
    sent_ns: int = 0
    byte_ns: int = 0
    ended_ns: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    bursts: int = 0
    thought: int = 0
    n_prompt: int = 0
    n_gen: int = 0
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    timings: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    status: int = 0
    room: int = 0

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

    def connected(self) -> http.Client:
        """Connections to it."""
        return http.client(self.url, self.key)

    def body(self, prompt: Prompt, stream: bool, top: int) -> dict[str, Any]:
        """JSON body of a request; `top`: number of log probabilities requested per token."""
        chat = self.api == "chat/completions"
        asked: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt.text}]} if chat else {"prompt": prompt.text}
        )
        asked |= {"max_tokens": prompt.n_gen, "temperature": 0, "stream": stream, **self.usual}
        asked |= {"model": self.model} if self.model else {}
        asked |= {"stream_options": {"include_usage": True}} if stream else {}
        if top:
            asked |= {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}
        return asked


def parted(alone: Answer, answer: Answer) -> Parting:
    """Where an answer parts from the one alone. A broken-off answer is compared as far as it got."""
    text = alone.text[: len(answer.text)] if answer.failure else alone.text
    return parting(text, answer.text, alone.gaps, alone.tokens or alone.texts)


def over(target: Target, work: Callable[[http.Client], Awaitable[Found]]) -> Found:
    """Run `work` to its end with connections to a server."""

    async def met() -> Found:
        async with target.connected() as web:
            return await work(web)

    return http.run(met())


async def ask(
    web: http.Client,
    target: Target,
    prompt: Prompt,
    due_ns: int = 0,
    top: int = 0,
    quiet_s: float = http.QUIET_S,
) -> Answer:
    """Post one request and read its answer to the end or to the first error."""
    answer = Answer(prompt, due_ns or clock())
    answer.sent_ns = clock()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await _read(web, target, answer, top, quiet_s)
    except TimeoutError:
        answer.failure = f"no end after {PATIENCE_S:g} s"
    except http.TimeoutException:
        answer.failure = f"nothing came for {quiet_s:g} s"
    except http.TransportError as error:
        answer.failure = http.said(error)
    except SpentError as error:
        answer.failure = str(error)
    except (ValueError, OverflowError, RecursionError) as error:
        answer.failure = f"malformed answer: {http.said(error)}"[: http.SAID]
    answer.ended_ns = clock()
    answer.failure = printable(" ".join(answer.failure.split()), http.SAID)
    return answer


async def ask_whole(web: http.Client, target: Target, prompt: Prompt) -> tuple[str, int, int]:
    """Answer without streaming: text, and prompt and answer tokens by the server's count.

    Raises StudyError if the answer or its token count is missing.
    """
    try:
        async with web.stream("POST", target.path, json=target.body(prompt, False, 0)) as reply:
            body = await http.whole(reply)
            if reply.status_code != 200:
                raise ValueError(f"HTTP {reply.status_code}: {_reason(body)}"[: http.SAID])
            event: Event = parsed(body, Event)
            if not (event.choices and event.usage):
                raise ValueError("no answer, or no count of its tokens")
            return event.choices[0].said.answer(), event.usage.prompt_tokens, event.usage.completion_tokens
    except (http.TransportError, ValueError) as error:
        why = f"no answer to a plain request ({http.said(error)})"
        raise StudyError(target.path, why, "look at the server's log") from None


async def _read(web: http.Client, target: Target, answer: Answer, top: int, quiet_s: float) -> None:
    if target.allowance:
        target.allowance.ask()
    asked = target.body(answer.prompt, True, top)
    async with web.stream("POST", target.path, json=asked, timeout=http.quiet(quiet_s)) as reply:
        if reply.is_redirect:
            answer.status, answer.failure = reply.status_code, "a redirect elsewhere, refused"
            return
        if not reply.is_success:
            body = await http.whole(reply, MOST_LINE, target.allowance.take if target.allowance else None)
            answer.status, answer.room = reply.status_code, _room(body)
            answer.failure = f"HTTP {answer.status}: {_reason(body)}"[: http.SAID]
            return
        if http.media_type(reply) == "text/html":
            answer.status, answer.failure = 404, "a page (text/html) in place of an answer"
            return
        last = None
        async with aclosing(_events(reply, answer, target.allowance)) as events:
            async for stamp, turn, data in events:
                if data == b"[DONE]":
                    return
                event: Event = parsed(data, Event)
                if event.error or event.object == "error":
                    answer.room, answer.failure = _room(data), f"the server says: {_reason(data)}"[: http.SAID]
                    return
                n_chunks = len(answer.chunk_ns)
                _take(answer, event, stamp)
                if len(answer.chunk_ns) > n_chunks and turn != last:
                    answer.bursts, last = answer.bursts + 1, turn
        answer.failure = "the stream ended before its end"


def _take(answer: Answer, event: Event, stamp: int) -> None:
    """Add one event to an answer, skipping empty texts. ValueError for an impossible token count."""
    if event.usage:
        answer.n_prompt, answer.n_gen = event.usage.prompt_tokens, event.usage.completion_tokens
        if not 0 <= answer.n_gen <= answer.prompt.n_gen + MOST_MORE:
            raise ValueError(f"{answer.n_gen:,} tokens counted, {answer.prompt.n_gen:,} requested")
    if event.timings:
        numbers = {name: value for name, value in event.timings.items() if isinstance(value, int | float)}
        answer.timings = {name: float(value) for name, value in numbers.items()}
    for choice in event.choices or ():
        text, thought = choice.said.answer(), choice.said.thought()
        answer.thought += bool(thought and not text)
        if thought or text:
            answer.chunk_ns.append(stamp)
            answer.texts.append(thought + text)
        likeliest = _likeliest(choice.logprobs) or ([(thought + text, NAN)] if thought or text else [])
        answer.tokens += [token for token, _ in likeliest]
        answer.gaps += [gap for _, gap in likeliest]


def _likeliest(logs: msgspec.Raw) -> list[tuple[str, float]]:
    """Text of each token and the likeliest one's lead over the second (nats), from either format; [] for another."""
    try:
        probs: Logs | None = parsed(logs, Logs | None)
    except ValueError:
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


async def _events(
    reply: http.Reply, answer: Answer, allowance: Allowance | None
) -> AsyncGenerator[tuple[int, int, bytes], None]:
    """Data of each event, the arrival time of its last byte (ns), and a number that events share which came at once.

    Between two parts of a body that had both arrived, the event loop does not turn.
    """
    rest, turns = b"", 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    async for part in http.parts(reply, count=allowance.take if allowance else None):
        stamp = clock()
        answer.byte_ns = answer.byte_ns or stamp
        this_turn = turns
        asyncio.get_running_loop().call_soon(turn)
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MOST_LINE:
            raise ValueError(f"an event of more than {MOST_LINE:,} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield stamp, this_turn, line[5:].strip()


def _reason(body: bytes) -> str:
    """The reason in a refusal: `error.message`, `error`, `message` or `detail` of JSON, else the text itself."""
    text = body[:MOST_REASON].decode(errors="replace")
    with suppress(ValueError):
        told = parsed(body)
        for name in ("error", "message", "detail"):
            told = told.get(name, told) if isinstance(told, dict) else told
        text = told if isinstance(told, str) else text
    return " ".join(text.split())


ROOMS = (  # how a refusal tells of the context; llama-server's own field first
    re.compile(r"""n_ctx["']?\s*[:=]\s*(\d+)"""),
    re.compile(r"context (?:length|size|window)[^\d]{0,40}?(\d[\d,]*)|must be <=\s*(\d+)"),
)


def _room(body: bytes) -> int:
    """Tokens of the context that a request exceeded, as its refusal says; 0 where it says none."""
    text = body[:MOST_REASON].decode(errors="replace")
    match = next(filter(None, (pattern.search(text) for pattern in ROOMS)), None)
    digits = next(filter(None, match.groups())).replace(",", "") if match else ""
    return int(digits) if 0 < len(digits) < 10 else 0
