"""Notebook 04's sentences and tables about size and speed.

Quality, fragile tensors and the numeric range have modules of their own.
"""

from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import kernel_paths, stats
from plamo_study.analysis.stats import Estimate
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence, sentences
from plamo_study.present.evidence import escaped
from plamo_study.present.tables import Columns, Format, Formatter, Table, folded, noise, significant, table
from plamo_study.studies.quality import analysis as losses
from plamo_study.studies.quantization import analysis, prediction as arithmetic
from plamo_study.studies.quantization.claims import claims

PHASES = {"prefill": "prefill", "decode": "decode, one sequence", "batch": "decode, a batch"}
FILE: dict[str, tuple[str, Format]] = {"model": ("model", ""), "dtype": ("type", "")}


def finding(recording: Recording, quality: Recording) -> Markdown:
    """Size and speed in one paragraph: the fastest type of each model, what its bytes promised, and the condition."""
    compared = against(recording).set_index(["model", "dtype", "phase"])
    parts = []
    for model, group in joined(recording, quality).groupby("model"):
        best, first = fastest(group, "decode"), fastest(group, "prefill")
        if best is None or first is None:
            parts.append(f"- Nothing of {escaped(str(model))} was computed right.")
            continue
        promised = compared.loc[(model, best["dtype"], "decode")]["predicted"]
        (faster, rates), (sooner, prompts) = _gain(group, best, "decode"), _gain(group, first, "prefill")
        parts.append(
            f"**{escaped(str(model))} decodes {faster}** {rates}; its bytes promised {promised:.2f}. It reads prompts "
            f"{sooner} {prompts}; equal FLOPs promised no gain."
        )
    said = evidence.disturbed(recording.rows) + "\n\n".join(parts)
    return Markdown(
        f"{said}\n\nEach of these types is the fastest of its model, chosen after measuring. So its interval is "
        f"widened to hold for all types at once (Bonferroni).\n\nCondition: prompts of {prompt(recording)} tokens, "
        f"decode of one sequence, {condition(recording)}"
    )


def _gain(group: pd.DataFrame, best: dict[str, Any], phase: str) -> tuple[str, str]:
    """A best type's gain over the reference, selected among all types, and the two rates."""
    chosen_from = int((group["dtype"] != analysis.REFERENCE).sum())
    reference = group.set_index("dtype").loc[analysis.REFERENCE, f"{phase}_rate"]
    gain = stats.selected(best[phase], chosen_from)
    times, rates = sentences.quotient(gain, best[f"{phase}_rate"], reference, "t/s")
    return f"{times} as fast in {best['dtype']} as in {analysis.REFERENCE}", rates


def condition(recording: Recording) -> str:
    """Scale, weights, machine and verdicts behind a number, as one clause."""
    rows = recording.rows
    kinds = " and ".join(sorted({evidence.weights_of(fact) for fact in known(recording).values()}))
    return (
        f"scale {recording.scale} ({kinds} weights), {evidence.chips(recording)}, "
        f"{rows['n_threads'].max()} threads; ratios "
        f"are medians of pairs within blocks, with {evidence.INTERVALS}. {evidence.computed(rows)}"
    )


def fastest(group: pd.DataFrame, phase: str) -> dict[str, Any] | None:
    """The line of a model's table that gains most in a phase, the reference's own left out."""
    lines = [line for line in group.to_dict("records") if isinstance(line[phase], Estimate)]
    others = [line for line in lines if line["dtype"] != analysis.REFERENCE]
    return max(others, key=lambda line: float(line[phase].value)) if others else None


def known(recording: Recording) -> analysis.Files:
    """The files of a recording."""
    return analysis.files(recording.rows, recording.facts)


def against(recording: Recording) -> pd.DataFrame:
    """Prediction beside measurement."""
    return arithmetic.against_prediction(recording.rows, known(recording))


def joined(recording: Recording, quality: Recording) -> pd.DataFrame:
    """Size, speed and memory at one scale beside quality at its own, and the front of both."""
    found = analysis.table(recording.rows, recording.facts)
    return analysis.with_quality(found, losses.table(quality.rows))


