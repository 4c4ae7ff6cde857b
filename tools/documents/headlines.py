"""Five findings in plain words, each from recorded rows: the beginning of the README.

Each sentence is written by hand and holds only while its rows support it: `_while` raises where they no longer do.
"""

import base64
from collections.abc import Callable, Iterable

import pandas as pd

from plamo_study.analysis import ceilings, roofline, timing
from plamo_study.analysis.estimates import compare, estimate
from plamo_study.analysis.files import files as files_of
from plamo_study.analysis.stats import Claim, Estimate
from plamo_study.errors import StudyError
from plamo_study.measure.plan import DEPTH, MODELS
from plamo_study.measure.recording import Recording, added
from plamo_study.measurements import measurements, recording
from plamo_study.present import charts, theme
from plamo_study.present.evidence import chips, escaped
from plamo_study.studies.batch_scaling import analysis as batch_scaling
from plamo_study.studies.batch_scaling.builds import CORRECT
from plamo_study.studies.batching_law import analysis as batching_law
from plamo_study.studies.context import analysis as context
from plamo_study.studies.quantization import analysis as quantization, plan as quantization_plan
from plamo_study.studies.serving import analysis as serving
from plamo_study.studies.speculative import analysis as speculative

USERS, SLOTS = 2, 16  # of the server that survived the most requests
TILE = 4  # columns that the matrix kernels process together
CLIFF = 1.3  # smallest factor between neighbouring steps that counts as a cliff
BEST, NEXT, REFERENCE = "Q4_0", "Q2_K", "F16"
WINDOW = 2048  # tokens that plamo-2-1b's attention looks back, by its published configuration


def corruption() -> str:
    """The effect of concurrent requests on a server as released, and whether the law predicts it."""
    law = recorded("03-batching-law", "mini")
    checked = batching_law.of_hybrid(batching_law.checked(law.rows, law.facts), law.facts)
    stock = checked[(checked["build"] == batch_scaling.STOCK) & checked["judged"]]
    there = added("03-batching-law", "mini")
    on_gpu = pd.concat(batching_law.of_hybrid(batching_law.checked(r.rows, r.facts), r.facts) for r in there)
    on_gpu = on_gpu[on_gpu["build"] == batch_scaling.STOCK]
    drawn = (stock["label"] == "").sum()
    _while(stock["exact"].all() and on_gpu["exact"].all(), "corruption")
    loads = recorded("11-serving", "mini")
    found = serving.answers(loads.rows)
    found = found[found["model"].str.startswith(MODELS[0]) & (found["server"] == "llama-server")]
    found = found[found["n_clients"] > 1]
    released, patched = (found[found["build"] == build] for build in (batch_scaling.STOCK, CORRECT))
    quiet = released[(released["n_clients"] == USERS) & (released["n_seq"] == SLOTS)].iloc[0]
    changed = (released["differ"] - released["near_ties"]).sum()
    _while(quiet["differ"] > quiet["answers"] / 2 and not quiet["died"] and not patched["differ"].sum(), "corruption")
    return (
        "**One user's request changes another's answer, and nothing says so.** llama.cpp mixes up PLaMo 2's "
        f"sequences when their prompts share a call. Asked by {released['n_clients'].min()} to "
        f"{released['n_clients'].max()} users at once, a `llama-server` as released changed "
        f"{changed} of {released['answers'].sum()} answers beyond near-ties, and {released['died'].sum()} of "
        f"{released['runs'].sum()} servers died. With the patch we propose, {patched['differ'].sum()} of "
        f"{patched['answers'].sum()} answers changed and no server died ({chips(loads)}, a small trained model). A "
        f"law says beforehand which sequences go wrong; it was right in all {len(stock)} batches on a CPU ({drawn} "
        f"drawn at random) and all {len(on_gpu)} with CUDA on an NVIDIA H200, which left the scan to the CPU."
    )


