"""Other people's parts, formulas and figures (data/published), and how they look beside ours."""

import tomllib
from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.measure.recording import LOCAL, REFERENCE
from plamo_study.present.evidence import READ_KERNELS, chip
from plamo_study.present.tables import (
    PAIRED,
    Columns,
    Table,
    divided,
    folded,
    scaled,
    significant,
    table,
    with_quotient,
)
from plamo_study.studies.roofline import side_by_side as crosscheck_ceilings, side_by_side_ratios

WRONG = ("impossible", "does not fit", "disagrees")
FACTORS = {"ms": 1e3, "GB": 1e-9, "GB/s": 1e-9, "MB": 1e-6, "TFLOP": 1e-12, "%": 100.0}
COUNTED = {"agrees": "agree", "disagrees": "disagree", "possible": "can be", "impossible": "cannot be",
           "fits": "fit", "does not fit": "does not fit", "nothing printed": "have no number to compare"}  # fmt: skip
PER_SECOND = {side_by_side_ratios.READ: (1e-9, "GB/s"), side_by_side_ratios.MATMUL: (1e-9, "GFLOP/s")}


def _toml(name: str) -> dict[str, Any]:
    path = paths.PUBLISHED / name
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise StudyError(str(path), f"cannot be read ({error})", "git checkout data/published") from error


def parts() -> list[dict[str, Any]]:
    """Parts with their published bandwidth, memory and peaks, each with its sources."""
    found: list[dict[str, Any]] = _toml("hardware.toml")["part"]
    return found


def cores() -> list[dict[str, Any]]:
    """What cores of the processors measured here do per cycle, with its sources."""
    found: list[dict[str, Any]] = _toml("hardware.toml")["core"]
    return found


def part(name: str) -> dict[str, Any]:
    """The part whose name begins like this."""
    return next(entry for entry in parts() if entry["name"].startswith(name))


def printed() -> dict[str, Any]:
    """The sources' figures, the models they calculate with, and the sources' names."""
    return _toml("source-tables.toml")


def part_sources() -> Markdown:
    """Where each part's figures were read."""
    lines = []
    for entry in parts():
        links = f"[memory]({entry['memory_source']}), [peak]({entry['peak_source']})"
        lines.append(f"- {entry['name']}: {links}; {entry['note']}.")
    return Markdown("\n".join(lines))


def core_sources() -> Markdown:
    """Where each core's operations per cycle and its highest clock were read."""
    lines = []
    for entry in cores():
        rates = ", ".join(f"{n} {unit}" for unit, n in entry["per_cycle"].items())
        links = f"[operations]({entry['per_cycle_source']}), [method]({entry['method_source']})"
        clock = f"[{entry['highest_clock'] / 1e9:.1f} GHz at most]({entry['clock_source']})"
        lines.append(f"- {entry['name']}: {rates} a cycle and core ({links}), {clock}; {entry['note']}.")
    return Markdown("\n".join(lines))


def intensities(checked: pd.DataFrame, balance: float) -> Table:
    """The sources' intensity table recomputed, with which ceiling each pass stands under on that part."""
    data = checked[checked["topic"] == "intensity"]
    near = ["compute" if row["ours"] >= balance else f"memory, {balance / row['ours']:.3g} times below"
            for row in data.to_dict("records")]  # fmt: skip
    whole = ["compute" if row["counted"] >= balance else "memory" for row in data.to_dict("records")]
    columns: Columns = {
        "what": ("pass", ""),
        "printed": ("printed", ",.0f"),
        "ours": ("ours, as the source counts", ",.0f"),
        "counted": ("ours, everything counted", significant(3)),
        "says": ("the source says", ""),
        "near": ("from the balance point", ""),
        "whole": ("everything counted", ""),
    }
    return table(data.assign(near=near, whole=whole), columns)


