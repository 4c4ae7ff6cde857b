"""Five findings in plain words, from recorded rows or quoted from the notebooks: those of README.md and README.ja.md.

Each sentence is written by hand, in English and in Japanese, and holds only while its rows support it: `_while` raises
where they no longer do.
"""

import base64
from functools import cache

import pandas as pd

from llama_meter.errors import StudyError
from llama_meter.measure.plan import MODELS
from plamo_study.laws import batching_tests as batching_law, serving
from plamo_study.laws.builds import CORRECT
from plamo_study.measurements import answers, measurements, recording
from plamo_study.read.recording import Recording, added
from plamo_study.read.usable import STOCK
from plamo_study.show import charts, collected, theme
from plamo_study.show.evidence import chips, escaped
from plamo_study.stats.estimates import estimate

TILE = 4  # columns that the matrix kernels process together
BEST, REFERENCE = "Q4_0", "F16"
Said = tuple[str, str]  # in English and in Japanese
LANGUAGES = ("en", "ja")
PARTS = (512, 128)  # tokens of a prompt's parts on the hosts that ran the engine with the window and without
WINDOW = 2048  # tokens that plamo-2-1b's attention looks back, by its published configuration


def corruption() -> Said:
    """The effect of concurrent requests on a server as released, and whether the law predicts it."""
    law = recorded("03-batching-law", "mini")
    checked = batching_law.of_hybrid(batching_law.checked(law.rows, law.facts), law.facts)
    stock = checked[(checked["build"] == STOCK) & checked["judged"]]
    there = added("03-batching-law", "mini")
    on_gpu = pd.concat(batching_law.of_hybrid(batching_law.checked(r.rows, r.facts), r.facts) for r in there)
    on_gpu = on_gpu[on_gpu["build"] == STOCK]
    drawn = (stock["label"] == "").sum()
    _while(stock["exact"].all() and on_gpu["exact"].all(), "corruption")
    loads, asked = recorded("11-serving", "mini"), answers("11-serving", "recorded", "mini")
    asked = asked[asked["model"].str.startswith(MODELS[0]) & (asked["server"] == "llama-server")]
    together = serving.under_load(asked).set_index("build")
    released, patched = (together.loc[build] for build in (STOCK, CORRECT))
    _while(released["prompts_changed"] == released["prompts"] and not patched["prompts_changed"], "corruption")
    least, most = (users := asked["n_clients"][asked["n_clients"] > 1]).min(), users.max()
    changed, of, dead, runs = (released[name] for name in ("changed", "answers", "died", "servers"))
    prompts, still, of_all = released["prompts"], patched["changed"], patched["answers"]
    other, distinct, where = shared_calls(STOCK)
    kept, *_ = shared_calls(CORRECT)
    _while(int(other) > int(distinct) / 2 and int(kept) == 0, "corruption")
    english = (
        "**One user's request changes another's answer, and nothing says so.** llama.cpp mixes up PLaMo 2's "
        f"sequences when their prompts share a call. Asked by {least} to {most} users at once, a `llama-server` as released "
        f"changed the answers to all {prompts} prompts. Of {of} answers that came, {changed} differ by more than a near-tie. "
        f"{dead} of {runs} servers died. With the patch we propose, {still} of {of_all} answers changed and no server died ({chips(loads)}, a small trained model). Of {distinct} "
        f"distinct prompts given to the engine itself in pairs, {other} got another answer than alone as released, and "
        f"{kept} with the patch ({where}). A law says beforehand which sequences go wrong; it was right in all {len(stock)} batches on a CPU ({drawn} "
        f"drawn at random) and all {len(on_gpu)} with CUDA on an NVIDIA H200, which left the scan to the CPU."
    )
    japanese = (
        "**ほかの人の質問で、あなたへの答えが変わります。しかも何の警告も出ません。** llama.cpp は、複数のプロンプトを"
        f"一度に処理するとき PLaMo 2 の系列を取り違えます。配布版の `llama-server` に {least}～{most} 人が同時に質問すると、"
        f"{prompts} 種類の質問すべてで答えが変わり({of} 件のうち {changed} 件、僅差の場合を除く)、{runs} 回のうち {dead} 回はサーバーが落ちました。"
        f"私たちの修正を当てると、{of_all} 件のうち変わったのは {still} 件で、一度も落ちません({chips(loads)}、小さな学習済み"
        f"モデル)。エンジンに {distinct} 種類の質問を 2 件ずつ直接渡すと、配布版では {other} 種類、修正版では {kept} 種類の答えが"
        f"変わりました({where})。どの系列が壊れるかは簡単な法則で予測でき、CPU の {len(stock)} 通り(うち {drawn} 通りは無作為)と NVIDIA H200 の "
        f"CUDA の {len(on_gpu)} 通りのすべてで当たりました。"
    )
    return english, japanese


