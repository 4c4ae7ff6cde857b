"""The words and tables around several machines."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis.energy import per_token
from plamo_study.analysis.stats import Estimate
from plamo_study.present.evidence import escaped
from plamo_study.present.processors import processor
from plamo_study.present.sentences import CLOSE, is_close
from plamo_study.present.tables import Columns, Table, scaled, significant, table
from plamo_study.studies.machines import analysis, gpu
from plamo_study.studies.machines.analysis import Studies

NOTE = (
    "Best samples: of the study that read slowest and of the one that read fastest, which passes are held against; "
    "multiplications with the commonest type of weights."
)


def finding(found: pd.DataFrame, scale: str) -> Markdown:
    """How far apart the machines are in speed, how near in shares, and how well one foretells another.

    `found`, here and below: the passes of `analysis.passes`.
    """
    data = analysis.predicted(found)
    if data.empty:
        return Markdown(
            f"Rows of {found['machine'].nunique()} machine: there is nothing to set beside them yet. "
            f"`plamo-study rows add FILE` adds another one's."
        )
    by_share = data["ratio"].map(lambda ratio: ratio.value)
    near, reading = _near(by_share), _near(data["read"])
    most = data.groupby(["known", "asked"]).size().max()
    apart = [max(ratio, 1 / ratio) for ratio in data["same"]]
    worst = data.loc[data["ratio"].map(_off).idxmax()]
    missed = sum(ratio.above(1.0) != "inconclusive" for ratio in data["ratio"])
    return Markdown(
        f"- **We foretold {len(data)} passes of one machine from another's rows. {near} came out within {CLOSE} "
        f"times.** Nothing of the machine asked about was known but its two ceilings: what it reads and what it "
        f"multiplies a second. The passes themselves are up to {max(apart):.1f} times apart, and {most} of them are of "
        f"one pair of machines.\n"
        f"- **One number says {WORSE[np.sign(near - reading)]}.** Time in proportion to what both machines read a "
        f"second, whatever they multiply, is within {CLOSE} times in {reading} of {len(data)}. Its median miss is "
        f"{_median_miss(data['read']):.0%}, that of the share {_median_miss(by_share):.0%}. {_by_phase(data)}\n"
        f"- Two other guesses: that a pass takes as long as on the other machine is within {CLOSE} times in "
        f"{_near(data['same'])}; that it takes what the ceilings allow, in {_near(data['roof'])}.\n"
        f"- **The misses are real, and lean.** In {missed} of {len(data)} the interval excludes an exact forecast. "
        f"{_leaning(data)} Furthest off of all is {escaped(worst['model'])}, {_pass(worst)}: {escaped(worst['asked'])} "
        f"takes {worst['ratio'].value:.2f} times what {escaped(worst['known'])} promises for it.\n\n"
        f"(scale {scale}, {found['machine'].nunique()} machines, the engine as released with all "
        f"threads; only rows that were computed right. Intervals are those of the times; a ceiling itself is "
        f"another one in another session, see the table.)"
    )


WORSE = {1: "less", 0: "as much", -1: "more"}  # by how often the share is near and reading alone is not


def _median_miss(ratios: "pd.Series[float]") -> float:
    """By how much the middle forecast is off, either way."""
    return float(np.exp(np.abs(np.log(ratios)).median()) - 1)


def _by_phase(data: pd.DataFrame) -> str:
    """Median misses of both forecasts by phase."""
    said = []
    for phase, group in data.groupby("phase", sort=True):
        what = "steps" if phase == "decode" else "prompts"
        share, read = (_median_miss(each) for each in (group["ratio"].map(lambda ratio: ratio.value), group["read"]))
        said.append(f"for {len(group)} {what} {read:.0%} against {share:.0%}")
    return f"By phase: {', '.join(said)}."


def _leaning(data: pd.DataFrame) -> str:
    """For each pair of machines and phase with several passes, by how much the middle one is off."""
    said = []
    for (known, asked, phase), group in data.groupby(["known", "asked", "phase"], sort=False):
        if len(group) > 2:
            middle = float(np.exp(np.median([math.log(ratio.value) for ratio in group["ratio"]])))
            what = "Steps" if phase == "decode" else "Prompts"
            said.append(
                f"{what} on {asked} take {middle:.2f} times what {known} promises, in the middle of {len(group)}"
            )
    return f"{'. '.join(said)}." if said else ""


def _middle(ratios: "pd.Series[Estimate]") -> float:
    return float(np.exp(np.median([math.log(ratio.value) for ratio in ratios])))


def _off(ratio: Estimate) -> float:
    return abs(math.log(ratio.value))


def _near(ratios: "pd.Series[float]") -> int:
    return sum(is_close(ratio) for ratio in ratios)


def _pass(line: Mapping[Any, Any]) -> str:
    what = "a step" if line["phase"] == "decode" else f"a prompt of {line['tokens']:,} tokens"
    several = f", {line['n_seq']} sequences" if line["n_seq"] > 1 else ""
    behind = f" after {line['depth']:,.0f}" if line["depth"] else ""
    return f"{what}{behind}{several}"


def machines(studies: Studies, found: pd.DataFrame) -> Table:
    """Every machine: what it is, its two ceilings, and how much of them its passes reach."""
    known = analysis.machines(studies, found)
    known["range"] = [f"{1e-9 * row.least:.1f} to {1e-9 * row.read:.1f}" for row in known.itertuples()]
    columns: Columns = {
        "chip": ("machine", ""),
        "cores": ("cores used", ""),
        "memory": ("memory (GB)", scaled(1e-9, ".0f")),
        "range": ("reads (GB/s)", ""),
        "compute": ("multiplies (GFLOP/s)", significant(3, 1e-9)),
        "balance": ("FLOP a byte at which both bind", ".1f"),
        "passes": ("kinds of passes", ""),
        "share": ("share of its ceilings, median", ".0%"),
    }
    return table(known, columns, NOTE)


def shared(found: pd.DataFrame) -> pd.DataFrame:
    """What the figure draws: every pass that two machines share, `name`, `chip`, `rate` (tokens/s), `share`."""
    entries = []
    for known, asked in analysis.common(found):
        alike = asked._asdict()
        name = f"{asked.model.rstrip('*')}: {_pass(alike)}"
        for line in (known, alike):
            rate = line["tokens"] * line["n_seq"] / line["measured"].value
            entry = {"name": name, "chip": line["chip"], "rate": rate, "share": line["share"]}
            entries.append(entry | {"order": (line["phase"] == "decode", line["tokens"], asked.depth)})
    drawn = pd.DataFrame(entries, columns=["name", "chip", "rate", "share", "order"])
    return drawn.sort_values("order").drop_duplicates(["name", "chip"]).drop(columns="order")


def prediction(found: pd.DataFrame) -> Table:
    """Every pass that two machines share: promised from one, measured on the other, the furthest off first."""
    told = analysis.predicted(found)
    told["pass"] = [_pass(line) for line in told.to_dict("records")]
    told = told.sort_values("ratio", key=lambda ratios: -ratios.map(_off))
    columns: Columns = {
        "model": ("model", ""),
        "pass": ("pass", ""),
        "known": ("from", ""),
        "asked": ("for", ""),
        "promised": ("promised (ms)", significant(3, 1e3)),
        "measured": ("measured (ms)", significant(3, 1e3)),
        "ratio": ("measured / promised", ".2f"),
    }
    return table(told, columns)


def score(found: pd.DataFrame) -> Table:
    """How often each way to foretell is near, by pair of machines and phase."""
    entries = []
    for (known, asked, phase), group in analysis.predicted(found).groupby(["known", "asked", "phase"], sort=False):
        entry = {"pair": f"{known} for {asked}", "phase": phase, "n": len(group)}
        entry |= {"by share": sum(is_close(ratio.value) for ratio in group["ratio"])}
        entry |= {"read": _near(group["read"]), "same time": _near(group["same"]), "roof": _near(group["roof"])}
        entries.append(entry | {"middle": _middle(group["ratio"])})
    columns: Columns = {
        "pair": ("machines", ""),
        "phase": ("phase", ""),
        "n": ("passes", ""),
        "by share": (f"within {CLOSE} times by the share", ""),
        "read": ("by what they read alone", ""),
        "same time": ("by the same time", ""),
        "roof": ("by ceilings alone", ""),
        "middle": ("measured / promised, median", ".2f"),
    }
    return table(pd.DataFrame(entries), columns)


def energy(studies: Studies) -> Table | Markdown:
    """Joules a token by phase, meter by meter, idle power taken off; or that nobody counted."""
    found = pd.concat([per_token(rows).assign(study=name) for name, rows, _ in studies])
    if found.empty:
        return Markdown(
            "n/a: no row of these machines was measured beside an energy meter. Where a machine shows one, every "
            "timed row counts its joules: RAPL on Linux, NVML of an NVIDIA board, IOReport of an Apple chip. Virtual "
            "machines seldom show any."
        )
    chips = {name: processor(fact) for name, fact in analysis.facts_of(studies).items()}
    found = found.assign(chip=found["machine"].map(chips), phase=[_phase(row) for row in found.itertuples()])
    columns: Columns = {
        "chip": ("machine", ""), "meter": ("meter", ""), "model": ("model", ""), "phase": ("phase", ""),
        "idle": ("idle (W)", significant(3)), "watts": ("power (W)", significant(3)),
        "joules": ("J for 1,000 tokens", significant(3, 1e3)), "most": ("its limit allows", _allowed),
    }  # fmt: skip
    note = "Idle power is taken off. The last column was known before: what the power limit allows at this speed. "
    return table(found, columns, f"{note}Meters of different kinds count different parts and are not compared.")


def _phase(row: Any) -> str:
    return f"prompt of {row.n_prompt:,}" if row.workload == "prefill" else f"step of {row.n_seq}"


def _allowed(joules: float) -> str:
    return "n/a" if math.isnan(joules) else f"{joules * 1e3:.3g}"


def foretold(studies: Studies) -> Table:
    """What was written down of a CUDA GPU before anything ran on one, beside what one that has added rows measured."""
    boards = gpu.boards(studies)
    columns: Columns = {
        "key": ("foretold", ""), "low": ("from", "g"), "high": ("to", "g"), "unit": ("", ""), "why": ("because", ""),
    }  # fmt: skip
    if not boards:
        return table(pd.DataFrame(gpu.foretold()), columns, "Not measured: no machine with a CUDA GPU has added rows.")
    scored = pd.concat([gpu.scored(board).assign(board=board.chip) for board in boards])
    more: Columns = {"board": ("GPU", ""), "measured": ("measured", ".2f"), "claim": ("in the range", "")}
    return table(scored, {**columns, **more})


def gpu_gains(studies: Studies) -> Table | Markdown:
    """What offloading buys, phase by phase, every core of the host against the GPU beside it."""
    boards = gpu.boards(studies)
    if not boards:
        return Markdown("n/a: no machine of these has a GPU that ran notebook 01.")
    columns: Columns = {
        "board": ("GPU", ""), "model": ("model", ""), "phase": ("phase", ""),
        "cpu": ("its host's CPU (ms)", significant(3, 1e3)), "gpu": ("GPU (ms)", significant(3, 1e3)),
        "gain": ("GPU over CPU", ".1f"),
    }  # fmt: skip
    return table(pd.concat([gpu.gains(board).assign(board=board.chip) for board in boards]), columns)
