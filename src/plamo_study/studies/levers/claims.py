"""What the source of the table of levers claims, each beside what the rows say of it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from plamo_study.analysis.stats import Claim, Estimate
from plamo_study.measure.recording import Recording
from plamo_study.studies.batch_scaling import analysis as batch_scaling
from plamo_study.studies.batch_scaling.builds import HYBRID
from plamo_study.studies.chunked import analysis as chunked_prefill
from plamo_study.studies.disaggregation import analysis as moving
from plamo_study.studies.levers import gains
from plamo_study.studies.levers.gains import Line, Recordings
from plamo_study.studies.quality import analysis as losses
from plamo_study.studies.quantization import analysis as types
from plamo_study.studies.replicas import analysis as processes
from plamo_study.studies.speculative import analysis as drafts

PUBLISHED = 0.15  # a factor of another machine is called found here within this margin
FIVE_TIMES, SEQUENCES = 5.0, 16  # tokens of so many answers over one's
TWICE = 2.0  # Q4 over Q8
STOPS = 5  # sequences at which the hybrid's serving is said to end
CHUNKS_GAIN = 1.03  # the least that cutting a prompt is said to give
NEEDED = 0.5  # of a loss: what a tensor that needs an exemption causes of it at least
WHOLE, EXEMPT = "Q4_0", "Q4_0-ssm_out-F16"
Said = tuple[str, Claim]


@dataclass(frozen=True)
class Checked:
    """One claim: `found`, what the rows say, and whether it holds; `study`: whose rows."""

    claim: str
    found: str
    verdict: Claim
    study: str


def agreed(verdicts: Iterable[Claim]) -> Claim:
    """The one verdict of all models, or inconclusive."""
    known = set(verdicts)
    return known.pop() if len(known) == 1 else "inconclusive"


def batching(recording: Recording) -> Said | None:
    """How many times the tokens of one answer sixteen give, attention only."""
    found = batch_scaling.scaling(recording.rows)
    found = found[(found["build"] == batch_scaling.STOCK) & (found["n_seq"] == SEQUENCES)]
    found = found[~found["model"].str.startswith(HYBRID)]
    factors: dict[str, Estimate] = dict(zip(found["model"], found["factor"], strict=True))
    if not factors:
        return None
    said = "; ".join(f"{factor:.2f} times on {model}" for model, factor in factors.items())
    within = [factor.within(FIVE_TIMES / (1 + PUBLISHED), FIVE_TIMES * (1 + PUBLISHED)) for factor in factors.values()]
    return f"{SEQUENCES} answers at once: {said}", agreed(within)


def ceiling(scaling: Recording, table: Recording) -> Said | None:
    """Where the hybrid's batches end as released, prompts in one call as the source ran them, and what lifts that."""
    released = batch_scaling.table_cells(table.rows)
    released = released[released["model"].str.startswith(HYBRID) & (released["build"] == batch_scaling.STOCK)]
    known = batch_scaling.curves(scaling.rows)
    most = max((int(curve.index.max()) for (b, m), curve in known.items()
                if b == batch_scaling.STOCK and m.startswith(HYBRID)), default=0)  # fmt: skip
    if released.empty or not most:
        return None
    ways = released[released["policy"] == "packed"].set_index("n_seq")["outcome"]
    untried = "" if STOPS in ways.index else f" ({STOPS} were not tried)"
    ends = {word: sorted(int(n) for n in ways.index[ways == word]) for word in ("abort", "wrong")}
    said = (
        f"as the source ran it, prompts in one call{untried}: aborts at {_numbers(ends['abort'])} sequences and is "
        f"wrong without a word at {_numbers(ends['wrong'])}. It is a defect and no limit: with prompts fed one by one "
        f"{most} at once are right"
    )
    return said, "does not hold" if ends["abort"] and min(ends["abort"]) <= STOPS else "inconclusive"


def _numbers(found: list[int]) -> str:
    return ", ".join(map(str, found)) or "no number of"


def four_bits(speed: Recording, quality: Recording) -> Said | None:
    """Q4 over Q8."""
    lines: list[Line] = gains.bits(speed, quality)
    if not lines:
        return None
    said = "; ".join(f"{line.gain:.2f} times on {line.model}" for line in lines)
    low, high = TWICE / (1 + PUBLISHED), TWICE * (1 + PUBLISHED)
    return f"{gains.FEWER_BITS} over {gains.BITS}: {said}", agreed(line.gain.within(low, high) for line in lines)


def exemption(quality: Recording, speed: Recording) -> Said | None:
    """What keeping `ssm_out` in F16 saves, and what it costs; it is needed where it causes half of the loss."""
    model = next((name for name in speed.rows["model"].unique() if str(name).startswith(HYBRID)), "")
    lost = {row.file: row.kld for row in losses.table(quality.rows).itertuples() if row.model.startswith(HYBRID)}
    slower = types.ratio(speed.rows, "decode", str(model), EXEMPT, WHOLE)
    if not lost.keys() >= {WHOLE, EXEMPT} or slower is None:
        return None
    whole, kept = lost[WHOLE].scaled(1e3), lost[EXEMPT].scaled(1e3)
    said = (
        f"on the model trained here {whole:.3g} thousandths of a nat are lost without it and {kept:.3g} with it, and "
        f"it writes {slower:.2f} times as fast. Released weights have not been seen"
    )
    left = Estimate(kept.value / whole.value, kept.low / whole.high, kept.high / whole.low, kept.n)
    return said, left.below(1 - NEEDED)