def shared_calls(build: str) -> tuple[str, str, str]:
    """Prompts of the first model that got another answer in calls of two than alone, all that were asked so, where."""
    line = rf"^{MODELS[0]}, {build}, 2 equally long prompts a call: (\d+) of (\d+) distinct prompts .* \((.*)\)\.$"
    changed, distinct, machine = collected.quoted(known(), "03b-batching-law", line)
    return changed, distinct, machine


def cliff() -> Said:
    """The cost of a product's fifth and ninth column, as a sequence and as a token of a draft, and where it was seen."""
    page, drafts, side = "03-batch-scaling", "08-speculative", chips(recorded("08-columns"))
    (eight, nine) = collected.quoted(
        known(), page, rf"^{MODELS[0]}.*: 8 write (\S+) tokens a second, and 9 write (\S+)\.$"
    )
    fifth, ninth = (_asked(page, question) for question in ("fifth sequence make a step", "nine sequences write fewer"))
    _while(fifth.answer.eq("yes").all() and ninth.answer.eq("yes").all(), "cliff")
    everywhere = collected.asked(known(), page, "nine sequences write fewer.*machine by machine")
    everywhere = everywhere[everywhere["of"].str.contains(f", {MODELS[0]}")]
    here = everywhere.answer.eq("yes")
    open_on = dict.fromkeys(of.split(", ")[0] for of in everywhere["of"][~here])
    _while(here.sum() == 1 and everywhere.answer[~here].eq("inconclusive").all(), "cliff")
    beside = _asked(drafts, "same blocks, does the fifth column").set_index("of")
    more = _asked(drafts, "same blocks, does the ninth column", f"^{MODELS[0]}.*sequences")
    _while(beside.answer.eq("yes").all() and more.answer.eq("yes").all() and side != _machine(page), "cliff")
    draft, step = (beside.value[beside.index.str.contains(kind)].iloc[0] for kind in ("a draft", "sequences"))
    english = (
        f"**On two CPUs the ninth user costs everyone.** Eight sequences write {float(eight):.0f} tokens a second on "
        f"{_named(page)}, and nine write {float(nine):.0f} ({_machine(page)}). The fifth sequence makes a step "
        f"{fifth.value.iloc[0]:.1f} times as long there. On another host, measured side by side, the fifth sequence makes a "
        f"step {step:.1f} times as long, the ninth {more.value.iloc[0]:.1f} times, and the fifth token of a draft makes "
        f"its check {draft:.1f} times as long ({side}). By their source the kernels of these CPUs take {TILE} "
        f"columns together, so a draft of {TILE - 1} fits in one pass over the weights and one of {TILE} does not; whether it "
        f"pays is another question. On {' and '.join(open_on)} too few pairs leave it open what the ninth costs."
    )
    japanese = (
        f"**二つの CPU で、9 人目が来ると全員が遅くなりました。** {_named(page)} は 8 系列なら毎秒 {float(eight):.0f} トークンを書きますが、9 系列では "
        f"{float(nine):.0f} トークンです({_machine(page)})。同じマシンでは 5 系列目で 1 ステップが {fifth.value.iloc[0]:.1f} 倍になります。"
        f"別のマシンで同じブロックの中で測ると、5 系列目で {step:.1f} 倍、9 系列目で {more.value.iloc[0]:.1f} 倍、"
        f"ドラフトを検証する呼び出しは 5 トークン目で {draft:.1f} 倍でした({side})。"
        f"ソースによれば、これらの CPU の行列カーネルは {TILE} 列ずつ処理します。{TILE - 1} トークンのドラフトは重みを一度読むだけで検証できますが、"
        f"{TILE} トークンでは二度になります。ドラフト自体が得になるかどうかは別の問題です。"
        f"{' と '.join(open_on)} では測定した組が少なく、9 人目の影響はまだ分かりません。"
    )
    return english, japanese


