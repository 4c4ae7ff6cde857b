"""Notebook 03's tables on the shape of the curves: what amortises, where they bend, where they jump, and why."""

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import batch_prediction as arithmetic
from plamo_study.analysis import batch_scaling as study
from plamo_study.measure.collect import Recording
from plamo_study.present.batch_scaling import stock
from plamo_study.present.evidence import escaped
from plamo_study.present.tables import Columns, Format, Table, significant, table

FIT: dict[str, tuple[str, Format]] = {"build": ("build", ""), "model": ("model", "")}


def fits(recording: Recording) -> Table:
    """Step time as a shared part and a part per sequence; with the kernel's passes over the weights where known."""
    columns: Columns = FIT | {
        "form": ("step time", ""),
        "fixed": ("shared part (ms)", significant(3, 1e3)),
        "each": ("per sequence (ms)", significant(3, 1e3)),
        "amortised": ("share that amortises", ".0%"),
        "off": ("worst miss", ""),
    }
    tile = arithmetic.tile_of(recording.rows, recording.facts)
    data = study.fits(recording.rows).assign(form="shared + B x each")
    if tile:
        passes = study.fits(recording.rows, tile).assign(form="passes(B) x shared + B x each, B > 1")
        data = pd.concat([data, passes], ignore_index=True)
    off = [f"{row.worst:+.0%} at {row.worst_at}" for row in data.itertuples()]
    return table(data.assign(off=off), columns)


def bends(recording: Recording) -> Table:
    """Whether the curves bend, and where."""
    data = study.bends(recording.rows)
    data["verdict"] = ["bends" if gain > 6 else "no bend" if gain < 0 else "inconclusive" for gain in data["gain"]]
    columns: Columns = FIT | {
        "gain": ("criterion gained by a second line", ".1f"),
        "at": ("lines meet at", ".0f"),
        "steeper": ("slope after / before", ".2f"),
        "verdict": ("verdict", ""),
    }
    return table(data, columns)


def switches(recording: Recording) -> Table | Markdown:
    """The kernel switches the engine is known to make, and whether the curves show them."""
    data = arithmetic.known_switches(recording.rows, recording.facts)
    if data.empty:
        return Markdown("For this backend and weight type no kernel switch is known to this project.")
    columns: Columns = {
        "n_seq": ("from", ""),
        "next": ("to", ""),
        "what": ("known switch", ""),
        "model": ("model", ""),
        "jump": ("step grows, over the line's growth", ".2f"),
        "shown": ("in the data", ""),
    }
    return table(data.assign(next=data["n_seq"] + 1), columns)


def unexplained(recording: Recording) -> Markdown:
    """Jumps found where no kernel switch is known."""
    known = set(arithmetic.known_switches(recording.rows, recording.facts)["n_seq"])
    data = stock(study.jumps(recording.rows))
    rest = data[data["found"] & ~data["n_seq"].isin(known)]
    if rest.empty:
        return Markdown("No jump was found where no switch is known.")
    found = [f"{escaped(r.model)} {r.n_seq} to {r.n_seq + 1} ({r.jump:.2f})" for r in rest.itertuples()]
    return Markdown(f"Jumps found where no switch is known: {'; '.join(found)}.")
