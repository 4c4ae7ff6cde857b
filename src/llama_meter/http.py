"""HTTP, in one place: how servers are reached, how long they are waited for, and how much of them is read.

Servers are asked directly: no proxy or other setting of the environment, no redirect, nothing compressed, as each would
change what is timed or take a key elsewhere.
"""

import asyncio
import ipaddress
import os
import select
import selectors
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from llama_meter.errors import StudyError

AGENT = "llama-meter"
QUIET_S = 60.0  # without a byte: hung
LOOK_S = 5.0  # for all of what a server has at hand
MOST_BYTES = 16 << 20  # of a body; no answer requested here comes close
MOST_TOLD = 4 << 20  # bytes of a list
SAID = 160  # characters of an error's text that are kept
UNREACHED = "ConnectError"  # how the failure of a request begins that found no server
LOOPBACK = ("localhost",)
ADDRESS = "name one such as http://127.0.0.1:8080"
Client = httpx2.AsyncClient
Reply = httpx2.Response
TransportError = httpx2.TransportError
TimeoutException = httpx2.TimeoutException
InvalidURL = httpx2.InvalidURL
Found = TypeVar("Found")


# ------------------------------------------------------------------ addresses


def check_url(url: str) -> str:
    """The server's address without a path; StudyError for anything that is not one."""
    try:
        parts = urlsplit(url)
        httpx2.URL(url)
        right = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except (ValueError, InvalidURL):
        right = False
    if not right:
        raise StudyError(f"URL {url!r}", "is no http or https address", ADDRESS)
    if parts.username or parts.password:
        raise StudyError("URL", "carries a password, which would appear in the report", "give the key by environment")
    return url.rstrip("/").removesuffix("/v1")


def is_loopback(url: str) -> bool:
    """Whether a URL can only lead to this machine, however names resolve."""
    try:
        host = urlsplit(url).hostname or ""
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ------------------------------------------------------------------ a server


def client(url: str, key: str = "") -> Client:
    """Connections to a server, as many as are asked for; `key`: sent as a bearer token."""
    headers = {"Accept-Encoding": "identity", "User-Agent": AGENT}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    tls: bool | ssl.SSLContext = not url.lower().startswith("http:")  # loading certificates takes long
    if tls and (own := os.environ.get("SSL_CERT_FILE")):
        try:
            tls = ssl.create_default_context(cafile=own)
        except OSError as error:
            why = f"holds no certificates ({error})"
            raise StudyError(f"SSL_CERT_FILE={own}", why, "unset it, or name a PEM file") from None
    return Client(
        headers=headers, limits=limits, timeout=quiet(QUIET_S), trust_env=False, follow_redirects=False, verify=tls
    )


def quiet(seconds: float) -> httpx2.Timeout:
    """The limit of a request: seconds without a byte. Waiting for a connection of one's own has none."""
    return httpx2.Timeout(seconds, pool=None)


def answers(url: str) -> bool:
    """Whether a GET request is answered with 200 by now."""

    async def asked() -> bool:
        async with client(url) as web:
            try:
                return (await web.get(url, timeout=quiet(LOOK_S))).status_code == 200
            except TransportError:
                return False

    return run(asked())


async def look(web: Client, url: str, mend: str) -> tuple[int, bytes]:
    """Status and body of a GET request. StudyError for no answer, or a body that is too long, too slow or compressed.

    `mend`: what helps where something answers, but not so.
    """
    try:
        async with asyncio.timeout(LOOK_S), web.stream("GET", url) as reply:
            return reply.status_code, await whole(reply, MOST_TOLD)
    except TransportError as error:
        raise _unanswered(url, error) from None
    except TimeoutError:
        raise StudyError(url, f"gives no end within {LOOK_S:g} s", mend) from None
    except ValueError as error:
        raise StudyError(url, f"gives {error}", mend) from None


def _unanswered(url: str, error: TransportError) -> StudyError:
    """Why no answer came: an address of the other kind and a certificate do not mean that there is no server."""
    said, (scheme, _, rest) = str(error), url.partition("://")
    if "CERTIFICATE_VERIFY_FAILED" in said:
        why = said.partition("verify failed: ")[2].partition(" (_ssl")[0] or "verify failed"
        mend = "put SSL_CERT_FILE=ITS-CERTIFICATE.pem before the command, if the server is yours"
        return StudyError(url, f"its certificate is not trusted ({why})", mend)
    if scheme == "https" and "[SSL" in said:
        return StudyError(url, f"does not speak https ({said[:SAID]})", f"try http://{rest}")
    if scheme == "http" and isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
        return StudyError(
            url, f"breaks off ({type(error).__name__})", f"try https://{rest}, or look at the server's log"
        )
    return StudyError(url, f"does not answer ({type(error).__name__})", "start the server first")


async def parts(
    reply: Reply, most: int = MOST_BYTES, count: Callable[[int], None] | None = None
) -> AsyncIterator[bytes]:
    """A body as it arrives. ValueError beyond `most` bytes, or where it is compressed; `count` gets each part's size.

    `count` may raise an error of its own, which ends the body.
    """
    size = 0
    if coding := compressed(reply):
        raise ValueError(f"a body compressed with {coding[:20]}, which was not asked for")
    async for part in reply.aiter_raw():
        size += len(part)
        if size > most:
            raise ValueError(f"a body of more than {most:,} bytes")
        if count:
            count(len(part))
        yield part


async def whole(reply: Reply, most: int = MOST_BYTES, count: Callable[[int], None] | None = None) -> bytes:
    """All of a body, as `parts` gives it."""
    return b"".join([part async for part in parts(reply, most, count)])


def compressed(reply: Reply) -> str:
    """How a body is compressed; "" for one that is not."""
    coding = str(reply.headers.get("Content-Encoding", "identity")).lower()
    return coding if coding != "identity" else ""


def media_type(reply: Reply) -> str:
    """The media type of a body."""
    return str(reply.headers.get("Content-Type", "")).partition(";")[0].strip().lower()


def said(error: Exception) -> str:
    """An error's name and text, as a failure keeps them."""
    return f"{type(error).__name__}: {error}".rstrip(": ")[:SAID]


# ------------------------------------------------------------------ time


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
