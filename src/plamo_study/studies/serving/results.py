"""What the tools of this study keep beside the journals: soaks, crowds, AIPerf beside our client, trials of the probe.

Their fields and how they are read, without the servers and clients that make them.
"""

from typing import Any

import msgspec

from plamo_study.measure import kept

HELD_AT = 2  # minutes before a server is held up
RELEASED, PATCHED = "as released", "patched"  # servers that take turns in a crowd
OURS, AIPERF = "our client", "AIPerf"
SOAKED, CROWDED = "plamo-study server soak", "plamo-study server crowd"
INSTALL = "python -m venv aip && aip/bin/pip install aiperf, then plamo-study server beside aip/bin/aiperf"
CROWD, BESIDE, TRIALS = "11-crowd.mini.json", "11-beside.{}.json", "11-probes.json"


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """What ended in one minute, and the memory of client and server at its end. None: nothing was answered in it.

    `ttft`: seconds to the first token at the 50th and 90th percentile; `tpot`: median seconds for each further one;
    `late`: the 95th percentile of how much later than due the client sent; `waiting`: requests not ended at its end.
    `fine`: answers that ended in each twelfth of it, 5 seconds; empty in runs recorded before these were counted.
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
    """A soak: what was asked of which server, what became of every request by its number, and its minutes.

    `missing`: sent and neither answered nor failed; `twice`: ended more than once. `differ`: answers that are not the
    one that the prompt got alone, `near_ties` of these. `failures`: the reasons, and how often each. `tokens`: of all
    answers as they came; `counted`: as the server counted meanwhile (None where nobody asked it).
    """

    machine: dict[str, Any]
    model: str
    scale: str
    n_prompt: int
    n_gen: int
    rate: float
    held_s: float = 0.0  # the server was stopped for so long after HELD_AT minutes, and then went on
    patched: bool = False  # the server of `server build --patched`
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
    """One load of one server: a number for each answer that ended while the crowd was full.

    `token`: seconds of a further token, by the server; `seconds`: until the last of these ended; `tokens`: of them all.
    """

    server: str
    n_clients: int
    round: int
    token: list[float]
    seconds: float
    tokens: int


class Crowds(msgspec.Struct, frozen=True, kw_only=True):
    """Loads of both servers, in turn, on which machine."""

    machine: dict[str, Any]
    model: str
    n_prompt: int
    n_gen: int
    loads: list[Crowd]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load by one client; a number a request, seconds: `ttft`, `itl` (mean gap), `whole`, and `n_gen` tokens.

    `throughput`: tokens a second as the client tells it. The server's own count of this run, None where it has none:
    mean seconds of a `prompt` and of each further `token`, and all tokens of answers (`counted`).
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
    """Runs of both clients against one server, on which machine, and what was asked."""

    machine: dict[str, Any]
    model: str
    scale: str
    n_prompt: int
    n_gen: int
    version: str
    runs: list[Run]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A server probed `runs` times: verdicts, and of all runs together the answers compared and how they differ."""

    model: str
    build: str
    runs: int
    verdicts: dict[str, int]
    compared: int
    other: int
    near_ties: int
    died: int


class Trials(msgspec.Struct, frozen=True):
    """All of them."""

    trials: list[Trial]


def soaks(place: str, scale: str, held: bool = False, patched: bool = False) -> list[Soak]:
    """The soaks of a place in the order in which they ran, or those whose server was held up or patched.

    StudyError for a damaged file, which names what makes it anew.
    """
    either = Soak | list[Soak]  # one alone, as long as only the last one was kept
    found = kept.load_any(place, soak_name(scale, held, patched), either, SOAKED) or []
    return found if isinstance(found, list) else [found]


def soak_name(scale: str, held: bool, patched: bool) -> str:
    """The file of one kind of soak."""
    return f"11-{'held' if held else 'soak'}{'-patched' if patched else ''}.{scale}.json"


def crowds(place: str) -> Crowds | None:
    """The loads of a place; None where none were compared."""
    return kept.load(place, CROWD, Crowds, CROWDED)


def beside(place: str, scale: str) -> Beside | None:
    """The runs of a place; None where nothing was compared there."""
    return kept.load(place, BESIDE.format(scale), Beside, INSTALL)


def trials(place: str) -> list[Trial]:
    """The trials of a place; none where none were written down."""
    found = kept.load(place, TRIALS, Trials, "plamo-study server trial")
    return found.trials if found else []
