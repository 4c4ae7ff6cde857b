"""What each lever gives and what it costs, using only the rows of the study that measured it.

A lever changes one thing about how a model is served. A function of `LEVERS` takes all recordings and gives a line per
model. More is better: a wait cut to a third is a gain of 3.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pandas as pd

from plamo_study.analysis import timing
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.usable import usable
from plamo_study.errors import StudyError
from plamo_study.measure.frame import unstarred
from plamo_study.measure.plan import check_scale
from plamo_study.measure.recording import Recording, check_device, check_source, read
from plamo_study.studies.batch_scaling import analysis as batch_scaling
from plamo_study.studies.batch_scaling.builds import CORRECT, FLAT, HYBRID
from plamo_study.studies.chunked import analysis as chunked_prefill
from plamo_study.studies.chunked.plan import DECODING, PROMPT, USUAL_CHUNK
from plamo_study.studies.context import analysis as context, memory
from plamo_study.studies.disaggregation import analysis as moving, sizes
from plamo_study.studies.quality import analysis as losses
from plamo_study.studies.quantization import analysis as types
from plamo_study.studies.replicas import analysis as processes
from plamo_study.studies.speculative import analysis as drafts
from plamo_study.studies.speculative.plan import USUAL as DRAFTED

TOGETHER = 8  # answers at once, where a lever is about a batch
FEWER_BITS, BITS = "Q4_0", "Q8_0"
ACCEPTED = 0.7  # of a draft, where a lever is about drafting
KEPT = 2048  # tokens of a prompt that is read once and kept
SPLIT = (2, 4)  # processes, and sequences of each
FREE = f"tokens a second of an answer, over no drafts, if {ACCEPTED:.0%} of them are right"
BACK = {
    drafts.NATIVE: "rejected tokens are deleted from the cache",
    drafts.PART: "after a rejection the state from before the draft is put back, and part of it computed again",
}
DRAFTS, BUILDS = "08-speculative", {"heads": batch_scaling.STOCK, "rollback": "rollback"}  # of levers
SEVERAL = "08-several"  # the same lengths of drafts beside one answer and beside several
AT_ONCE = 10**18  # bits per second of a link that takes no time
FALLBACK = "mini"
LEAST = 3  # blocks a recording needs to be preferred to one at a smaller scale
TOKENS, WAITS, PROMPTS, IF_FREE = "more tokens a second", "shorter waits", "prompts", "if drafts cost nothing"
Table = TypeVar("Table")


class Recordings(Mapping[str, Recording]):
    """Recordings by study, and the tables of them that several levers are read from; empty where a study has no rows.

    `steps`: curves of 03-batch-scaling. `types`: seconds of 04-quantization. `ladders`: samples of 05-context.
    `kinds`: of 05-memory. `window`: what it changes, of 05-beside. `drafts`: speeds over plain decode by study of 08.
    """

    def __init__(self, found: Mapping[str, Recording]) -> None:
        self._found = found
        self.steps: batch_scaling.Curves = self._of("03-batch-scaling", batch_scaling.curves, {})
        self.types: types.Series = self._of("04-quantization", types.seconds, {})
        self.ladders = self._of("05-context", context.samples, pd.DataFrame())
        self.kinds = self._of("05-memory", memory.kinds, pd.DataFrame())
        self.window = self._of("05-beside", lambda rows: context.explained(context.samples(rows)), pd.DataFrame())
        self.drafts = {study: drafts.speed_ups(self[study].rows) for study in (SEVERAL, DRAFTS) if study in self}

    def __getitem__(self, study: str) -> Recording:
        return self._found[study]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def _of(self, study: str, table: Callable[[pd.DataFrame], Table], none: Table) -> Table:
        return table(self[study].rows) if study in self else none


@dataclass(frozen=True)
class Line:
    """What a lever gives a model: `gain`, how many times better `what` becomes; `price`: what becomes worse, in words.

    `aim`: what the lever is for; gains of one aim may be compared.
    """

    model: str
    what: str
    gain: Estimate
    price: str = ""
    aim: str = TOKENS


@dataclass(frozen=True)
class Gain(Line):
    """A line with the name of its lever, and of the study it comes from."""

    lever: str = ""
    study: str = ""


def batch(known: Recordings) -> list[Line]:
    """Several answers at once, on the engine as released."""
    lines = []
    for (build, model), curve in known.steps.items():
        if build == batch_scaling.STOCK and TOGETHER in curve.index:
            factor = batch_scaling.factor(curve, TOGETHER)
            price = f"a token of each answer takes {factor.per(TOGETHER):.1f} times as long"
            lines.append(Line(model, f"tokens a second of {TOGETHER} answers", factor, price))
    return lines


def one_by_one(known: Recordings) -> list[Line]:
    """The hybrid's prompts read in separate calls, over one shared call on a build that computes it right."""
    found = usable(known["03-batch-scaling"].rows)
    found = found[(found["workload"] == "prefill") & found["model"].str.startswith(HYBRID)]
    lines = []
    for model, own in found.groupby("model"):
        alone = own[(own["build"] == batch_scaling.STOCK) & (own["policy"] == "per_sequence")]
        shared = own[(own["build"] == CORRECT) & (own["policy"] == "packed")]
        n_seq = max(set(alone["n_seq"]) & set(shared["n_seq"]), default=0)
        if n_seq:
            times = (timing.median_by_block(each[each["n_seq"] == n_seq]) for each in (shared, alone))
            what = f"{n_seq} short prompts read in a call each, over one call for all on our corrected build"
            lines.append(Line(str(model), what, timing.paired_ratio(*times), "one call for each prompt", PROMPTS))
    return lines


