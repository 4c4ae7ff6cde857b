"""Simulated against live: how far off the clock is, by policy and load, and whether it picks what the engine confirms.

Frames in, estimates out. A process is one number. Both sides serve the same requests at the same times.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import stats, timing
from plamo_study.analysis.memo import once_a_frame
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import marked, usable
from plamo_study.errors import StudyError
from plamo_study.measure.arrivals import since_first
from plamo_study.studies.scheduling import clock, observed, policies
from plamo_study.studies.scheduling.clock import Simulated
from plamo_study.studies.scheduling.fleets_plan import WELL
from plamo_study.studies.scheduling.loop import Load, Preempt, Served, quantile, serve
from plamo_study.studies.scheduling.plan import PARTS, SERVER, SPLIT, WITHIN, known_loads
from plamo_study.studies.scheduling.steps import AWAKE_S, StepModel, kind

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
METRICS = [f"{what}_{q}" for what in ("ttft", "itl") for q in QUANTILES] + ["throughput", "goodput"]
LOADED = ["model", "per_second", "rule"]
SEEDS, ASKED = 5, 4000  # simulations of one load, of which the middle counts: so many, or of so many requests in all
LIMIT = 0.15  # how far off P99 may be before a policy's simulation is called unusable
AIMS = ("ttft_p90", "itl_p99")  # what a policy is picked for, the least of each
MISSING = "plamo-study measure 10-scheduling"
IDLE = (0.0, 0.005, AWAKE_S, 0.02, 0.08)  # s: classes of idleness, each up to the next
Seconds = Callable[[int], float]  # by tokens


def figures(
    ttft: np.ndarray, tpot: np.ndarray, gaps: tuple[np.ndarray, np.ndarray], rate: tuple[int, float], load: Load
) -> dict[str, float]:
    """METRICS of one load: quantiles (s) of its own requests' first tokens and of its own gaps, each counted for those
    who waited; tokens a second, and requests a second that were served within what the load says.

    `ttft`, `tpot`: seconds to the first token and, in the mean, for each further one, by request; `gaps`: seconds and
    how many waited; `rate`: tokens written, and seconds from the first arrival to the last token.
    """
    well = in_time(ttft, tpot, load.within)
    return waits(ttft, gaps) | {"throughput": rate[0] / rate[1], "goodput": float(well.sum()) / rate[1]}


def waits(ttft: np.ndarray, gaps: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """QUANTILES (s) of first tokens, by request, and of gaps, each counted for those who waited."""
    found = {f"ttft_{name}": float(quantile(ttft, np.ones(len(ttft)), q)) for name, q in QUANTILES.items()}
    return found | {f"itl_{name}": float(quantile(*gaps, q)) for name, q in QUANTILES.items()}


def in_time(ttft: np.ndarray, tpot: np.ndarray, within: tuple[float, float]) -> np.ndarray:
    """Which requests were served within what a load says."""
    return (ttft <= within[0]) & (tpot <= within[1])  # type: ignore[no-any-return] # an array


def of_served(served: Served, arrives: list[float] | None = None) -> dict[str, float]:
    """METRICS of a simulation; `arrives`: when requests arrived, where the load's own times are later ones."""
    asked = arrives or served.load.arrives
    rate = served.written, float(served.finish.max()) - asked[0]
    return figures(served.first - np.asarray(asked), served.tpot, (served.gaps, served.weights), rate, served.load)


