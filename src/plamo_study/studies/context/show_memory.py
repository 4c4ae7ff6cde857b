"""Notebook 05's sentences and tables on caches, the loop without one, and weights of other values."""

import pandas as pd
from IPython.display import Markdown

from plamo_study.measure.recording import Recording
from plamo_study.present import evidence, sentences
from plamo_study.present.evidence import escaped
from plamo_study.present.tables import Columns, Table, significant, table
from plamo_study.studies.context import memory as study, prediction, values
from plamo_study.studies.context.analysis import PHASES
from plamo_study.studies.context.claims import of_caches

CONTEXTS = (4096, 16384)
MIB = 1 / (1 << 20)


def kinds(recording: Recording) -> Table:
    """Speed and memory by kind of attention and cache."""
    data = study.kinds(recording.rows)
    columns: Columns = {
        "model": ("model", ""),
        "kept": ("sliding layers keep", ""),
        "kind": ("flash / K / V", ""),
        "depth": ("at depth", ",d"),
        "prefill_gain": ("prefill, times off/f16/f16", ".2f"),
        "decode_gain": ("decode, times off/f16/f16", ".2f"),
        "prefill": ("prefill (ms per token)", significant(3, 1e3)),
        "decode": ("decode (ms per token)", significant(3, 1e3)),
    }
    plain = data[data["kind"] == study.PLAIN].set_index(["model", "whole"])
    same = pd.MultiIndex.from_frame(data[["model", "whole"]])
    data = data.assign(**{f"plain_{phase}": plain[phase].reindex(same).tolist() for phase in PHASES})
    return table(_kept(data), columns, ratios={f"{phase}_gain": (f"plain_{phase}", phase) for phase in PHASES})


def _kept(data: pd.DataFrame) -> pd.DataFrame:
    return data.assign(kept=["everything" if whole else "the window" for whole in data["whole"]])


def sizes(recording: Recording) -> Table:
    """Memory by kind of attention and cache: predicted, and reserved by the engine's log."""
    data = study.kinds(recording.rows)
    predicted = [
        prediction.reserved(recording.facts[r["model"]], r["kind"], r["room"], r["n_ubatch"], r["whole"])
        for r in data.to_dict("records")
    ]
    for name in ("kv", "state", "scores"):
        data[f"{name}_predicted"] = [entry[name] for entry in predicted]
    shown = significant(3, MIB)
    both = [f"{shown(r['state_predicted'])} / {shown(r['state'])}" for r in data.to_dict("records")]
    data["kind"] += [", everything kept" if whole else "" for whole in data["whole"]]
    columns: Columns = {
        "model": ("model", ""),
        "kind": ("flash / K / V", ""),
        "kv_predicted": ("keys and values, predicted (MiB)", significant(3, MIB)),
        "kv": ("reserved (MiB)", significant(3, MIB)),
        "states": ("state, predicted / reserved (MiB)", ""),
        "scores_predicted": ("scores, predicted (MiB)", significant(3, MIB)),
        "compute": ("all work buffers (MiB)", significant(3, MIB)),
        "rss": ("resident in all (MiB)", significant(3, MIB)),
    }
    return table(data.assign(states=both), columns)


def window(recording: Recording) -> Table:
    """Sliding layers that keep everything against those that keep the window."""
    columns: Columns = {
        "model": ("model", ""),
        "kind": ("flash / K / V", ""),
        "prefill": ("prefill time, everything / window", ".2f"),
        "decode": ("decode time, everything / window", ".2f"),
        "kv": ("bytes, everything / window", ".2f"),
    }
    return table(study.window(recording.rows), columns)


def drift(recording: Recording) -> Table:
    """What kinds of attention and cache change in the predictions."""
    columns: Columns = {
        "model": ("model", ""),
        "kind": ("flash / K / V", ""),
        "kld": ("KLD (nats per token)", significant(2)),
        "same_top": ("same likeliest token", ".1%"),
        "ppl_ratio": ("perplexity ratio", ".4f"),
        "p_adjusted": ("p, corrected", ".2g"),
        "detectable": ("smallest ratio seen, minus 1", ".2g"),
        "chunks": ("chunks", ""),
    }
    return table(study.drift(recording.rows), columns)


