"""What a machine's page says first: the command to run, what it does, what binds it, and how sure it is.

Files are ranked by the seconds of a request, calculated in each block from the speeds of both phases. A file of fewer
than FEW processes, or of disturbed ones, is named and not ranked. What is not told apart is "either".
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from llama_meter.limits import DRIFT_LIMIT, RIGHT
from llama_meter.models import registry as models
from llama_meter.stats import FEW, Estimate, selected
from plamo_study.read.recording import read
from plamo_study.show.findings import figure, name, number
from plamo_study.stats.estimates import compare, estimate
from plamo_study.studies.context import law as contexts
from plamo_study.studies.quantization import law as quality

ENOUGH = 0.95  # of the best gain: fewer slots that come so near are chosen, for every user's speed is higher
SLOWER = 1.25  # times as long a file may take, by all of its interval, that is chosen because it loses less
STEP, TEMPLATE = 1024, 64  # tokens that a context is rounded up to; and that a chat template takes
UBATCH = 512  # llama-server's own micro-batch
MIXTURE = "a mixture of experts"  # reads some of its weights; its cache is like others
UNRANKED = {"few": f"fewer than {FEW} quiet processes", "disturbed": "disturbed"}
BLOCK = ["file", "model", "dtype", "machine", "block"]
AS_IT_IS = "as it is"
Model = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A usual request in tokens, and the users who ask at the same time."""

    prompt: int
    answer: int
    users: int = 1

    def room(self, fact: Model) -> int:
        """Tokens of a slot's context: the request and a chat template, rounded up, within what the model knows."""
        wanted = -(-(self.prompt + self.answer + TEMPLATE) // STEP) * STEP
        return min(wanted, fact["shape"].get("context_length") or wanted)


@dataclass(frozen=True)
class Timed:
    """Lines of the frame: prompts read, one sequence written after `depth` tokens, several (`value`: s a token)."""

    prompts: pd.DataFrame
    alone: pd.DataFrame
    batch: pd.DataFrame
    depth: float


def losses(facts: Mapping[str, Model]) -> dict[str, float]:
    """Distance from F16, in thousandths of a nat a token, of files whose model has a small trained namesake here.

    By the reference's quality rows (chapter 5): mean KL divergence on held-out text.
    """
    part = read("05-quality", "recorded", "mini")
    table = quality.table(part.rows) if part else pd.DataFrame(columns=["model", "file", "kld"])
    known = {
        (row.model.rstrip("*"), row.file): 0.0 if row.file == "F16" else 1e3 * row.kld.value
        for row in table.itertuples()
    }
    return {
        file: known.get((fact.get("like", fact["name"]), fact["dtype"]), float("nan")) for file, fact in facts.items()
    }


def ranked(whole: pd.DataFrame, loss: Mapping[str, float]) -> pd.DataFrame:
    """Files of a model: the fastest first, then those not ranked.

    `whole`: as of a `Decision`. Columns: `file`, `dtype`, `value` (seconds), `n` processes, `kind` ("least", "longer",
    "alike", or why it is not ranked), `over` (an Estimate of its seconds over the fastest's, by paired blocks, selected
    among all ranked) and `loss`.
    """
    files = whole.groupby(["file", "dtype"]).agg(
        value=("value", "median"), n=("value", "size"), marked=("marked", "any")
    )
    files = files.reset_index().assign(kind="alike", over=None)
    files.loc[files.n < FEW, "kind"] = "few"
    files.loc[files.marked.astype(bool), "kind"] = "disturbed"
    files = files.assign(last=files.kind != "alike").sort_values(["last", "value"], ignore_index=True)
    n = int((~files["last"]).sum())
    for at in range(1, n):
        pair = compare(whole, of=f"dtype == '{files.dtype[at]}'", to=f"dtype == '{files.dtype[0]}'", by="model")
        ratio = selected(pair.estimate.iloc[0], n - 1)
        files.at[at, "over"] = ratio
        files.loc[at, "kind"] = "few" if ratio.n < FEW else "longer" if ratio.low > 1 else "alike"
    files.loc[files.index[: min(n, 1)], "kind"] = "least"
    return files.assign(loss=files.file.map(loss)).drop(columns=["last", "marked"])


def chosen(files: pd.DataFrame) -> Any:
    """The line of the file to run: the fastest, or one at most SLOWER times as long that loses less; None if none is.

    `files`: of `ranked`.
    """
    less = files.over.map(lambda over: over is not None and over.high <= SLOWER) & (files.loss < files.loss.iloc[0])
    return next(files[less | (files.kind == "least")].sort_values(["loss", "value"]).itertuples(), None)


def slots(of: pd.DataFrame, users: int, safe: bool | None) -> int:
    """Requests at once: 1 unless users may share this build, else the fewest that come within ENOUGH of the best gain.

    Several share a server only where the mean user waits no longer than one by one: n that ask together wait for
    (n + 1) / 2 requests in the mean if they are answered in turn, and for n over the gain if they share.
    `of`: `gains` of one file.
    """
    good = of[of.clear.astype(bool) & of.n_seq.notna() & of.n_seq.le(users)] if safe else of.head(0)
    good = good[good.value >= 2 * good.n_seq / (good.n_seq + 1)]
    return int(good[good.value >= ENOUGH * good.value.max()].n_seq.min()) if len(good) else 1


def command(path: str, n: int, room: int, row: pd.Series, gpu: bool) -> str:
    """llama-server with `n` slots of `room` tokens each; `row`: settings of the rows that this rests on.

    `gpu`: whether the machine has one, which llama-server would use by itself.
    """
    words = ["llama-server", "-m", shlex.quote(path), f"-np {n}", f"-c {n * room}", f"-t {row.n_threads}"]
    words += [f"-ngl {99 if row.n_gpu_layers < 0 else row.n_gpu_layers}"] if row.n_gpu_layers or gpu else []
    flags = (("-fa", row.flash_attn), ("-ctk", row.type_k), ("-ctv", row.type_v))
    words += [f"{flag} {kind}" for flag, kind in flags if kind not in ("auto", "f16")]
    return " ".join(words)


def does(value: float, reading: float, together: float, n: int, request: Request) -> str:
    """What one request takes, and how long users who ask at the same time wait, one by one and in `n` slots.

    `value`: seconds of a request alone; `reading`: tokens a second of a prompt; `together`: seconds of `n` requests at
    once, until all are answered.
    """
    first = number(request.prompt / reading)
    text = f"{number(value)} s a request · first token after {first} s for the first user"
    if request.users < 2:
        return f"{text}."
    at_once = n if n > 1 else request.users
    mean, last = number(value * (at_once + 1) / 2), number(value * at_once)
    each = f"each waits {number(together)} s, and in turn " if n > 1 else "they are answered in turn and wait "
    return f"{text} · if {at_once} ask at once {each}{mean} s on average, the last {last} s."


def context(fact: Model, n: int, request: Request, row: pd.Series, longest: float) -> str:
    """What slots of this file take besides its weights, by arithmetic; and what its measurements do not reach."""
    room, most = request.room(fact), fact["shape"].get("context_length") or 0
    why = fact.get("uncounted", MIXTURE)
    if why.startswith(MIXTURE):
        cache = contexts.reserved(fact, f"on/{row.type_k}/{row.type_v}", room, UBATCH, whole=False)
        state = f", {number(cache['state'] / 1e6)} MB of it a recurrent state" if cache["state"] else ""
        each = cache["kv"] + cache["state"]
        text = f"a slot of {room:,} tokens takes {number(each / 1e6)} MB{state}"
        text += f"; {n} take {number(n * each / 1e9)} GB." if n > 1 else "."
    else:
        text = f"n/a: {why}, so its cache is not computed."
    if 0 < most < request.prompt + request.answer + TEMPLATE:
        text += f" This request does not fit: the model knows {most:,} tokens."
    beyond = f" Reading was measured up to {longest:,.0f} tokens." if longest < request.prompt else ""
    return text + beyond


def warning(arch: str, safe: bool | None, release: str) -> str:
    """What to know before users share a server of this architecture on this release; "" where they may."""
    if safe:
        return ""
    if safe is None:
        return (
            f"Keep `-np 1` until `plamo-study probe` finds its answers right: nobody asked whether users may share "
            f"{name(arch)} on {release} (chapter 10)."
        )
    return (
        f"**Keep `-np 1`:** users who share {name(arch)} on {release} get wrong answers or a dead server "
        "([chapter 4](04-right-answers.ipynb))."
    )


def limit(share: float, bandwidth: float, disturbed: bool, smaller: pd.DataFrame) -> str:
    """What a written token waits for; NaN `share`: not known.

    `smaller`: measured files of fewer bytes, with `dtype` and the Estimate of their writing speed over this file's.
    """
    if share != share:
        return "n/a: its ceilings were not measured."
    text = f"memory, {bandwidth / 1e9:.3g} GB/s at its best, would take {share:.0%} of a written token"
    if disturbed:
        return f"{text}; it was measured while disturbed, so it may be faster."
    if share <= 0.5:
        return f"{text}, so more than memory slows it."
    faster = [row.dtype for row in smaller.itertuples() if row.estimate.low > 1]
    if faster or smaller.empty:
        return f"{text}: a smaller file {f'helps ({faster[0]})' if faster else 'should help'}."
    return f"{text}, yet no smaller file was shown to write faster."


def sure(files: pd.DataFrame, best: Any, n: int = 1, gain: Estimate | None = None) -> str:
    """How far the files of a model were told apart, and what `n` at once gain."""
    left = {why: list(files.dtype[files.kind == kind]) for kind, why in UNRANKED.items()}
    out = [f"not ranked: {' and '.join(dtypes)} ({why})" for why, dtypes in left.items() if dtypes]
    if best is None:
        return f"not yet: {'; '.join(out)}. Run the same command again when the machine is idle."
    alike = files.dtype[files.kind.isin(["least", "alike"]) & (files.dtype != best.dtype) & (best.kind != "longer")]
    text = [f"{best.dtype} and {' and '.join(alike)} are not told apart: either"] if len(alike) else []
    text += [
        f"{row.dtype} takes {figure(row.over)} times as long as {files.dtype[0]}"
        for row in files.itertuples()
        if row.kind in ("longer", "alike")
    ]
    text += [f"{n} at once do {figure(gain)} times the requests in the same time"] if gain else []
    text += ["one type was measured; give files of several to compare them"] if len(files) == 1 else []
    return "; ".join(text + out) + "."


@dataclass(frozen=True)
class Plan:
    """What is advised of a model: the file, slots, sentences, and the command `run`, "" where nothing is sure."""

    model: str
    file: str
    n: int
    run: str
    does: str
    warning: str
    context: str
    sure: str
    disturbed: bool


@dataclass(frozen=True)
class Decision:
    """A machine's rows as advice.

    `m`: the tidy frame; `rows`: of the recording, with every setting; `facts`: of its files; `shared`: whether users
    may share an architecture on this `release`; `gpu`: whether the machine has one.
    """

    m: pd.DataFrame
    rows: pd.DataFrame
    facts: Mapping[str, Model]
    request: Request
    shared: Mapping[str, bool | None]
    release: str
    gpu: bool = False

    @cached_property
    def timed(self) -> Timed:
        """What a request is made of, from the usable lines with most threads."""
        good = self.m[self.m.usable & (self.m.n_threads == self.m.n_threads.max())]
        good = good.assign(marked=good.disturbed.astype(bool) | (good.drift > DRIFT_LIMIT))
        steps = good[good.metric == "step"]
        single = steps[steps.n_seq == 1]
        depth = single.depth.mode().max()  # where one sequence was measured most
        alone = single[(single.depth == depth) & (single.n_gen == single.n_gen.min())]
        short = good[(good.metric == "prompt") & (good.n_seq == 1)]  # the prompt before those steps, read in one call
        prompts = pd.concat([good[good.metric == "prefill"], short.assign(n_prompt=short.depth)])
        batch = steps[steps.n_seq > 1].assign(value=lambda d: d.value / d.n_seq)
        return Timed(prompts.drop_duplicates(["file", "n_prompt", "block"]), alone, batch, depth)

    @cached_property
    def both(self) -> pd.DataFrame:
        """Seconds of each phase of a request, by block: `phase`, `value`. Files of a model read one length."""
        prompts, alone = self.timed.prompts, self.timed.alone
        both = prompts[prompts.file.isin(alone.file)]
        n_files = both.groupby(["model", "n_prompt"]).file.transform("nunique")
        common = both[n_files == both.groupby("model").file.transform("nunique")]
        alike = common[common.n_prompt == common.groupby("model").n_prompt.transform("max")]
        reads = alike.assign(phase="reading", value=self.request.prompt * alike.value / alike.n_prompt)
        return pd.concat([reads, alone.assign(phase="writing", value=self.request.answer * alone.value)])

    @cached_property
    def whole(self) -> pd.DataFrame:
        """Seconds of the request by block, of files with `both` phases; `marked`: one of them was disturbed."""
        whole = self.both.groupby(BLOCK).agg(value=("value", "sum"), n=("value", "size"), marked=("marked", "any"))
        return whole[whole.n == 2].reset_index()

    @cached_property
    def failed(self) -> pd.DataFrame:
        """Lines of several sequences that were not computed right."""
        return self.m[(self.m.n_seq > 1) & ~self.m.verdict.isin(RIGHT)]

    @cached_property
    def options(self) -> pd.DataFrame:
        """Seconds by block of each file's request as it is, in other types, and as a share of several at once.

        Several prompts are read one after another, and their answers written together; numbers of sequences that were
        computed wrong are left out. Columns: `saves` (the file), `option`, `n_seq`, machine, block, value, marked.
        """
        whole, batch = self.whole, self.timed.batch
        lines = [whole.assign(saves=whole.file, option=AS_IT_IS)]
        for (model, dtype), other in whole.groupby(["model", "dtype"]):
            for file in whole.file[(whole.model == model) & (whole.dtype != dtype)].unique():
                lines.append(other.assign(saves=file, option=f"use {dtype}"))
        wrong = pd.MultiIndex.from_frame(self.failed[["file", "n_seq"]])
        batch = batch[~pd.MultiIndex.from_frame(batch[["file", "n_seq"]]).isin(wrong)]
        writes = batch.assign(value=self.request.answer * batch.value).drop_duplicates([*BLOCK, "n_seq"])
        reads = self.both.loc[self.both.phase == "reading", [*BLOCK, "value", "marked"]]
        several = writes.merge(reads, on=BLOCK, suffixes=("", "_read"))
        marked = several.marked.astype(bool) | several.marked_read.astype(bool)
        words = several.n_seq.astype(str) + " requests at once"
        several = several.assign(value=several.value + several.value_read, marked=marked, saves=several.file)
        return pd.concat([*lines, several.assign(option=words)]).reindex(
            columns=["saves", "option", "n_seq", "machine", "block", "value", "marked"]
        )

    @cached_property
    def gains(self) -> pd.DataFrame:
        """Times the requests in the same time that each option does, paired by block, selected among a file's options.

        Columns: `file`, `option`, `n_seq`, `estimate` and its numbers, `few` pairs, and whether it is `clear`: neither
        few nor disturbed, and its interval above 1.
        """
        every = self.options
        tried = [
            compare(every, of=f"option == '{AS_IT_IS}'", to=f"option == '{option}'", by="saves").assign(
                option=option, n_seq=d.n_seq.iloc[0], marked=lambda lines, d=d: lines.saves.isin(d.saves[d.marked])
            )
            for option, d in every.groupby("option", sort=False)
            if option != AS_IT_IS
        ]
        if not tried:
            return pd.DataFrame(columns=["file", "option", "n_seq", "value", "n", "estimate", "few", "clear"])
        lines = pd.concat(tried)
        lines = lines[lines.n > 0].rename(columns={"saves": "file"})
        number_of = lines.groupby("file").option.transform("size")
        lines["estimate"] = [selected(ratio, n) for ratio, n in zip(lines.estimate, number_of, strict=True)]
        usual = every[(every.option == AS_IT_IS) & every.marked.astype(bool)].saves
        quiet = ~lines.marked.astype(bool) & ~lines.file.isin(usual)
        above = lines.estimate.map(lambda ratio: ratio.low > 1).astype(bool)
        return lines.assign(few=lines.n < FEW, clear=(lines.n >= FEW) & quiet & above)

    @cached_property
    def waited(self) -> pd.Series:
        """Seconds until several requests are answered, by file and number."""
        several = self.options[self.options.n_seq.notna()]
        return several.groupby(["saves", "n_seq"]).value.median().pipe(lambda d: d * d.index.get_level_values("n_seq"))

    @cached_property
    def order(self) -> dict[str, pd.DataFrame]:
        """The files of each model, `ranked`."""
        loss = losses(self.facts)
        return {str(model): ranked(of, loss) for model, of in self.whole.groupby("model")}

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """Seconds a token of both phases: of a prompt of 512 tokens, else the longest, and of one sequence."""
        prompts = self.timed.prompts
        lengths = prompts.groupby("file").n_prompt.agg(lambda n: 512 if (n == 512).any() else n.max())
        reads = prompts[prompts.n_prompt == prompts.file.map(lengths)]
        return pd.concat(
            [
                reads.assign(phase="reading", value=reads.value / reads.n_prompt),
                self.timed.alone.assign(phase="writing"),
            ]
        )

    @cached_property
    def rate(self) -> pd.DataFrame:
        """Tokens a second: an estimate by file and phase."""
        return estimate(self.tokens, by="file phase", work=1)

    @cached_property
    def speed(self) -> pd.DataFrame:
        """The same, a file a line: `reading`, `writing`."""
        wide = self.rate.pivot(index="file", columns="phase", values="value")
        return wide.reindex(columns=["reading", "writing"])

    @cached_property
    def held(self) -> pd.Series:
        """Most bytes that one sequence of each file needed."""
        alone = self.m[self.m.usable & (self.m.metric == "memory") & (self.m.n_seq == 1)]
        return alone.groupby("file").value.max()

    def plan(self, model: str) -> Plan:
        """What is advised of a model."""
        files, request = self.order[model], self.request
        best = chosen(files)
        line = next(files.itertuples()) if best is None else best
        fact, arch, file = self.facts[line.file], self.facts[line.file]["shape"]["arch"], line.file
        gains = self.gains[self.gains.file == file].dropna(subset="n_seq")
        n = 1 if best is None else slots(gains, request.users, self.shared[arch])
        used = self.timed.alone[self.timed.alone.file == file]
        row = self.rows[self.rows.key.isin(used.key)].iloc[-1]
        room = request.room(fact)
        together = self.waited.get((file, n), float("nan"))
        longest = self.both[(self.both.file == file) & (self.both.phase == "reading")].n_prompt.max()
        gain = next(iter(gains.estimate[gains.n_seq == n]), None)
        return Plan(
            model,
            file,
            n,
            "" if best is None else command(path_of(fact), n, room, row, self.gpu),
            does(line.value, self.speed.reading[file], together, n, request),
            warning(arch, self.shared[arch], self.release),
            context(fact, n, request, row, longest),
            sure(files, best, n, gain),
            best is None and "disturbed" in set(files.kind),
        )


def path_of(fact: Model) -> str:
    """A file's name: as it was given, else as this repository writes it."""
    file = models.FILES.get((fact["name"], fact["scale"], fact["dtype"]))
    return file.path.name if file else f"{fact['name']}.{fact['scale']}.{fact['dtype']}.gguf"
