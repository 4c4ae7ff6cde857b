"""A GPU against its host, and the forecasts made before anything ran on it: times, gains, the score.

On CUDA two builds run beside the released one in the same blocks. `cuda-scan` keeps PLaMo 2's scan on the GPU.
`cuda-launches` launches every kernel separately, without graphs.

What Metal's kernels do is read in the locked engine's source; `metal-forecast.toml` names the lines.
"""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import paths, stats
from llama_meter.stats import Estimate
from plamo_study.laws.builds import full_chunks
from plamo_study.laws.context import samples
from plamo_study.laws.machines import Studies
from plamo_study.read import results
from plamo_study.read.frame import unstarred
from plamo_study.read.processors import device
from plamo_study.read.usable import STOCK, usable
from plamo_study.stats.estimates import median_sample, paired_ratio, seconds_by_block

FORECASTS = {"CUDA": "gpu-forecast.toml", "MTL": "metal-forecast.toml"}  # by the backend, as the engine names it
HYBRID, ATTENTION = "plamo-2-1b", "plamo-3-nict-2b"  # released, or of their size: with a star
SCAN, LAUNCHES = "cuda-scan", "cuda-launches"
MIDDLE = 512  # prompt tokens in the findings
OFFLOADED_PROMPT, OFFLOADED_STEPS = 128, 32  # tokens of the cells that are measured at every thread count
ASYMMETRY, BATCHES, CHUNKS, CACHES = "01-phase-asymmetry", "03-batch-scaling", "06-tiles", "05-memory"
MS = 1e3

# Metal's kernels, each with its place under llama.cpp/ggml/src
GROUPS = {2: (2,), 3: (3,), 4: (4,), 5: (5,), 6: (3, 3), 7: (4, 4), 8: (4, 4)}  # ggml-metal/ggml-metal-ops.cpp:2506
TILE = 32  # columns: ggml-metal/ggml-metal-device.cpp:846; 128 with tensor units (840)


@dataclass(frozen=True)
class Board:
    """What was measured on one machine with a GPU: usable rows of notebook 01's study, and of others it has.

    `backend`: one of FORECASTS. `gates`: of all its studies, passed or not. `tensor`: whether tensor units are used.
    """

    backend: str
    chip: str
    tensor: bool
    gates: pd.DataFrame
    asymmetry: pd.DataFrame
    batches: pd.DataFrame
    chunks: pd.DataFrame
    caches: pd.DataFrame

    def prompt(self, model: str, tokens: int, build: str = STOCK, gpu: bool = True) -> pd.Series:
        """Seconds of one sequence's prompt by block."""
        prefills = self._of(self.asymmetry, "prefill", model, build, gpu)
        return seconds_by_block(prefills[prefills["n_prompt"] == tokens], median_sample)

    def step(self, model: str, build: str = STOCK, gpu: bool = True) -> pd.Series:
        """Seconds of one sequence's decode step by block: the median of the first ones, which both devices ran."""
        decodes = self._of(self.asymmetry, "decode", model, build, gpu)
        return seconds_by_block(_first_steps(decodes, OFFLOADED_STEPS), median_sample)

    def steps(self, model: str, n_seq: int) -> pd.Series:
        """Seconds of a decode step of `n_seq` sequences by block."""
        decodes = self._of(self.batches, "decode", model, STOCK, gpu=True)
        return seconds_by_block(decodes[decodes["n_seq"] == n_seq], median_sample)

    def chunk(self, tokens: int) -> pd.Series:
        """Seconds of a call with `tokens` of one prompt of PLaMo 3 by block; none decodes meanwhile."""
        offloaded = self.chunks[self.chunks["n_gpu_layers"] != 0]
        return full_chunks(offloaded.assign(model=offloaded["model"].map(unstarred))).get(
            (ATTENTION, STOCK, tokens), pd.Series(dtype=float)
        )

    def deepest(self, phase: str, flash: str, kind: str) -> pd.Series:
        """Seconds a token of PLaMo 2 by block, at the deepest depth that was measured, with a cache of one `kind`."""
        depths = samples(self.caches[self.caches["n_gpu_layers"] != 0])
        depths = _of_model(depths, HYBRID)
        depths = depths[depths[["phase", "flash_attn", "type_k", "type_v", "label"]].eq(
            [phase, flash, kind, kind, "few"]
        ).all(axis=1)]  # fmt: skip
        return depths[depths["depth"] == depths["depth"].max()].set_index("block")["value"]

    def right(self, model: str, gpu: bool) -> Estimate:
        """The share of a released file's gates in Q8_0 on one device that agree with the oracle; no sample, so no
        interval."""
        gates = self.gates[(self.gates["model"] == model) & (self.gates["dtype"] == "Q8_0")]
        gates = gates[(gates["n_gpu_layers"] != 0) == gpu]
        if gates.empty:
            return stats.median([])
        agree = [
            row.status == "ok" and all(agrees for name, agrees in row.checks.items() if name.endswith("_agrees"))
            for row in gates.itertuples()
        ]
        share = sum(agree) / len(agree)
        return Estimate(share, share, share, len(agree))

    @staticmethod
    def _of(rows: pd.DataFrame, workload: str, model: str, build: str, gpu: bool) -> pd.DataFrame:
        own = _of_model(rows[(rows["workload"] == workload) & (rows["build"] == build)], model)
        own = own[(own["n_gpu_layers"] != 0) == gpu]
        return own[own["n_threads"] == own["n_threads"].max()].drop_duplicates(
            ["block", "n_seq", "n_prompt"], keep="last"
        )


