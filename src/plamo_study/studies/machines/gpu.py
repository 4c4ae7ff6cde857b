"""A GPU against its host, and the forecasts made before anything ran on it: times, gains, the score.

On CUDA two builds run beside the released one in the same blocks. `cuda-scan` keeps PLaMo 2's scan on the GPU.
`cuda-launches` launches every kernel separately, without graphs.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from plamo_study import paths
from plamo_study.analysis import stats
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.timing import median_sample, paired_ratio, seconds_by_block
from plamo_study.analysis.usable import model_names, usable
from plamo_study.studies.batch_scaling.analysis import STOCK
from plamo_study.studies.machines.analysis import Studies

FORECASTS = {"CUDA": "gpu-forecast.toml", "MTL": "metal-forecast.toml"}  # by the backend, as the engine names it
HYBRID, ATTENTION = "plamo-2-1b*", "plamo-3-nict-2b*"
RELEASED, SCAN, LAUNCHES = "cuda", "cuda-scan", "cuda-launches"
MIDDLE = 512  # prompt tokens in the findings
OFFLOADED_PROMPT, OFFLOADED_STEPS = 128, 32  # tokens of the cells that are measured at every thread count
ASYMMETRY, BATCHES = "01-phase-asymmetry", "03-batch-scaling"
MS = 1e3


@dataclass(frozen=True)
class Board:
    """What was measured on one machine with a GPU: usable rows of notebook 01's study and of 03's.

    `backend`: one of FORECASTS.
    """

    backend: str
    chip: str
    asymmetry: pd.DataFrame
    batches: pd.DataFrame

    def prompt(self, model: str, tokens: int, build: str = STOCK, gpu: bool = True) -> pd.Series:
        """Seconds of one sequence's prompt by block."""
        found = self._of(self.asymmetry, "prefill", model, build, gpu)
        return seconds_by_block(found[found["n_prompt"] == tokens], median_sample)

    def step(self, model: str, build: str = STOCK, gpu: bool = True) -> pd.Series:
        """Seconds of one sequence's decode step by block: the median of the first ones, which both devices ran."""
        found = self._of(self.asymmetry, "decode", model, build, gpu)
        return seconds_by_block(_first_steps(found, OFFLOADED_STEPS), median_sample)

    def steps(self, model: str, n_seq: int) -> pd.Series:
        """Seconds of a decode step of `n_seq` sequences by block."""
        found = self._of(self.batches, "decode", model, STOCK, gpu=True)
        return seconds_by_block(found[found["n_seq"] == n_seq], median_sample)

    @staticmethod
    def _of(rows: pd.DataFrame, workload: str, model: str, build: str, gpu: bool) -> pd.DataFrame:
        found = rows[(rows["workload"] == workload) & (rows["model"] == model) & (rows["build"] == build)]
        found = found[(found["n_gpu_layers"] != 0) == gpu]
        return found[found["n_threads"] == found["n_threads"].max()].drop_duplicates(
            ["block", "n_seq", "n_prompt"], keep="last"
        )


def _first_steps(found: pd.DataFrame, n: int) -> pd.DataFrame:
    """Decode rows cut to their first `n` steps."""
    return found.assign(samples_ns=[[steps[:n] for steps in samples] for samples in found["samples_ns"]])


def boards(studies: Studies, backend: str = "CUDA") -> list[Board]:
    """Every machine with a GPU of this backend that has rows of notebook 01's study."""
    facts = {name: fact for _, _, known in studies for name, fact in known.items() if _has(fact, backend)}
    found = []
    for machine, fact in facts.items():
        rows = {name: usable(_named(own)) for name, own, _ in studies if (own["machine"] == machine).all()}
        if ASYMMETRY in rows:
            batches = rows.get(BATCHES, rows[ASYMMETRY].iloc[:0])
            found.append(Board(backend, fact["gpus"][0]["chip"], rows[ASYMMETRY], batches))
    return found


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    """Give the released CUDA engine one build name, whether installed or built beside."""
    return rows.assign(build=rows["build"].replace(RELEASED, STOCK))


def _has(fact: dict[str, Any], backend: str) -> bool:
    return any(gpu["name"].startswith(backend) for gpu in fact.get("gpus", ()))


