"""Five findings in plain words, each from recorded rows: the findings of README.md and README.ja.md.

Each sentence is written by hand, in English and in Japanese, and holds only while its rows support it: `_while` raises
where they no longer do.
"""

import base64
from collections.abc import Iterable
from functools import cache

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
Said = tuple[str, str]  # in English and in Japanese
LANGUAGES = ("en", "ja")
WINDOW = 2048  # tokens that plamo-2-1b's attention looks back, by its published configuration


def corruption() -> Said:
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
    least, most = released["n_clients"].min(), released["n_clients"].max()
    answers, dead, runs = released["answers"].sum(), released["died"].sum(), released["runs"].sum()
    still, of_all = patched["differ"].sum(), patched["answers"].sum()
    english = (
        "**One user's request changes another's answer, and nothing says so.** llama.cpp mixes up PLaMo 2's "
        f"sequences when their prompts share a call. Asked by {least} to {most} users at once, a `llama-server` as released "
        f"changed {changed} of {answers} answers beyond near-ties, and {dead} of {runs} servers died. With the patch "
        f"we propose, {still} of {of_all} answers changed and no server died ({chips(loads)}, a small trained model). A "
        f"law says beforehand which sequences go wrong; it was right in all {len(stock)} batches on a CPU ({drawn} "
        f"drawn at random) and all {len(on_gpu)} with CUDA on an NVIDIA H200, which left the scan to the CPU."
    )
    japanese = (
        "**ほかの人の質問で、あなたへの答えが変わります。しかも何の警告も出ません。** llama.cpp は、複数のプロンプトを"
        f"一度に処理するとき PLaMo 2 の系列を取り違えます。配布版の `llama-server` に {least}～{most} 人が同時に質問すると、"
        f"{answers} 件の答えのうち {changed} 件が変わり(僅差の場合を除く)、{runs} 回のうち {dead} 回はサーバーが落ちました。"
        f"私たちの修正を当てると、{of_all} 件のうち変わったのは {still} 件で、一度も落ちません({chips(loads)}、小さな学習済み"
        f"モデル)。どの系列が壊れるかは規則で予測でき、CPU の {len(stock)} 通り(うち {drawn} 通りは無作為)と NVIDIA H200 の "
        f"CUDA の {len(on_gpu)} 通りのすべてで当たりました。"
    )
    return english, japanese


def cliff() -> Said:
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
    english = (
        f"**The ninth user costs everyone.** Eight sequences write {rates[8]:.0f} tokens a second on {hybrid}, and "
        f"nine write {rates[9]:.0f} ({chips(steps)}). The kernels take {TILE} columns together, so the fifth sequence "
        f"makes a step {of_steps[0].value:.1f} times as long, and the fifth token of a draft {of_calls[0].value:.1f} "
        f"times ({chips(drafts)}). Draft {TILE - 1} tokens, not {TILE}."
    )
    japanese = (
        f"**9 人目が来ると、全員が遅くなります。** {hybrid} は 8 系列なら毎秒 {rates[8]:.0f} トークンを書きますが、9 系列では "
        f"{rates[9]:.0f} トークンです({chips(steps)})。行列カーネルは {TILE} 列ずつ処理するので、5 系列目で 1 ステップが "
        f"{of_steps[0].value:.1f} 倍、ドラフトの 5 トークン目で {of_calls[0].value:.1f} 倍かかります({chips(drafts)})。"
        f"ドラフトは {TILE} トークンではなく {TILE - 1} トークンが得です。"
    )
    return english, japanese


def _over(curve: pd.DataFrame, n_seq: int) -> Estimate:
    """Ratio of a step's time to that of a step with one sequence less."""
    return timing.paired_ratio(curve.loc[n_seq], curve.loc[n_seq - 1])


