"""Notebook 01's sentences and tables: the words around numbers that come from rows, never the other way round."""

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import phase_asymmetry as study
from plamo_study.analysis.phase_claims import claims
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.usable import drifted
from plamo_study.measure.collect import Recording
from plamo_study.present import published
from plamo_study.present.tables import Table, scaled, significant, table

PER_SECOND = {"read": (1e-9, "GB/s"), "matmul": (1e-9, "GFLOP/s")}
CEILINGS = {"read": "read bandwidth", "matmul": "matrix throughput"}


def finding(recording: Recording) -> Markdown:
    """The study in one paragraph: number, unit, interval, condition, verdicts."""
    rows = recording.rows
    ratios = study.asymmetry(rows).set_index("model")["ratio"]
    fast, slow = study.prefill(rows), study.decode(rows, (512,))
    parts = []
    for model, ratio in ratios.items():
        prefill = fast[(fast["model"] == model) & (fast["n_prompt"] == 512)]["rate"].iloc[0]
        decode = slow[slow["model"] == model]["rate"].iloc[0]
        rates = f"{significant(3)(prefill)} against {significant(3)(decode)} tokens per second"  # type: ignore[operator]
        parts.append(f"**{model.replace('*', chr(92) + '*')} reads {ratio:.1f} times as fast as it writes** ({rates})")
    return Markdown("; ".join(parts) + f". {_condition(recording)}")


def takeaway(recording: Recording) -> Markdown:
    """The claims that held, and those that did not, as a boxed sentence."""
    checked = claims(recording.rows, recording.facts)
    lines = [f"- {r['claim']} ({r['model']}): **{r['verdict']}**, {r['estimate']:.2f}".replace("*)", r"\*)") for r in checked.to_dict("records")]
    return Markdown("\n".join(lines))


def guess(recording: Recording, guessed: float) -> Markdown:
    """The reader's guess beside the measured ratio of the first model."""
    ratio: Estimate = study.asymmetry(recording.rows)["ratio"].iloc[0]
    off = max(guessed / ratio.value, ratio.value / guessed)
    return Markdown(f"Your guess was a factor of **{guessed:g}**; measured: **{ratio:.1f}**. You were off by a factor of {off:.1f}.")


def provenance(recording: Recording) -> Table:
    """Where the rows come from: machine, engine, files; a model's assumptions are spelled out here."""
    facts = [recording.facts[i] for i in (*recording.rows["machine"].unique(), *recording.rows["engine"].unique())]
    machines, engines = [f for f in facts if "chip" in f], [f for f in facts if "binding" in f]
    entries = [("machine", f"{f['chip']}, {f['performance_cores']} cores, {f['memory_bytes'] / 2**30:.0f} GiB, {f['os']}") for f in machines]
    entries += [("engine", f"{f['binding']}, llama.cpp {f['commit']}, libraries {f['sha256'][:12]}") for f in engines]
    entries += [("rows", f"{len(recording.rows)}, {recording.source}, scale {recording.scale}")]
    return Table(pd.DataFrame(entries, columns=["what", "which"]))


def models(recording: Recording) -> Table:
    """The models measured: what kind of file, size, hash, and what is assumed about their shape."""
    entries = []
    for name in recording.rows.loc[recording.rows["model"] != "", "model"].unique():
        fact = recording.facts[name]
        kind = f"{'random weights' if fact['synthetic'] else 'released weights'}, {fact['dtype']}"
        size = f"{fact['file_bytes'] / 1e6:,.1f} MB, {fact['n_params'] / 1e6:,.1f} M parameters"
        assumed = " ".join(fact["assumptions"]) or "none"
        entries.append({"model": name, "file": kind, "size": size, "sha256": fact["sha256"][:12], "assumed": assumed})
    return Table(pd.DataFrame(entries))


def ceilings(recording: Recording) -> Table:
    """Both ceilings of this machine at each thread count, best and usual."""
    data = study.ceilings(recording.rows)
    factors = [PER_SECOND[c] for c in data["ceiling"]]
    shown = pd.DataFrame(
        {
            "ceiling": [CEILINGS[c] for c in data["ceiling"]],
            "device": ["CPU" if n == 0 else "GPU" for n in data["n_gpu_layers"]],
            "threads": data["n_threads"],
            "best": [f"{best * f:.1f} {unit}" for best, (f, unit) in zip(data["best"], factors, strict=True)],
            "median of processes": [scaled(f, ".1f")(e) for e, (f, _) in zip(data["usual"], factors, strict=True)],  # type: ignore[operator]
        }
    )
    return Table(shown)


def prediction(recording: Recording) -> Table:
    """What arithmetic says before anything is timed."""
    columns = {
        "model": ("model", ""),
        "what": ("what", ""),
        "flops": ("GFLOP", significant(3, 1e-9)),
        "bytes": ("GB moved", significant(3, 1e-9)),
        "bound": ("nearer ceiling", ""),
        "low": ("at least (s)", significant(3)),
        "high": ("at most (s)", significant(3)),
    }
    return table(study.prediction(recording.rows, recording.facts), columns)


def against_prediction(recording: Recording) -> Table:
    """Measured medians beside the predicted band, and how much of the nearer ceiling was reached."""
    data = study.against_prediction(recording.rows, recording.facts)
    band = [f"{significant(2)(r['low'])} to {significant(2)(r['high'])}" for r in data.to_dict("records")]  # type: ignore[operator]
    columns = {
        "model": ("model", ""),
        "what": ("what", ""),
        "band": ("predicted (s)", ""),
        "measured": ("measured (s)", significant(3)),
        "miss": ("times the band's edge", ".2f"),
        "bound": ("nearer ceiling", ""),
        "share": ("share of it reached", ".0%"),
    }
    return table(data.assign(band=band), columns)