def asymmetry() -> Said:
    """Prefill over decode speed of the first model, the share of its kernel that a prompt reaches, and types."""
    page, types = "01-phase-asymmetry", "04-quantization"
    line = rf"^{MODELS[0]}\S* (\S+) reads (\S+) tokens a second and writes (\S+): a written token costs (\S+) read ones"
    used, read, written, ratio = collected.quoted(known(), page, line)
    reached = _asked(page, "prompt reach 80 % of its kernel")
    _while(_asked(page, "written token cost more than twice").answer.eq("yes").all(), "asymmetry")
    ends = r"over (\S+): (\S+) times as fast in (\S+) .* and (\S+) times as fast in (\S+) "
    over, slow, slowest, fast, fastest = collected.quoted(known(), types, rf"^{MODELS[0]}\S* reads, {ends}")
    english = (
        f"**Reading is {ratio} times as fast as writing.** {_named(page)} in {used} reads {read} tokens a second and "
        f"writes {written} ({_machine(page)}). A prompt reaches {reached.value.iloc[0]:.0%} of what the {used} kernel did "
        f"in the same block, and the kernel depends on the type: over {over}, {_named(types)} reads {slow} times as fast in "
        f"{slowest} and {fast} times in {fastest}, the ends of all types smaller than {over} ({_machine(types)})."
    )
    japanese = (
        f"**読むのは、書くより {ratio} 倍速いです。** {used} の {_named(page)} は毎秒 {read} トークンを読み、{written} トークンを"
        f"書きます({_machine(page)})。プロンプトの処理は同じブロックで測った {used} カーネルの {reached.value.iloc[0]:.0%} に達しますが、カーネルの速さは"
        f"重みの型で決まります。{_named(types)} が読む速さは {over} に対して、{over} より小さい型の両端で {slowest} の {slow} 倍から "
        f"{fastest} の {fast} 倍まであります({_machine(types)})。"
    )
    return english, japanese


def window() -> Said:
    """The effect of the window that llama.cpp leaves out, on the two hosts that ran both builds."""
    page, english, japanese, helps, deepest = "05-context-length", [], [], [], set()
    for part in PARTS:
        line = rf"^{MODELS[0]}\S* on (.*?), parts of {part}, reading: at a depth of (\S+) .* takes (\S+) ms with the "
        where, deep, inside, without, pairs, depths = collected.quoted(
            known(), page, line + r"window and (\S+) without; .* of (\d+) pairs, .* asked: (.*)\.$"
        )
        _while(deep in depths.split(", "), "window")
        english.append(f"{inside} ms instead of {without} ({where}; {pairs} pairs, prompts in parts of {part})")
        japanese.append(f"{where} では {without} ms から {inside} ms({pairs} 組、プロンプトは {part} トークンずつ)")
        helps.append(depths.split(", "))
        deepest.add(deep)
    saved = _asked(page, "window save a tenth", f"^{MODELS[0]}.*prefill")
    _while(len(saved) == len(PARTS) and saved.answer.eq("yes").all() and len(deepest) == 1, "window")
    tokens, first = f"{WINDOW:,}", next(depth for depth in helps[0] if all(depth in others for others in helps))
    return (
        f"**llama.cpp leaves out {MODELS[0]}'s attention window, which made it slow on long contexts on both hosts that "
        f"we tried.** We built the {tokens} tokens in (plamo-2-translate: 32,768). At {deep}, reading one more then takes "
        f"{' and '.join(english)}. On both, reading gains from {first} tokens on.",
        f"**llama.cpp は {MODELS[0]} の注意窓を実装していません。試した二台とも、そのために長い文脈で遅くなりました。** "
        f"公開設定の {tokens} トークン(plamo-2-translate は 32,768)の窓を入れると、{deep} トークン目で 1 トークンを読む時間は、"
        f"{'、'.join(japanese)}になりました。どちらでも、読む速さは {first} トークンから上がります。",
    )