def corrected(known: Recordings) -> list[Line]:
    """The hybrid's step with its projections computed by one product for all sequences, over the other corrections."""
    lines = []
    for (build, model), flat in known.steps.items():
        other = known.steps.get((CORRECT, model))
        if build == FLAT and other is not None and TOGETHER in flat.index.intersection(other.index):
            gain = timing.paired_ratio(other.loc[TOGETHER], flat.loc[TOGETHER])
            lines.append(Line(model, f"tokens a second of {TOGETHER} answers", gain, "a build of one's own"))
    return lines


def lost(quality: Recording) -> dict[tuple[str, str], Estimate]:
    """KL divergence of a type from the reference, in nats, by (model, type)."""
    return {(row.model, row.file): row.kld for row in losses.table(quality.rows).itertuples()}


def bits(known: Recordings) -> list[Line]:
    """Four bits a weight instead of eight, one answer."""
    rows, loses, lines = known["04-quantization"].rows, lost(known["04-quality"]), []
    for model in dict.fromkeys(rows[rows["model"] != ""]["model"]):
        gain, reading = (types.ratio(known.types, phase, model, FEWER_BITS, BITS) for phase in ("decode", "prefill"))
        if gain is None or reading is None:
            continue
        kld = loses.get((unstarred(model), FEWER_BITS))
        price = f"; {1e3 * kld.value:.2g} thousandths of a nat are lost (mini)" if kld else ""
        said = f"a prompt is read {reading:.2f} times as fast{price}"
        lines.append(Line(model, f"tokens a second of an answer, {FEWER_BITS} over {BITS}", gain, said))
    return lines


def drafting(known: Recordings) -> list[Line]:
    """Drafts looked up in the text itself, on real text, greedily."""
    found = drafts.on_text(known["08-drafters"].rows)
    usual = (found["label"] == "lookup") & (found["n_draft"] == DRAFTED) & (found["temperature"] == 0)
    usual &= found["build"] == batch_scaling.STOCK
    return [
        Line(
            row.model, f"tokens a second of an answer, {DRAFTED} looked up, {row.text}", row.speed,
            f"{1 - row.taken:.0%} of what is drafted is computed for nothing",
        )
        for row in found[usual].itertuples()
    ]  # fmt: skip


def heads(known: Recordings) -> list[Line]:
    """Upper bound for a draft head of the model's own: drafts that cost nothing, at a given acceptance."""
    return [Line(row.model, FREE, row.speed, BACK[row.how], IF_FREE) for row in _free(known, "heads")]


def rollback(known: Recordings) -> list[Line]:
    """The same on the build that keeps the states of the hybrid's last tokens."""
    lines = []
    for row in _free(known, "rollback"):
        state = sizes.size(known[DRAFTS].facts[row.model]["shape"], 0, "f16", "f16").recurrent
        price = f"{row.n_draft * state / 1e6:.2g} MB more for each answer, and a build of one's own"
        lines.append(Line(row.model, FREE, row.speed, price, IF_FREE))
    return lines