def prefill(recording: Recording) -> Table:
    """Prefill by prompt length."""
    columns = {
        "model": ("model", ""),
        "n_prompt": ("prompt tokens", ""),
        "rate": ("prefill rate (t/s)", significant(3)),
        "ttft": ("TTFT, median (ms)", significant(3, 1e3)),
        "ttft_p95": ("TTFT, p95 (ms)", significant(3, 1e3)),
        "noise": ("variation", _noise),
        "n": ("processes", ""),
    }
    return table(study.prefill(recording.rows), columns)


def decode(recording: Recording) -> Table:
    """Decode by output length."""
    columns = {
        "model": ("model", ""),
        "generated": ("output tokens", ""),
        "seconds": ("time (s)", significant(3)),
        "rate": ("decode rate (t/s)", significant(3)),
        "itl": ("ITL, median (ms)", significant(3, 1e3)),
        "itl_p95": ("ITL, p95 (ms)", significant(3, 1e3)),
        "noise": ("variation", _noise),
        "n": ("processes", ""),
    }
    return table(study.decode(recording.rows).sort_values(["model", "generated"]), columns)


def asymmetry(recording: Recording) -> Table:
    """The ratio of the two phases' rates."""
    return table(study.asymmetry(recording.rows), {"model": ("model", ""), "ratio": ("prefill rate / decode rate", ".2f")})


def crossover(recording: Recording) -> Table:
    """Where a request turns from prefill-bound to decode-bound."""
    columns = {"model": ("model", ""), "n_prompt": ("prompt tokens", ""), "tokens": ("output tokens of equal time", ".0f")}
    return table(study.crossover(recording.rows), columns)


def gains(recording: Recording) -> Table:
    """What full threads gain over half of them."""
    data = study.threads_experiment(recording.rows)
    data = data.assign(what=[CEILINGS.get(what, what) for what in data["what"]])
    return table(data, {"what": ("what", ""), "model": ("model", ""), "gain": ("gain", ".2f")})


def checked_claims(recording: Recording) -> Table:
    """Every claim of the text with its estimate, its threshold and its verdict."""
    columns = {"claim": ("claim", ""), "model": ("model", ""), "estimate": ("measured", ".2f"), "wanted": ("needed", ""), "verdict": ("verdict", "")}
    return table(claims(recording.rows, recording.facts), columns)


def beside_published(recording: Recording) -> Table:
    """The M4 Pro's figures beside ours: other machine, other engine build, other weights, so only the pattern compares."""
    theirs = published.load("m4-pro-b9596")
    theirs = theirs[(theirs["n_seq"] == 1) & theirs["value"].notna()]
    fast = {(r["model"].rstrip("*"), r["n_prompt"]): r["rate"] for r in study.prefill(recording.rows).to_dict("records")}
    slow = {(r["model"].rstrip("*"), r["generated"]): r["rate"] for r in study.decode(recording.rows).to_dict("records")}
    ours = [(fast.get((r.model, r.n_prompt)) if r.quantity == "prefill" else slow.get((r.model, r.n_gen))) for r in theirs.itertuples()]
    what = [f"{r.quantity} of {r.n_prompt if r.quantity == 'prefill' else r.n_gen}" for r in theirs.itertuples()]
    columns = {"model": ("model", ""), "what": ("what", ""), "value": ("M4 Pro, published (t/s)", ",.0f"), "ours": ("here (t/s)", significant(3))}
    return table(theirs.assign(what=what, ours=ours), columns)


def _condition(recording: Recording) -> str:
    rows = recording.rows
    machine = next(f for f in (recording.facts[i] for i in rows["machine"].unique()))
    judged = rows[rows["model"] != ""]
    valid = (judged["verdict"] == "valid").sum()
    kinds = ", ".join(dict.fromkeys(f"{recording.facts[m]['dtype']} {'random' if recording.facts[m]['synthetic'] else 'released'} weights" for m in judged["model"].unique()))
    return (
        f"Condition: prompts of 512 tokens, 512 output tokens, one sequence, scale {recording.scale} ({kinds}), {machine['chip']}, "
        f"{rows['n_threads'].max()} threads; medians over processes with 95 % intervals. {valid} of {len(judged)} rows were computed right."
    )


def _noise(variation: float) -> str:
    return f"{variation:.0%}" + (" noisy" if variation > 0.10 else "")


def verdicts(recording: Recording) -> Table:
    """Rows counted by verdict, with the largest disagreement between the two paths and with the oracle."""
    rows = recording.rows[recording.rows["model"] != ""]
    entries = []
    for (model, workload), group in rows.groupby(["model", "workload"]):
        errors = [v for checks in group["checks"] for name, v in checks.items() if name.endswith("_error")]
        counts = {verdict: int((group["verdict"] == verdict).sum()) for verdict in ("valid", "invalid", "failed")}
        against = "oracle" if workload == "gate" else "second path"
        entries.append({"model": model, "cells": workload, "against": against, "largest error": f"{max(errors):.1e}" if errors else "n/a"} | counts)
    marked, blocks = drifted(recording.rows)
    entries.append({"model": "blocks", "cells": f"{blocks} in all, {marked} marked by the anchor"})
    return Table(pd.DataFrame(entries).fillna(""))
