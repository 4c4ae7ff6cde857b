"""Published figures of quantized models beside ours: other machines and backends, so only the pattern compares."""

from plamo_study.measure.recording import Recording
from plamo_study.present import published
from plamo_study.present.tables import Columns, Table, table
from plamo_study.studies.quantization import analysis
from plamo_study.studies.quantization.show import known, prompt, together

OURS = {"INT8": "Q8_0", "FP16": "F16", "Q4": "Q4_0", "Q8": "Q8_0"}  # the types here that stand for the sources' words


def speedups(recording: Recording) -> Table:
    """The sources' factors beside ours: other machines, other backends, so only the pattern compares."""
    theirs = published.load("quantization-speedups")
    data = theirs.assign(compared=[f"{r.dtype} over {r.over}" for r in theirs.itertuples()])
    models = list(dict.fromkeys(model for model, _ in known(recording)))
    for model in models:
        data[model] = [
            analysis.ratio(recording.rows, str(r.phase), model, OURS[str(r.dtype)], OURS[str(r.over)])
            for r in theirs.itertuples()
        ]
    data["ours"] = [
        f"{OURS[r.dtype]} over {OURS[r.over]}, {_ours(recording, str(r.phase))}" for r in theirs.itertuples()
    ]
    columns: Columns = {
        "what": ("theirs", ""),
        "compared": ("types", ""),
        "value": ("published", ".2f"),
        "ours": ("ours, not the same", ""),
    }
    return table(data, {**columns, **{model: (model, ".2f") for model in models}})


def _ours(recording: Recording, phase: str) -> str:
    """What a phase is here, in the words in which sources name theirs."""
    sequences = f"decode, batch {together(recording)}"
    return {"prefill": f"prefill of {prompt(recording)} tokens", "decode": "decode, batch 1", "batch": sequences}[phase]


def m1_max(recording: Recording) -> Table:
    """The M1 Max's decode rates and quality of a larger PLaMo 2, its decode gains beside the first model's here."""
    theirs = published.load("m1-max-translate").pivot(index="dtype", columns="quantity", values="value")
    theirs = theirs.sort_values("decode").reset_index()
    first = next(model for model, _ in known(recording))
    theirs["gain"] = theirs["decode"] / float(theirs[theirs["dtype"] == analysis.REFERENCE]["decode"].iloc[0])
    theirs["ours"] = [
        analysis.ratio(recording.rows, "decode", first, str(dtype), analysis.REFERENCE) for dtype in theirs["dtype"]
    ]
    columns: Columns = {
        "dtype": ("type", ""),
        "decode": ("M1 Max, published (t/s)", ".2f"),
        "chrF": ("chrF, published", ".2f"),
        "gain": ("decode over F16, published", ".2f"),
        "ours": (f"{first}, here", ".2f"),
    }
    return table(theirs, columns)
