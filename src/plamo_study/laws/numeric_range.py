"""Ranges against limits: inputs of a model's products judged for each backend, and planted amplitudes checked.

A prompt's products have many columns and use a backend's matrix kernels; a decode step's have one and use its vector
kernels. On GPUs, prompts of up to eight tokens also use vector kernels, so these are judged by both phases. The
verdict comes from casts.py. A range is that of one text, not of the weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from gguf import GGMLQuantizationType

from llama_meter.cells import PLANTED
from llama_meter.measure.tolerance import OFFLOADED
from llama_meter.models import casts

Series = Mapping[str, Sequence[float]]
FAR = OFFLOADED["F16"]  # relative error of logits that rounding does not explain: only the size of the input changed
PHASES = {"prompt": "mat-mul", "decode": "mat-vec"}  # phase -> path its products take
WORDS = {"mat-vec": "one column", "mat-mul": "many columns"}
NUMBERS = ("largest", "sum16", "sum32", "output", "not_finite")


def ranges(series: Series) -> pd.DataFrame:
    """The probe's series as a tidy frame: phase, kind, layer (-1: none), dtype, and one column per number."""
    rows = []
    for name in series:
        if not name.startswith("layers/"):
            continue
        kind = name.removeprefix("layers/")
        types = [casts.met(kind, GGMLQuantizationType(int(number)).name) for number in series[f"types/{kind}"]]
        for phase in PHASES:
            columns = {number: series.get(f"{number}/{phase}/{kind}", ()) for number in NUMBERS}
            for at, values in enumerate(zip(*columns.values(), strict=True)):
                layer = int(series[name][at])
                rows.append(
                    {
                        "phase": phase,
                        "kind": kind,
                        "layer": layer,
                        "dtype": types[at],
                        **dict(zip(columns, values, strict=True)),
                    }
                )
    return pd.DataFrame(rows, columns=["phase", "kind", "layer", "dtype", *NUMBERS])


def judged(products: pd.DataFrame, backends: Sequence[str] = casts.BACKENDS) -> pd.DataFrame:
    """Every product on every backend and path: columns of `products`, backend, path, cast, of, limit, factor, verdict.

    `factor` is the number over its limit: above one it overflows, by that factor. "unknown": a type missing from the
    table. "not finite": the input already held an infinity or NaN.
    """
    judgements = []
    for row in products.to_dict("records"):
        for path in casts.PATHS if row["phase"] == "prompt" else ("mat-vec",):
            judgements += [
                row | {"backend": backend, "path": path} | _judge(row, backend, path) for backend in backends
            ]
    columns = [*products.columns, "backend", "path", "cast", "of", "limit", "factor", "verdict"]
    return pd.DataFrame(judgements, columns=columns)


def _judge(row: Mapping[str, Any], backend: str, path: str) -> dict[str, Any]:
    numbers = {of: row[column] for of, column in casts.SERIES.items()}
    verdict = casts.verdict(backend, row["dtype"], path, numbers)
    if verdict is None:
        judgement = {"cast": "", "of": "", "limit": np.nan, "factor": np.nan, "verdict": "unknown"}
    else:
        cast, word = verdict.cast, "fits" if verdict.fits else "overflows"
        judgement = {"cast": cast.cast, "of": cast.of, "limit": cast.limit, "factor": verdict.factor, "verdict": word}
    return judgement | ({"verdict": "not finite"} if row["not_finite"] else {})