@once_a_frame
def live(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a process of traffic: LOADED, `block`, METRICS. Disturbed ones only of a model that has no others."""
    return _taken(_judged(traffic_of(usable(rows))))


def _taken(rows: pd.DataFrame) -> pd.DataFrame:
    entries = []
    for row in rows.itertuples():
        load, came = load_of(row), [np.array(each.token_ns) / NS for each in row.requests]
        gaps = np.concatenate([np.diff(each) for each in came])
        ttft = np.array([each[0] for each in came]) - np.array(load.arrives)
        tpot = np.array([(each[-1] - each[0]) / max(len(each) - 1, 1) for each in came])
        rate = sum(load.output), max(each[-1] for each in came) - load.arrives[0]
        entry = {"model": row.model, "per_second": row.per_second, "rule": row.label, "block": row.block}
        entries.append(entry | figures(ttft, tpot, (gaps, np.ones(len(gaps))), rate, load))
    return pd.DataFrame(entries, columns=[*LOADED, "block", *METRICS])


def _judged(used: pd.DataFrame) -> pd.DataFrame:
    hit = marked(used)
    return used[~hit | hit.groupby(used["model"]).transform("all")]


def unjudged(rows: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Model, load and policy of the cells whose every process something disturbed, where a model has others."""
    used = traffic_of(usable(rows))
    names = ["model", "per_second", "label"]
    kept = set(map(tuple, _judged(used)[names].to_numpy().tolist()))
    return sorted(set(map(tuple, used[names].to_numpy().tolist())) - kept)


def traffic_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of loads that a policy served."""
    served = ~rows["label"].isin((PARTS, SERVER))
    return rows[(rows["workload"] == "traffic") & served & (rows["status"] == "ok")]


def typical(rows: pd.DataFrame) -> Load:
    """The requests that all loads of these rows consist of."""
    return load_of(next(traffic_of(usable(rows)).itertuples()))


def load_of(row: Any) -> Load:
    """The requests of a row."""
    told = [(each.arrived_ns / NS, min(each.n_prompt, row.n_prompt), len(each.token_ns)) for each in row.requests]
    arrives, prompt, output = map(list, zip(*told, strict=True))
    return Load(arrives, prompt, output, WITHIN[row.scale])


def models(rows: pd.DataFrame, others: Iterable[pd.DataFrame] = (), loads: bool = True) -> dict[str, StepModel]:
    """A step model for each model that traffic was measured on: of calls measured alone and, with `loads`, of traffic
    at the known loads. `others`: rows of other studies on the same machine, at the same scale, with all threads."""
    found = observed.calls(rows)
    known = known_loads(str(rows["scale"].iloc[0]))
    own = observed.parts_of(found)
    if loads:
        own = pd.concat([own, found[(found["workload"] == "traffic") & found["per_second"].isin(known)]])
    more = [_same(observed.calls(each), found) for each in others]
    every = pd.concat([own, *more], ignore_index=True)
    return {
        model: observed.fitted(every, model, int(own["n_threads"].max()), rows, _command(rows))
        for model in sorted(set(own["model"]))
    }


def _same(other: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame:
    """Calls of another study that were made on the machine and at the scale of this one."""
    return other[other["machine"].isin(set(own["machine"])) & other["scale"].isin(set(own["scale"]))]


def _command(rows: pd.DataFrame) -> str:
    return f"{MISSING} --scale {rows['scale'].iloc[0]}"


@once_a_frame
def fitted(rows: pd.DataFrame) -> dict[str, StepModel]:
    """A step model for each model, of its parts and of the known loads."""
    return models(rows)


@once_a_frame
def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """`both` of these rows with these models."""
    return both(rows, fitted(rows))


@once_a_frame
def half(rows: pd.DataFrame) -> dict[str, StepModel]:
    """The same of the parts with half of the threads; none where there is but one."""
    found = observed.calls(rows)
    if found["n_threads"].nunique() < 2:
        return {}
    own = observed.parts_of(found)
    return with_threads(rows, int(own["n_threads"].min()))


@once_a_frame
def with_threads(rows: pd.DataFrame, n_threads: int) -> dict[str, StepModel]:
    """A step model for each model of which the parts were measured with so many threads."""
    own = observed.parts_of(observed.calls(rows))
    own = own[own["n_threads"] == n_threads]
    return {model: observed.fitted(own, model, n_threads, rows, _command(rows)) for model in sorted(set(own["model"]))}


def elsewhere(rows: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """What a fit on another study's rows says of the calls of traffic here: `model`, `kind`, `calls`, `refused` (those
    outside of what was measured there) and `ratio`, measured over said, by process."""
    own = observed.calls(rows)
    own = own[(own["workload"] == "traffic") & (own["rule"] != PARTS) & (own["idle"] < AWAKE_S)]  # NaN: neither
    foreign = _same(observed.calls(other), own)
    entries = []
    for model, group in own.groupby("model"):
        try:
            known = observed.fitted(foreign, str(model), int(group["n_threads"].max()), rows, "")
        except StudyError:
            continue
        said = [_said(known, call) for call in group[observed.COLUMNS[:-1]].to_numpy().tolist()]
        group = group.assign(
            said=said, kind=[kind(*what) for what in zip(group["decoding"], group["chunk"], strict=True)]
        )
        for name, of in group.groupby("kind"):
            inside = of[of["said"].notna()]
            by_process = (inside["seconds"] / inside["said"]).groupby(inside["block"]).median()
            entry = {"model": model, "kind": name, "calls": len(of), "refused": int(of["said"].isna().sum())}
            entries.append(entry | {"ratio": stats.median(by_process.tolist())})
    return pd.DataFrame(entries, columns=["model", "kind", "calls", "refused", "ratio"])


@once_a_frame
def after_idle(rows: pd.DataFrame) -> pd.DataFrame:
    """What the first call of a prompt takes beyond the fit, by how long nothing had been computed: `model`, `idle` (one
    of IDLE), `calls`, `more` (s, in the middle) and `more_p90`, over processes."""
    own = observed.calls(rows)
    own = own[(own["workload"] == "traffic") & (own["rule"] != PARTS) & (own["decoding"] == 0) & (own["before"] == 0)]
    known, entries = fitted(rows), []
    said = [_said(known[call.model], [0, 0, call.chunk, 0]) for call in own.itertuples()]
    own = own.assign(more=own["seconds"] - said, since=pd.cut(own["idle"], [*IDLE, np.inf], right=False, labels=IDLE))
    for (model, since), of in own.groupby(["model", "since"], observed=True):
        by_process = of.groupby("block")["more"]
        entry: dict[str, Any] = {"model": model, "idle": since, "calls": len(of)}
        entry |= {"more": stats.median(by_process.median().tolist())}
        entries.append(entry | {"more_p90": stats.median(by_process.quantile(0.9).tolist())})
    return pd.DataFrame(entries, columns=["model", "idle", "calls", "more", "more_p90"])


def _said(known: StepModel, call: list[int]) -> float:
    try:
        return known.seconds(*call)
    except StudyError:
        return float("nan")


def simulated(load: Load, rule: str, model: StepModel, slots: int, **how: Any) -> dict[str, float]:
    """METRICS of a load by a policy: the middle of `seeds` simulations."""
    seen = range(seeds(load))
    return _middle([of_served(serve(load, policies.named(rule), Simulated(model, n), slots, **how)) for n in seen])


def seeds(load: Load) -> int:
    """Simulations of a load: the fewer requests it has, the more of its 99th percentile is luck."""
    return max(SEEDS, -(-ASKED // len(load)))


def _middle(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([run[name] for run in runs])) for name in METRICS}


def both(rows: pd.DataFrame, known: dict[str, StepModel]) -> pd.DataFrame:
    """A line a model, load and policy that was measured: METRICS live (estimates over processes), `NAME_simulated` and
    `NAME_ratio`, simulated over live; `held_out`: whether the load is one that no model was fitted on.

    Loads that a model cannot be asked about, because it was not measured so far, are in `refused`, with the reason.
    """
    entries = []
    first = traffic_of(usable(rows)).drop_duplicates(["model", "per_second", "label"])
    loads = {(row.model, row.per_second, row.label): (load_of(row), int(row.n_seq)) for row in first.itertuples()}
    fitted_on = known_loads(str(rows["scale"].iloc[0]))
    halves = half(rows)
    for key, group in live(rows).groupby(LOADED, sort=True):
        entry: dict[str, Any] = dict(zip(LOADED, key, strict=True)) | {"held_out": key[1] not in fitted_on}
        load, slots = loads[key]
        try:
            if entry["rule"] == SPLIT:
                model = entry["model"]
                found = disaggregated(load, _known(halves, model, rows), slots, shipping(rows, model))
            else:
                found = simulated(load, entry["rule"], known[entry["model"]], slots)
        except StudyError as error:
            entries.append(entry | {"refused": f"{error.what}: {error.why}"})
            continue
        entries.append(entry | _held_against(group, found) | {"refused": ""})
    return pd.DataFrame(entries, columns=[*LOADED, "held_out", *BOTH, "refused"])


def _known(halves: dict[str, StepModel], model: str, rows: pd.DataFrame) -> StepModel:
    if model not in halves:
        raise StudyError(model, "was not measured with half of the threads", _command(rows))
    return halves[model]


def shipping(rows: pd.DataFrame, model: str) -> tuple[Seconds, Seconds]:
    """Seconds of moving a state by its tokens: saved, checked and sent, which keeps the sender; loaded, which keeps the
    receiver. The medians of the shipments of known loads, between the lengths that were shipped by a straight line,
    beyond them the nearest.

    Raises StudyError where nothing was shipped at those loads.
    """
    used = traffic_of(usable(rows))
    used = used[(used["label"] == SPLIT) & (used["model"] == model)]
    used = used[used["per_second"].isin(known_loads(str(rows["scale"].iloc[0])))]
    told = [
        (each.n_prompt, *took)
        for row in used.itertuples()
        for each, *took in zip(row.requests, row.series["shipped"], row.series["loaded"], strict=True)
    ]
    if not told:
        raise StudyError(model, "no state was shipped at a load that the simulation knows", _command(rows))
    by_tokens = pd.DataFrame(told, columns=["tokens", "shipped", "loaded"]).groupby("tokens").median()
    return _between(by_tokens["shipped"]), _between(by_tokens["loaded"])


def _between(by_tokens: pd.Series) -> Seconds:
    return lambda tokens: float(np.interp(tokens, by_tokens.index, by_tokens))


BOTH = [name + end for name in METRICS for end in ("", "_simulated", "_ratio")]


def _held_against(group: pd.DataFrame, found: dict[str, float]) -> dict[str, Any]:
    """BOTH of the processes of one load."""
    entry: dict[str, Any] = {}
    for name in METRICS:
        taken = group.drop_duplicates("block", keep="last")[name].tolist()
        entry |= {name: stats.median(taken), f"{name}_simulated": found[name]}
        known_both = found[name] > 0 and min(taken) > 0  # nobody may have been served well
        entry[f"{name}_ratio"] = stats.ratio([found[name]] * len(taken), taken) if known_both else None
    return entry


@once_a_frame
def beside_a_server(rows: pd.DataFrame) -> pd.DataFrame:
    """The same requests served by llama-server, and its rule simulated with as many threads: `model`, `per_second`,
    BOTH, and `http` (s), what a request takes that asks for nothing.

    The rule is that of the policy "shared", but for prompts that arrive together: the server reads them in one call.
    """
    used = usable(rows)
    used = used[(used["workload"] == "traffic") & (used["label"] == SERVER) & (used["status"] == "ok")]
    known = {n: with_threads(rows, int(n)) for n in used["n_threads"].unique()}
    entries = []
    for (model, per_second, n_threads), group in used.groupby(["model", "per_second", "n_threads"]):
        if (fitted_on := known[n_threads].get(str(model))) is None:
            continue
        first = next(group.itertuples())
        found = simulated(load_of(first), "shared", fitted_on, int(first.n_seq))
        http = stats.median([float(np.median(series["floor"])) for series in group["series"]])
        entries.append({"model": model, "per_second": per_second, "http": http} | _held_against(_taken(group), found))
    return pd.DataFrame(entries, columns=["model", "per_second", "http", *BOTH])


def residuals(compared: pd.DataFrame) -> pd.DataFrame:
    """Per policy: how far simulated is from live over all loads, `worst_NAME` of P99 of both and of the throughput, as
    the ratio furthest from 1, and `verdict`: usable, or unusable where P99 is beyond LIMIT with its whole interval."""
    entries = []
    for (model, rule), group in compared[compared["refused"] == ""].groupby(["model", "rule"], sort=True):
        entry: dict[str, Any] = {"model": model, "rule": rule, "loads": len(group)}
        for name in ("ttft_p99", "itl_p99", "throughput"):
            entry[f"worst_{name}"] = max(group[f"{name}_ratio"], key=lambda ratio: abs(np.log(ratio.value)))
        entry["verdict"] = _verdict([entry["worst_ttft_p99"], entry["worst_itl_p99"]])
        entries.append(entry)
    names = ["worst_ttft_p99", "worst_itl_p99", "worst_throughput"]
    return pd.DataFrame(entries, columns=["model", "rule", "loads", *names, "verdict"])


def _verdict(ratios: list[Estimate]) -> str:
    said = {ratio.within(1 / (1 + LIMIT), 1 + LIMIT) for ratio in ratios}
    if "does not hold" in said:
        return "unusable"
    return "inconclusive" if "inconclusive" in said else "usable"


def picks(rows: pd.DataFrame, compared: pd.DataFrame) -> pd.DataFrame:
    """What the simulation would pick at each load, by what it is picked for: `rule`, `best` (of the live engine),
    `confirmed` (the same, or not shown to be worse), `chance`, the share of the policies of which that is so, and
    `held_out`."""
    entries = []
    taken = live(rows)
    for (model, per_second), group in compared[compared["refused"] == ""].groupby(["model", "per_second"]):
        if len(group) < 2:
            continue
        for name in AIMS:
            value = {row["rule"]: row for row in group.to_dict("records")}
            rule = min(value, key=lambda each: value[each][f"{name}_simulated"])  # called here
            best = min(value, key=lambda each: value[each][name].value)
            own = taken[(taken["model"] == model) & (taken["per_second"] == per_second)]
            by_rule = {
                each: own[own["rule"] == each].drop_duplicates("block", keep="last").set_index("block")[name]
                for each in value
            }
            ratios = {each: timing.paired_ratio(taken_by, by_rule[best]) for each, taken_by in by_rule.items()}
            good = {each: each == best or ratio.above(1.0) != "holds" for each, ratio in ratios.items()}
            entry = {"model": model, "per_second": per_second, "for": name, "rule": rule, "best": best}
            entry |= {"ratio": ratios[rule], "confirmed": good[rule], "chance": float(np.mean(list(good.values())))}
            entries.append(entry | {"held_out": group["held_out"].iloc[0]})
    names = ["model", "per_second", "for", "rule", "best", "ratio", "confirmed", "chance", "held_out"]
    return pd.DataFrame(entries, columns=names)


def ranked(compared: pd.DataFrame) -> tuple[int, int]:
    """(pairs of policies that simulation and engine put in the same order by P99 of the gaps, pairs that differ)."""
    same = every = 0
    for _, group in compared[compared["refused"] == ""].groupby(["model", "per_second"]):
        lines = group.to_dict("records")
        for n, one in enumerate(lines):
            for two in lines[n + 1 :]:
                a, b = one["itl_p99"], two["itl_p99"]
                if a.high < b.low or b.high < a.low:
                    every += 1
                    simulated_less = one["itl_p99_simulated"] < two["itl_p99_simulated"]
                    same += simulated_less == (a.value < b.value)
    return same, every


# ------------------------------------------------------------------ what was not measured, simulated

FULL: dict[str, Preempt] = {"wait": "", "recompute": "recompute", "save the state": "save"}
FINE = 1500  # requests of a simulation over loads


def at_rate(load: Load, per_second: float, n: int = FINE, seed: int = 0) -> Load:
    """Requests of a load's lengths, over and over in an order of their own, so many a second."""
    rng = np.random.default_rng([n, round(per_second * 1000), seed])
    which = rng.integers(0, len(load), n)
    arrives = since_first(rng.exponential(1 / per_second, n))
    return replace(clock.chosen(load, which.tolist()), arrives=arrives.tolist())