def cliff() -> str:
    """The cost of a product's fifth column, as a sequence and as a token of a draft."""
    steps, drafts = recorded("03-batch-scaling"), recorded("08-speculative")
    curves = batch_scaling.curves(steps.rows)
    names = [f"{model}*" for model in MODELS]
    of_steps = [_over(curves[batch_scaling.STOCK, name], TILE + 1) for name in names]
    calls = speculative.columns(drafts.rows)
    calls = calls[(calls["build"] == batch_scaling.STOCK) & (calls["n_prompt"] == calls["n_prompt"].min())]
    calls = calls.set_index(["model", "n_tokens"])["longer"]
    of_calls = [calls[name, TILE + 1] for name in names]
    ninth = _over(curves[batch_scaling.STOCK, names[0]], 9)
    _claim((*(ratio.above(CLIFF) for ratio in (*of_steps, *of_calls)), ninth.above(9 / 8)), "cliff")
    hybrid = escaped(names[0])
    by_size = curves[batch_scaling.STOCK, names[0]]
    rates = {n: n / by_size.loc[n].median() for n in (8, 9)}
    return (
        f"**The ninth user costs everyone.** Eight sequences write {rates[8]:.0f} tokens a second on {hybrid}, and "
        f"nine write {rates[9]:.0f} ({chips(steps)}). The kernels take {TILE} columns together, so the fifth sequence "
        f"makes a step {of_steps[0].value:.1f} times as long, and the fifth token of a draft {of_calls[0].value:.1f} "
        f"times ({chips(drafts)}). Draft {TILE - 1} tokens, not {TILE}."
    )


def _over(curve: pd.DataFrame, n_seq: int) -> Estimate:
    """Ratio of a step's time to that of a step with one sequence less."""
    return timing.paired_ratio(curve.loc[n_seq], curve.loc[n_seq - 1])


def asymmetry() -> str:
    """Prefill over decode speed of the first model, by type, and the share of the machine that a prompt reaches."""
    recording, types = recorded("01-phase-asymmetry"), recorded("04-quantization")
    model, n = f"{MODELS[0]}*", 512
    m = measurements("01-phase-asymmetry")
    own = m[m.usable & (m.n_threads == m.n_threads.max())]
    kernel, prompts = own[own.metric == "matmul"], own.query(f"model == '{model}' and n_prompt == {n}")
    steps = own.query(f"model == '{model}' and metric == 'step' and n_gen == {n}")
    reading = prompts[prompts.metric == "prefill"]
    both = pd.concat([reading.assign(what="read", value=reading.value / n),
                      steps.assign(what="write", value=steps.samples.map(lambda each: each.mean()))])  # fmt: skip
    rate = estimate(both, by="what", work=1).set_index("what").value
    ratio = compare(both, of="what == 'write'", to="what == 'read'").value[0]
    flops = roofline.prefill_flops(recording.facts[model], n)
    beside = pd.concat([kernel.assign(what="allowed", value=flops / kernel.value), reading.assign(what="took")])
    reached = compare(beside, of="what == 'allowed'", to="what == 'took'").value[0]
    by_type = quantization.asymmetry(types.rows, model)
    least, most = by_type.iloc[0], by_type.iloc[-1]
    used = str(reading.dtype.iloc[0])
    kernels = ceilings.every_kernel([ceilings.measured([types.rows])], ceilings.main_place(types.rows))
    fastest = max(known.best for known in kernels.values())
    share = max(known.best for kind, known in kernels.items() if kind.dtype == used) / fastest
    return (
        f"**Reading is {ratio:.1f} times as fast as writing.** {escaped(model)} in {used} reads {rate['read']:.0f} "
        f"tokens a second and writes {rate['write']:.1f} ({chips(recording)}). The type decides the ratio: from "
        f"{least['ratio'].value:.1f} in {least['dtype']} to {most['ratio'].value:.1f} in {most['dtype']}, the ends of "
        f"{len(by_type)} types, for prompts of {least['n_prompt']} tokens. A prompt reaches {reached:.0%} of what the "
        f"{used} kernel can do, and that kernel does {share:.0%} of what the fastest one does."
    )


