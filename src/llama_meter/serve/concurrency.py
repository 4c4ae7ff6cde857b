"""llama-server under concurrent requests: do answers match those of the same prompts alone, and does it survive?

Prompts get greedy answers one at a time, then several at once, in rounds, until all rounds are done or the server has
ended. The server listens on loopback only. Nothing is timed. Timed loads, and the answers of notebook 11 and README,
are those of workloads/serving.py.
"""

import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from llama_meter import children, paths
from llama_meter.disk import growing
from llama_meter.errors import StudyError
from llama_meter.measure.tolerance import near_tie
from llama_meter.serve import server
from llama_meter.serve.server import Setup

if TYPE_CHECKING:
    import httpx2

ANSWER = 24  # tokens of an answer
PROMPTS = 12  # prompts that are asked alone, and drawn from again in every round
REQUEST_S, RUN_S = 120, 900  # limits: one answer, all rounds
UNLIKE = 1e3  # nats: the gap given where one answer merely ends before the other
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
    import httpx2  # its import takes 0.2 s, and `plamo-study --help` reaches this module

    prompts = _prompts()
    version = _version(binary, server.environment("llama-server", libraries))
    # No repacking: the graph is tested, not one processor's kernels.
    setup = Setup("llama-server", model, slots, 1024, 2, libraries=libraries, binary=binary, options=("--no-repack",))
    with (
        server.started(setup) as running,
        httpx2.Client(base_url=running.url, trust_env=False, timeout=REQUEST_S) as web,
    ):
        alone = [_answer(web, prompt) for prompt in prompts]
        if any(answer is None for answer in alone):
            raise StudyError(str(binary), "ended while prompts were asked one at a time", "look at its own log")
        done, differing, parted = 0, 0, []
        answers, started = 0, time.monotonic()
        with ThreadPoolExecutor(at_once) as pool:
            for turn in range(rounds):
                asked = [(turn * at_once + i) % len(prompts) for i in range(at_once)]
                for which, answer in zip(asked, pool.map(lambda i: _answer(web, prompts[i]), asked), strict=True):
                    if answer is not None:
                        answers += 1
                        gap = _gap(alone[which] or {}, answer)
                        differing += gap is not None
                        parted += [gap] if gap is not None else []
                if running.ended(1.0) or time.monotonic() - started > RUN_S:
                    break
                done += 1
        ended = running.exit
        said = running.assertion()
    return Served(
        build=build, model=model.name, version=version, slots=slots, at_once=at_once, rounds=rounds, rounds_done=done,
        answers=answers, differ=differing, gaps=parted, exit=ended, said=said,
    )  # fmt: skip


def recorded() -> list[Served]:
    """The runs of the reference machine; none where none were recorded."""
    return msgspec.json.decode(RECORD.read_bytes(), type=list[Served]) if RECORD.exists() else []


def record(runs: Sequence[Served]) -> None:
    """Keep runs as the reference machine's, in place of those of the same build, model, slots and number at once."""
    key = lambda run: (run.build, run.model, run.slots, run.at_once)  # noqa: E731 # said once, used twice
    kept = {key(run): run for run in [*recorded(), *runs]}
    with growing(RECORD) as partial:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(list(kept.values())), indent=1) + b"\n")


def _prompts() -> list[str]:
    """Texts of 600 to 1,200 characters from the held-out corpus."""
    text = (paths.DATA / "corpus" / "python-heldout.txt").read_text(encoding="utf-8")
    return [text[4000 * i : 4000 * i + 600 + 50 * i] for i in range(PROMPTS)]


def _version(binary: Path, environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            [binary.absolute(), "--version"], env=environment, cwd=children.NOWHERE, capture_output=True, text=True,
            timeout=server.START_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StudyError(str(binary), f"cannot be run ({error})", "name a llama-server binary") from None
    return next((line for line in (done.stderr + done.stdout).splitlines() if "version" in line), "unknown")


def _answer(web: "httpx2.Client", prompt: str) -> dict[str, Any] | None:
    """The greedy answer with its tokens and, at each, the two likeliest; None when the server has gone."""
    import httpx2  # as above

    wanted = {
        "prompt": prompt, "n_predict": ANSWER, "temperature": 0, "cache_prompt": False, "return_tokens": True,
        "n_probs": 2, "ignore_eos": True,
    }  # fmt: skip
    try:
        reply = web.post("/completion", json=wanted).raise_for_status()
        return dict(reply.json())
    except (httpx2.HTTPError, ValueError):
        return None


def _gap(alone: dict[str, Any], answer: dict[str, Any]) -> float | None:
    """Nats between the likeliest two tokens, alone, where two answers first diverge; None where they agree."""
    first, second = alone["tokens"], answer["tokens"]
    at = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return None if len(first) == len(second) else UNLIKE
    top = alone["completion_probabilities"][at]["top_logprobs"]
    return float(top[0]["logprob"] - top[1]["logprob"])