def gains(board: Board) -> pd.DataFrame:
    """`gain` of the GPU over all CPU threads and both times, `cpu` and `gpu` (seconds), per model and phase.

    A prompt of OFFLOADED_PROMPT tokens, and the first OFFLOADED_STEPS decode steps.
    """
    entries = []
    for model in model_names(board.asymmetry[board.asymmetry["n_gpu_layers"] != 0]):
        prompt = (board.prompt(model, OFFLOADED_PROMPT, gpu=gpu) for gpu in (False, True))
        step = (board.step(model, gpu=gpu) for gpu in (False, True))
        for phase, (cpu, gpu) in (("prefill", prompt), ("decode", step)):
            entry: dict[str, Any] = {"model": model, "phase": phase, "gain": paired_ratio(cpu, gpu)}
            entries.append(entry | {"cpu": stats.median(cpu.tolist()), "gpu": stats.median(gpu.tolist())})
    return pd.DataFrame(entries, columns=["model", "phase", "cpu", "gpu", "gain"])


def foretold(backend: str = "CUDA") -> list[dict[str, Any]]:
    """`key`, `unit`, `low`, `high` and `why` of every forecast; on Metal also what the simplest forecasts say."""
    path = paths.DATA / "published" / FORECASTS[backend]
    return list(tomllib.loads(path.read_text(encoding="utf-8"))["forecast"])


def scored(board: Board) -> pd.DataFrame:
    """The forecasts with what was `measured` (estimate in its unit), and `claim`: whether that lies in the range."""
    entries = []
    for forecast in foretold(board.backend):
        measured = MEASURES[forecast["key"]](board)
        entries.append({**forecast, "measured": measured, "claim": measured.within(forecast["low"], forecast["high"])})
    return pd.DataFrame(entries)


def off(scores: pd.DataFrame) -> dict[str, float]:
    """By what factor `scored` forecasts miss in the geometric mean: ours (the range's middle), and the two simplest.

    Only forecasts with simpler ones beside them count, and of these only what was measured.
    """
    known = scores.dropna(subset=["constant"])
    known = known[[each.value > 0 for each in known["measured"]]]
    measured = np.array([each.value for each in known["measured"]])
    said = {"ours": np.sqrt(known["low"] * known["high"])} | {way: known[way] for way in ("constant", "proportional")}
    return {way: float(np.exp(np.abs(np.log(measured / told)).mean())) for way, told in said.items()}


def _ms(seconds: pd.Series) -> Estimate:
    return stats.median((MS * seconds).tolist())


def _against(board: Board, many: int, few: int) -> Estimate:
    return paired_ratio(board.steps(ATTENTION, many), board.steps(ATTENTION, few))


MEASURES: dict[str, Callable[[Board], Estimate]] = {
    "step of PLaMo 2, as released": lambda board: _ms(board.step(HYBRID)),
    "step of PLaMo 2, scan on the GPU": lambda board: _ms(board.step(HYBRID, SCAN)),
    "step of PLaMo 3": lambda board: _ms(board.step(ATTENTION)),
    "prompt of 512, PLaMo 2: gain of a scan on the GPU": lambda board: paired_ratio(
        board.prompt(HYBRID, MIDDLE), board.prompt(HYBRID, MIDDLE, SCAN)
    ),
    "step of PLaMo 3: gain of graphs": lambda board: paired_ratio(
        board.step(ATTENTION, LAUNCHES), board.step(ATTENTION)
    ),
    "step of PLaMo 3: gain of the GPU over the CPU": lambda board: paired_ratio(
        board.step(ATTENTION, gpu=False), board.step(ATTENTION)
    ),
    "prompt of 128, PLaMo 3: gain of the GPU over the CPU": lambda board: paired_ratio(
        board.prompt(ATTENTION, OFFLOADED_PROMPT, gpu=False), board.prompt(ATTENTION, OFFLOADED_PROMPT)
    ),
    "asymmetry of PLaMo 3: tokens a second of a prompt of 512 over those of a step": lambda board: paired_ratio(
        board.step(ATTENTION), board.prompt(ATTENTION, MIDDLE) / MIDDLE
    ),
    "step of 16 sequences of PLaMo 3 against a step of one": lambda board: _against(board, 16, 1),
    "step of 8 sequences of PLaMo 3 against a step of 4": lambda board: _against(board, 8, 4),
    "step of 7 sequences of PLaMo 3 against a step of 8": lambda board: _against(board, 7, 8),
    "step of 6 sequences of PLaMo 3 against a step of 5": lambda board: _against(board, 6, 5),
    "step of 9 sequences of PLaMo 3 against a step of 8": lambda board: _against(board, 9, 8),
    "step of 16 sequences of PLaMo 3 against a step of 9": lambda board: _against(board, 16, 9),
    "step of 32 sequences of PLaMo 3 against a step of 16": lambda board: _against(board, 32, 16),
}
