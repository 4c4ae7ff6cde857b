"""Amplitudes planted in front of one matrix: does the model stay finite, type by type, in prompt and decode?

In the first Mamba layer the scan's output is a sum of two parts, each proportional to an F32 tensor: the norm of C and
the skip D. Both times a factor make the input of ssm_out larger by that factor and nothing else, and the norm behind
ssm_out takes the factor out again: a model whose arithmetic has the range keeps its logits. Only ssm_out's type
changes. Prompt and decode start from an empty memory, so neither inherits the other's infinities.

Series, one number per amplitude: `amplitude` (asked for), and of each PHASE, prompt and decode, `largest/PHASE`,
`sum16/PHASE`, `sum32/PHASE`, `output/PHASE` (what entered and left ssm_out of that layer), `finite/PHASE` (1: every
logit was finite), `error/PHASE` (relative, of the logits against those before anything was planted, at the worst
token). A backend that holds its sums at the largest number of their type stays finite and is wrong.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf import GGUFReader

from llama_meter.cells import Ranges
from llama_meter.engine import quantizer
from llama_meter.engine.ggml import Tensor
from llama_meter.engine.nodes import InputRanges
from llama_meter.errors import StudyError
from llama_meter.models import casts, recipes
from llama_meter.models.recipes import Recipe
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured
from llama_meter.workloads import range_probe

PLANTED = ("ssm_c_norm", "ssm_d")  # what ssm_out's input is proportional to, together
STEPS = np.logspace(2, 8, 13)  # half decades
BESIDE = 0.01  # amplitudes this far below and above every limit are tried too
Finite = dict[str, float]


def run(cell: Ranges, path: Path, dtype: str, stage: Callable[[str], None]) -> Measured:
    """Plant every amplitude in `path` with ssm_out as `dtype`, one file in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        stage(f"quantize ssm_out to {dtype}")
        file = _quantized(path, Path(folder) / "planted.gguf", dtype)
        layer, planted = _planted(file)
        originals = [values.copy() for values in planted]
        seen, usual = _look(cell, file, layer)
        natural = seen["largest/prompt"]
        series: dict[str, list[float]] = {"amplitude": amplitudes()}
        for amplitude in series["amplitude"]:
            stage(f"amplitude {amplitude:g}")
            for values, original in zip(planted, originals, strict=True):
                values[:] = original * np.float32(amplitude / natural)
            numbers, logits = _look(cell, file, layer)
            numbers |= {f"error/{phase}": relative_error(logits[phase], usual[phase]) for phase in logits}
            for name, value in numbers.items():
                series.setdefault(name, []).append(value)
    n = (len(series["amplitude"]) + 1) * 2 * cell.n_prompt
    checks: dict[str, float | bool] = {"natural": natural, "layer": float(layer)}
    return Measured(series=series, checks=checks, valid=True, n_evaluated=n)


class OneProduct(InputRanges):
    """Looks at the product with one layer's ssm_out only."""

    layer = 0

    def wanted(self, node: Tensor) -> bool:
        """That product, by its node's name: names cost less to compare than operations and sources."""
        return bool(node.name == f"mamba_out_proj-{self.layer}".encode())


def amplitudes() -> list[float]:
    """Half decades from 1e2 to 1e8, and a point on either side of every limit on the largest input."""
    limits = {cast.limit for cast in casts.load() if cast.of == "largest" and np.isfinite(cast.limit)}
    return sorted([*STEPS.tolist(), *(limit * (1 + side) for limit in limits for side in (-BESIDE, BESIDE))])


def _quantized(source: Path, out: Path, dtype: str) -> Path:
    file_type, patterns, metadata = recipes.quantizer_arguments(Recipe("F16", (("ssm_out", dtype),)))
    quantizer.quantize(source, out, file_type, patterns, metadata, requantize=True, n_threads=1)
    return out


def _planted(path: Path) -> tuple[int, list[np.ndarray]]:
    """The first Mamba layer, and its planted tensors: views that write to the file."""
    named = {t.name.removesuffix(".weight"): t.data for t in GGUFReader(path, "r+").tensors}
    layers = sorted(int(name.split(".")[1]) for name in named if name.endswith(".ssm_out"))
    if not layers:
        raise StudyError(str(path), "has no Mamba layer to plant in", "name a PLaMo 2 model")
    return layers[0], [named[f"blk.{layers[0]}.{kind}"] for kind in PLANTED]


def _look(cell: Ranges, path: Path, layer: int) -> tuple[Finite, dict[str, np.ndarray]]:
    """The cell's tokens as one prompt and, from an empty memory, one by one: ssm_out's numbers, whether all logits
    were finite, and these by phase, (tokens, n_vocab)."""
    numbers: Finite = {}
    logits: dict[str, np.ndarray] = {}
    with OneProduct(path, range_probe.session_config(msgspec.structs.replace(cell, n_gen=0))) as model:
        model.layer = layer
        tokens = range_probe.tokens_of(cell, model)[: cell.n_prompt]
        for phase, size in (("prompt", len(tokens)), ("decode", 1)):
            model.clear()
            model.phase = phase
            pieces = np.split(tokens, range(size, len(tokens), size))
            logits[phase] = np.concatenate([model.prefill({0: piece}, every=True)[0] for piece in pieces])
            finite = bool(np.isfinite(logits[phase]).all())
            numbers |= _numbers(model.found[phase, "ssm_out", layer], phase) | {f"finite/{phase}": float(finite)}
    return numbers, logits


def _numbers(seen: Any, phase: str) -> Finite:
    sums = {f"sum{n}/{phase}": value for n, value in seen.sums.items()}
    return {f"largest/{phase}": seen.largest, f"output/{phase}": seen.output} | sums