def bits() -> Said:
    """The gain of the first model from four bits, beside the gain that its bytes promised."""
    page = "04-quantization"
    line = rf"^{MODELS[0]}\S* writes, over {REFERENCE}: .* and (\S+) times as fast in {BEST} \(promised (\S+)\)"
    gain, promised = collected.quoted(known(), page, line)
    faster = _asked(page, "write at least a quarter faster", f"{MODELS[0]}.*{BEST}$").iloc[0]
    _while(faster.answer == "yes" and faster.high < float(promised), "bits")
    lost = collected.quoted(known(), "04b-quality", rf"^{MODELS[0]}.*nat: .* (\S+) in {BEST};")
    english = (
        f"**Four-bit weights write faster, but by less than their bytes promise.** {_named(page)} writes {gain} times as "
        f"fast in {BEST} as in {REFERENCE}, where its bytes promised {promised} ({_machine(page)}). The small trained "
        f"model of that name loses {lost[0]} thousandths of a nat a token."
    )
    japanese = (
        f"**4 ビットにすると書くのは速くなりますが、バイト数ほどではありません。** {_named(page)} は {BEST} で {REFERENCE} の "
        f"{gain} 倍速く書きます。バイト数からは {promised} 倍のはずでした({_machine(page)})。同じ名前の小さな学習済みモデルは、"
        f"1 トークンあたり {lost[0]} ミリナットを失います。"
    )
    return english, japanese


def _asked(page: str, question: str, of: str = f"^{MODELS[0]}") -> pd.DataFrame:
    """The answers to a question of a notebook about the first model."""
    found = collected.asked(known(), page, question)
    return found[found["of"].str.contains(of)]


def _named(page: str) -> str:
    """The first model as a notebook's answers call it: with a star where its shape rests on assumptions."""
    return escaped(
        next(line["of"] for line in known()[page]["questions"] if line["of"].startswith(MODELS[0]))
        .split()[0]
        .strip(",")
    )


def _machine(page: str) -> str:
    """The machine whose rows a notebook shows."""
    return str(known()[page]["rows"]["machine"])


@cache
def known() -> collected.Known:
    """What the committed notebooks found."""
    return collected.read()


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
    steps = m[m.usable & m.metric.eq("step") & m.policy.eq("shared") & m.build.eq(STOCK)]
    rate = estimate(steps[~steps.model.str.contains("matched")], by="model n_seq", work="n_seq")
    title, y_title = f"What a batch writes, {_machine('03-batch-scaling')}", "tokens per second, all sequences"
    ticks: list[float] = [1, 4, 5, 8, 9, 12, 13, 16, 24, 32]
    chart = charts.lines(rate, "n_seq", title, x_title="sequences in a step", y_title=y_title, values=ticks)
    return base64.b64decode(theme.mimebundle(chart.to_dict())[0]["image/png"])


def recorded(study: str, scale: str = "shape") -> Recording:
    """The recorded rows behind the documents, read once."""
    return recording(study, "recorded", scale)
