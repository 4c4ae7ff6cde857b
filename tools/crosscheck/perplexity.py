"""Our quality figures against llama-perplexity's, on the same libraries, files, text and chunks; also time and disk.

The tool runs once on the reference, writing its log-probabilities to a file, and once per candidate, reading them, with
`-b` = `-c`: at its default it packs four chunks as parallel sequences, which PLaMo 2 mixes up. The file
holds each log-probability in 16 bits over a range of 16 nats, so differences below that step are the tool's, not ours.
"""

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crosscheck.llama_bench import ran
from llama_meter import progress, stats
from llama_meter.cells import Quality
from llama_meter.errors import StudyError
from llama_meter.measure import texts
from llama_meter.measure.plan import change
from llama_meter.measure.process import measured_once
from llama_meter.rows import Measured
from llama_meter.serve.server import offload
from llama_meter.stats import Estimate
from llama_meter.workloads import divergence, quality

ALIKE = 0.01  # of the tool's figure
ATTEMPTS = 20
STEP = 16 / 65535  # nats: the coarsest spacing of the reference's log-probabilities in the tool's file
NOISE = STEP / 12**0.5  # standard deviation of rounding to it
NUMBER = r"(-?[\d.]+(?:e[-+]?\d+)?|-?nan|-?inf)"
PATTERNS = {  # what the tool prints, the quantity, and its unit
    r"Final estimate: PPL = ": ("perplexity", 1.0),
    r"Mean PPL\(Q\) *: *": ("perplexity", 1.0),
    r"Mean +KLD: *": ("mean KLD", 1.0),
    r"Median +KLD: *": ("50 % KLD", 1.0),
    r"90\.0% +KLD: *": ("90 % KLD", 1.0),
    r"99\.0% +KLD: *": ("99 % KLD", 1.0),
    r"99\.9% +KLD: *": ("99.9 % KLD", 1.0),
    r"RMS Δp *: *": ("RMS Δp", 0.01),
    r"Same top p *: *": ("same top", 0.01),
}


@dataclass(frozen=True)
class Figure:
    """One quantity of one file, by us and by the tool; `resolution` is how finely the tool can tell it."""

    file: str
    quantity: str
    ours: float
    theirs: float
    resolution: float

    @property
    def agrees(self) -> bool:
        """Within 1 % of the tool's figure, or within its resolution."""
        return bool(abs(self.ours - self.theirs) <= max(ALIKE * abs(self.theirs), self.resolution))


@dataclass(frozen=True)
class Comparison:
    """All figures, the tool's seconds over ours for the whole table, and the bytes its log-probabilities take."""

    figures: list[Figure]
    seconds: Estimate
    ours_s: list[float]
    theirs_s: list[float]
    logits_bytes: int


def compare(cell: Quality, path: Path, tool: Path, rounds: int = 1) -> Comparison:
    """One quality cell, without continuations, by us and by the tool, `rounds` times in alternating order.

    Raises StudyError when the tool or our worker fails.
    """
    cell = change(cell, n_gen=0, n_seq=1)
    ours_s, theirs_s = [], []
    for number in progress.counted(range(rounds), f"{cell.model} beside {tool.name}"):
        for our_turn in (True, False) if number % 2 == 0 else (False, True):
            if our_turn:
                start = time.perf_counter()
                ours = measured_once(cell, path)
                ours_s.append(time.perf_counter() - start)
            else:
                printed, seconds, logits_bytes = run_tool(cell, path, tool)
                theirs_s.append(seconds)
    own = our_figures(cell, ours)
    figures = [
        Figure(name, quantity, own[name][quantity], value, resolution(quantity, value, ours))
        for name, text in printed.items()
        for quantity, value in parse(text).items()
    ]
    return Comparison(figures, stats.ratio(theirs_s, ours_s), ours_s, theirs_s, logits_bytes)


def lines(model: str, compared: Comparison) -> list[tuple[str, str, str, bool]]:
    """Lines of a self-check: name, result, requirement, and whether they agree."""
    figures = compared.figures
    told = [f for f in figures if f.theirs and abs(f.theirs) * ALIKE > f.resolution]
    worst = max(told, key=lambda f: abs(f.ours / f.theirs - 1))
    agreeing = sum(figure.agrees for figure in figures)
    off = f"{agreeing} of {len(figures)}; the farthest {abs(worst.ours / worst.theirs - 1):.2%}"
    seconds = f"{compared.seconds:.2f} ({np.median(compared.theirs_s):.1f} s / {np.median(compared.ours_s):.1f} s)"
    return [
        (
            f"{model}: figures as llama-perplexity's",
            f"{off} ({worst.file}, {worst.quantity})",
            "within 1 %, or what it can tell",
            agreeing == len(figures),
        ),
        (f"{model}: its seconds / ours, whole table", seconds, "1 or more", compared.seconds.value >= 1),
        (f"{model}: disk for logits", f"0 bytes, its file {compared.logits_bytes:,}", "0 bytes", True),
    ]


