"""Study 03's arithmetic: what a step of B sequences must move and compute, and the time the ceilings allow for it."""

from typing import Any

import pandas as pd

from plamo_study.analysis import roofline, stats
from plamo_study.analysis.ceilings import limits, usual_limits
from plamo_study.analysis.kernels import column_tile, switches, weight_passes
from plamo_study.analysis.roofline import Ceilings, Model, miss
from plamo_study.analysis.usable import usable
from plamo_study.studies.batch_scaling import analysis
from plamo_study.studies.batch_scaling.analysis import Curves

Facts = dict[str, dict[str, Any]]
ROOM = 256  # llama.cpp rounds the tokens kept for one sequence up to a multiple of this (llama-context.cpp, n_ctx_seq)


def depth(rows: pd.DataFrame) -> float:
    """Mean depth of the timed steps: the shared prompt and half of the steps."""
    cell = rows[(rows["workload"] == "decode") & (rows["policy"] == "shared")].iloc[0]
    return float(cell["n_prompt"] + cell["n_gen"] / 2)


def prediction(rows: pd.DataFrame, facts: Facts, known: Curves) -> pd.DataFrame:
    """Per model and n_seq: `bytes` and `flops` of a step, the nearer ceiling (`bound`), the band `low` to `high` (s).

    `bytes` = weights + n_seq * (keys and values at depth + recurrent state, read and written). `passes`: how often the
    engine's kernel is known to read the weights (1 where that is not known), `low_passes` to `high_passes` the band
    with them.
    """
    at, tile, entries = depth(rows), tile_of(rows, facts), []
    stock = {model: curve for (build, model), curve in known.items() if build == analysis.STOCK}
    ceilings = limits(rows, {model: facts[model] for model in stock})
    for model, curve in stock.items():
        for n in (int(str(n)) for n in curve.index):
            moved, flops = roofline.decode_bytes(facts[model], at, n), roofline.decode_flops(facts[model], at, n)
            passes = weight_passes(n, tile) if tile else 1
            again = moved + (passes - 1) * roofline.weight_bytes(facts[model])
            entry = {"model": model, "n_seq": n, "bytes": moved, "flops": flops, "passes": passes}
            for end, band in (
                ("", roofline.band(flops, moved, ceilings[model])),
                ("_passes", roofline.band(flops, again, ceilings[model])),
            ):
                entry |= {f"low{end}": band.low, f"high{end}": band.high} | ({} if end else {"bound": band.bound})
            entries.append(entry)
    return pd.DataFrame(entries)


def against_prediction(rows: pd.DataFrame, facts: Facts, known: Curves) -> pd.DataFrame:
    """Prediction beside the `measured` step (s); `miss` and `miss_passes`: 1 inside the band, else times its edge."""
    table = prediction(rows, facts, known)
    seconds = [known[analysis.STOCK, row.model].loc[row.n_seq].dropna() for row in table.itertuples()]
    steps = [stats.median(of_step.tolist()) for of_step in seconds]
    for end in ("", "_passes"):
        edges = zip(steps, table[f"low{end}"], table[f"high{end}"], strict=True)
        table[f"miss{end}"] = [miss(step.value, low, high) for step, low, high in edges]
    return table.assign(measured=steps)


def turning(rows: pd.DataFrame, facts: Facts, known: Curves) -> pd.DataFrame:
    """Per model: the n_seq from which a step is bound by compute, no longer by memory.

    `predicted`: where the roofline's two times are equal, ceilings best-of; `usual`: the ceilings of the same blocks.
    `measured`: where the part every sequence adds has grown as large as the part all share, in the chosen fit, whose
    `worst` miss lies at `worst_at`. `miss`: measured over predicted.
    """
    at, fitted, entries = depth(rows), analysis.chosen_fits(known, tile_of(rows, facts)), []
    fitted = fitted[fitted["build"] == analysis.STOCK]
    models = {name: facts[name] for name in fitted["model"]}
    best, usual = limits(rows, models), usual_limits(rows, models)
    for fit in fitted.to_dict("records"):
        name, model = fit["model"], models[fit["model"]]
        entry = {key: fit[key] for key in ("model", "worst", "worst_at")} | {"measured": fit["half"]}
        entry |= {"predicted": _turn(model, at, best[name]), "usual": _turn(model, at, usual[name])}
        entries.append(entry | {"miss": fit["half"].scaled(1 / entry["predicted"])})
    return pd.DataFrame(entries)


