"""Predictions against live loads: how far off the simulator is, and whether it picks a policy that the engine confirms.

Every load is predicted from the others by three methods (WAYS): simulation, the measurement at the nearest load, and
queueing theory. Each predicts twice: without the speed of the machine, and given the pace of each process (PACED),
because a virtual machine's pace varies. Frames in, estimates out. A process is one number. The simulation serves the
same requests at the same times as the engine.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from plamo_study.analysis import stats, timing
from plamo_study.analysis.memo import once_a_frame
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import marked, usable
from plamo_study.errors import StudyError
from plamo_study.studies.scheduling import clock, closed, observed, policies
from plamo_study.studies.scheduling.clock import Simulated
from plamo_study.studies.scheduling.fleets_plan import WELL
from plamo_study.studies.scheduling.loop import Load, Preempt, Served, quantile, serve
from plamo_study.studies.scheduling.plan import PARTS, SERVER, SPLIT, WITHIN
from plamo_study.studies.scheduling.steps import AWAKE_S, StepModel

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
METRICS = [f"{what}_{q}" for what in ("ttft", "itl") for q in ("mean", *QUANTILES)] + ["throughput", "well"]
LOADED = ["model", "per_second", "rule"]
WAYS = ("simulation", "nearest load", "theory")
PACED = {f"{way}, paced": way for way in WAYS}
PROCESS = ["model", "rule", "per_second", "block"]
PREDICTED = ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p95", "ttft_p99", "itl_p50", "itl_p90", "itl_p95", "itl_p99")
SEEDS, ASKED = 5, 4000  # simulations of one load, whose median counts: at least SEEDS, and ASKED requests in all
LIMIT = 0.15  # largest error of a usable prediction
MISSING = "plamo-study measure 10-scheduling"
IDLE = (0.0, 0.005, AWAKE_S, 0.02, 0.08)  # s: lower bounds of the classes of idle time
Seconds = Callable[[int], float]  # by tokens


def figures(
    ttft: np.ndarray, tpot: np.ndarray, gaps: tuple[np.ndarray, np.ndarray], rate: tuple[int, float], load: Load
) -> dict[str, float]:
    """METRICS of one load: `waits`, tokens per second, and the share of requests served within the load's limits.

    `ttft`, `tpot`: seconds to the first token and mean seconds per further one, by request; `gaps`: seconds and
    how many waited; `rate`: tokens written, and seconds from the first arrival to the last token.
    """
    well = float(in_time(ttft, tpot, load.within).mean())
    return waits(ttft, gaps) | {"throughput": rate[0] / rate[1], "well": well}


def waits(ttft: np.ndarray, gaps: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Means and QUANTILES (s) of first tokens, by request, and of gaps, each counted for those who waited.

    A percentile with too few values (`stats.NEEDED`) is NaN.
    """
    found: dict[str, float] = {}
    for what, values, weights in (("ttft", ttft, np.ones(len(ttft))), ("itl", *gaps)):
        many = float(weights.sum())
        found[f"{what}_mean"] = float(values @ weights / many) if many else stats.NAN
        for (name, q), value in zip(
            QUANTILES.items(), quantile(values, weights, list(QUANTILES.values())), strict=True
        ):
            found[f"{what}_{name}"] = float(value) if many >= stats.NEEDED[q] else stats.NAN
    return found


def in_time(ttft: np.ndarray, tpot: np.ndarray, within: tuple[float, float]) -> np.ndarray:
    """Whether each request was served within the load's limits, (n,) bool."""
    return (ttft <= within[0]) & (tpot <= within[1])  # type: ignore[no-any-return] # an array


def of_served(served: Served, arrives: list[float] | None = None) -> dict[str, float]:
    """METRICS of a simulation; `arrives`: the original arrival times (s), if the load's own are later."""
    asked = arrives or served.load.arrives
    rate = served.written, float(served.finish.max()) - asked[0]
    return figures(served.first - np.asarray(asked), served.tpot, (served.gaps, served.weights), rate, served.load)