def _free(known: Recordings, lever: str) -> list[Any]:
    """Speed over plain decode of one answer whose drafts cost nothing."""
    found = drafts.free(known.drafts[DRAFTS], BUILDS[lever], ACCEPTED)
    return list(found[found["n_seq"] == 1].itertuples())


def chunked(known: Recordings) -> list[Line]:
    """A prompt in chunks between the steps of others, which otherwise wait for it."""
    rows, lines = known["06-chunked"].rows, []
    for model in dict.fromkeys(rows[rows["workload"] == "arrival"]["model"]):
        waits = waited(rows, model, DECODING)
        if waits is not None:
            price = f"the prompt's own first token takes {waits['ttft'].per(1):.2f} times as long"
            what = f"longest wait of {DECODING} others while a prompt of {PROMPT} tokens is read"
            lines.append(Line(model, what, waits["largest"], price, WAITS))
    return lines


def waited(rows: pd.DataFrame, model: str, n_seq: int) -> dict[str, Estimate] | None:
    """Whole prompt over prompt in chunks: the longest wait of `n_seq` others (`largest`), and the prompt's own first
    token (`ttft`); None if either was not measured."""
    own = (rows["model"] == model) & (rows["n_seq"] == n_seq) & (rows["n_arriving"] == PROMPT)
    found = chunked_prefill.usable_processes(rows[own])
    found = found[(found["flash_attn"] == "auto") & ~found["kv_unified"]]
    found = found[found["n_prompt"] == found["n_prompt"].min()]
    whole = found[found["way"] == "whole"]
    cut = found[(found["way"] == "apart") & (found["n_chunk"] == USUAL_CHUNK)]
    if whole.empty or cut.empty:
        return None
    at_once, in_chunks = (each.groupby("block")[["largest", "ttft"]].median() for each in (whole, cut))
    return {name: timing.paired_ratio(at_once[name], in_chunks[name]) for name in ("largest", "ttft")}


def replicas(known: Recordings) -> list[Line]:
    """Two processes with half of the sequences and of the threads each, over one process with all of them."""
    found = processes.over_one(known["07-replicas"].rows, known["07-replicas"].facts).dropna(subset=["copies"])
    usual = found["use_mmap"] & (found["dtype"] == found["dtype"].iloc[0])
    found = found[usual & (found["n_processes"] == SPLIT[0]) & (found["n_seq"] == SPLIT[1])]
    what = f"tokens a second of {SPLIT[0] * SPLIT[1]} answers, {SPLIT[0]} processes over one"
    return [
        Line(row.model, what, row.against_one, f"the weights take {max(row.copies, 1.0):.2f} times the memory")
        for row in found.itertuples()
        if row.against_one is not None and row.against_one.n > 1
    ]


def split(known: Recordings) -> list[Line]:
    """One half of the threads reads prompts and the other writes answers, at the highest load that was tried."""
    found, lines = moving.compared(known["09-disaggregation"].rows), []
    for model, group in found.groupby("model"):
        row = group.loc[group["per_second"].idxmax()]
        price = f"{row['throughput_ratio']:.2f} times the tokens a second; "
        price += f"the first token takes {row['ttft_ratio']:.2f} times as long"
        what = f"longest gap between two tokens, {row['per_second']:g} requests a second"
        lines.append(Line(str(model), what, row["largest_ratio"].per(1), price, WAITS))
    return lines


def reuse(known: Recordings) -> list[Line]:
    """A prompt's state kept and put back, instead of reading the prompt again."""
    recording = known["09-disaggregation"]
    found, lines = moving.shares(recording.rows, (AT_ONCE,)), []
    for model, group in found[found["n_prompt"] <= KEPT].groupby("model"):
        row = group.loc[group["n_prompt"].idxmax()]
        size = sizes.size(recording.facts[str(model)]["shape"], int(row["n_prompt"]), "f16", "f16").total
        what = f"a prompt of {row['n_prompt']:,} tokens that was read before"
        lines.append(Line(str(model), what, row["ratio"].per(1), f"{size / 1e6:.2g} MB for each that is kept", PROMPTS))
    return lines