def wrong(checked: pd.DataFrame) -> Table:
    """The other printed figures that differ from ours or cannot be, what cannot be first."""
    data = checked[checked["topic"] != "intensity"]
    kinds = data["verdict"].str.split(":").str[0]
    data = data.assign(order=kinds.map({kind: n for n, kind in enumerate(WRONG)})).dropna(subset="order")
    return _figures(data.sort_values("order", kind="stable"))


def figures(checked: pd.DataFrame) -> Markdown:
    """Every other printed figure beside ours, with the verdict and what there is to say about it, folded."""
    data = checked[checked["topic"] != "intensity"].sort_values("source", kind="stable")
    return folded(f"All {len(data)} figures", _figures(data))


def _figures(data: pd.DataFrame) -> Table:
    shown = {
        "source": data["source"],
        "what": data["what"],
        "printed": [_in_unit(row, "printed") for row in data.to_dict("records")],
        "ours": [_in_unit(row, "ours") for row in data.to_dict("records")],
        "everything counted": [_in_unit(row, "counted") for row in data.to_dict("records")],
        "verdict": data["verdict"],
        "note": data["note"],
    }
    return Table(pd.DataFrame(shown))


def counted(checked: pd.DataFrame) -> Markdown:
    """How many figures agree, disagree, or cannot be, and where each source is quoted from."""
    kinds = checked["verdict"].str.split(":").str[0].map(COUNTED).value_counts()
    names = "; ".join(f"*{key}*: {title}" for key, title in printed()["source"].items())
    said = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    return Markdown(f"Of {len(checked)} figures: {said}. Sources: {names}.")


def printed_rates(checked: pd.DataFrame) -> pd.DataFrame:
    """The 70B decode rates that the sources print, for the batch curve: sequences, rate, what."""
    names = {"70B FP16, batch 1": 1, "70B FP16, batch 256, measured": 256}
    data = checked[checked["what"].isin(names)]
    return pd.DataFrame({"sequences": data["what"].map(names), "rate": data["printed"], "what": "printed"}).reset_index(
        drop=True
    )


def side_by_side(source: str) -> Table | Markdown:
    """Rates of our ceilings and of the programs run beside them, and our rate over theirs."""
    found = crosscheck_ceilings.load(LOCAL if source == "live" else REFERENCE)
    if found is None:
        return Markdown(f"Nothing was run beside our ceilings on this machine yet: `{crosscheck_ceilings.INSTALL}`.")
    runs, tools = crosscheck_ceilings.frame(found), found.tools
    data = side_by_side_ratios.rates(runs)
    ratio, rates = side_by_side_ratios.ratios(runs).set_index("other"), data.set_index("what")["rate"]
    entries = []
    for row in data.to_dict("records"):
        factor, unit = PER_SECOND[side_by_side_ratios.AGAINST.get(row["what"], row["what"])]
        entry = {"program": row["what"], "which": tools.get(row["what"], "the engine's, as the studies measure it")}
        if row["what"] == side_by_side_ratios.READ:
            entry["which"] = READ_KERNELS["CPU"]
        entry |= {f"median of {row['n']} runs": f"{scaled(factor, '.1f')(row['rate'])} {unit}"}
        entry |= {"best run": f"{row['best'] * factor:.1f}", "variation": f"{row['variation']:.0%}"}
        entry |= {"ours / it": "", "within 10 %": ""}
        if row["what"] in ratio.index:
            line = ratio.loc[row["what"]]
            quotient = divided(rates[line["ours"]], row["rate"])
            entry |= {"ours / it": with_quotient(line["ratio"], quotient, ".2f"), "within 10 %": line["verdict"]}
        entries.append(entry | {"machine": chip(found.machine)})
    return Table(pd.DataFrame(entries).fillna(""), PAIRED)


def _in_unit(row: dict[str, Any], column: str) -> str:
    value, unit = row[column], row["unit"]
    if value is None or value != value:
        return ""
    return f"{significant(3)(value * FACTORS.get(unit, 1.0))} {unit}"
