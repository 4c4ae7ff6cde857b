"""The words and tables around several machines."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis.stats import Estimate
from plamo_study.present.evidence import escaped
from plamo_study.present.sentences import CLOSE, closeness, is_close
from plamo_study.present.tables import Columns, Table, scaled, significant, table
from plamo_study.studies.machines import analysis
from plamo_study.studies.machines.analysis import Studies

NOTE = "The ceilings are best samples, the multiplications those of the commonest type of weights."


def finding(studies: Studies) -> Markdown:
    """How far apart the machines are in speed, how near in shares, and how well one foretells another."""
    found = analysis.passes(studies)
    data = analysis.predicted(found)
    if data.empty:
        return Markdown(
            f"Rows of {found['machine'].nunique()} machine: there is nothing to set beside them yet. "
            f"`plamo-study rows add FILE` adds another one's."
        )
    near, sure = closeness(list(data["ratio"]))
    apart = [max(ratio, 1 / ratio) for ratio in data["same"]]
    worst = data.loc[data["ratio"].map(_off).idxmax()]
    return Markdown(
        f"- **One machine's rows foretell another's within {CLOSE} times in {near} of {len(data)} passes** ({sure}). "
        f"Nothing of the other machine was known but its two ceilings: what it reads and what it multiplies a second.\n"
        f"- The passes themselves are up to {max(apart):.1f} times apart. That each takes as long as on the other "
        f"machine is within {CLOSE} times in {_near(data['same'])} of {len(data)}; that each takes what the ceilings "
        f"allow, in {_near(data['roof'])}.\n"
        f"- Furthest off is {escaped(worst['model'])}, {_pass(worst)}: {escaped(worst['asked'])} takes "
        f"{worst['ratio']:.2f} times what {escaped(worst['known'])} promises for it.\n\n"
        f"(scale {found_scale(studies)}, {found['machine'].nunique()} machines, {len(found)} kinds of passes, the "
        f"engine as released with all threads; only rows that were computed right)"
    )


def _off(ratio: Estimate) -> float:
    return abs(math.log(ratio.value))


def _near(ratios: "pd.Series[float]") -> int:
    return sum(is_close(ratio) for ratio in ratios)


def found_scale(studies: Studies) -> str:
    """The one scale of these rows."""
    return str(next(rows["scale"][rows["model"] != ""].iloc[0] for _, rows, _ in studies))


def _pass(line: Mapping[Any, Any]) -> str:
    what = "a step" if line["phase"] == "decode" else f"a prompt of {line['tokens']:,} tokens"
    several = f", {line['n_seq']} sequences" if line["n_seq"] > 1 else ""
    behind = f" after {line['depth']:,.0f}" if line["depth"] else ""
    return f"{what}{behind}{several}"


def machines(studies: Studies) -> Table:
    """Every machine: what it is, its two ceilings, and how much of them its passes reach."""
    found = analysis.machines(studies, analysis.passes(studies))
    columns: Columns = {
        "chip": ("machine", ""),
        "cores": ("cores used", ""),
        "memory": ("memory (GB)", scaled(1e-9, ".0f")),
        "read": ("reads (GB/s)", scaled(1e-9, ".1f")),
        "compute": ("multiplies (GFLOP/s)", significant(3, 1e-9)),
        "balance": ("FLOP a byte at which both bind", ".1f"),
        "passes": ("kinds of passes", ""),
        "share": ("share of its ceilings, median", ".0%"),
    }
    return table(found, columns, NOTE)


def shared(studies: Studies) -> pd.DataFrame:
    """What the figure draws: every pass that two machines share, `name`, `chip`, `rate` (tokens/s), `share`."""
    entries = []
    for known, asked in analysis.common(analysis.passes(studies)):
        alike = asked._asdict()
        name = f"{asked.model.rstrip('*')}: {_pass(alike)}"
        for line in (known, alike):
            rate = line["tokens"] * line["n_seq"] / line["measured"].value
            entry = {"name": name, "chip": line["chip"], "rate": rate, "share": line["share"]}
            entries.append(entry | {"order": (line["phase"] == "decode", line["tokens"], asked.depth)})
    found = pd.DataFrame(entries, columns=["name", "chip", "rate", "share", "order"])
    return found.sort_values("order").drop_duplicates(["name", "chip"]).drop(columns="order")


def prediction(studies: Studies) -> Table:
    """Every pass that two machines share: promised from one, measured on the other, the furthest off first."""
    found = analysis.predicted(analysis.passes(studies))
    found["pass"] = [_pass(line) for line in found.to_dict("records")]
    found = found.sort_values("ratio", key=lambda ratios: -ratios.map(_off))
    columns: Columns = {
        "model": ("model", ""),
        "pass": ("pass", ""),
        "known": ("from", ""),
        "asked": ("for", ""),
        "promised": ("promised (ms)", significant(3, 1e3)),
        "measured": ("measured (ms)", significant(3, 1e3)),
        "ratio": ("measured / promised", ".2f"),
    }
    return table(found, columns)


def score(studies: Studies) -> Table:
    """How often each way to foretell is near, by pair of machines and phase."""
    found = analysis.predicted(analysis.passes(studies))
    entries = []
    for (known, asked, phase), group in found.groupby(["known", "asked", "phase"], sort=False):
        entry = {"pair": f"{known} for {asked}", "phase": phase, "n": len(group)}
        entry |= {"by share": sum(is_close(ratio.value) for ratio in group["ratio"])}
        entry |= {"same time": _near(group["same"]), "roof": _near(group["roof"])}
        entries.append(entry | {"middle": float(np.exp(np.median([np.log(r.value) for r in group["ratio"]])))})
    columns: Columns = {
        "pair": ("machines", ""),
        "phase": ("phase", ""),
        "n": ("passes", ""),
        "by share": (f"within {CLOSE} times by the share", ""),
        "same time": ("by the same time", ""),
        "roof": ("by ceilings alone", ""),
        "middle": ("measured / promised, median", ".2f"),
    }
    return table(pd.DataFrame(entries), columns)
