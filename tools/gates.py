"""Which gate sees which fault: the table of appendix A. `python tools/gates.py` writes A-planted.csv.

Faults are planted in the oracle, since a wrong oracle beside a right engine differs as a wrong engine beside a right
oracle. Checks of the engine against itself have no oracle: for them a copy of the file is changed, where a file can
hold the fault. A fault that begins at a position cannot be planted so; both sides of such a check would have it.
`python tools/gates.py shape` adds full size, in Q8_0, which takes an hour on two cores; mini is F16.
"""

import csv
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from gguf import GGUFReader

from llama_meter import paths
from llama_meter.cells import Gate, Prefill
from llama_meter.engine import library
from llama_meter.engine.nodes import PartSums
from llama_meter.engine.session import Session
from llama_meter.measure import plan, proof, sessions
from llama_meter.measure.tolerance import attention_tolerance, part_tolerance, tolerance
from llama_meter.oracle.compare import agreement
from llama_meter.oracle.faults import FromPosition
from llama_meter.oracle.forward import Oracle
from llama_meter.oracle.judge import judge_at
from llama_meter.oracle.weights import Weights
from llama_meter.workloads import phases
from llama_meter.workloads.phases import draw

OUT = paths.MEASURED / "reference" / "A-planted.csv"
HYBRID, ATTENTION = plan.MODELS
OLD, LEAN, USUAL = "8 tokens, whole", "24 tokens, by parts", "72 tokens, by parts and whole"
PROMPTS = {OLD: 8, LEAN: 24, USUAL: 72}


class Base(Oracle):
    """Rotary base one and a half times too large."""

    def _reach(self, layer: int) -> tuple[int | None, float]:
        window, theta = super()._reach(layer)
        return window, 1.5 * theta


class Half(Oracle):
    """A window of half its size."""

    def _reach(self, layer: int) -> tuple[int | None, float]:
        window, theta = super()._reach(layer)
        return window and window // 2, theta


def since(position: int, skips: bool) -> type[Oracle]:
    """A fault that begins at a position."""
    return type("Since", (FromPosition,), {"since": position, "skips": skips})


def scaled(factor: float) -> Any:
    """Every matrix times a factor."""
    right = Weights.linear
    return patch.object(
        Weights, "linear", lambda self, *args, **named: np.float32(factor) * right(self, *args, **named)
    )


def steps(factor: float) -> Any:
    """The decay of every Mamba head times a factor."""
    right = Weights.array
    own = lambda self, name: right(self, name) * np.float32(factor if name.endswith("ssm_a") else 1)  # noqa: E731
    return patch.object(Weights, "array", own)


FAULTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "none": (Oracle, plan.MODELS),
    "last layer skipped from 1,024 on": (since(1024, True), plan.MODELS),
    "keys rotated otherwise from 1,024 on": (since(1024, False), plan.MODELS),
    "last layer skipped from 4,096 on": (since(4096, True), plan.MODELS),
    "keys rotated otherwise from 4,096 on": (since(4096, False), plan.MODELS),
    "every matrix times 1.02": (scaled(1.02), plan.MODELS),
    "rotary base times 1.5": (Base, plan.MODELS),
    "ssm_a times 1.05": (steps(1.05), (HYBRID,)),
    "window halved": (Half, (ATTENTION,)),
}


@contextmanager
def planted(fault: Any) -> Iterator[type[Oracle]]:
    """The oracle with a fault: a class of its own, or a patch of the weights."""
    if isinstance(fault, type):
        yield fault
    else:
        with fault:
            yield Oracle


