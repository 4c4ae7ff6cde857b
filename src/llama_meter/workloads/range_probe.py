"""The numeric range of a model's activations: what enters every matrix product, in prompt and decode, and at what cost.

Nothing is judged here: which number survives which backend's cast, casts.py knows.

Series, one number per layer: `layers/KIND` and `types/KIND` (ggml's number), and for each PHASE, prompt and decode,
`largest/PHASE/KIND`, `sum16/...`, `sum32/...`, `output/...` and `not_finite/...` (engine/nodes.py says what they
are). `off_ns` and `on_ns`: prompt and decode time of each repetition without and with the probe, in turn.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from llama_meter.cells import Ranges
from llama_meter.engine import library
from llama_meter.engine.nodes import InputRanges
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.errors import StudyError
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import sessions, texts
from llama_meter.rows import Measured

SHORTEST = 4  # tokens that a text has at least

clock = time.perf_counter_ns


def probe(cell: Ranges, path: Path, stage: Callable[[str], None], whole: bool = False) -> Measured:
    """`whole`: a text shorter than the cell asks for is taken whole, and decode goes on with its beginning."""
    start = clock()
    config = session_config(cell)
    with InputRanges(path, config) as watched, Session(path, config) as plain:
        load_ns = clock() - start
        tokens = tokens_of(cell, watched, shortest=SHORTEST if whole else cell.n_prompt + cell.n_gen)
        n_prompt = min(cell.n_prompt, len(tokens))
        tokens = np.concatenate([tokens, tokens])[: n_prompt + cell.n_gen]
        times: dict[str, list[list[int]]] = {"off": [], "on": []}
        logits: dict[str, np.ndarray] = {}
        for repetition in range(cell.repetitions):
            stage(f"repetition {repetition}")
            for name, model in (("off", plain), ("on", watched)):
                spent, logits[name] = _evaluate(model, tokens, n_prompt)
                times[name].append(spent)
        series = as_series(watched.found)
        series |= {f"{name}_ns": [float(ns) for spent in values for ns in spent] for name, values in times.items()}
    checks = _checks(times, logits)
    same, n_evaluated = checks["same_logits"] is True, 2 * cell.repetitions * len(tokens)
    return Measured(checks=checks, series=series, valid=same, n_evaluated=n_evaluated, load_ns=load_ns)


def _checks(times: dict[str, list[list[int]]], logits: dict[str, np.ndarray]) -> dict[str, float | bool]:
    """What the probe changes (nothing) and costs: time with it over time without it, medians over repetitions."""
    middle = {name: [median(spent) for spent in zip(*values, strict=True)] for name, values in times.items()}
    prompt, decode = (on / off for on, off in zip(middle["on"], middle["off"], strict=True))
    return {
        "same_logits": bool(np.array_equal(logits["off"], logits["on"], equal_nan=True)),
        "overhead_prompt": prompt,
        "overhead_decode": decode,
        "not_finite_logits": float(np.size(logits["on"]) - np.isfinite(logits["on"]).sum()),
    }


def session_config(cell: Ranges) -> SessionConfig:
    """The cell's context of one sequence; a prompt is one call and micro-batch, so that a product sees all of it."""
    size = cell.n_prompt + cell.n_gen
    return sessions.config(cell, size, n_batch=size, n_ubatch=max(cell.n_ubatch, 1))


def as_series(ranges: Any) -> dict[str, list[float]]:
    """What `InputRanges.found` holds, as named lists of numbers by layer."""
    series: dict[str, list[float]] = {}
    for (phase, kind, layer), seen in sorted(ranges.items()):
        if float(layer) not in series.setdefault(f"layers/{kind}", []):
            series[f"layers/{kind}"].append(float(layer))
            series.setdefault(f"types/{kind}", []).append(float(seen.weight_type))
        numbers = {"largest": seen.largest, "output": seen.output, "not_finite": float(seen.not_finite)}
        numbers |= {f"sum{n}": value for n, value in seen.sums.items()}
        for name, value in numbers.items():
            series.setdefault(f"{name}/{phase}/{kind}", []).append(value)
    return series


def tokens_of(cell: Ranges, model: Session, shortest: int = 0) -> np.ndarray:
    """The cell's prompt and what is decoded after it, (n_prompt + n_gen,) token ids or as many as its text has.

    StudyError when that is fewer than `shortest`.
    """
    n = cell.n_prompt + cell.n_gen
    if not cell.text:
        return np.random.default_rng(cell.seed).integers(FIRST_TOKEN, model.n_vocab, n, dtype=np.int32)
    text = texts.planned(cell.text, cell.text_sha256)
    tokens: np.ndarray = model.tokenize(texts.beginning(text, n))[:n]
    if len(tokens) < shortest:
        why = f"is {len(tokens)} tokens long, {shortest} are asked for"
        raise StudyError(f"text {cell.text!r}", why, "give a longer text")
    return tokens


def _evaluate(model: Session, tokens: np.ndarray, n_prompt: int) -> tuple[list[int], np.ndarray]:
    """Prompt in one call, the rest one by one: nanoseconds of both, and the logits after each call."""
    model.clear()
    if isinstance(model, InputRanges):
        model.phase = "prompt"
    start = clock()
    rows = [model.prefill({0: tokens[:n_prompt]})[0][0]]
    prompt = clock() - start
    if isinstance(model, InputRanges):
        model.phase = "decode"
    start = clock()
    for token in tokens[n_prompt:].tolist():
        model.decode({0: token})
        rows.append(model.logits())
    return [prompt, clock() - start], np.stack(rows)


def _probe_file(cell: Ranges, path: Path, stage: Callable[[str], None]) -> Measured:
    library.capture_log([])
    return probe(cell, path, stage, whole=True)


RUNS = {Ranges: _probe_file}
