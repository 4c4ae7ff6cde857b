"""Notebook 03's tables on the shape of the curves: what amortises, where they bend, where they jump, and why."""

import pandas as pd
from IPython.display import Markdown

from plamo_study.measure.recording import Recording
from plamo_study.present.evidence import escaped
from plamo_study.present.tables import Columns, Format, Table, folded, significant, table
from plamo_study.studies.batch_scaling import analysis, prediction
from plamo_study.studies.batch_scaling.show import stock, worst_miss

STRONG = 6  # a difference of the Bayesian information criterion that decides
FIT: dict[str, tuple[str, Format]] = {"build": ("build", ""), "model": ("model", "")}


def fits(recording: Recording) -> Table:
    """The chosen fit of every curve, with its worst miss."""
    data = analysis.chosen_fits(recording.rows, prediction.tile_of(recording.rows, recording.facts))
    return _fits(data)


def all_fits(recording: Recording) -> Markdown:
    """Every form of the fit on every curve, the rejected ones too; folded."""
    tile = prediction.tile_of(recording.rows, recording.facts)
    forms = [analysis.fits(recording.rows), *([analysis.fits(recording.rows, tile)] if tile else [])]
    return folded("Every form that was fitted, the rejected ones too", _fits(pd.concat(forms, ignore_index=True)))


def _fits(data: pd.DataFrame) -> Table:
    columns: Columns = FIT | {
        "form": ("step time", ""),
        "fixed": ("shared part (ms)", significant(3, 1e3)),
        "each": ("per sequence (ms)", significant(3, 1e3)),
        "amortised": ("shared part of the first sequence", ".0%"),
        "off": ("worst miss", ""),
    }
    return table(data.assign(off=worst_miss(data)), columns)


def bends(recording: Recording) -> Table:
    """Whether the curves bend: two lines that meet against one line, and against the chosen fit."""
    tile = prediction.tile_of(recording.rows, recording.facts)
    data, again = analysis.bends(recording.rows), analysis.bends(recording.rows, tile)
    columns: Columns = FIT | {
        "gain": ("gained over one line", ".1f"),
        "at": ("lines meet at", ".0f"),
        "against": ("gained over the known passes", ".1f"),
        "verdict": ("verdict", ""),
    }
    against = again["gain"].tolist() if tile else data["gain"].tolist()
    return table(data.assign(against=against, verdict=list(map(_bent, against))), columns)


def _bent(gain: float) -> str:
    """What a difference of the criterion says; 6 is strong evidence."""
    return "bends" if gain > STRONG else "no bend" if gain < -STRONG else "not decided"


def switches(recording: Recording) -> Table | Markdown:
    """The kernel switches the engine is known to make, and whether the curves show them."""
    data = prediction.known_switches(recording.rows, recording.facts)
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
    """Jumps that are left after the chosen fit, with the passes over the weights where they are known."""
    rows = recording.rows
    data = stock(analysis.jumps(rows, prediction.tile_of(rows, recording.facts)))
    rest = data[data["found"]]
    if rest.empty:
        return Markdown("After the chosen fit no jump is left.")
    found = [f"{escaped(r.model)} from {r.n_seq} to {r.n_seq + 1} sequences ({r.jump:.2f})" for r in rest.itertuples()]
    return Markdown(f"The chosen fit leaves these jumps unexplained: {'; '.join(found)}.")
