"""llama-server under concurrent requests: do answers match those of the same prompts alone, and does it survive?

Prompts get greedy answers one at a time, then several at once, in rounds, until all rounds are done or the server has
ended. The server listens on loopback only. Nothing is timed. Timed loads, and the answers of notebook 11 and README,
are those of workloads/serving.py.
"""

import subprocess
import time
from collections.abc import Sequence
from math import isnan
from pathlib import Path

import msgspec

from llama_meter import children, http, paths
from llama_meter.disk import growing
from llama_meter.errors import StudyError
from llama_meter.measure.tolerance import near_tie
from llama_meter.serve import client, load, questions, server
from llama_meter.serve.client import Prompt, Target
from llama_meter.serve.difference import Difference, difference
from llama_meter.serve.server import Server, Setup

ANSWER = 24  # tokens of an answer
PROMPTS = 12  # prompts that are asked alone, and drawn from again in every round
LIKELIEST = 2  # tokens at each place whose log probabilities are asked for
RUN_S = 900  # limit of all rounds
UNLIKE = 1e3  # nats: the gap given where none is known, as where one answer merely ends before the other
RECORD = paths.MEASURED / "reference" / "llama-server.json"


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One run: answers received, how many `differ` from the same prompt alone, and how the server ended.

    `gaps` are the differences in log probability of the two likeliest tokens where a differing answer first diverges.
    `exit` is None for a server that survives; `said` is its assertion.
    """

    build: str
    model: str
    version: str
    slots: int
    at_once: int
    rounds: int
    rounds_done: int
    answers: int
    differ: int
    gaps: list[float]
    exit: int | None
    said: str = ""

    @property
    def near_ties(self) -> int:
        """Differing answers that diverge where the two likeliest tokens are nearly as likely."""
        return sum(near_tie(gap) for gap in self.gaps)

    @property
    def changed(self) -> int:
        """Answers that part from those alone elsewhere."""
        return self.differ - self.near_ties


def serve(
    binary: Path, model: Path, build: str, libraries: Path | None, slots: int, at_once: int, rounds: int
) -> Served:
    """Send prompts to a llama-server alone and together; `libraries`: folder whose libllama it is made to load.

    Raises StudyError when the binary cannot be started or does not begin to listen.
    """
    prompts, version = _prompts(), _version(binary, server.environment("llama-server", libraries))
    # No repacking: the graph is tested, not one processor's kernels.
    setup = Setup("llama-server", model, slots, 1024, 2, libraries=libraries, binary=binary, options=("--no-repack",))
    with server.started(setup) as running:
        target = Target(running.url, usual=questions.OURS["llama-server"])
        done, got = client.over(target, lambda web: _asked(web, target, running, prompts, at_once, rounds))
        ended, said = running.exit, running.assertion()
    gaps = [UNLIKE if isnan(parted.gap) else parted.gap for parted in got if parted]
    return Served(
        build=build, model=model.name, version=version, slots=slots, at_once=at_once, rounds=rounds, rounds_done=done,
        answers=len(got), differ=len(gaps), gaps=gaps, exit=ended, said=said,
    )  # fmt: skip


async def _asked(
    web: http.Client, target: Target, running: Server, prompts: Sequence[Prompt], at_once: int, rounds: int
) -> tuple[int, list[Difference | None]]:
    """Rounds that were done, and where each answer given together parts from its prompt's alone; None: nowhere."""
    alone = [await client.ask(web, target, prompt, top=LIKELIEST) for prompt in prompts]
    if failed := next((answer.failure for answer in alone if answer.failure), ""):
        raise StudyError(target.url, f"asked one at a time, {failed}", "look at the server's own log")
    done, started, got = 0, time.monotonic(), list[Difference | None]()
    for turn in range(rounds):
        asked = [(turn * at_once + i) % len(prompts) for i in range(at_once)]
        loaded = await load.closed(web, target, [prompts[which] for which in asked], at_once)
        pairs = zip(asked, loaded.answers, strict=True)
        got += [difference(alone[which], answer) for which, answer in pairs if not answer.failure]
        if running.ended(1.0) or time.monotonic() - started > RUN_S:
            break
        done += 1
    return done, got


def recorded() -> list[Served]:
    """The runs of the reference machine; none where none were recorded."""
    return msgspec.json.decode(RECORD.read_bytes(), type=list[Served]) if RECORD.exists() else []


def record(runs: Sequence[Served]) -> None:
    """Keep runs as the reference machine's, in place of those of the same build, model, slots and number at once."""
    key = lambda run: (run.build, run.model, run.slots, run.at_once)  # noqa: E731 # said once, used twice
    by_key = {key(run): run for run in [*recorded(), *runs]}
    with growing(RECORD) as partial:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(list(by_key.values())), indent=1) + b"\n")


def _prompts() -> list[Prompt]:
    """Texts of 600 to 1,200 characters from the held-out corpus."""
    text = (paths.DATA / "corpus" / "python-heldout.txt").read_text(encoding="utf-8")
    return [Prompt(str(i), text[4000 * i : 4000 * i + 600 + 50 * i], ANSWER) for i in range(PROMPTS)]


def _version(binary: Path, environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            [binary.absolute(), "--version"], env=environment, cwd=children.NOWHERE, capture_output=True, text=True,
            timeout=server.START_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StudyError(str(binary), f"cannot be run ({error})", "name a llama-server binary") from None
    return next((line for line in (done.stderr + done.stdout).splitlines() if "version" in line), "unknown")