def asymmetry() -> Said:
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
    english = (
        f"**Reading is {ratio:.1f} times as fast as writing.** {escaped(model)} in {used} reads {rate['read']:.0f} "
        f"tokens a second and writes {rate['write']:.1f} ({chips(recording)}). The type decides the ratio: from "
        f"{least['ratio'].value:.1f} in {least['dtype']} to {most['ratio'].value:.1f} in {most['dtype']}, the ends of "
        f"{len(by_type)} types, for prompts of {least['n_prompt']} tokens. A prompt reaches {reached:.0%} of what the "
        f"{used} kernel can do, and that kernel does {share:.0%} of what the fastest one does."
    )
    japanese = (
        f"**読むのは、書くより {ratio:.1f} 倍速いです。** {used} の {escaped(model)} は毎秒 {rate['read']:.0f} トークンを読み、"
        f"{rate['write']:.1f} トークンを書きます({chips(recording)})。この比は重みの型で決まります。{len(by_type)} 種類を比べると、"
        f"{least['n_prompt']} トークンのプロンプトで、{least['dtype']} の {least['ratio'].value:.1f} 倍から {most['dtype']} の "
        f"{most['ratio'].value:.1f} 倍まであります。プロンプトの処理は {used} カーネルの性能の {reached:.0%} に達しますが、その"
        f"カーネルは最速のカーネルの {share:.0%} しか出ません。"
    )
    return english, japanese


def window() -> Said:
    """The effect of the window that llama.cpp leaves out."""
    recording = recorded("05-beside")
    changed = context.explained(context.samples(recording.rows))
    reading = changed[changed["phase"] == "prefill"]
    last = reading.iloc[-1]
    _claim([last["estimate"].below(1.0)], "window")
    first = next(row["depth"] for row in reading.to_dict("records") if row["estimate"].below(1.0) == "holds")
    english = (
        f"**llama.cpp leaves out {MODELS[0]}'s attention window, which makes it slow on long contexts.** We built the "
        f"{WINDOW:,} tokens in (plamo-2-translate: 32,768): at {last['depth']:,}, one more takes "
        f"{last['first'].value * 1e3:.1f} ms to read instead of {last['second'].value * 1e3:.1f} "
        f"({chips(recording)}). It helps from {first:,} tokens on."
    )
    japanese = (
        f"**llama.cpp は {MODELS[0]} の注意窓を実装していないので、長い文脈で遅くなります。** 公開設定の {WINDOW:,} トークン"
        f"(plamo-2-translate は 32,768)の窓を入れると、{last['depth']:,} トークン目では 1 トークンを読む時間が "
        f"{last['second'].value * 1e3:.1f} ms から {last['first'].value * 1e3:.1f} ms になりました({chips(recording)})。"
        f"効果は {first:,} トークンから現れます。"
    )
    return english, japanese


def bits() -> Said:
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
    english = (
        f"**Four-bit weights write faster, but by less than their bytes promise.** {escaped(model)} writes "
        f"{gain.value:.1f} times as fast in {BEST} as in {REFERENCE}, where its bytes promised {bytes_say:.1f} "
        f"({chips(again)}). {NEXT} has fewer bits and is not shown to be slower or faster than {BEST} "
        f"({chips(speed)})."
    )
    japanese = (
        f"**4 ビットにすると書くのは速くなりますが、バイト数ほどではありません。** {escaped(model)} は {BEST} で {REFERENCE} の "
        f"{gain.value:.1f} 倍速く書きます。バイト数からは {bytes_say:.1f} 倍のはずでした({chips(again)})。さらにビットの少ない "
        f"{NEXT} は、{BEST} より速いとも遅いとも言えません({chips(speed)})。"
    )
    return english, japanese


def _claim(verdicts: Iterable[Claim], headline: str) -> None:
    """Raise StudyError unless every verdict of a sentence holds."""
    _while(all(verdict == "holds" for verdict in verdicts), headline)


def _while(true: bool, headline: str) -> None:
    if not true:
        raise StudyError(
            f"headline {headline!r}", "is not what the recorded rows say", "edit tools/documents/headlines.py"
        )


def all_of_them(language: str = LANGUAGES[0]) -> str:
    """The findings as a numbered list."""
    at = LANGUAGES.index(language)
    return "\n".join(f"{number}. {said[at]}" for number, said in enumerate(_all(), 1))


@cache
def _all() -> tuple[Said, ...]:
    return corruption(), cliff(), window(), asymmetry(), bits()


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
