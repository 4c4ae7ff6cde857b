"""Do levers multiply? A lever's gain alone, against its gain on top of another lever.

Like is compared with like: the same type, draft length and chunk, in the same recording. The cells compared have no
part in the prediction: they have other numbers of answers, or other types.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis.stats import Estimate
from plamo_study.studies.chunked.plan import DECODING, OTHERS
from plamo_study.studies.levers import gains
from plamo_study.studies.levers.gains import Recordings
from plamo_study.studies.quantization import analysis as types
from plamo_study.studies.replicas import analysis as processes
from plamo_study.studies.replicas.plan import REPACKED
from plamo_study.studies.speculative import analysis as drafts

CLOSE = 1.5  # largest accepted factor between prediction and measurement
COLUMNS = ["pair", "lever", "kind", "model", "beside", "alone", "measured", "ratio", "close", "turned", "study"]
TYPES, DRAFTS = "a type of weights beside a batch", "drafts beside a batch"
CHUNKS, REPLICAS = "chunks beside more or fewer answers", "two processes beside another type"


def stacked(known: Recordings) -> pd.DataFrame:
    """One line per lever that was measured alone and beside another: COLUMNS.

    `pair`: which two levers meet. `alone` and `measured`: its gain in both; `ratio`: measured over alone; `close`:
    within 1.5 times; `turned`: shown to be a gain in one and a loss in the other.
    """
    entries: list[dict[str, Any]] = []
    for pair, parts in ((TYPES, _types), (DRAFTS, _drafts), (CHUNKS, _chunks), (REPLICAS, _replicas)):
        for entry in parts(known):
            ratio = entry["measured"].value / entry["alone"].value
            said = {entry["measured"].above(1.0), entry["alone"].above(1.0)}
            turned = said == {"holds", "does not hold"}
            entries.append(
                entry | {"pair": pair, "ratio": ratio, "close": 1 / CLOSE <= ratio <= CLOSE, "turned": turned}
            )
    return pd.DataFrame(entries, columns=COLUMNS)


def _line(
    lever: str, kind: Any, model: str, beside: str, pair: tuple[Estimate, Estimate], study: str
) -> dict[str, Any]:
    alone, measured = pair
    return {"lever": lever, "kind": kind, "model": model, "beside": beside, "alone": alone, "measured": measured,
            "study": study}  # fmt: skip


def _types(known: Recordings) -> Iterator[dict[str, Any]]:
    """A type's gain for one answer, and for a batch."""
    if (recording := known.get("04-quantization")) is None:
        return
    rows = recording.rows
    for model in dict.fromkeys(rows[rows["model"] != ""]["model"]):
        for dtype in dict.fromkeys(rows[rows["model"] == model]["dtype"]):
            pair = tuple(types.ratio(known.types, phase, model, dtype, gains.BITS) for phase in ("decode", "batch"))
            if dtype != gains.BITS and pair[0] is not None and pair[1] is not None:
                yield _line("bits", dtype, model, f"{gains.TOGETHER} answers", (pair[0], pair[1]), "04-quantization")


def _drafts(known: Recordings) -> Iterator[dict[str, Any]]:
    """Drafts of a length that cost nothing for one answer, and the same for several at once."""
    if (found := gains.drafted(known)) is None:
        return
    study, ups = found
    for lever, build in gains.BUILDS.items():
        every = drafts.free_by_length(ups, build, gains.ACCEPTED)
        for (model, k), group in every.groupby(["model", "n_draft"]):
            by_n = group.set_index("n_seq")["speed"]
            for n in sorted(set(by_n.index) - {1}) if 1 in by_n.index else ():
                kind = f"{k} drafted, {gains.ACCEPTED:.0%} right"
                yield _line(lever, kind, str(model), f"{n} answers", (by_n[1], by_n[n]), study)


def _chunks(known: Recordings) -> Iterator[dict[str, Any]]:
    """Chunks beside the usual number of answers, and beside fewer and more."""
    if (recording := known.get("06-chunked")) is None:
        return
    for model in dict.fromkeys(recording.rows[recording.rows["workload"] == "arrival"]["model"]):
        usual = gains.waited(recording.rows, model, DECODING)
        for n in OTHERS if usual else ():
            if other := gains.waited(recording.rows, model, n):
                pair = (usual["largest"], other["largest"])  # type: ignore[index] # the loop is empty without it
                yield _line("chunked", "", model, f"{n} others", pair, "06-chunked")


def _replicas(known: Recordings) -> Iterator[dict[str, Any]]:
    """Two processes over one with the usual type, and with one that each process lays out anew."""
    if (recording := known.get("07-replicas")) is None:
        return
    found = processes.over_one(recording.rows, recording.facts).dropna(subset=["against_one"])
    found = found[found["use_mmap"] & (found["n_processes"] == gains.SPLIT[0])]
    for (model, total), group in found.groupby(["model", "total"]):
        by_type = group.drop_duplicates("dtype").set_index("dtype")["against_one"]
        for dtype in by_type.index.difference([REPACKED]) if REPACKED in by_type.index else ():
            pair = (by_type[dtype], by_type[REPACKED])
            yield _line("replicas", f"{total} answers", str(model), REPACKED, pair, "07-replicas")


def by_pair(found: pd.DataFrame) -> pd.DataFrame:
    """Number of lines of each pair of levers: `pair`, `n`, `off` (more than 1.5 times) and `turned`.

    Lines of one pair are not independent: those of a type all divide by the same rows of one type.
    """
    groups = found.assign(off=~found["close"].astype(bool)).groupby("pair", sort=False)
    return groups.agg(n=("off", "size"), off=("off", "sum"), turned=("turned", "sum")).reset_index()


def order(found: pd.DataFrame) -> pd.DataFrame:
    """Whether types keep their order in a batch: `model`, `best` type alone and `best_beside` others, and how many are
    `kept` of the `pairs` of types that the batch tells apart (their intervals do not overlap)."""
    entries = []
    for model, group in found[found["lever"] == "bits"].groupby("model"):
        both = list(zip(group["alone"], group["measured"], strict=True))
        told = [(a, b) for a, b in combinations(both, 2) if a[1].low > b[1].high or b[1].low > a[1].high]
        kept = sum((a[0].value > b[0].value) == (a[1].value > b[1].value) for a, b in told)
        best, beside = (group["kind"].iloc[_largest(group[name])] for name in ("alone", "measured"))
        entries.append({"model": model, "best": best, "best_beside": beside, "kept": kept, "pairs": len(told)})
    return pd.DataFrame(entries, columns=["model", "best", "best_beside", "kept", "pairs"])


def _largest(gains_of: "pd.Series[Estimate]") -> int:
    return int(np.argmax([gain.value for gain in gains_of]))
