"""Results that the tools keep beside the journals: soaks, crowds, AIPerf beside our client, probed servers.

Only their fields and readers; the servers and clients that produce them are elsewhere.
"""

import tomllib
from typing import Any

import msgspec
import pandas as pd
from IPython.display import Markdown

from llama_meter import paths

HELD_AT = 2  # minutes before a server is suspended
RELEASED, PATCHED = "as released", "patched"  # servers that take turns in a crowd
OURS, AIPERF = "our client", "AIPerf"
CROWD, BESIDE, PROBED = "09-crowd.mini.json", "09-beside.{}.json", "09-probed.json"


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended in one minute, and memory of client and server at its end. None: no answer in that minute.

    `ttft`: seconds to the first token at the 50th and 90th percentile; `tpot`: median seconds for each further one;
    `late`: 95th percentile of the client's sending delay (s); `waiting`: requests still open at the minute's end.
    `fine`: answers that ended in each 5 s of the minute; empty in older recordings.
    """

    answered: int
    failed: int
    ttft: float | None
    ttft_p90: float | None
    tpot: float | None
    late: float | None
    waiting: int
    client_bytes: int
    server_bytes: int
    fine: tuple[int, ...] = ()


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """A soak: its server and load, the outcome of all requests, and its minutes.

    `missing`: neither answered nor failed; `twice`: ended more than once. `differ`: answers that differ from the one to
    the prompt alone, `near_ties` among them. `failures`: count by reason. `tokens`: of all answers as received;
    `counted`: by the server over the same time (None where it was not read).
    """

    machine: dict[str, Any]
    model: str
    scale: str
    n_prompt: int
    n_gen: int
    rate: float
    held_s: float = 0.0  # seconds for which the server was suspended after HELD_AT minutes
    patched: bool = False  # the server with our patch for waiting threads
    sent: int
    answered: int
    failed: int
    missing: int
    twice: int
    differ: int
    near_ties: int
    failures: dict[str, int]
    tokens: int | None = None
    counted: int | None = None
    ended: str
    minutes: list[Minute]


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """One load of one server, over the answers that ended while the crowd was full.

    `token`: seconds per further token of each, by the server; `seconds`: until the last one ended; `tokens`: in all.
    """

    server: str
    n_clients: int
    round: int
    token: list[float]
    seconds: float
    tokens: int


class Crowds(msgspec.Struct, frozen=True, kw_only=True):
    """Loads of both servers, in turn, on one machine."""

    machine: dict[str, Any]
    model: str
    n_prompt: int
    n_gen: int
    loads: list[Crowd]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load by one client; per request in seconds: `ttft`, `itl` (mean gap), `whole`; and `n_gen` in tokens.

    `throughput`: tokens/s as the client reports it. The server's own count of this run, None if it has none: mean
    seconds per `prompt` and per further `token`, and all answer tokens (`counted`).
    """

    tool: str
    n_clients: int
    round: int
    ttft: list[float]
    itl: list[float]
    whole: list[float]
    n_gen: list[int]
    throughput: float
    prompt: float | None = None
    token: float | None = None
    counted: int | None = None


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of both clients against one server on one machine, and their load."""

    machine: dict[str, Any]
    model: str
    scale: str
    n_prompt: int
    n_gen: int
    version: str
    runs: list[Run]


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """A server known to be right or wrong (`truth`), and what a probe of it said; counts as in `right.Rightness`.

    `server`: its kind; `log_probabilities`: whether they were there to judge by; `died`: whether it ended by itself.
    """

    model: str
    dtype: str
    build: str
    slots: int
    server: str
    truth: str
    verdict: str
    why: str
    log_probabilities: bool
    compared: int
    identical: int
    distinct: int
    other: int
    near_ties: int
    unknown: int
    failed: int
    gap: float
    died: bool
    seconds: float


class Probings(msgspec.Struct, frozen=True, kw_only=True):
    """All servers that were probed on one machine."""

    machine: dict[str, Any]
    servers: list[Probed]


def stored(place: str, name: str, kind: Any) -> Any:
    """A result of this type; None where there is none. Commit 53f8ee5 made them."""
    path = paths.MEASURED / place / name
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None


def soaks(place: str, scale: str, held: bool = False, patched: bool = False) -> list[Soak]:
    """Soaks kept at a place, in the order in which they ran; `held`: those whose server was suspended."""
    either = Soak | list[Soak]  # older files hold a single soak
    found = stored(place, soak_name(scale, held, patched), either) or []
    return found if isinstance(found, list) else [found]


def soak_name(scale: str, held: bool, patched: bool) -> str:
    """File name of one kind of soak."""
    return f"09-{'held' if held else 'soak'}{'-patched' if patched else ''}.{scale}.json"


def crowds(place: str) -> Crowds | None:
    """The loads of a place; None where none were compared."""
    return stored(place, CROWD, Crowds)


def beside(place: str, scale: str) -> Beside | None:
    """The runs of a place; None where nothing was compared there."""
    return stored(place, BESIDE.format(scale), Beside)


def probed(place: str) -> Probings | None:
    """The servers probed at a place; None where there were none."""
    return stored(place, PROBED, Probings)


def load(name: str) -> pd.DataFrame:
    """The figures of one source, with the columns of its file; `sources.toml` says where they come from."""
    return pd.read_csv(paths.PUBLISHED / f"{name}.csv")


def weights(name: str) -> str:
    """The model files behind a source's figures."""
    return str(_entry(name)["weights"])


def source(name: str) -> Markdown:
    """The publisher of the figures, machine, build, and notes for their reading."""
    entry = _entry(name)
    head = f"Source: *{entry['title']}*, {entry['subject']}; {entry['machine']}; {entry['engine']}; {entry['weights']}."
    return Markdown("\n".join([head, "", *(f"- {note}" for note in entry["notes"])]))


def _entry(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = tomllib.loads((paths.PUBLISHED / "sources.toml").read_text(encoding="utf-8"))[name]
    return entry
