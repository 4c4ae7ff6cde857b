"""Study 04's claims about speed, each an estimate against a threshold: holds, does not hold, or inconclusive."""

from typing import Any

import pandas as pd

from plamo_study.analysis.claims import above, below, family, within
from plamo_study.analysis.timing import paired_ratio
from plamo_study.studies.quantization import analysis
from plamo_study.studies.quantization.analysis import Facts
from plamo_study.studies.quantization.prediction import against_prediction, packing

INT8_DECODE, INT8_PREFILL, Q4_OVER_Q8 = 1.93, 1.87, 2.0  # data/published/quantization-speedups.csv
HELD = ("Q8_0", "Q4_K_M", "Q4_0", "Q2_K")  # types that predictions are claimed of; all stand in the table beside them
ALIKE = 0.15  # a published factor is called found within this margin
BATCHED = "Q4_0"  # the type whose gain in a batch is held against that alone
AS_BYTES = 0.10  # and a prediction from bytes is called right within this one


def claims(rows: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """One family of claims; `wanted` is the threshold in words."""
    compared = against_prediction(rows, analysis.files(rows, facts)).set_index(["model", "dtype", "phase"])
    entries: list[dict[str, Any]] = []
    for model in compared.index.get_level_values("model").unique():
        of_model = compared.loc[model].sort_index()
        promised = of_model["predicted"].xs(BATCHED, level="dtype").to_dict() if BATCHED in of_model.index else {}
        entries += _by_bytes(model, compared.loc[model]) + _published(rows, model, promised)
    for gain in packing(rows).to_dict("records"):
        what = "a prompt's products" if gain["columns"] == "many" else "a single column's product"
        entries.append(above(f"packing {gain['dtype']} when it is loaded speeds {what}", "", gain["gain"], 1.0))
    return family(entries)


def _by_bytes(model: str, compared: pd.DataFrame) -> list[dict[str, Any]]:
    """What arithmetic said of each type: decode by its bytes, prefill not at all."""
    entries = []
    for (dtype, phase), row in compared[compared.index.isin(HELD, level="dtype")].iterrows():
        if phase == "decode":
            claim = f"{dtype} decodes as fast as its bytes say, over F16"
            entries.append(within(claim, model, row["miss"], 1 - AS_BYTES, 1 + AS_BYTES))
        elif phase == "prefill":
            claim = f"{dtype} prefills as fast as F16"
            entries.append(within(claim, model, row["measured"], 1 - AS_BYTES, 1 + AS_BYTES))
    return entries


def _published(rows: pd.DataFrame, model: str, by_bytes: dict[str, float]) -> list[dict[str, Any]]:
    wanted = (
        ("the H100's 1.93 for INT8 decode is found for Q8_0", "decode", "Q8_0", "F16", INT8_DECODE),
        ("the H100's 1.87 for INT8 prefill is found for Q8_0", "prefill", "Q8_0", "F16", INT8_PREFILL),
        ("Q4_0 decodes twice as fast as Q8_0", "decode", "Q4_0", "Q8_0", Q4_OVER_Q8),
        ("Q4_K_M decodes twice as fast as Q8_0", "decode", "Q4_K_M", "Q8_0", Q4_OVER_Q8),
    )
    entries = []
    for claim, phase, dtype, over, factor in wanted:
        ratio = analysis.ratio(rows, phase, model, dtype, over)
        if ratio:
            entries.append(within(claim, model, ratio, factor / (1 + ALIKE), factor * (1 + ALIKE)))
    spent = analysis.seconds(rows)
    times = [spent.get((phase, model, dtype)) for phase in ("batch", "decode") for dtype in ("F16", "Q4_0")]
    if by_bytes and not any(time is None for time in times):
        batch_f16, batch_q4, alone_f16, alone_q4 = (time for time in times if time is not None)
        less = paired_ratio(batch_f16 * alone_q4, batch_q4 * alone_f16)
        claim = "Q4_0 gains less over F16 in a batch than alone, by more than bytes say"
        entries.append(below(claim, model, less, by_bytes["batch"] / by_bytes["decode"]))
    return entries
