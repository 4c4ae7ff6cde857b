"""The numeric range of a model's activations: what enters every matrix product, in prompt and decode, and at what cost.

A cell labelled `planted TYPE` makes ssm_out's input larger step by step instead: measure/planting.py. Nothing is
judged here: which number survives which backend's cast, casts.py knows.

Series, one number per layer: `layers/KIND` and `types/KIND` (ggml's number), and for each PHASE, prompt and decode,
`largest/PHASE/KIND`, `sum16/...`, `sum32/...`, `output/...` and `not_finite/...` (engine/ranges.py says what they
are). `off_ns` and `on_ns`: prompt and decode time of each repetition without and with the probe, in turn.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from gguf import GGMLQuantizationType

from plamo_study.errors import StudyError
from plamo_study.limits import FIRST_TOKEN
from plamo_study.measure import machine, worker
from plamo_study.measure.cells import ROTATION, Ranges
from plamo_study.measure.process import work
from plamo_study.measure.rows import Measured
from plamo_study.models import casts

TIME_S, BYTES_PER_S, TOKENS_PER_S = 120.0, 50e6, 2.0  # time limit of a file's probe: start, reading it, evaluating
PLANTED = "planted "
SHORTEST = 4  # tokens that a text has at least

clock = time.perf_counter_ns


class Probing(msgspec.Struct, frozen=True, kw_only=True):
    """A file to probe with a text, on the engine's backend (`n_gpu_layers` < 0) or the CPU (0)."""

    path: str
    text: str
    n_prompt: int
    n_gen: int
    n_gpu_layers: int = 0
    n_threads: int = 0  # 0: one per performance core


def run(cell: Ranges, path: Path, stage: Callable[[str], None]) -> Measured:
    """Probe one file over the cell's text (random tokens where it names none), plant amplitudes in it, or have it lose
    its rotation."""
    from plamo_study.engine import library
    from plamo_study.measure import planting, rotation

    library.capture_log([])
    if cell.mode == ROTATION:
        return rotation.run(cell, stage)
    if cell.mode.startswith(PLANTED):
        return planting.run(cell, path, cell.mode.removeprefix(PLANTED), stage)
    return _probe(cell, path, stage)


def probe_file(
    path: Path, text: Path, n_prompt: int = 512, n_gen: int = 32, n_gpu_layers: int = 0, n_threads: int = 0
) -> Measured:
    """Probe a file over at most so many tokens of a text in a process of its own; a short text is taken whole.

    Raises StudyError when the engine refuses, crashes or hangs, and for a text that does not do.
    """
    from plamo_study.measure import texts

    if not path.is_file():
        raise StudyError(str(path), "no such file", "plamo-study models list")
    if n_prompt < 1 or n_gen < 0:
        raise StudyError(f"{n_prompt} + {n_gen} tokens", "a text has a prompt", "--n-prompt 512 --n-gen 32")
    longest = len(texts.read(text)) + 1  # a token has a byte at least, but for the one before the first
    n_prompt, n_gen = min(n_prompt, longest), min(n_gen, longest)
    job = Probing(
        path=str(path.resolve()),
        text=str(text),
        n_prompt=n_prompt,
        n_gen=n_gen,
        n_gpu_layers=n_gpu_layers,
        n_threads=n_threads,
    )
    seconds = TIME_S + path.stat().st_size / BYTES_PER_S + (n_prompt + n_gen) / TOKENS_PER_S
    outcome = work(job, seconds, worker=__name__)
    if outcome.failure is not None:
        why = outcome.failure.why
        mend = f"plamo-study models check {path}"
        raise StudyError(str(path), f"cannot be probed ({outcome.failure.stage}: {why})", mend)
    return outcome.measured


def main() -> None:
    """Probe the one file that the job on stdin names."""
    worker.serve(Probing, _probe_job)


def _probe_job(job: Probing) -> Measured:
    from plamo_study.engine import library

    library.capture_log([])
    threads = job.n_threads or machine.performance_cores()
    cell = Ranges(n_prompt=job.n_prompt, n_gen=job.n_gen, text=job.text, n_threads=threads)
    cell = msgspec.structs.replace(cell, n_gpu_layers=job.n_gpu_layers, flash_attn="off")  # which hides kqv
    return _probe(cell, Path(job.path), worker.stage, whole=True)