@once_a_frame
def live(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per process of traffic: LOADED, `block`, METRICS and `busy`, the share of time that the engine computed
    (NaN if its calls are unknown). Disturbed processes are used only for a model without others."""
    return _taken(_judged(traffic_of(usable(rows))))


def measures(rows: pd.DataFrame) -> pd.DataFrame:
    """`live` with one row per process and metric, for `estimate` and `compare`: LOADED, `block`, `machine`, `metric`
    (of METRICS, or "busy") and `value` (s, tokens a second, or a share)."""
    taken = live(rows).drop_duplicates([*LOADED, "block"], keep="last")
    return taken.melt([*LOADED, "block", "machine"], ["busy", *METRICS], "metric").dropna(subset="value")


def _taken(rows: pd.DataFrame) -> pd.DataFrame:
    entries = []
    for row in rows.itertuples():
        load, came = load_of(row), [np.array(each.token_ns) / NS for each in row.requests]
        gaps = np.concatenate([np.diff(each) for each in came])
        ttft = np.array([each[0] for each in came]) - np.array(load.arrives)
        tpot = np.array([(each[-1] - each[0]) / max(len(each) - 1, 1) for each in came])
        rate = sum(load.output), max(each[-1] for each in came) - load.arrives[0]
        entry = {"model": row.model, "per_second": row.per_second, "rule": row.label, "block": row.block}
        entry["machine"] = row.machine
        entry["busy"] = sum(row.samples_ns[0]) / NS / rate[1] if row.label not in (SPLIT, SERVER) else stats.NAN
        entries.append(entry | figures(ttft, tpot, (gaps, np.ones(len(gaps))), rate, load))
    return pd.DataFrame(entries, columns=[*LOADED, "block", "machine", "busy", *METRICS])


def _judged(used: pd.DataFrame) -> pd.DataFrame:
    hit = marked(used)
    return used[~hit | hit.groupby(used["model"]).transform("all")]


def unjudged(rows: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Model, load and policy of the cells whose processes were all disturbed, where the model has undisturbed ones."""
    used = traffic_of(usable(rows))
    names = ["model", "per_second", "label"]
    kept = set(map(tuple, _judged(used)[names].to_numpy().tolist()))
    return sorted(set(map(tuple, used[names].to_numpy().tolist())) - kept)


def traffic_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of loads that a policy served."""
    served = ~rows["label"].isin((PARTS, SERVER))
    return rows[(rows["workload"] == "traffic") & served & (rows["status"] == "ok")]


def typical(rows: pd.DataFrame) -> Load:
    """Requests of the loads at which policies are compared."""
    used = traffic_of(usable(rows))
    compared_at = used[used["per_second"].isin(loads(rows))]
    return load_of(next((compared_at if len(compared_at) else used).itertuples()))


@once_a_frame
def loads(rows: pd.DataFrame) -> tuple[float, ...]:
    """Loads (1/s) at which several policies were measured; each is predicted from the others."""
    policies_at = traffic_of(usable(rows)).groupby("per_second")["label"].nunique()
    return tuple(sorted(policies_at[policies_at > 1].index))


def load_of(row: Any) -> Load:
    """The requests of a row."""
    told = [(each.arrived_ns / NS, min(each.n_prompt, row.n_prompt), len(each.token_ns)) for each in row.requests]
    arrives, prompt, output = map(list, zip(*told, strict=True))
    return Load(arrives, prompt, output, WITHIN[row.scale])


def _models(own: pd.DataFrame, rows: pd.DataFrame) -> dict[str, StepModel]:
    """A step model for each model of these calls."""
    threads = int(own["n_threads"].max()) if len(own) else 0
    return {model: observed.fitted(own, model, threads, rows, _command(rows)) for model in sorted(set(own["model"]))}


def _same(other: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame:
    """Calls of another study on the same machine and at the same scale."""
    return other[other["machine"].isin(set(own["machine"])) & other["scale"].isin(set(own["scale"]))]


def _command(rows: pd.DataFrame) -> str:
    return f"{MISSING} --scale {rows['scale'].iloc[0]}"


@once_a_frame
def fitted(rows: pd.DataFrame, without: float = 0.0) -> dict[str, StepModel]:
    """Step model by model: fitted on calls measured alone, and on traffic at all `loads` except `without`."""
    found = observed.calls(rows)
    known = found["per_second"].isin(set(loads(rows)) - {without})
    own = pd.concat([observed.parts_of(found), found[(found["workload"] == "traffic") & known]])
    return _models(own, rows[rows["per_second"] != without])


@once_a_frame
def paced(rows: pd.DataFrame, without: float = 0.0) -> tuple[dict[str, StepModel], pd.Series]:
    """Step models by model, and each process's pace by PROCESS: the seconds of its calls over those that `fitted`
    predicts. The models are fitted on the same calls, divided by the pace of their process."""
    found, known = observed.calls(rows), fitted(rows, without)
    found = found[found["n_threads"] == found["n_threads"].max()]
    found = found.assign(said=_said(known, found))
    awake = found[found["said"].notna() & ~(found["idle"] >= AWAKE_S)].groupby(PROCESS)
    pace = (awake["seconds"].sum() / awake["said"].sum()).rename("pace").sort_index()
    found = found.join(pace, on=PROCESS)
    found["seconds"] /= found["pace"].fillna(1.0)
    own = found["per_second"].isin(set(loads(rows)) - {without}) | (found["workload"] != "traffic")
    return _models(found[own | (found["rule"] == PARTS)], rows[rows["per_second"] != without]), pace


@once_a_frame
def half(rows: pd.DataFrame) -> dict[str, StepModel]:
    """Step models of the parts with half of the threads; empty if there is only one thread."""
    found = observed.calls(rows)
    if found["n_threads"].nunique() < 2:
        return {}
    own = observed.parts_of(found)
    return with_threads(rows, int(own["n_threads"].min()))


@once_a_frame
def with_threads(rows: pd.DataFrame, n_threads: int) -> dict[str, StepModel]:
    """Step model by model, of the parts that were measured with `n_threads` threads."""
    own = observed.parts_of(observed.calls(rows))
    return _models(own[own["n_threads"] == n_threads], rows)


def elsewhere(rows: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Predictions of this traffic's calls by a fit on another study: `model`, `kind`, `calls`, `refused` (calls
    outside its measured range) and `ratio`, measured over predicted, by process."""
    own = observed.calls(rows)
    own = own[(own["workload"] == "traffic") & (own["rule"] != PARTS) & (own["idle"] < AWAKE_S)]  # NaN: neither
    foreign = _same(observed.calls(other), own)
    entries = []
    for model, group in own.groupby("model"):
        try:
            known = observed.fitted(foreign, str(model), int(group["n_threads"].max()), rows, "")
        except StudyError:
            continue
        of_group = observed.table(group)
        group = group.assign(said=known.of(of_group), kind=of_group.kinds)
        for name, of in group.groupby("kind"):
            inside = of[of["said"].notna()]
            by_process = (inside["seconds"] / inside["said"]).groupby(inside["block"]).median()
            entry = {"model": model, "kind": name, "calls": len(of), "refused": int(of["said"].isna().sum())}
            entries.append(entry | {"ratio": stats.median(by_process.tolist())})
    return pd.DataFrame(entries, columns=["model", "kind", "calls", "refused", "ratio"])


@once_a_frame
def after_idle(rows: pd.DataFrame) -> pd.DataFrame:
    """Extra time of a prompt's first call over the fit, by idle time before it: `model`, `idle` (one
    of IDLE), `calls`, `more` (s, median) and `more_p90` (s), over processes."""
    own = observed.calls(rows)
    own = own[(own["workload"] == "traffic") & (own["rule"] != PARTS) & (own["decoding"] == 0) & (own["before"] == 0)]
    known, entries = fitted(rows), []
    own = own.assign(
        more=own["seconds"] - _said(known, own), since=pd.cut(own["idle"], [*IDLE, np.inf], right=False, labels=IDLE)
    )
    for (model, since), of in own.groupby(["model", "since"], observed=True):
        by_process = of.groupby("block")["more"]
        entry: dict[str, Any] = {"model": model, "idle": since, "calls": len(of)}
        entry |= {"more": stats.median(by_process.median().tolist())}
        entries.append(entry | {"more_p90": stats.median(by_process.quantile(0.9).tolist())})
    return pd.DataFrame(entries, columns=["model", "idle", "calls", "more", "more_p90"])


def _said(known: dict[str, StepModel], found: pd.DataFrame) -> pd.Series:
    """Seconds of each call by its model's fit; NaN outside the measured range."""
    each = [pd.Series(known[str(name)].of(observed.table(of)), of.index) for name, of in found.groupby("model")]
    return pd.concat(each) if each else pd.Series(dtype=float)


def simulated(load: Load, rule: str, model: StepModel, slots: int, simulations: int = 0) -> dict[str, float]:
    """METRICS of a load by a policy: the median of `simulations` simulations, or of `seeds` if 0."""
    seen = range(simulations or seeds(load))
    return _middle([of_served(serve(load, policies.named(rule), Simulated(model, n), slots)) for n in seen])


def seeds(load: Load) -> int:
    """Number of simulations of a load: with fewer requests, more of its 99th percentile is chance."""
    return max(SEEDS, -(-ASKED // len(load)))


def _middle(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([run[name] for run in runs])) for name in METRICS}


@once_a_frame
def predictions(rows: pd.DataFrame) -> pd.DataFrame:
    """Predictions of each load without its own data, one row per model, load, policy, metric of METRICS and `way`.

    Theory does not cover the split engine, which is two servers in series, and nothing is paced whose
    calls are unknown. `asked`: whether the load is "between" known ones or "beyond" them. `predicted`; `measured`, over
    processes; `ratio`, predicted over measured, None if either is missing. `refused`: why the simulation gave
    no prediction.
    """
    entries = []
    used = traffic_of(usable(rows)).drop_duplicates(["model", "per_second", "label"])
    first = {(row.model, row.per_second, row.label): row for row in used.itertuples()}
    taken = live(rows).drop_duplicates([*LOADED, "block"], keep="last").set_index("block")
    for key, group in taken.groupby(LOADED, sort=True):
        model, per_second, rule = key
        others = taken[(taken["model"] == model) & (taken["rule"] == rule)]
        others = others[others["per_second"].isin(set(loads(rows)) - {per_second})]
        told = dict(zip(LOADED, key, strict=True)) | {"asked": _asked(per_second, set(others["per_second"]))}
        found, why = _simulated(rows, first[key])
        ways = {"simulation": found, "nearest load": nearest(others, per_second)}
        if rule != SPLIT:
            ways |= {"theory": _theory(rows, first[key])} | _paced(rows, first[key], others)
        for (way, said), name in product(ways.items(), METRICS):
            entry = told | {"metric": name, "way": way, "refused": why if way == "simulation" else ""}
            entries.append(entry | _held_against(said.get(name), group[name]))
    columns = [*LOADED, "asked", "metric", "way", "refused", "predicted", "measured", "ratio"]
    return pd.DataFrame(entries, columns=columns)


def _asked(per_second: float, known: set[float]) -> str:
    """Whether a load is "between" known ones or "beyond" them, or "none known"."""
    if not known:
        return "none known"
    return "between" if min(known) < per_second < max(known) else "beyond"


def _unknown(row: Any, rows: pd.DataFrame) -> float:
    """The load (1/s) to exclude from fits when this one is predicted; 0 for a load that no fit uses."""
    return float(row.per_second) if row.per_second in loads(rows) else 0.0


def nearest(others: pd.DataFrame, per_second: float) -> dict[str, pd.Series]:
    """METRICS by block at the nearest of the other loads, and its rate; empty if there is none."""
    if others.empty:
        return {}
    at = min(set(others["per_second"]), key=lambda each: (abs(each - per_second), each))
    chosen = others[others["per_second"] == at]
    return {name: chosen[name] for name in ("per_second", *METRICS)}


def _simulated(rows: pd.DataFrame, row: Any) -> tuple[dict[str, Any], str]:
    """The simulation's prediction of a load without its data; empty with the reason if it refuses."""
    load, without = load_of(row), _unknown(row, rows)
    try:
        if row.label == SPLIT:
            moves = shipping(rows, row.model, without)
            return disaggregated(load, _known(half(rows), row.model, rows), int(row.n_seq), moves), ""
        return simulated(load, row.label, fitted(rows, without)[row.model], int(row.n_seq)), ""
    except StudyError as error:
        return {}, f"{error.what}: {error.why}"


def _theory(rows: pd.DataFrame, row: Any) -> dict[str, Any]:
    known = fitted(rows, _unknown(row, rows))[row.model]
    return theory(load_of(row), row.per_second, row.label, known, int(row.n_seq))


def _paced(rows: pd.DataFrame, row: Any, others: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Prediction by each method of a load, by block, given nothing of the load but the pace of each process."""
    known, pace = paced(rows, _unknown(row, rows))
    if (row.model, row.label, row.per_second) not in pace.index.droplevel("block"):
        return {}
    own, load, slots = pace.loc[row.model, row.label, row.per_second], load_of(row), int(row.n_seq)
    many = max(SEEDS, seeds(load) // len(own))
    models = {block: known[row.model].slower(each) for block, each in own.items()}
    ways = {
        "simulation": {block: simulated(load, row.label, each, slots, many) for block, each in models.items()},
        "theory": {block: theory(load, row.per_second, row.label, each, slots) for block, each in models.items()},
    }
    found = {way: {name: pd.DataFrame(said).T.get(name) for name in METRICS} for way, said in ways.items()}
    near = nearest(others, row.per_second)
    if near:
        theirs = pace.loc[row.model, row.label, near["per_second"].iloc[0]]
        found["nearest load"] = {
            name: near[name] * own / theirs if name not in ("throughput", "well") else near[name] for name in METRICS
        }
    return {f"{way}, paced": said for way, said in found.items()}


def theory(load: Load, per_second: float, rule: str, model: StepModel, slots: int) -> dict[str, float]:
    """`ttft_*` (s) and `well` of a load by Pollaczek and Khinchine: one server, busy for each request's whole work.

    The work: its prompt in the policy's chunks, and its answer's share of steps: steps of one sequence for the policy
    "one at a time", else of all slots. A first token's time is wait plus prefill. The mean wait is exact for such a
    server; percentiles assume exponential waits of those who wait. Empty if the load exceeds the capacity.
    """
    size, together = policies.chunk(rule), 1 if rule == "one at a time" else slots
    reading = np.array([_reading(model, n, size) for n in load.prompt])
    held = min(int(np.mean(load.prompt) + np.mean(load.output) / 2), model.range.held)
    step = model.seconds(together, together * held, 0, 0) * float(np.mean(model.factors["step"])) / together
    work = reading + (np.array(load.output) - 1) * step
    busy = per_second * float(work.mean())
    if busy >= 1:
        return {}
    wait = closed.mg1(per_second, float(work.mean()), float((work**2).mean()))

    def sooner(seconds: float) -> float:
        return float(closed.exponential_wait(seconds - reading, wait, busy).mean())

    def until(q: float) -> float:
        return float(brentq(lambda seconds: sooner(seconds) - q, 0.0, float(reading.max()) + 20 * wait / busy))

    found = {f"ttft_{name}": until(q) for name, q in QUANTILES.items() if len(load) >= stats.NEEDED[q]}
    return found | {"ttft_mean": wait + float(reading.mean()), "well": sooner(load.within[0])}


def _reading(model: StepModel, n: int, size: int) -> float:
    """Mean seconds to read a prompt of `n` tokens in chunks of `size`."""
    chunks = [(min(size, n - before), before) for before in range(0, n, size)]
    return sum(model.seconds(0, 0, *chunk) for chunk in chunks) * float(np.mean(model.factors["chunk"]))


def _known(halves: dict[str, StepModel], model: str, rows: pd.DataFrame) -> StepModel:
    if model not in halves:
        raise StudyError(model, "was not measured with half of the threads", _command(rows))
    return halves[model]


def shipping(rows: pd.DataFrame, model: str, without: float = 0.0) -> tuple[Seconds, Seconds]:
    """Seconds to move a state, by its tokens: to save, check and send it, which occupies the sender; to load it, which
    occupies the receiver. Medians of the shipments at all loads except `without`, interpolated linearly between the
    shipped lengths, and constant beyond them.

    Raises StudyError if nothing was shipped at those loads.
    """
    used = traffic_of(usable(rows))
    used = used[(used["label"] == SPLIT) & (used["model"] == model)]
    used = used[used["per_second"] != without]
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


def _held_against(said: Any, taken: pd.Series) -> dict[str, Any]:
    """A prediction, one number or one per block, beside the measured values by block."""
    measured = stats.median(taken.tolist())
    if said is None:
        return {"predicted": stats.NAN, "measured": measured, "ratio": None}
    if not isinstance(said, pd.Series):
        said = pd.Series(float(said), taken.index)
    said = said.astype(float)
    entry: dict[str, Any] = {"predicted": float(said.median()), "measured": measured}
    both = pd.concat([said, taken], axis=1, join="inner").to_numpy()
    known = len(both) and (both > 0).all()  # `well` may be 0; a percentile may be missing
    return entry | {"ratio": stats.ratio(both[:, 0].tolist(), both[:, 1].tolist()) if known else None}


@once_a_frame
def beside_a_server(rows: pd.DataFrame) -> pd.DataFrame:
    """The same requests served by llama-server, and its rule simulated with as many threads: `model`, `per_second`,
    METRICS, each with `NAME_WAY`, predicted over measured, for every way, and `http` (s), the time of an empty
    request.

    The rule is that of the policy "shared", except that the server reads prompts that arrive together in one call.
    """
    used = usable(rows)
    used = used[(used["workload"] == "traffic") & (used["label"] == SERVER) & (used["status"] == "ok")]
    taken = _taken(used).drop_duplicates([*LOADED, "block"], keep="last").set_index("block")
    entries = []
    for (model, per_second, n_threads), group in used.groupby(["model", "per_second", "n_threads"]):
        known = with_threads(rows, int(n_threads)).get(str(model))
        if known is None:
            continue
        load, slots = load_of(next(group.itertuples())), int(group["n_seq"].iloc[0])
        own = taken[taken["model"] == model]
        ways = {
            "simulation": simulated(load, "shared", known, slots),
            "nearest load": nearest(own[own["per_second"] != per_second], float(per_second)),
            "theory": theory(load, float(per_second), "shared", known, slots),
        }
        http = stats.median([float(np.median(series["floor"])) for series in group["series"]])
        entry: dict[str, Any] = {"model": model, "per_second": per_second, "http": http}
        for name, (way, said) in product(METRICS, ways.items()):
            found = _held_against(said.get(name), own[own["per_second"] == per_second][name])
            entry |= {name: found["measured"], f"{name}_{way}": found["ratio"]}
        entries.append(entry)
    names = [name + end for name in METRICS for end in ("", *(f"_{way}" for way in WAYS))]
    return pd.DataFrame(entries, columns=["model", "per_second", "http", *names])


def tails(rows: pd.DataFrame) -> dict[str, str]:
    """Highest percentile of first tokens and of gaps for which every load has enough requests, as METRICS."""
    known = live(rows)[METRICS].notna().all()
    return {what: next(f"{what}_{q}" for q in reversed(QUANTILES) if known[f"{what}_{q}"]) for what in ("ttft", "itl")}


def aims(rows: pd.DataFrame) -> tuple[str, str]:
    """Metrics that a policy should minimize: P90 of first tokens, or a lower one if unknown, and the gaps' tail."""
    known = tails(rows)
    return min(known["ttft"], "ttft_p90"), known["itl"]


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The `predictions` of the loads at which policies are compared, where the simulation answered.

    All ways are judged on the same loads: those that the simulation predicts.
    """
    found = predictions(rows)
    answered = found.groupby(LOADED)["refused"].transform("max") == ""
    return found[answered & found["per_second"].isin(loads(rows))]


def refused(rows: pd.DataFrame) -> list[str]:
    """Reasons why the simulation refused a prediction, each once."""
    found = predictions(rows)["refused"]
    return sorted(set(found[found != ""]))


def accuracy(found: pd.DataFrame, by: Sequence[str] = ("metric", "way"), limit: float = LIMIT) -> pd.DataFrame:
    """Errors of `compared` predictions: `by`, `asked_of` (number asked for), `answered`, `within` (number at most
    `limit` off), `middle` (median relative error of the answered ones) and `worst`, the ratio furthest
    from 1, with an interval corrected for the selection."""
    entries = []
    for key, group in found.groupby(list(by), sort=False):
        known = [ratio for ratio in group["ratio"] if ratio is not None]
        off = [abs(np.log(ratio.value)) for ratio in known]  # two loads nearest to each other miss by the same
        entry: dict[str, Any] = dict(zip(by, key, strict=True)) | {"asked_of": len(group), "answered": len(known)}
        entry["within"] = sum(value <= np.log(1 + limit) for value in off)
        entry["middle"] = float(np.expm1(np.median(off))) if off else stats.NAN
        entry["worst"] = stats.selected(known[int(np.argmax(np.round(off, 9)))], len(known)) if off else None
        entries.append(entry)
    return pd.DataFrame(entries, columns=[*by, "asked_of", "answered", "within", "middle", "worst"])


def picks(rows: pd.DataFrame) -> pd.DataFrame:
    """Policy that each way picks at each load and metric: `rule`, `best` (on the live engine), `ratio`, live, of the
    pick over the best, `confirmed` (the same, or not shown to be worse), and `chance`, the share of policies
    that would be confirmed. A way without a prediction of the metric picks nothing."""
    entries = []
    taken = live(rows).drop_duplicates([*LOADED, "block"], keep="last").set_index("block")
    every = compared(rows)
    for (model, per_second, name), group in every[every["metric"].isin(aims(rows))].groupby(
        ["model", "per_second", "metric"]
    ):
        measured = {rule: estimate.value for rule, estimate in zip(group["rule"], group["measured"], strict=True)}
        if len(measured) < 2:
            continue
        best = min(measured, key=measured.__getitem__)
        own = taken[(taken["model"] == model) & (taken["per_second"] == per_second)]
        by_rule = {rule: own[own["rule"] == rule][name] for rule in measured}
        ratios = {rule: timing.paired_ratio(took, by_rule[best]) for rule, took in by_rule.items()}
        good = {rule: rule == best or ratio.above(1.0) != "holds" for rule, ratio in ratios.items()}
        for way, said in group[group["way"].isin(WAYS)].dropna(subset="predicted").groupby("way", sort=False):
            rule = str(said.sort_values("predicted", kind="stable")["rule"].iloc[0])
            entry = {"model": model, "per_second": per_second, "for": name, "way": way, "rule": rule, "best": best}
            entry |= {"ratio": ratios[rule], "confirmed": good[rule], "chance": float(np.mean(list(good.values())))}
            entries.append(entry | {"asked": said["asked"].iloc[0]})
    names = ["model", "per_second", "asked", "for", "way", "rule", "best", "ratio", "confirmed", "chance"]
    return pd.DataFrame(entries, columns=names)


def alone(rows: pd.DataFrame) -> pd.DataFrame:
    """One machine at loads that no way knows, one row per process: its `pace`, and the share of requests served in
    time, `measured`, predicted by each of WAYS without the pace, and `paced`, simulated with it."""
    entries = []
    found = predictions(rows)
    found = found[(found["metric"] == "well") & ~found["per_second"].isin(loads(rows))]
    taken = live(rows).drop_duplicates(PROCESS, keep="last").set_index(PROCESS)["well"].sort_index()
    used = traffic_of(usable(rows)).drop_duplicates(["model", "per_second", "label"])
    known, pace = paced(rows)
    for row in used[~used["per_second"].isin(loads(rows)) & (used["label"] != SPLIT)].itertuples():
        said = found[(found[LOADED] == [row.model, row.per_second, row.label]).all(axis=1)].set_index("way")[
            "predicted"
        ]
        for block, measured in taken.loc[row.model, row.label, row.per_second].items():
            own = float(pace.loc[row.model, row.label, row.per_second, block])
            model = known[row.model].slower(own)
            entry = {"model": row.model, "per_second": row.per_second, "rule": row.label, "block": block, "pace": own}
            entry |= {"measured": measured, **said[list(WAYS)]}
            entries.append(entry | {"paced": simulated(load_of(row), row.label, model, int(row.n_seq), SEEDS)["well"]})
    names = [*LOADED, "block", "pace", "measured", *WAYS, "paced"]
    return pd.DataFrame(entries, columns=names).sort_values(["model", "rule", "per_second", "pace"])


# ------------------------------------------------------------------ what was not measured, simulated

FULL: dict[str, Preempt] = {"wait": "", "recompute": "recompute", "save the state": "save"}
FINE = 1500  # requests of a simulation over loads


def at_rate(load: Load, per_second: float, n: int = FINE, seed: int = 0) -> Load:
    """`n` requests with a load's lengths, drawn at random, at `per_second` requests a second (Poisson)."""
    rng = np.random.default_rng([n, round(per_second * 1000), seed])
    which = rng.integers(0, len(load), n)
    gaps = rng.exponential(1 / per_second, n)
    arrives = np.cumsum(gaps) - gaps[0]
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
    """A policy at one rate, by memory size and action when it is full: `room` (tokens), `full` ("wait", "recompute"
    or "save the state"), `preempted` and METRICS. A state is loaded and saved as fast as a sequence moves."""
    entries = []
    asked = at_rate(load, per_second)
    for room in rooms:
        for full, preempt in FULL.items():
            machine = Simulated(model, loads=lambda held: model.moving)
            served = serve(asked, policies.named(rule), machine, slots, room, preempt)
            entries.append({"room": room, "full": full, "preempted": served.preempted} | of_served(served))
    return pd.DataFrame(entries, columns=["room", "full", "preempted", *METRICS])


class Receiver(Simulated):
    """A machine that receives states from another one: instead of reading a prompt it only loads its state."""

    def call(self, decoding: list[int], step: bool, keys: int, reading: int, chunk: int, before: int) -> float:
        """The time after a call (s)."""
        if chunk:
            self.now += self.loads(chunk)
            self._slept = False  # wake-up times were measured on prompts
            return self.now
        return super().call(decoding, step, keys, reading, 0, 0)


def disaggregated(
    load: Load, model: StepModel, slots: int, moves: tuple[Seconds, Seconds], simulations: int = 0
) -> dict[str, float]:
    """METRICS of a load that one machine prefills and another decodes; `model` is each one's, half of a shared machine.

    `moves`: seconds by tokens that a state occupies the sender and the receiver, as in `shipping`. The time
    between them is left out: sockets, and processes that wake. `simulations`: 0 for `seeds` of the load.
    """
    ships, loads = moves
    runs = []
    for seed in range(simulations or seeds(load)):
        there = clock.read_elsewhere(load, model, ships, seed)
        served = serve(there, policies.prefill_first, Receiver(model, seed + 1, loads=loads), slots)
        runs.append(of_served(served, load.arrives))
    return _middle(runs)


def capacity(load: Load, model: StepModel, slots: int) -> float:
    """Most requests a second of a machine with whole prompts and full slots: λ (t_p + o t_b / b) < 1.

    `t_p`: mean seconds of a prompt; `o`: mean tokens of an answer; `t_b`: seconds of a step of all `b` slots.
    """
    read = float(np.mean([model.seconds(0, 0, n, 0) for n in load.prompt]))
    held = int(np.mean(load.prompt) + np.mean(load.output) / 2)
    step = model.seconds(slots, min(held, model.range.held) * slots, 0, 0)
    return 1 / (read + float(np.mean(load.output) - 1) * step / slots)


def needed(rows: pd.DataFrame) -> pd.DataFrame:
    """Machines that a load needs, relative to those that just keep up, by simulation: `model`, `pattern`, `balance`,
    `n_machines`, `needed` (over repetitions; infinite if even the most that was tried is not enough), and of those
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