def _of_model(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """The rows of a model, whether its weights are released or its shape is assumed."""
    return rows[rows["model"].map(unstarred) == unstarred(model)]


def _first_steps(decodes: pd.DataFrame, n: int) -> pd.DataFrame:
    """Decode rows cut to their first `n` steps."""
    return decodes.assign(samples_ns=[[steps[:n] for steps in samples] for samples in decodes["samples_ns"]])


def boards(studies: Studies, backend: str = "CUDA") -> list[Board]:
    """Every machine with a GPU of this backend that has rows of notebook 01's study."""
    facts = {name: fact for _, _, of_study in studies for name, fact in of_study.items() if _has(fact, backend)}
    gpus = []
    for machine, fact in facts.items():
        rows = {name: own for name, own, _ in studies if (own["machine"] == machine).all()}
        if ASYMMETRY in rows:
            every = pd.concat(rows.values())
            gates = every[every["workload"] == "gate"].drop_duplicates("key")
            none = every.iloc[:0]
            studied = (usable(rows.get(name, none)) for name in (ASYMMETRY, BATCHES, CHUNKS, CACHES))
            gpus.append(Board(backend, device(fact, True), bool(fact["gpus"][0].get("tensor")), gates, *studied))
    return gpus


def _has(fact: dict[str, Any], backend: str) -> bool:
    return any(gpu["name"].startswith(backend) for gpu in fact.get("gpus", ()))


def foretold(backend: str = "CUDA") -> list[dict[str, Any]]:
    """`key`, `unit`, `low`, `high` and `why` of every forecast; on Metal also what the simplest forecasts say.

    `about`: the group it belongs to, "" for those of the first. `tiles`: it holds without tensor units only.
    """
    path = paths.DATA / "published" / FORECASTS[backend]
    usual = {"about": "", "tiles": False}
    return [usual | forecast for forecast in tomllib.loads(path.read_text(encoding="utf-8"))["forecast"]]


def scored(board: Board) -> pd.DataFrame:
    """The forecasts with what was `measured` (estimate in its unit), and `claim`: whether that lies in the range.

    Without those that say nothing about this board's kind of matrix kernel.
    """
    entries = []
    for forecast in foretold(board.backend):
        if forecast["tiles"] and board.tensor:
            continue
        measured = MEASURES[forecast["key"]](board)
        entries.append({**forecast, "measured": measured, "claim": measured.within(forecast["low"], forecast["high"])})
    return pd.DataFrame(entries)


def off(scores: pd.DataFrame) -> dict[str, float]:
    """By what factor `scored` forecasts miss in the geometric mean: ours (the range's middle), and the two simplest.

    Only forecasts with simpler ones beside them count, and of these only what was measured.
    """
    judged = scores.dropna(subset=["constant"])
    judged = judged[[estimate.value > 0 for estimate in judged["measured"]]]
    measured = np.array([estimate.value for estimate in judged["measured"]])
    said = {"ours": np.sqrt(judged["low"] * judged["high"])} | {
        way: judged[way] for way in ("constant", "proportional")
    }
    return {way: float(np.exp(np.abs(np.log(measured / forecast)).mean())) for way, forecast in said.items()}


def by_kernel(columns: Iterable[int]) -> pd.DataFrame:
    """What PLaMo 3 should take on the M4 Pro for so many columns: sequences in a step, or tokens of a prompt's chunk.

    `width` (columns), `kernel`, `ms`, `each` (ms a column), and `published` (ms; NaN where the source has none). The
    source's five steps and its prompt of 512 fix four numbers: one column; a group of g columns, a line through 2 and
    4; the first tile of 32, which 16 columns fill as well as 9; and a further tile, from the prompt's 16.
    """
    steps, prompt = _published(1), _published(512)[1]
    slope = (steps[4] - steps[2]) / 2
    tile = (prompt - steps[16]) / (512 / TILE - 1)
    entries = []
    for n in columns:
        groups, tiles = GROUPS.get(n), ceil(n / TILE)
        if n == 1:
            kernel, ms = "one column", steps[1]
        elif groups:
            kernel = f"{len(groups)} group{'s' * (len(groups) > 1)} of {groups[0]}"
            ms = sum(steps[2] + slope * (group - 2) for group in groups)
        else:
            kernel = f"{tiles} tile{'s' * (tiles > 1)} of {TILE}"
            ms = steps[16] + tile * (tiles - 1)
        entries.append({"width": n, "kernel": kernel, "ms": ms, "each": ms / n})
    return pd.DataFrame(entries).assign(published=lambda d: d["width"].map(steps | {512: prompt}).astype(float))


def _published(tokens: int) -> dict[int, float]:
    """Milliseconds by sequences, of a step (`tokens` 1) or of a prompt of so many, as the M4 Pro study prints them."""
    printed = results.load("m4-pro-b9596").query("model == 'plamo-3-nict-2b'")
    printed = printed[printed["quantity"] == ("decode" if tokens == 1 else "prefill")]
    return {int(row.n_seq): MS * row.n_seq * tokens / row.value for row in printed.itertuples()}


def _ms(seconds: pd.Series) -> Estimate:
    return stats.median((MS * seconds).tolist())


def _against(board: Board, many: int, few: int) -> Estimate:
    return paired_ratio(board.steps(ATTENTION, many), board.steps(ATTENTION, few))


def _chunks(board: Board, many: int, few: int) -> Estimate:
    return paired_ratio(board.chunk(many), board.chunk(few))


def _cached(board: Board, phase: str, kind: str, flash: str = "on") -> Estimate:
    return paired_ratio(board.deepest(phase, flash, kind), board.deepest(phase, "on", "f16"))


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
    "chunk of 8 tokens of PLaMo 3 against one of 16": lambda board: _chunks(board, 8, 16),
    "chunk of 16 tokens of PLaMo 3 against one of 32": lambda board: _chunks(board, 16, 32),
    "chunk of 33 tokens of PLaMo 3 against one of 32": lambda board: _chunks(board, 33, 32),
    "chunk of 48 tokens of PLaMo 3 against one of 64": lambda board: _chunks(board, 48, 64),
    "chunk of 65 tokens of PLaMo 3 against one of 64": lambda board: _chunks(board, 65, 64),
    "chunk of 512 tokens of PLaMo 3 against one of 128": lambda board: _chunks(board, 512, 128),
    "deep step of PLaMo 2: Q8_0 cache against F16": lambda board: _cached(board, "decode", "q8_0"),
    "deep step of PLaMo 2: Q4_0 cache against F16": lambda board: _cached(board, "decode", "q4_0"),
    "deep prompt of PLaMo 2: Q8_0 cache against F16": lambda board: _cached(board, "prefill", "q8_0"),
    "deep prompt of PLaMo 2: no flash attention against flash": lambda board: _cached(board, "prefill", "f16", "off"),
    "released PLaMo 2, no layers on the GPU: gates that pass": lambda board: board.right(HYBRID, gpu=False),
    "released PLaMo 2, all layers on the GPU: gates that pass": lambda board: board.right(HYBRID, gpu=True),
}