def unprofitable(recording: Recording) -> Said | None:
    """Whether drafts make the hybrid faster, as released and on the build that takes tokens back."""
    stock = [line for line in gains.heads(recording) if line.model.startswith(HYBRID)]
    if not stock:
        return None
    found = drafts.soonest(recording.rows)
    found = found[found["model"].str.startswith(HYBRID) & (found["n_seq"] == 1)]
    found = found[found["n_prompt"] == found["n_prompt"].min()]
    first = {build: min(own["from"], key=lambda each: each.value) for build, own in found.groupby("build")}
    said = f"as released {stock[0].gain:.2f} times as fast with free drafts, {gains.ACCEPTED:.0%} of them right"
    for build, crossed in first.items():
        where = "as released" if build == batch_scaling.STOCK else f"on the build `{build}`"
        said += f"; {where} the best length pays from an acceptance of {crossed:.2f}"
    ever = batch_scaling.STOCK in first and first[batch_scaling.STOCK].high < 1
    return said, "inconclusive" if ever else stock[0].gain.below(1.0)


def chunks(recording: Recording) -> Said | None:
    """Whether cutting a prompt makes the same work faster."""
    found = chunked_prefill.equal_work(recording.rows)
    if found.empty:
        return None
    faster, slower = (sum(each) for each in ((g.low > 1 for g in found["gain"]), (g.high < 1 for g in found["gain"])))
    said = (
        f"the same work: of {len(found)} ways to cut a prompt {faster} are shown to take less time and {slower} more. "
        f"The source names a talk, and no machine or load; here a processor and one prompt"
    )
    verdicts = [gain.above(CHUNKS_GAIN) for gain in found["gain"]]
    return said, "holds" if "holds" in verdicts else agreed(verdicts)


def transfer(recording: Recording) -> Said | None:
    """Whether a state of the hybrid goes on in another process."""
    found = moving.identity(recording.rows)
    found = found[found["model"].str.startswith(HYBRID)]
    if found.empty:
        return None
    n, valid, same = (int(found[name].sum()) for name in ("n", "valid", "identical"))
    said = (
        f"its reason does not: in llama.cpp {valid} of {n} states of {HYBRID} go on in another process as if they had "
        f"stayed, {same} in every bit. vLLM was not run here; it merged this between March and June 2026 (version 0.20)"
    )
    return said, "does not hold" if valid == n else "inconclusive"


def duplicates(recording: Recording) -> Said | None:
    """How many copies of the weights several processes hold, by how these were loaded."""
    found = processes.weights(recording.rows, recording.facts)
    found = found[found["n_processes"] > 1]
    if found.empty:
        return None
    kinds = found.groupby("n_processes")["copies"].size()  # the one number that was tried in most ways
    n = int(kinds.idxmax())
    found = found[(found["n_processes"] == n) & (found["model"] == found["model"].iloc[0])]
    said = "; ".join(
        f"{row.copies:.2f} times in {row.dtype}, {'mapped' if row.use_mmap else 'private'}"
        for row in found.itertuples()
    )
    verdicts: list[Claim] = ["holds" if copies > (n + 1) / 2 else "does not hold" for copies in found["copies"]]
    return f"{n} processes hold them {said}", agreed(verdicts)


def by_construction(recording: Recording) -> Said | None:
    """Whether one process for all beats as many processes as there are cores.

    As many as there are answers wait for cores, whatever they share, and say nothing of it.
    """
    found = processes.table(recording.rows)
    found = found[found["use_mmap"] & (found["dtype"] == found["dtype"].iloc[0])].dropna(subset=["against_one"])
    each, between = found[(found["n_seq"] == 1) & (found["total"] == gains.TOGETHER)], gains.replicas(recording)
    if each.empty:
        return None
    crowded = "; ".join(f"{row.against_one:.2f} times on {row.model}" for row in each.itertuples())
    said = "; ".join(f"{gains.SPLIT[0]} processes write {line.gain:.2f} times on {line.model}" for line in between)
    said += f"; {gains.TOGETHER} processes, more than there are cores, {crowded}"
    return said, agreed(line.gain.below(1.0) for line in between) if between else "inconclusive"


CLAIMS: dict[str, tuple[tuple[str, ...], Callable[..., Said | None]]] = {
    "batching": (("03-batch-scaling",), batching),
    "ceiling": (("03-batch-scaling", "03-source-table"), ceiling),
    "four bits": (("04-quantization", "04-quality"), four_bits),
    "exemption": (("04-quality", "04-quantization"), exemption),
    "unprofitable": ((gains.DRAFTS,), unprofitable),
    "chunks": (("06-chunked",), chunks),
    "transfer": (("09-disaggregation",), transfer),
    "duplicates": (("07-replicas",), duplicates),
    "by construction": (("07-replicas",), by_construction),
}


def checked(known: Recordings) -> Iterator[Checked]:
    """Every claim whose studies have rows."""
    for claim, (studies, check) in CLAIMS.items():
        if known.keys() >= set(studies) and (said := check(*(known[study] for study in studies))) is not None:
            yield Checked(claim, *said, studies[0])