def window() -> str:
    """The effect of the window that llama.cpp leaves out."""
    recording = recorded("05-beside")
    changed = context.explained(context.samples(recording.rows))
    reading = changed[changed["phase"] == "prefill"]
    last = reading.iloc[-1]
    _claim([last["ratio"].below(1.0)], "window")
    first = next(row["depth"] for row in reading.to_dict("records") if row["ratio"].below(1.0) == "holds")
    return (
        f"**llama.cpp leaves out {MODELS[0]}'s attention window, which makes it slow on long contexts.** We built the "
        f"{WINDOW:,} tokens in (plamo-2-translate: 32,768): at {last['depth']:,}, one more takes "
        f"{last['windowed'].value * 1e3:.1f} ms to read instead of {last['plain'].value * 1e3:.1f} "
        f"({chips(recording)}). It helps from {first:,} tokens on."
    )


def bits() -> str:
    """The gain of the first model from four bits, beside the gain that its bytes promised."""
    speed, again = recorded("04-quantization"), recorded("04-controlled")
    model = f"{MODELS[0]}*"
    gain = quantization.ratio(quantization.seconds(again.rows), "decode", model, BEST, REFERENCE)
    nearest = quantization.ratio(quantization.seconds(speed.rows), "decode", model, BEST, NEXT)
    files, depth = files_of(speed.rows, speed.facts), DEPTH + quantization_plan.STEPS / 2
    whole, fewer = (roofline.decode_bytes(files[model, dtype], depth) for dtype in (REFERENCE, BEST))
    bytes_say = whole / fewer
    assert gain is not None
    assert nearest is not None
    _claim((gain.above(1.0), gain.below(bytes_say)), "bits")
    _while(nearest.within(1.0, float("inf")) == "inconclusive", "bits")
    return (
        f"**Four-bit weights write faster, but by less than their bytes promise.** {escaped(model)} writes "
        f"{gain.value:.1f} times as fast in {BEST} as in {REFERENCE}, where its bytes promised {bytes_say:.1f} "
        f"({chips(again)}). {NEXT} has fewer bits and is not shown to be slower or faster than {BEST} "
        f"({chips(speed)})."
    )


def _claim(verdicts: Iterable[Claim], headline: str) -> None:
    """Raise StudyError unless every verdict of a sentence holds."""
    _while(all(verdict == "holds" for verdict in verdicts), headline)


def _while(true: bool, headline: str) -> None:
    if not true:
        raise StudyError(
            f"headline {headline!r}", "is not what the recorded rows say", "edit tools/documents/headlines.py"
        )


def all_of_them() -> str:
    """The findings as a numbered list."""
    found: tuple[Callable[[], str], ...] = (corruption, cliff, window, asymmetry, bits)
    return "\n".join(f"{number}. {said()}" for number, said in enumerate(found, 1))


def picture() -> bytes:
    """PNG: tokens per second of a batch at every number of sequences, for both real models."""
    theme.enable()
    m = measurements("03-batch-scaling")
    steps = m[m.usable & m.metric.eq("step") & m.policy.eq("shared") & m.build.eq(batch_scaling.STOCK)]
    rate = estimate(steps[~steps.model.str.contains("matched")], by="model n_seq", work="n_seq")
    title, y_title = "Eight users: 56 tokens a second. Nine: 46.", "tokens per second, all sequences"
    ticks: list[float] = [1, 4, 5, 8, 9, 12, 13, 16, 24, 32]
    chart = charts.lines(rate, "n_seq", title, x_title="sequences in a step", y_title=y_title, values=ticks)
    return base64.b64decode(theme.mimebundle(chart.to_dict())[0]["image/png"])


def recorded(study: str, scale: str = "shape") -> Recording:
    """The recorded rows behind the documents, read once."""
    return recording(study, "recorded", scale)
