"""The few numbers that the argument needs, each from the rows of the study that measured it.

Frames and facts in, estimates out. One model carries the story: the first one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import roofline
from plamo_study.analysis.files import files
from plamo_study.analysis.own_ceilings import usual_limits
from plamo_study.analysis.roofline import Ceilings, Model
from plamo_study.analysis.stats import Estimate
from plamo_study.measure import serving
from plamo_study.measure.plan import MODELS
from plamo_study.measure.recording import Recording
from plamo_study.present import sentences
from plamo_study.studies.batch_scaling import analysis as batch_scaling, show as show_batches
from plamo_study.studies.disaggregation import sizes
from plamo_study.studies.phase_asymmetry import analysis as phase_asymmetry
from plamo_study.studies.quantization import analysis as quantization

PROMPT, ANSWER = 512, 64  # tokens of the request that is drawn
TOGETHER = 8  # answers at once
FEWER_BITS = "Q4_0"
TYPES = ("F16", "Q8_0", FEWER_BITS)
CONTEXTS = (128, 512, 2048, 8192, 16384)


@dataclass(frozen=True)
class Mystery:
    """Tokens per second read and written by one model alone, and how many times as fast reading is."""

    model: str
    read: Estimate
    write: Estimate
    ratio: Estimate


def mystery(phases: Recording) -> Mystery:
    """The two numbers: a prompt of PROMPT tokens, and a long answer."""
    rows = phases.rows
    first = phase_asymmetry.asymmetry(rows, PROMPT).iloc[0]
    fast, slow = phase_asymmetry.prefill(rows), phase_asymmetry.decode(rows, (512,))
    read = fast[(fast["model"] == first["model"]) & (fast["n_prompt"] == PROMPT)]["rate"].iloc[0]
    write = slow[slow["model"] == first["model"]]["rate"].iloc[0]
    return Mystery(str(first["model"]), read, write, first["ratio"])


def request(phases: Recording) -> pd.DataFrame:
    """The calls of one request: `call`, `begin` and `end` (s), `tokens` in it."""
    known = mystery(phases)
    prompt, step = PROMPT / known.read.value, 1 / known.write.value
    entries = [{"call": "read the prompt", "begin": 0.0, "end": prompt, "tokens": PROMPT}]
    begins = prompt + step * np.arange(ANSWER)
    entries += [{"call": "write a token", "begin": float(at), "end": float(at + step), "tokens": 1} for at in begins]
    return pd.DataFrame(entries)


def of_first(phases: Recording) -> tuple[Model, Ceilings]:
    """The first model's file, and what this machine usually reads and multiplies per second beside it."""
    known = files(phases.rows, phases.facts)
    model = next(fact for (name, _), fact in known.items() if name == mystery(phases).model)
    return model, usual_limits(phases.rows, model)


@dataclass(frozen=True)
class Token:
    """What a call of one token needs, and seconds that this machine usually takes for each of the two."""

    weights: int  # bytes fetched
    flops: float
    ceilings: Ceilings

    @property
    def fetching(self) -> float:
        """Seconds for the weights."""
        return self.weights / self.ceilings.read

    @property
    def multiplying(self) -> float:
        """Seconds for the operations."""
        return self.flops / self.ceilings.matmul


def token(phases: Recording) -> Token:
    """Of the first model."""
    model, ceilings = of_first(phases)
    return Token(roofline.weight_bytes(model), roofline.decode_flops(model, 0), ceilings)


def prompt(phases: Recording) -> float:
    """Seconds that multiplying takes at least for a prompt of PROMPT tokens."""
    model, ceilings = of_first(phases)
    return roofline.prefill_flops(model, PROMPT) / ceilings.matmul


def calls(phases: Recording, batches: Recording) -> pd.DataFrame:
    """Seconds of a call against the tokens in it: `tokens`, `seconds` (estimate), `what`."""
    name = mystery(phases).model
    prompts = phase_asymmetry.prefill(phases.rows)
    entries = [
        {"tokens": int(row["n_prompt"]), "seconds": row["rate"].per(row["n_prompt"]), "what": "a prompt"}
        for row in prompts[prompts["model"] == name].to_dict("records")
    ]
    steps = show_batches.stock(batch_scaling.scaling(batches.rows))
    entries += [
        {"tokens": int(row["n_seq"]), "seconds": row["step"], "what": "a token each of several answers"}
        for row in steps[steps["model"] == name].to_dict("records")
    ]
    return pd.DataFrame(entries)


def allowed(phases: Recording, most: int = 2048) -> pd.DataFrame:
    """What a call of so many tokens takes at least: `tokens`, `seconds`, `what` limits it."""
    model, ceilings = of_first(phases)
    tokens = np.unique(np.geomspace(1, most, 40).round().astype(int))
    fetching = token(phases).fetching
    entries = [{"tokens": int(n), "seconds": fetching, "what": "fetching the weights once"} for n in tokens]
    entries += [
        {"tokens": int(n), "seconds": roofline.prefill_flops(model, int(n)) / ceilings.matmul, "what": "multiplying"}
        for n in tokens
    ]
    return pd.DataFrame(entries)


def bits(types: Recording) -> pd.DataFrame:
    """By type of weights: `dtype`, `smaller` than F16, and how many times as fast each `phase` is (`ratio`)."""
    model = MODELS[0] + "*"
    smaller = quantization.sizes(files(types.rows, types.facts)).set_index(["model", "dtype"])["smaller"]
    entries = []
    for dtype in TYPES:
        for phase, said in (("prefill", "reading"), ("decode", "writing")):
            ratio = quantization.ratio(types.rows, phase, model, dtype, TYPES[0])
            if ratio is not None:
                entry = {"dtype": dtype, "phase": said, "ratio": ratio, "smaller": smaller[model, dtype]}
                entries.append(entry)
    return pd.DataFrame(entries)


def batch(batches: Recording) -> pd.DataFrame:
    """Tokens per second of all answers together, by how many there are: `model`, `n_seq`, `rate`, `factor` over one."""
    found = show_batches.stock(batch_scaling.scaling(batches.rows))
    return found[found["model"] == MODELS[0] + "*"]


def kept(phases: Recording) -> pd.DataFrame:
    """What is kept of a conversation: `model`, `tokens`, `part`, `mb`."""
    entries = []
    for (name, _), fact in files(phases.rows, phases.facts).items():
        for n in CONTEXTS:
            size = sizes.size(fact["shape"], n, "f16", "f16")
            parts = {"state": size.recurrent, "cache": size.full + size.sliding}
            entries += [
                {"model": name, "tokens": n, "part": part, "mb": n_bytes / 1e6} for part, n_bytes in parts.items()
            ]
    return pd.DataFrame(entries)


def served(at_once: int = 2, build: str = "stock") -> serving.Served:
    """What a server did to so many users of the first model at once, on a build of the engine."""
    runs = (run for run in serving.recorded() if run.at_once == at_once and run.model.startswith(MODELS[0]))
    return next(run for run in runs if run.build == build)


def score(guesses: dict[str, tuple[float, Estimate | float]]) -> pd.DataFrame:
    """Each guess beside what was measured: `what`, `guess`, `measured`, `off` (a factor), and whether it is `close`."""
    entries: list[dict[str, Any]] = []
    for what, (guess, measured) in guesses.items():
        value = measured.value if isinstance(measured, Estimate) else measured
        off = max(guess / value, value / guess) if guess > 0 and value > 0 else float("nan" if guess != value else 1)
        entries.append(
            {"what": what, "guess": guess, "measured": measured, "off": off, "close": off <= sentences.CLOSE}
        )
    return pd.DataFrame(entries)