def closest(judgements: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The product of each group that comes closest to its limit or exceeds it most."""
    ordered = judgements.sort_values("factor", ascending=False, kind="stable", na_position="last")
    return ordered.groupby(list(by), sort=False).head(1).sort_values(list(by)).reset_index(drop=True)


def by_kind(products: pd.DataFrame) -> pd.DataFrame:
    """Per model and kind of product the largest input of each phase, and the limit it comes closest to.

    Columns: model, kind, prompt and decode (NaN where there was none), where (backend, path, type and cast of that
    limit), layer, factor, verdict; largest factor first.
    """
    largest = products.pivot_table(index=["model", "kind"], columns="phase", values="largest", aggfunc="max")
    worst = closest(judged(products), ["model", "kind"])
    worst["where"] = [
        f"{r.backend}, {WORDS[r.path]}, {r.dtype.removeprefix('KV-')}: {r.cast}" for r in worst.itertuples()
    ]
    worst = worst[["model", "kind", "where", "layer", "factor", "verdict"]]
    merged = largest.reindex(columns=list(PHASES)).reset_index().merge(worst, on=["model", "kind"])
    return merged.sort_values(["model", "factor"], ascending=[True, False])


def planted(rows: pd.DataFrame, facts: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Predicted against observed for every type, phase and amplitude.

    Columns: dtype, phase, path, amplitude (asked for), largest (what entered), factor, predicted and observed
    ("finite", "not finite", or "wrong": finite, but far from the result before planting; "failed" for a worker that
    did not end well), agrees ("wrong" counts as not finite), build. The backend is that of the row's engine and
    machine.
    """
    planted_rows = rows[(rows["workload"] == "ranges") & rows["label"].str.startswith(PLANTED)]
    cells: list[dict[str, Any]] = []
    for _, row in planted_rows.iterrows():
        dtype, machine = row["label"].removeprefix(PLANTED), str(facts[row["machine"]]["architecture"])
        corrects, build = facts[row["engine"]].get("corrects", ()), row["build"]
        if row["status"] != "ok":
            cells.append({"dtype": dtype, "observed": "failed", "agrees": False, "build": build})
            continue
        gpu = facts[row["machine"]]["gpus"][0] if row["n_gpu_layers"] else None
        for phase, path in PHASES.items():
            backend = casts.of_engine(corrects, machine, path, gpu)
            cells += [cell | {"build": build} for cell in _cells(row["series"], dtype, backend, phase)]
    columns = ["dtype", "phase", "path", "amplitude", "largest", "factor", "predicted", "observed", "agrees", "build"]
    return pd.DataFrame(cells, columns=columns)


def _cells(series: Series, dtype: str, backend: str, phase: str) -> list[dict[str, Any]]:
    cells = []
    errors = series.get(f"error/{phase}") or [0.0] * len(series["amplitude"])  # not compared in the oldest rows
    for at, amplitude in enumerate(series["amplitude"]):
        numbers = {of: series[f"{column}/{phase}"][at] for of, column in casts.SERIES.items()}
        verdict = casts.verdict(backend, dtype, PHASES[phase], numbers)
        assert verdict is not None
        predicted = "finite" if verdict.fits else "not finite"
        observed = ("wrong" if errors[at] > FAR else "finite") if series[f"finite/{phase}"][at] else "not finite"
        place = {"dtype": dtype, "phase": phase, "path": PHASES[phase], "amplitude": amplitude}
        agrees = (predicted == "finite") == (observed == "finite")
        result = {"factor": verdict.factor, "predicted": predicted, "observed": observed, "agrees": agrees}
        cells.append(place | {"largest": numbers["largest"]} | result)
    return cells


def thresholds(grid: pd.DataFrame) -> pd.DataFrame:
    """Per build, type and phase the largest input that stayed right and the smallest that did not (NaN: none).

    `how`: how it failed there, "not finite" or "wrong"; "" where nothing did.
    """
    ended = grid[grid["observed"] != "failed"]
    entries = []
    for (build, dtype, phase), group in ended.groupby(["build", "dtype", "phase"], sort=False):
        good, bad = group[group["observed"] == "finite"], group[group["observed"] != "finite"]
        entry = {"build": build, "dtype": dtype, "phase": phase, "finite_up_to": good["largest"].max()}
        entry |= {"not_finite_from": bad["largest"].min(), "how": ", ".join(sorted(set(bad["observed"])))}
        entries.append(entry | {"cells": len(group), "agree": int(group["agrees"].sum())})
    names = ["build", "dtype", "phase", "finite_up_to", "not_finite_from", "how", "cells", "agree"]
    return pd.DataFrame(entries, columns=names)