def paged(recording: Recording) -> Table:
    """What paged attention would change, by arithmetic."""
    names, memory = prediction.compared_models(recording.rows), prediction.memory_of(recording.facts, recording.rows)
    data = pd.concat([prediction.paged(recording.facts, names, memory, n) for n in CONTEXTS], ignore_index=True)
    columns: Columns = {
        "model": ("model", ""),
        "n_ctx": ("context set aside", ",d"),
        "reserved": ("a sequence reserves (MiB)", significant(3, MIB)),
        "used": ("it uses, on average (MiB)", significant(3, MIB)),
        "paged": ("with pages (MiB)", significant(3, MIB)),
        "gain": ("sequences, times as many", ".2f"),
        "fit": ("fit this machine, reserved", ",d"),
        "fit_paged": ("fit, paged", ",d"),
    }
    return table(data, columns)


def loop(recording: Recording) -> Table:
    """The loop without a cache and with it: time and tokens."""
    columns: Columns = {
        "model": ("model", ""),
        "n_prompt": ("prompt", ""),
        "n_gen": ("output tokens", ""),
        "naive_tokens": ("evaluated without", ",d"),
        "cached_tokens": ("with", ",d"),
        "naive": ("seconds without", significant(3)),
        "cached": ("with ", significant(3)),
        "times": ("times as long", ".1f"),
    }
    return table(study.loop_totals(recording.rows), columns, ratios={"times": ("naive", "cached")})


def source_loop(recording: Recording, depths: Recording) -> Markdown:
    """The source's 500 tokens that become 500,000: counted, and what they would take here."""
    n_prompt, n_gen, said = study.SOURCE_PROMPT, study.SOURCE_OUTPUT, study.SOURCE_COUNT
    naive, cached = study.naive_tokens(n_prompt, n_gen), study.cached_tokens(n_prompt, n_gen)
    pairs = study.naive_pairs(n_prompt, n_gen) / study.cached_pairs(n_prompt, n_gen)
    lines = [
        f"After a prompt of {n_prompt:,} tokens, {n_gen} output tokens evaluate **{naive:,.0f} tokens** without a "
        f"cache and {cached:,.0f} with it: {naive / cached:,.0f} times as many, and {pairs:,.0f} times the pairs of "
        f"full attention. The source says about {said:,} against about {n_gen}: its first number is that of a prompt "
        f"of {study.prompt_for(said, n_gen):,.0f} tokens, its second leaves the prompt out."
    ]
    summed = study.loop_prediction(recording.rows, depths.rows, n_prompt, n_gen)
    if not len(summed):
        lines.append(
            "- The loop ran on another machine than the depth curves, which therefore say nothing of its time."
        )
    for row in summed.to_dict("records"):
        lines.append(
            f"- {escaped(row['model'])}, summed from its depth curves: {row['naive'].scaled(1 / 60):.1f} minutes "
            f"instead of {row['cached']:.1f} seconds, {row['times']:.0f} times as long"
            f"{sentences.beside(row['times'], row['naive'], row['cached'], '.0f')}"
            + (" (extrapolated)." if row["extrapolated"] else ".")
        )
    return Markdown("\n".join([lines[0], "", *lines[1:]]))


def checked_claims(recording: Recording, drifted: Recording, looped: Recording, depths: Recording) -> Table:
    """Every claim on caches with its estimate, its threshold and its verdict."""
    return evidence.claims(of_caches(recording.rows, drifted.rows, looped.rows, depths.rows))


def of_values(recording: Recording) -> Table:
    """Times with other values in the same tensors, over those with the usual ones."""
    found = values.by_values(recording.rows)
    columns: Columns = {
        "model": ("model", ""),
        "kind": ("weights", ""),
        "phase": ("phase", ""),
        "depth": ("at depth", ",d"),
        "where": ("weights in", ""),
        "usual": ("usual weights (ms per token)", significant(3, 1e3)),
        "ratio": ("time, times usual", ".3f"),
        "same": (f"within {values.WITHIN[1] - 1:.0%}", ""),
    }
    where = found["mapped"].map({False: "memory of the process", True: "pages of the file"})
    return table(found.assign(kind=found["values"].map(values.KINDS), where=where), columns)