def cache(known: Recordings) -> list[Line]:
    """Keys and values in 8 bits, with the flash attention that this needs, over F16 without."""
    return _kind(known.kinds, "on/q8_0/q8_0")


def flash(known: Recordings) -> list[Line]:
    """Flash attention with F16 keys and values, over none."""
    return _kind(known.kinds, "on/f16/f16")


def _kind(found: pd.DataFrame, kind: str) -> list[Line]:
    plain = found[~found["whole"] & (found["kind"] == memory.PLAIN)].set_index("model")["kv"]
    lines = []
    for row in found[~found["whole"] & (found["kind"] == kind)].itertuples():
        smaller = plain[row.model] / row.kv
        price = f"a prompt's token is read {row.prefill_gain:.2f} times as fast"
        price += f"; keys and values are {smaller:.2f} times smaller" if smaller > 1 else ""
        lines.append(Line(row.model, f"a token written after {row.depth:,}", row.decode_gain, price))
    return lines


def window(known: Recordings) -> list[Line]:
    """The hybrid's published attention window, built into the engine."""
    lines = []
    for model, group in known.window.groupby("model"):
        deepest = group[group["depth"] == group["depth"].max()].set_index("phase")
        written, read_at = deepest.loc["decode"], deepest.loc["prefill"]
        price = f"a token is read {read_at['ratio'].per(1):.2f} times as fast; a build of one's own"
        name = str(model).replace(context.WITH_WINDOW, "")
        lines.append(Line(name, f"a token written after {written['depth']:,}", written["ratio"].per(1), price))
    return lines


LEVERS: dict[str, tuple[tuple[str, ...], Callable[[Recordings], list[Line]]]] = {
    "batch": (("03-batch-scaling",), batch),
    "one by one": (("03-batch-scaling",), one_by_one),
    "corrected": (("03-batch-scaling",), corrected),
    "bits": (("04-quantization", "04-quality"), bits),
    "drafting": (("08-drafters",), drafting),
    "heads": ((DRAFTS,), heads),
    "rollback": ((DRAFTS,), rollback),
    "chunked": (("06-chunked",), chunked),
    "split": (("09-disaggregation",), split),
    "replicas": (("07-replicas",), replicas),
    "flash": (("05-memory",), flash),
    "cache": (("05-memory",), cache),
    "window": (("05-beside",), window),
    "reuse": (("09-disaggregation",), reuse),
}
STUDIES = tuple(dict.fromkeys(study for studies, _ in LEVERS.values() for study in studies))
FURTHER = ("05-context", "03-source-table", SEVERAL)  # for what a request is made of, for a claim, and for pairs


def recordings(source: str, scale: str, device: str = "auto") -> Recordings:
    """The rows of every study that a lever or a claim rests on: at this scale, else at mini.

    `device`: which of the live rows, as for `recording.of_device`. StudyError for an unknown source, scale or device,
    or where no study has any row.
    """
    check_source(source)
    check_scale(scale)
    check_device(device)
    found = {}
    for study in (*STUDIES, *FURTHER):
        recording = read(study, source, scale, device=device)
        if recording is None or _blocks(recording) < LEAST:
            recording = read(study, source, FALLBACK, device=device) or recording
        if recording is not None:
            found[study] = recording
    if not found:
        raise StudyError("levers", f"no study has {source} rows to show", f"plamo-study study --scale {scale}")
    return Recordings(found)


def _blocks(recording: Recording) -> int:
    rows = recording.rows
    return int(rows[(rows["block"] >= 0) & ~rows["anchor"]]["block"].nunique())


def gains(known: Recordings) -> list[Gain]:
    """Gains of every lever whose studies have rows, in the order of `LEVERS`."""
    return [
        Gain(line.model, line.what, line.gain, line.price, line.aim, lever, studies[0])
        for lever, (studies, lines) in LEVERS.items()
        if known.keys() >= set(studies)
        for line in lines(known)
    ]


def drafted(known: Recordings) -> tuple[str, pd.DataFrame] | None:
    """The study, and its speeds, of drafts beside one answer and beside several: every short length, or the one length
    that notebook 08 measured so."""
    return next(iter(known.drafts.items()), None)


def lacking(measured: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Levers that are not among those measured, with the studies that they need."""
    said = set(measured)
    return {lever: studies for lever, (studies, _) in LEVERS.items() if lever not in said}
