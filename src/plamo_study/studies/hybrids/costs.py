"""What a kept state costs: the bytes that a context takes more for it, and the time of steps and of drafts.

Two contexts on one file, one of which keeps states, are timed in turns in one process: whatever else the machine does
meets both.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from plamo_study.engine.session import Session, SessionConfig
from plamo_study.measure import watch
from plamo_study.studies.hybrids.catalogue import N_CTX

SLOTS = 64  # of the contexts that are weighed: the engine's log rounds to a hundredth of a MiB
PROMPT, CALLS, ROUNDS = 24, 16, 12  # tokens; timed calls of a context in a turn, and turns
SIZE = re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB")
MIB = 1 << 20


def bytes_each(path: Path, number: int, config: SessionConfig, log: Sequence[str]) -> float:
    """Bytes that a slot takes more for each of `number` kept states, by the engine's log; 0 where it keeps none."""
    sizes = []
    for kept in (0, number):
        start = len(log)
        with Session(path, replace(config, n_seq_max=SLOTS, n_rs_seq=kept)):
            found = SIZE.findall("".join(log[start:]))
        sizes.append(sum(map(float, found)) * MIB)
    return (sizes[1] - sizes[0]) / (SLOTS * number)


def times(path: Path, number: int, config: SessionConfig, seed: int) -> dict[str, list[float]]:
    """Nanoseconds of calls: "step" of one token, "draft" of one and `number` more, and both in a context that keeps.

    Turns of the two contexts alternate, and so does which of them is first. The first turns are not counted.
    """
    keeping = replace(config, n_rs_seq=number)
    found: dict[str, list[float]] = {f"{what}{kept}": [] for what in ("step", "draft") for kept in ("", " kept")}
    with Session(path, config) as plain, Session(path, keeping) as other:
        tokens = np.random.default_rng(seed).integers(0, plain.n_vocab, N_CTX, dtype=np.int32)
        with watch.timed():
            for turn in range(-1, ROUNDS):
                for what, n in (("step", 1), ("draft", 1 + number)):
                    both = (("", plain), (" kept", other))
                    for kept, session in both if turn % 2 else both[::-1]:
                        spent = _calls(session, tokens, n)
                        if turn >= 0:
                            found[what + kept] += spent
    return found


def _calls(session: Session, tokens: np.ndarray, n: int) -> list[float]:
    """Nanoseconds of calls of `n` tokens each behind a prompt."""
    session.clear()
    session.evaluate([(0, tokens[:PROMPT])])
    spent = []
    for at in range(PROMPT, PROMPT + n * CALLS, n):
        start = time.perf_counter_ns()
        session.evaluate([(0, tokens[at : at + n])])
        spent.append(float(time.perf_counter_ns() - start))
    return spent