def files(recording: Recording) -> Markdown:
    """Every file, folded: size, bits per weight, hash, and what is assumed about its shape."""
    entries = []
    for line in analysis.sizes(known(recording)).to_dict("records"):
        fact = known(recording)[line["model"], line["dtype"]]
        entries.append(
            line
            | {
                "parameters": fact["n_params"],
                "sha256": fact["sha256"][:12],
                "assumed": " ".join(fact["assumptions"]) or "none",
            }
        )
    columns = FILE | {
        "bytes": ("file (MB)", significant(3, 1e-6)),
        "bits": ("bits per weight", ".2f"),
        "parameters": ("parameters (M)", significant(3, 1e-6)),
        "sha256": ("sha256", ""),
        "assumed": ("assumed", ""),
    }
    return folded("The files: size, hash and what is assumed about their shape", table(pd.DataFrame(entries), columns))


def prediction(recording: Recording) -> Table:
    """What bytes say before anything is timed."""
    data = arithmetic.predicted(recording.rows, known(recording))
    wide = data.pivot(index=["model", "dtype"], columns="phase", values="predicted")
    wide = wide.reindex([key for key in known(recording) if key in wide.index]).reset_index()
    columns = FILE | {phase: (f"{words}, over F16", ".2f") for phase, words in PHASES.items()}
    return table(wide, columns)


def everything(recording: Recording, quality: Recording) -> Table:
    """The table people want: size, speed per phase, what is lost, and the Pareto front."""
    data = joined(recording, quality)
    speed, lost = f"({recording.scale})", f"({quality.scale})"
    data["front"] = ["yes" if on else "" for on in data["front"]]
    columns = FILE | {
        "bytes": (f"file, MB {speed}", significant(3, 1e-6)),
        "prefill": (f"prefill over F16 {speed}", ".2f"),
        "decode": (f"decode over F16 {speed}", ".2f"),
        "batch": (f"decode of {together(recording)} over F16 {speed}", ".2f"),
        "kld": (f"KLD, 0.001 nats {lost}", significant(2, 1e3)),
        "front": ("on the front", ""),
    }
    return table(data, columns)


def rest(recording: Recording, quality: Recording) -> Markdown:
    """What else is known of every file, folded: bits, memory, perplexity, loops, validity."""
    speed, lost = f"({recording.scale})", f"({quality.scale})"
    columns = FILE | {
        "bits": (f"bits per weight {speed}", ".2f"),
        "memory": (f"peak memory, MB {speed}", significant(3, 1e-6)),
        "ppl_ratio": (f"perplexity over F16 {lost}", ".4f"),
        "loops": (f"loops {lost}", ".0%"),
        "verdict": (f"validity {speed}", ""),
    }
    return folded("Bits per weight, memory, perplexity, loops and validity", table(joined(recording, quality), columns))


def summary(recording: Recording, quality: Recording) -> Table:
    """The same, short: values without intervals, for a page that only shows them."""

    def middle(spec: str, factor: float = 1.0) -> Formatter:
        return lambda estimate: format(estimate.value * factor, spec)

    columns = FILE | {
        "bytes": ("file (GB)", significant(3, 1e-9)),
        "bits": ("bits per weight", ".2f"),
        "prefill": ("prefill over F16", middle(".2f")),
        "decode": ("decode over F16", middle(".2f")),
        "batch": (f"decode of {together(recording)} over F16", middle(".2f")),
        "memory": ("peak memory (GB)", significant(3, 1e-9)),
        "kld": (f"KLD, 0.001 nats ({quality.scale})", middle(".2g", 1e3)),
        "verdict": ("validity", ""),
    }
    return table(joined(recording, quality), columns)


def rates(recording: Recording) -> Markdown:
    """Tokens per second of every type, and how much processes differ, folded."""
    columns = FILE | {
        "words": ("phase", ""),
        "rate": ("tokens per second", significant(3)),
        "noise": ("variation", noise),
        "n": ("processes", ""),
    }
    data = analysis.speeds(recording.rows)
    order = list(known(recording))
    places = [
        (m, list(PHASES).index(p), order.index((m, d))) for m, p, d in data[["model", "phase", "dtype"]].to_numpy()
    ]
    data = data.assign(words=[PHASES[phase] for phase in data["phase"]], place=places)
    return folded("Tokens per second of every type", table(data.sort_values("place"), columns))