def run_tool(cell: Quality, path: Path, tool: Path) -> tuple[dict[str, str], float, int]:
    """The tool's output by file, the reference first; its seconds; the bytes of its log-probabilities."""
    settings = {"-c": cell.n_ctx, "-b": cell.n_ctx, "-ub": cell.n_ubatch, "-t": cell.n_threads}
    settings |= {"--chunks": cell.n_chunks or -1}
    common = [*(str(word) for setting in settings.items() for word in setting), *offload(cell.n_gpu_layers)]
    with tempfile.TemporaryDirectory() as folder:
        text, logits = Path(folder, "text"), Path(folder, "logits")
        text.write_bytes(texts.read(cell.text) + b"\n")  # the tool drops a text's last line break
        base = [str(tool.absolute()), *common, "--kl-divergence-base", str(logits)]
        printed, seconds = _output([*base, "-m", str(path), "-f", str(text)], "Final estimate")
        found = {cell.dtype: printed}
        for name in cell.candidates:
            file = quality.candidate_path(cell, path, name)
            found[name], more = _output([*base, "-m", str(file), "--kl-divergence"], "Same top p: ")
            seconds += more
        return found, seconds, logits.stat().st_size


def parse(text: str) -> dict[str, float]:
    """The quantities in the tool's output, probabilities as fractions. StudyError when there are none."""
    found = {}
    for pattern, (quantity, unit) in PATTERNS.items():
        if match := re.search(pattern + NUMBER, text):
            found[quantity] = float(match.group(1)) * unit
    if not found:
        last = " ".join(text.strip().splitlines()[-1:])
        raise StudyError("llama-perplexity", f"printed no result ({last})", "run it by hand on the same file")
    return found


def our_figures(cell: Quality, ours: Measured) -> dict[str, dict[str, float]]:
    """Our values of the same quantities by file, from the series of `ours`."""
    total = {name: float(np.sum(values)) for name, values in ours.series.items()}
    n = total["tokens"]
    found = {name: {"perplexity": float(np.exp(total[f"nll/{name}"] / n))} for name in (cell.dtype, *cell.candidates)}
    for name in cell.candidates:
        found[name] |= {"mean KLD": total[f"kld/{name}"] / n, "same top": total[f"same_top/{name}"] / n}
        found[name] |= {"RMS Δp": (total[f"dp2/{name}"] / n) ** 0.5}
        at = dict(zip(divergence.GRID, ours.series[f"quantiles/{name}"], strict=True))
        found[name] |= {f"{100 * q:g} % KLD": at[q] for q in divergence.QUANTILES}
    return found


def resolution(quantity: str, theirs: float, ours: Measured) -> float:
    """The tool's resolution of a quantity: half its last printed digit plus the effect of its rounding."""
    n = float(np.sum(ours.series["tokens"]))
    if quantity == "RMS Δp":
        return 5e-6 + NOISE**2 / 2 / max(theirs, 5e-6)
    if quantity == "same top":
        return 5e-6
    if quantity == "perplexity":
        return 5e-5
    return 5e-7 + (3 * NOISE / n**0.5 if quantity == "mean KLD" else STEP / 2)


def _output(command: list[str], last: str) -> tuple[str, float]:
    """A run's output, complete up to its `last` figure, and its seconds.

    llama.cpp's logger drops unwritten lines when a tool ends (see common/log.cpp); such a run is repeated and not
    counted.
    """
    for _ in range(ATTEMPTS):
        start = time.perf_counter()
        done = ran(command)
        seconds = time.perf_counter() - start
        text = (done.stdout + done.stderr).decode(errors="replace")
        if done.returncode:
            raise StudyError(command[0], f"failed ({text.strip().splitlines()[-1:]})", " ".join(command))
        if last in text:
            return text, seconds
    raise StudyError(command[0], f"ended {ATTEMPTS} times before it had written {last!r}", " ".join(command))