def over_loads(
    load: Load, rules: Sequence[str], model: StepModel, slots: Sequence[int], rates: Iterable[float]
) -> pd.DataFrame:
    """Each policy with each number of slots at each rate, simulated with FINE requests: `rule`, `slots`, `per_second`
    and METRICS."""
    entries = []
    for rate in rates:
        asked = at_rate(load, rate)
        for rule, n in product(rules, slots):
            served = serve(asked, policies.named(rule), Simulated(model), n)
            entries.append({"rule": rule, "slots": n, "per_second": rate} | of_served(served))
    return pd.DataFrame(entries, columns=["rule", "slots", "per_second", *METRICS])


def over_memory(
    load: Load, rule: str, model: StepModel, slots: int, per_second: float, rooms: Iterable[int]
) -> pd.DataFrame:
    """A policy at one rate by memory and by what is done when it is full: `room` (tokens), `full` ("wait", "recompute"
    or "save"), `preempted` and METRICS. A state is loaded and saved as fast as a sequence moves."""
    entries = []
    asked = at_rate(load, per_second)
    for room in rooms:
        for full, preempt in FULL.items():
            machine = Simulated(model, loads=lambda held: model.moving)
            served = serve(asked, policies.named(rule), machine, slots, room, preempt)
            entries.append({"room": room, "full": full, "preempted": served.preempted} | of_served(served))
    return pd.DataFrame(entries, columns=["room", "full", "preempted", *METRICS])


