"""Five findings as one would say them to a colleague, each from recorded rows: what the README begins with."""

import base64
from collections.abc import Callable
from functools import cache

from plamo_study.measure import serving
from plamo_study.measure.plan import MODELS
from plamo_study.measure.recording import Recording
from plamo_study.present import figures, theme
from plamo_study.present.evidence import chips, escaped
from plamo_study.publish import upstream
from plamo_study.studies.batch_scaling import analysis as batch_scaling, show as show_batches
from plamo_study.studies.batching_law import analysis as batching_law
from plamo_study.studies.collect import collect
from plamo_study.studies.context import analysis as context
from plamo_study.studies.phase_asymmetry import prediction
from plamo_study.studies.quantization import analysis, show as quantization
from plamo_study.studies.start_here import analysis as start_here

USERS = 2


def corruption() -> str:
    """What concurrent requests do to a server as released, and whether the law of it holds."""
    law = recorded("03-batching-law", "mini")
    checked = batching_law.of_hybrid(batching_law.checked(law.rows, law.facts), law.facts)
    stock = checked[checked["build"] == "stock"]
    runs = [run for run in serving.recorded() if run.at_once == USERS and run.model.startswith(MODELS[0])]
    said = [_served(run) for build in upstream.BUILDS for run in runs if run.build == build]
    return (
        f"**One user's request changes another's answer, and nothing says so.** llama.cpp mixes up PLaMo 2's sequences "
        f"when their prompts share a call. {' '.join(said)} A law says beforehand which sequences of a batch go wrong: "
        f"it was right about every sequence in {stock['exact'].sum()} of {len(stock)} batches."
    )


def _served(run: serving.Served) -> str:
    same = f"gave {run.answers - run.differ} of {run.answers} answers as each user gets them alone"
    end = "lived" if run.exit is None else f"died in round {run.rounds_done + 1}"
    if run.build == "stock":
        return f"Asked by {run.at_once} users at once, a `llama-server` as released {same}, and {end}."
    return f"With the patch of our report it {same}, and {end}."


def batches() -> str:
    """What a second sequence buys the model where it is worst."""
    recording = recorded("03-batch-scaling")
    data = show_batches.stock(batch_scaling.scaling(recording.rows)).set_index(["model", "n_seq"])
    factors = {model: data.loc[(model, 2)]["factor"] for model in data.index.unique("model")}
    model = min(factors, key=lambda name: factors[name].value)
    many, one = data.loc[(model, 2)]["rate"], data.loc[(model, 1)]["rate"]
    verdict = factors[model].below(1.0)
    words = {"holds": "can write fewer", "inconclusive": "need not write more", "does not hold": "write more"}[verdict]
    return (
        f"**Two sequences {words} tokens a second than one.** On {escaped(model)} two write {many.value:.1f} tokens a "
        f"second and one writes {one.value:.1f}: {factors[model]:.2f} times as many ({chips(recording)})."
    )


def asymmetry() -> str:
    """How much faster the first model reads than it writes."""
    recording = recorded("01-phase-asymmetry")
    first = start_here.mystery(recording)
    reached = prediction.against_prediction(recording.rows, recording.facts).set_index(["model", "what"])["of_usual"]
    prompt, step = (reached[first.model, what] for what in ("prefill 512", "decode step"))
    return (
        f"**Reading is {first.ratio.value:.1f} times as fast as writing.** {escaped(first.model)} reads "
        f"{first.read.value:.0f} tokens a second and writes {first.write.value:.1f} (ratio {first.ratio:.1f}). "
        f"A prompt reaches {prompt.value:.0%} of what the matrix kernel can do, a step {step.value:.0%} of what memory "
        f"gave beside it ({chips(recording)})."
    )


def window() -> str:
    """What the window that llama.cpp leaves out would change."""
    recording = recorded("05-beside")
    changed = context.explained(recording.rows)
    reading = changed[changed["phase"] == "prefill"]
    last = reading.iloc[-1]
    shorter = last["ratio"].below(1.0) == "holds"
    words = "makes it slow at length" if shorter else "is not shown to slow it"
    first = next((row["depth"] for row in reading.to_dict("records") if row["ratio"].below(1.0) == "holds"), None)
    since = f" It helps from {first:,} tokens on." if first else ""
    return (
        f"**llama.cpp leaves out PLaMo 2's attention window, which {words}.** We built the window in and checked it: "
        f"at {last['depth']:,} tokens, reading one more takes {last['windowed'].value * 1e3:.1f} ms instead of "
        f"{last['plain'].value * 1e3:.1f}, {last['ratio']:.2f} times as long ({chips(recording)}).{since}"
    )


def bits() -> str:
    """What the fastest type gives the first model, beside what its bytes promised."""
    recording, lost = recorded("04-quantization"), recorded("04-quality", "mini")
    model, group = next(iter(quantization.joined(recording, lost).groupby("model")))
    best = quantization.fastest(group, "decode")
    if best is None:
        return "**Fewer bits:** no type was computed right."
    promised = quantization.against(recording).set_index(["model", "dtype", "phase"])
    bytes_say = promised.loc[(model, best["dtype"], "decode")]["predicted"]
    gain = analysis.simultaneous(best["decode"], int((group["dtype"] != analysis.REFERENCE).sum()))
    words = {"holds": "write faster, though not in order of bits"}.get(gain.above(1.0), "are not shown to write faster")
    return (
        f"**Fewer bits {words}.** {escaped(str(model))} is fastest in {best['dtype']}: {gain:.1f} times as fast as in "
        f"F16 (an interval for the best of all types), where its bytes promised {bytes_say:.1f} ({chips(recording)})."
    )


def all_of_them() -> str:
    """The findings as a numbered list."""
    found: tuple[Callable[[], str], ...] = (corruption, batches, window, asymmetry, bits)
    return "\n".join(f"{number}. {said()}" for number, said in enumerate(found, 1))


def picture() -> bytes:
    """PNG: what a batch writes per second, by number of sequences and model."""
    theme.enable()
    stock = show_batches.stock(batch_scaling.scaling(recorded("03-batch-scaling").rows))
    chart = figures.curves(stock, "rate", "model", "Tokens per second, all sequences", "Decode rate of a batch")
    return base64.b64decode(theme.mimebundle(chart.to_dict())[0]["image/png"])


@cache
def recorded(study: str, scale: str = "shape") -> Recording:
    """The recorded rows that documents speak of, read once: what a study makes of them is remembered by the frame."""
    return collect(study, "recorded", scale)