def judged(model: str, scale: str) -> Iterator[dict[str, Any]]:
    """A line for each gate and fault: the error, its limit, and whether the gate sees the fault."""
    dtype = plan.DTYPE[scale]
    base = Gate(model=model, scale=scale, dtype=dtype, n_threads=1, flash_attn="on")
    deep = plan.deep_gate(base, (model, scale, dtype))
    path, deepest = plan.model_file(base), f"{deep.n_prompt + deep.n_gen:,} tokens, by parts"
    for gate in (*PROMPTS, deepest):
        n = PROMPTS.get(gate, deep.n_prompt)
        cell = plan.change(base, n_prompt=n, n_gen=0, n_ubatch=32) if gate in PROMPTS else deep
        with Session(path, sessions.config(cell, n + cell.n_gen, n_batch=n)) as session, PartSums(session) as watched:
            tokens = draw(cell, session.n_vocab, 0)[0][0]
            inside = np.arange(n) if gate in PROMPTS else np.linspace(3 * n // 8, n - 1, 24).astype(int)
            at = np.concatenate([inside, np.arange(n, len(tokens))])
            logits, sums = proof._long(watched, tokens, inside), watched.sums()
        for name, (fault, models) in FAULTS.items():
            if model not in models:
                continue
            with planted(fault) as kind:
                oracle = kind(path, "CPU")
                seen = judge_at(oracle, tokens, sums, logits, at)
                whole = agreement(logits, oracle.logits(tokens), tolerance(cell)) if gate in (OLD, USUAL) else None
            attention = [e for i, e in enumerate(seen.parts["mixer"]) if not oracle.is_mamba(i)]
            others = [e for i, e in enumerate(seen.parts["mixer"]) if oracle.is_mamba(i)] + seen.parts["feed-forward"]
            part, error = part_tolerance(cell), max(seen.head, *others)
            of_attention = attention_tolerance(cell, part) if gate == deepest else part
            by_parts = error > part or max(attention) > of_attention
            found = (whole is not None and not whole.ok) or (gate != OLD and by_parts)
            parts, of_parts = ("", "") if gate == OLD else (f"{error:.4g}", f"{max(attention):.4g}")  # not looked at
            yield {
                "model": model,
                "scale": scale,
                "gate": gate,
                "fault": name,
                "parts": parts,
                "attention": of_parts,
                "logits": f"{whole.max_relative_error:.4g}" if whole else "",
                "parts_limit": part,
                "attention_limit": f"{of_attention:.4g}",
                "logits_limit": tolerance(cell) if whole else "",
                "seen": found,
            }


def _times(key: str, factor: float) -> Callable[[GGUFReader], None]:
    """Multiply a number of the header, and the matrices or tensors whose name ends so."""

    def change(file: GGUFReader) -> None:
        for name, field in file.fields.items():
            if name.endswith(key):
                field.parts[-1][0] = field.parts[-1][0] * factor
        for tensor in file.tensors:
            if tensor.name.endswith(key) and (key != ".weight" or len(tensor.shape) > 1):
                tensor.data[:] = tensor.data * np.float32(factor)

    return change


def _skipped(file: GGUFReader) -> None:
    """Let the last layer add nothing."""
    layers = [tensor for tensor in file.tensors if tensor.name.endswith(("post_attention_norm", "post_ffw_norm"))]
    last = max(int(tensor.name.split(".")[1]) for tensor in layers)
    for tensor in layers:
        if tensor.name.startswith(f"blk.{last}."):
            tensor.data[:] = 0


IN_FILES: dict[str, tuple[Callable[[GGUFReader], None] | None, tuple[str, ...]]] = {
    "none": (None, plan.MODELS),
    "last layer skipped everywhere": (_skipped, plan.MODELS),
    "every matrix times 1.02": (_times(".weight", 1.02), plan.MODELS),
    "rotary base times 1.5": (_times(".rope.freq_base", 1.5), plan.MODELS),
    "ssm_a times 1.05": (_times("ssm_a", 1.05), (HYBRID,)),
    "window halved": (_times(".sliding_window", 0.5), (ATTENTION,)),
}


def against_itself(model: str) -> Iterator[dict[str, Any]]:
    """The same for the engine against itself at mini: the gate of other architectures, and a row's second path."""
    n, how = plan.CONSISTENT_TOKENS, {"model": model, "scale": "mini", "dtype": plan.DTYPE["mini"], "n_threads": 1}
    checked = {
        f"{n} tokens, against itself": Gate(judges="consistent", n_prompt=n, **how),
        "2,048 tokens, second path": Prefill(n_prompt=2048, repetitions=1, flash_attn="on", **how),
    }
    for name, (change, models) in IN_FILES.items():
        if model not in models:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(shutil.copy(plan.model_file(checked[f"{n} tokens, against itself"]), folder))
            if change:
                change(GGUFReader(path, "r+"))
            for gate, cell in checked.items():
                measured = phases.run(cell, path, 0, lambda stage: None)
                error = max(v for k, v in measured.checks.items() if k.endswith("_error"))
                yield {
                    "model": model,
                    "scale": "mini",
                    "gate": gate,
                    "fault": name,
                    "parts": "",
                    "attention": "",
                    "logits": f"{error:.4g}",
                    "parts_limit": "",
                    "attention_limit": "",
                    "logits_limit": tolerance(cell),
                    "seen": not measured.valid,
                }


def main() -> None:
    """Write the table."""
    library.capture_log([])
    scales = ("mini", *sys.argv[1:])
    lines = [line for scale in scales for model in plan.MODELS for line in judged(model, scale)]
    lines += [line for model in plan.MODELS for line in against_itself(model)]
    with OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    main()