class Receiver(Simulated):
    """A machine to which states come that were read elsewhere: of a prompt it only loads the state."""

    def call(self, decoding: list[int], step: bool, keys: int, reading: int, chunk: int, before: int) -> float:
        """The time after a call."""
        if chunk:
            self.now += self.loads(chunk)
            self._slept = False  # what waking takes was measured of prompts
            return self.now
        return super().call(decoding, step, keys, reading, 0, 0)


def disaggregated(
    load: Load, model: StepModel, slots: int, moves: tuple[Seconds, Seconds], simulations: int = 0
) -> dict[str, float]:
    """METRICS of a load that one machine reads and another answers; `model` is each one's, half of a shared one's.

    `moves`: seconds that the state of so many tokens keeps the sender, and the receiver, as `shipping` tells. What
    lies between these is left out: sockets, and processes that wake. `simulations`: 0 for `seeds` of the load.
    """
    ships, loads = moves
    runs = []
    for seed in range(simulations or seeds(load)):
        there = clock.read_elsewhere(load, model, ships, seed)
        served = serve(there, policies.prefill_first, Receiver(model, seed + 1, loads=loads), slots)
        runs.append(of_served(served, load.arrives))
    return _middle(runs)


def capacity(load: Load, model: StepModel, slots: int) -> float:
    """Requests a second that a machine takes at most with whole prompts and full slots: λ (t_p + o t_b / b) < 1.

    `t_p`: a prompt of the load, in the mean; `o`: tokens of an answer, in the mean; `t_b`: a step of all `b` slots.
    """
    read = float(np.mean([model.seconds(0, 0, n, 0) for n in load.prompt]))
    held = int(np.mean(load.prompt) + np.mean(load.output) / 2)
    step = model.seconds(slots, min(held, model.range.held) * slots, 0, 0)
    return 1 / (read + float(np.mean(load.output) - 1) * step / slots)


def needed(rows: pd.DataFrame) -> pd.DataFrame:
    """Machines that a load needs, over those that just keep up, by simulation: `model`, `pattern`, `balance`,
    `n_machines`, `needed` (over repetitions; infinite where not even the most that was tried is enough), and of those
    machines `well`, `ttft_p99` and `itl_p99` (s)."""
    entries = []
    names = ["well", "ttft_p99", "itl_p99"]
    for row in rows[(rows["workload"] == "fleet") & (rows["status"] == "ok")].itertuples():
        if not row.checks["complete"]:
            continue
        tried = pd.DataFrame(row.series)
        enough = tried[tried["well"] >= WELL].sort_values("machines").groupby("repetition").first()
        enough = enough.reindex(sorted(set(tried["repetition"])))
        entry: dict[str, Any] = {"model": row.model, "pattern": row.pattern, "balance": row.balance}
        entry |= {
            "n_machines": int(row.n_processes),
            "needed": stats.median(enough["machines"].fillna(np.inf).tolist()),
        }
        entries.append(entry | {name: stats.median(enough[name].dropna().tolist()) for name in names})
    return pd.DataFrame(entries, columns=["model", "pattern", "balance", "n_machines", "needed", *names])