def memory(rows: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """Bytes that one more sequence needs, and their parts, per model, with a context of `tokens` per sequence.

    `grown`: growth of the peak resident size from fewest to most sequences, per sequence. By arithmetic
    `state` (recurrent) and `cache` (keys and values of `tokens` tokens); `rest` is what is left, logits and buffers.
    """
    shared, entries = rows[(rows["workload"] == "decode") & (rows["policy"] == "shared")], []
    cell = shared.iloc[0]
    tokens = -(-int(cell["n_prompt"] + cell["n_gen"]) // ROOM) * ROOM
    for name, group in usable(shared[shared["build"] == analysis.STOCK]).groupby("model"):
        peak, model = group.groupby("n_seq")["peak_rss_bytes"].max(), facts[str(name)]
        _, sliding, full = roofline.layers(model)
        cache = tokens * (sliding + full) * roofline.kv_bytes_per_token(model, cell["type_k"], cell["type_v"])
        entry = {"model": name, "tokens": tokens, "state": roofline.state_bytes(model), "cache": cache}
        entry["grown"] = (peak.iloc[-1] - peak.iloc[0]) / max(peak.index[-1] - peak.index[0], 1)
        entries.append(entry | {"rest": entry["grown"] - entry["state"] - entry["cache"]})
    return pd.DataFrame(entries)


def _turn(model: Model, at: float, limit: Ceilings) -> float:
    """n with n * FLOPs / compute = (weights + n * its own bytes) / bandwidth."""
    weights = roofline.weight_bytes(model)
    own = roofline.decode_bytes(model, at) - weights
    compute = roofline.decode_flops(model, at) / limit.matmul - own / limit.read
    return weights / limit.read / compute if compute > 0 else float("inf")


def tile_of(rows: pd.DataFrame, facts: Facts) -> int | None:
    """The column tile of the kernel these rows' matrices go through, where it is known."""
    return column_tile(engine(rows, facts), _dtype(rows))


def known_switches(rows: pd.DataFrame, facts: Facts, known: Curves) -> pd.DataFrame:
    """The kernel switches the engine is known to make, and whether each curve shows them.

    Columns n_seq (before), what, model, `jump` and `shown`: slower, faster, or not found.
    """
    jumps, entries = analysis.jumps(known), []
    jumps, on_gpu = jumps[jumps["build"] == analysis.STOCK], bool((rows["n_gpu_layers"] != 0).any())
    for switch in switches(engine(rows, facts), _dtype(rows), int(rows["n_seq"].max()), on_gpu):
        for row in jumps[jumps["n_seq"] == switch.n_seq].to_dict("records"):
            shown = ("slower" if row["jump"].value > 1 else "faster") if row["found"] else "not found"
            entries.append({"n_seq": switch.n_seq, "what": switch.what, "model": row["model"], "jump": row["jump"]})
            entries[-1]["shown"] = shown
    return pd.DataFrame(entries, columns=["n_seq", "what", "model", "jump", "shown"])


def engine(rows: pd.DataFrame, facts: Facts) -> dict[str, Any]:
    """The fact of the engine the study's main rows come from."""
    return facts[rows[rows["build"] == analysis.STOCK]["engine"].iloc[0]]


def _dtype(rows: pd.DataFrame) -> str:
    return str(rows[rows["workload"] == "decode"]["dtype"].iloc[0])