def against_prediction(recording: Recording) -> Table:
    """Predicted from bytes, predicted from the kernels' own rates, measured, and what each leaves unexplained."""
    data = against(recording)
    columns = FILE | {
        "words": ("phase", ""),
        "predicted": ("bytes say", ".2f"),
        "kernels": ("kernels say", ".2f"),
        "measured": ("measured over F16", ".2f"),
        "miss": ("measured / bytes", ".2f"),
        "left": ("measured / kernels", ".2f"),
    }
    shown = data.assign(words=[PHASES[phase] for phase in data["phase"]])
    return table(shown, columns, ratios={"left": ("measured", "kernels")})


def kernels(recording: Recording) -> Table:
    """Each tensor type's matrix product alone, and the kernels that it is known to take: for many columns; for one."""
    engine = next(recording.facts[i] for i in recording.rows["engine"].unique())
    data = arithmetic.kernels(recording.rows)
    data = data.assign(path=[kernel_paths.kernels(engine, dtype) or "not known" for dtype in data["dtype"]])
    columns: Columns = {
        "dtype": ("tensor type", ""),
        "path": ("kernels (many; one column)", ""),
        "read": ("one column (GB/s of weights)", significant(3, 1e-9)),
        "compute": ("many columns (GFLOP/s)", significant(3, 1e-9)),
        "read_plain": ("one column, not packed (GB/s)", significant(3, 1e-9)),
        "compute_plain": ("many columns, not packed (GFLOP/s)", significant(3, 1e-9)),
    }
    return table(data, columns)


def checked_claims(recording: Recording) -> Table:
    """Every claim of the text with its estimate, its threshold and its verdict."""
    return evidence.claims(claims(recording.rows, recording.facts))


def guess(recording: Recording, guessed: float) -> Markdown:
    """The reader's guess of what Q4_0 gains in decode beside the first model's measured gain."""
    first = next(model for model, _ in known(recording))
    ratio = analysis.ratio(recording.rows, "decode", first, "Q4_0", analysis.REFERENCE)
    return evidence.guessed(guessed, ratio) if ratio else Markdown("Q4_0 was not measured.")


def takeaway(recording: Recording, quality: Recording) -> Markdown:
    """Per model: what is on the front, how far bytes were off, then the claims that did not hold, counted."""
    data, compared, lines = joined(recording, quality), against(recording), []
    for model, group in data.groupby("model"):
        beaten = ", ".join(group[~group["front"].astype(bool)]["dtype"])
        decode = compared[(compared["model"] == model) & (compared["phase"] == "decode")]
        if decode.empty:
            continue
        worst = min(decode.to_dict("records"), key=lambda line: float(line["miss"].value))
        measured = stats.selected(worst["measured"], len(decode))
        lines.append(
            f"- **{escaped(str(model))}**: not on the front: {beaten or 'none'}. For every other type no file is as "
            f"small, as fast and as close to F16. {worst['dtype']} misses most of what its bytes promise: it decodes "
            f"{measured:.2f} times as fast as F16 ({sentences.among(measured, 'types')}) instead of "
            f"{worst['predicted']:.2f}" + _kernel_words(worst)
        )
    verdicts = claims(recording.rows, recording.facts)["verdict"]
    return Markdown("\n".join([*lines, f"- Of {len(verdicts)} claims about speed {evidence.counted(verdicts)}."]))


def _kernel_words(line: dict[str, Any]) -> str:
    if not isinstance(line["kernels"], Estimate):
        return "."
    return f". Its matrix kernels, timed alone, promise {line['kernels'].value:.2f}."


def prompt(recording: Recording) -> int:
    """Tokens of the prompts that were timed."""
    return int(recording.rows[recording.rows["workload"] == "decode"]["n_prompt"].max())


def together(recording: Recording) -> int:
    """Sequences of the batch that was timed."""
    return int(recording.rows["n_seq"].max())