def _probe(cell: Ranges, path: Path, stage: Callable[[str], None], whole: bool = False) -> Measured:
    """`whole`: a text shorter than the cell asks for is taken whole, and decode goes on with its beginning."""
    from plamo_study.engine.ranges import InputRanges

    start = clock()
    config = session_config(cell)
    with InputRanges(path, config) as watched, InputRanges(path, config, watch=False) as plain:
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
    return Measured(
        checks=checks,
        series=series,
        valid=checks["same_logits"] is True,
        n_evaluated=2 * cell.repetitions * len(tokens),
        load_ns=load_ns,
    )


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


def session_config(cell: Ranges) -> Any:
    """The cell's context of one sequence; a prompt is one micro-batch, so that a product sees all of it."""
    from plamo_study.measure import sessions

    return sessions.config(cell, cell.n_prompt + cell.n_gen, n_ubatch=max(cell.n_ubatch, 1))


def as_series(found: Any) -> dict[str, list[float]]:
    """What `InputRanges.found` holds, as named lists of numbers by layer."""
    series: dict[str, list[float]] = {}
    for (phase, kind, layer), seen in sorted(found.items()):
        if float(layer) not in series.setdefault(f"layers/{kind}", []):
            series[f"layers/{kind}"].append(float(layer))
            series.setdefault(f"types/{kind}", []).append(float(seen.weight_type))
        numbers = {"largest": seen.largest, "output": seen.output, "not_finite": float(seen.not_finite)}
        numbers |= {f"sum{n}": value for n, value in seen.sums.items()}
        for name, value in numbers.items():
            series.setdefault(f"{name}/{phase}/{kind}", []).append(value)
    return series


def worst(found: Any, backends: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Per backend the product of `InputRanges.found` that comes closest to a limit, or passes it furthest.

    Columns: kind, layer, dtype, path, cast, of, number, limit, factor, fits. A prompt's numbers are held against both
    paths, because its last few tokens can be few enough for vector kernels.
    """
    closest: dict[str, dict[str, Any]] = {}
    for (phase, kind, layer), seen in found.items():
        numbers = {"largest": seen.largest, "output": seen.output}
        numbers |= {f"sum of {n}": value for n, value in seen.sums.items()}
        dtype = casts.met(kind, GGMLQuantizationType(seen.weight_type).name)
        for backend in backends:
            for path in casts.PATHS if phase == "prompt" else ("mat-vec",):
                verdict = casts.verdict(backend, dtype, path, numbers)
                if verdict and verdict.factor > closest.get(backend, {"factor": 0.0})["factor"]:
                    place = {
                        "kind": kind,
                        "layer": layer,
                        "dtype": dtype,
                        "path": path,
                        "number": numbers[verdict.cast.of],
                    }
                    limit = {"cast": verdict.cast.cast, "of": verdict.cast.of, "limit": verdict.cast.limit}
                    closest[backend] = place | limit | {"factor": verdict.factor, "fits": verdict.fits}
    return closest


def tokens_of(cell: Ranges, model: Any, shortest: int = 0) -> np.ndarray:
    """The cell's prompt and what is decoded after it, (n_prompt + n_gen,) token ids or as many as its text has.

    StudyError when that is fewer than `shortest`.
    """
    n = cell.n_prompt + cell.n_gen
    if not cell.text:
        return np.random.default_rng(cell.seed).integers(FIRST_TOKEN, model.n_vocab, n, dtype=np.int32)
    from plamo_study.measure import texts

    text = texts.planned(cell.text, cell.text_sha256)
    tokens: np.ndarray = model.tokenize(text)[:n]
    if len(tokens) < shortest:
        why = f"is {len(tokens)} tokens long, {shortest} are asked for"
        raise StudyError(f"text {cell.text!r}", why, "give a longer text")
    return tokens


def _evaluate(model: Any, tokens: np.ndarray, n_prompt: int) -> tuple[list[int], np.ndarray]:
    """Prompt in one call, the rest one by one: nanoseconds of both, and the logits after each call."""
    model.clear()
    model.phase, start = "prompt", clock()
    model.evaluate(tokens[:n_prompt], every=False)
    prompt, logits = clock() - start, [model.logits()]
    model.phase, start = "decode", clock()
    for i in range(n_prompt, len(tokens)):
        model.evaluate(tokens[i : i + 1])
        logits.append(model.logits())
    return [prompt, clock() - start], np.concatenate(logits)


if __name__ == "__main__":
    main()
