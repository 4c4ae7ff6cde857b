"""Predictions against live loads: how far off the simulator is, and whether it picks a policy that the engine confirms.

Every load is predicted from the others by three methods (WAYS): simulation, the measurement at the nearest load, and
queueing theory. Each predicts twice: without the speed of the machine, and given the pace of each process (PACED),
because a virtual machine's pace varies. Frames in, estimates out. A process is one number. The simulation serves the
same requests at the same times as the engine.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import stats, timing
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import marked, usable
from plamo_study.errors import StudyError
from plamo_study.studies.scheduling import observed
from plamo_study.studies.scheduling.fleets_plan import WELL
from plamo_study.studies.scheduling.loop import Load
from plamo_study.studies.scheduling.observed import PROCESS, Observed
from plamo_study.studies.scheduling.plan import SERVER, SPLIT, WITHIN
from plamo_study.studies.scheduling.simulations import (
    METRICS,
    QUANTILES,
    SEEDS,
    Seconds,
    disaggregated,
    figures,
    seeds,
    simulated,
    theory,
)
from plamo_study.studies.scheduling.steps import StepModel

LOADED = ["model", "per_second", "rule"]
WAYS = ("simulation", "nearest load", "theory")
PACED = {f"{way}, paced": way for way in WAYS}
PREDICTED = ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p95", "ttft_p99", "itl_p50", "itl_p90", "itl_p95", "itl_p99")
LIMIT = 0.15  # largest error of a usable prediction


def live(seen: Observed) -> pd.DataFrame:
    """One row per process of traffic: LOADED, `block`, METRICS and `busy`, the share of time that the engine computed
    (NaN if its calls are unknown). Disturbed processes are used only for a model without others."""
    return _taken(_judged(seen.traffic))


def measures(found: pd.DataFrame) -> pd.DataFrame:
    """`live` rows as one row per process and metric, for `estimate` and `compare`: LOADED, `block`, `machine`, `metric`
    (of METRICS, or "busy") and `value` (s, tokens a second, or a share)."""
    taken = found.drop_duplicates([*LOADED, "block"], keep="last")
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


def unjudged(seen: Observed) -> list[tuple[Any, ...]]:
    """Model, load and policy of the cells whose processes were all disturbed, where the model has undisturbed ones."""
    names = ["model", "per_second", "label"]
    kept = set(map(tuple, _judged(seen.traffic)[names].to_numpy().tolist()))
    return sorted(set(map(tuple, seen.traffic[names].to_numpy().tolist())) - kept)


def typical(seen: Observed) -> Load:
    """Requests of the loads at which policies are compared."""
    compared_at = seen.traffic[seen.traffic["per_second"].isin(seen.loads)]
    return load_of(next((compared_at if len(compared_at) else seen.traffic).itertuples()))


def load_of(row: Any) -> Load:
    """The requests of a row."""
    told = [(each.arrived_ns / NS, min(each.n_prompt, row.n_prompt), len(each.token_ns)) for each in row.requests]
    arrives, prompt, output = map(list, zip(*told, strict=True))
    return Load(arrives, prompt, output, WITHIN[row.scale])


def predictions(seen: Observed, found: pd.DataFrame) -> pd.DataFrame:
    """Predictions of each load of `found`, the `live` rows, without its own data: one row per model, load, policy,
    metric of METRICS and `way`.

    Theory does not cover the split engine, which is two servers in series, and nothing is paced whose
    calls are unknown. `among`: whether policies are compared at the load. `asked`: whether the load is "between" known
    ones or "beyond" them. `predicted`; `measured`, over processes; `ratio`, predicted over measured, None if either is
    missing. `refused`: why the simulation gave no prediction.
    """
    entries = []
    used = seen.traffic.drop_duplicates(["model", "per_second", "label"])
    first = {(row.model, row.per_second, row.label): row for row in used.itertuples()}
    taken = _last(found)
    at = set(seen.loads)
    unknown = {per_second: per_second if per_second in at else 0.0 for per_second in sorted(set(taken["per_second"]))}
    fits = {without: observed.fitted(seen, without) for without in set(unknown.values())}
    paces = {without: observed.paced(seen, known, without) for without, known in fits.items()}
    for key, group in taken.groupby(LOADED, sort=True):
        model, per_second, rule = key
        row, without = first[key], unknown[per_second]
        others = taken[(taken["model"] == model) & (taken["rule"] == rule)]
        others = others[others["per_second"].isin(at - {per_second})]
        told = dict(zip(LOADED, key, strict=True)) | {"among": per_second in at}
        told |= {"asked": _asked(per_second, set(others["per_second"]))}
        said, why = _split(seen, row, without) if rule == SPLIT else _simulated(row, fits[without][model])
        ways = {"simulation": said, "nearest load": nearest(others, per_second)}
        if rule != SPLIT:
            ways["theory"] = theory(load_of(row), per_second, rule, fits[without][model], int(row.n_seq))
            ways |= _paced(row, others, *paces[without])
        by_block = group[METRICS].to_dict()
        measured = {name: stats.median(list(by_block[name].values())) for name in METRICS}
        for (way, told_of), name in product(ways.items(), METRICS):
            entry = told | {"metric": name, "way": way, "refused": why if way == "simulation" else ""}
            entries.append(entry | {"measured": measured[name]} | _held_against(told_of.get(name), by_block[name]))
    columns = [*LOADED, "among", "asked", "metric", "way", "refused", "predicted", "measured", "ratio"]
    return pd.DataFrame(entries, columns=columns)


def _last(found: pd.DataFrame) -> pd.DataFrame:
    """The last process of each load, policy and block, by block."""
    return found.drop_duplicates([*LOADED, "block"], keep="last").set_index("block")


def _asked(per_second: float, known: set[float]) -> str:
    """Whether a load is "between" known ones or "beyond" them, or "none known"."""
    if not known:
        return "none known"
    return "between" if min(known) < per_second < max(known) else "beyond"


def nearest(others: pd.DataFrame, per_second: float) -> dict[str, dict[int, float]]:
    """METRICS by block at the nearest of the other loads, and its rate; empty if there is none."""
    if others.empty:
        return {}
    at = min(set(others["per_second"]), key=lambda each: (abs(each - per_second), each))
    return others[others["per_second"] == at][["per_second", *METRICS]].to_dict()


def _simulated(row: Any, model: StepModel) -> tuple[dict[str, Any], str]:
    """The simulation of a load by a step model; empty with the reason if it refuses."""
    try:
        return simulated(load_of(row), row.label, model, int(row.n_seq)), ""
    except StudyError as error:
        return {}, f"{error.what}: {error.why}"


def _split(seen: Observed, row: Any, without: float) -> tuple[dict[str, Any], str]:
    """The simulation of a load that two machines share, each with half of the threads."""
    try:
        moves, halves = shipping(seen, row.model, without), observed.half(seen)
        if row.model not in halves:
            raise StudyError(row.model, "was not measured with half of the threads", seen.command)
        return disaggregated(load_of(row), halves[row.model], int(row.n_seq), moves), ""
    except StudyError as error:
        return {}, f"{error.what}: {error.why}"


def _paced(row: Any, others: pd.DataFrame, known: dict[str, StepModel], pace: pd.Series) -> dict[str, dict[str, Any]]:
    """Prediction by each method of a load, by block, given nothing of the load but the pace of each process."""
    if (row.model, row.label, row.per_second) not in pace.index.droplevel("block"):
        return {}
    own = pace.loc[row.model, row.label, row.per_second].to_dict()
    load, slots = load_of(row), int(row.n_seq)
    many = max(SEEDS, seeds(load) // len(own))
    models = {block: known[row.model].slower(each) for block, each in own.items()}
    ways: dict[str, dict[int, dict[str, float]]] = {
        "simulation": {block: simulated(load, row.label, each, slots, many) for block, each in models.items()},
        "theory": {block: theory(load, row.per_second, row.label, each, slots) for block, each in models.items()},
    }
    found: dict[str, dict[str, Any]] = {}
    for way, said in ways.items():
        found[way] = {name: _by_block(said, name) for name in METRICS}
    near = nearest(others, row.per_second)
    if near:
        theirs = pace.loc[row.model, row.label, next(iter(near["per_second"].values()))].to_dict()
        waits = {name: _scaled(near[name], own, theirs) for name in METRICS if name not in ("throughput", "well")}
        found["nearest load"] = near | waits
    return {f"{way}, paced": said for way, said in found.items()}


def _by_block(said: dict[int, dict[str, float]], name: str) -> dict[int, float] | None:
    """One metric of the predictions by block; None if no block has it."""
    known = any(name in each for each in said.values())
    return {block: each.get(name, stats.NAN) for block, each in said.items()} if known else None


def _scaled(near: dict[int, float], own: dict[int, float], theirs: dict[int, float]) -> dict[int, float]:
    """Seconds by block of a load nearby, by the pace of the load's own process over that of the other: NaN where a
    block lacks one of them."""
    every, nan = own | near | theirs, stats.NAN
    return {block: near.get(block, nan) * own.get(block, nan) / theirs.get(block, nan) for block in every}


def shipping(seen: Observed, model: str, without: float = 0.0) -> tuple[Seconds, Seconds]:
    """Seconds to move a state, by its tokens: to save, check and send it, which occupies the sender; to load it, which
    occupies the receiver. Medians of the shipments at all loads except `without`, interpolated linearly between the
    shipped lengths, and constant beyond them.

    Raises StudyError if nothing was shipped at those loads.
    """
    used = seen.traffic[(seen.traffic["label"] == SPLIT) & (seen.traffic["model"] == model)]
    used = used[used["per_second"] != without]
    told = [
        (each.n_prompt, *took)
        for row in used.itertuples()
        for each, *took in zip(row.requests, row.series["shipped"], row.series["loaded"], strict=True)
    ]
    if not told:
        raise StudyError(model, "no state was shipped at a load that the simulation knows", seen.command)
    by_tokens = pd.DataFrame(told, columns=["tokens", "shipped", "loaded"]).groupby("tokens").median()
    return _between(by_tokens["shipped"]), _between(by_tokens["loaded"])


def _between(by_tokens: pd.Series) -> Seconds:
    known, seconds = by_tokens.index.to_numpy(), by_tokens.to_numpy()
    return lambda tokens: float(np.interp(tokens, known, seconds))


def _held_against(said: Any, taken: dict[int, float]) -> dict[str, Any]:
    """A prediction, one number or one per block, beside the measured values by block: `predicted` and `ratio`."""
    if said is None:
        return {"predicted": stats.NAN, "ratio": None}
    by_block = said if isinstance(said, dict) else dict.fromkeys(taken, float(said))
    both = [(each, taken[block]) for block, each in by_block.items() if block in taken]
    known = both and all(predicted > 0 and value > 0 for predicted, value in both)  # `well` may be 0; a percentile NaN
    told = [each for each in by_block.values() if each == each]
    middle = float(np.median(told)) if told else stats.NAN
    return {"predicted": middle, "ratio": stats.ratio(*zip(*both, strict=True)) if known else None}


def beside_a_server(rows: pd.DataFrame) -> pd.DataFrame:
    """The same requests served by llama-server, and its rule simulated with as many threads: `model`, `per_second`,
    METRICS, each with `NAME_WAY`, predicted over measured, for every way, and `http` (s), the time of an empty
    request.

    The rule is that of the policy "shared", except that the server reads prompts that arrive together in one call.
    """
    used = usable(rows)
    used = used[(used["workload"] == "traffic") & (used["label"] == SERVER) & (used["status"] == "ok")]
    taken, seen = _last(_taken(used)), observed.of_rows(rows)
    entries = []
    for (model, per_second, n_threads), group in used.groupby(["model", "per_second", "n_threads"]):
        known = observed.with_threads(seen, int(n_threads)).get(str(model))
        if known is None:
            continue
        load, slots = load_of(next(group.itertuples())), int(group["n_seq"].iloc[0])
        own = taken[taken["model"] == model]
        ways: dict[str, dict[str, Any]] = {
            "simulation": simulated(load, "shared", known, slots),
            "nearest load": nearest(own[own["per_second"] != per_second], float(per_second)),
            "theory": theory(load, float(per_second), "shared", known, slots),
        }
        http = stats.median([float(np.median(series["floor"])) for series in group["series"]])
        entry: dict[str, Any] = {"model": model, "per_second": per_second, "http": http}
        by_block = own[own["per_second"] == per_second][METRICS].to_dict()
        for name, (way, said) in product(METRICS, ways.items()):
            entry[name] = stats.median(list(by_block[name].values()))
            entry[f"{name}_{way}"] = _held_against(said.get(name), by_block[name])["ratio"]
        entries.append(entry)
    names = [name + end for name in METRICS for end in ("", *(f"_{way}" for way in WAYS))]
    return pd.DataFrame(entries, columns=["model", "per_second", "http", *names])


def tails(found: pd.DataFrame) -> dict[str, str]:
    """Highest percentile of first tokens and of gaps for which every load of `predictions` has enough requests."""
    known = {name: all(not np.isnan(each.value) for each in of) for name, of in found.groupby("metric")["measured"]}
    return {
        what: next(name for q in reversed(QUANTILES) if known.get(name := f"{what}_{q}", True))
        for what in ("ttft", "itl")
    }


def aims(found: pd.DataFrame) -> tuple[str, str]:
    """Metrics that a policy should minimize: P90 of first tokens, or a lower one if unknown, and the gaps' tail."""
    known = tails(found)
    return min(known["ttft"], "ttft_p90"), known["itl"]


def compared(found: pd.DataFrame) -> pd.DataFrame:
    """The `predictions` of the loads at which policies are compared, where the simulation answered.

    All ways are judged on the same loads: those that the simulation predicts.
    """
    answered = found.groupby(LOADED)["refused"].transform("max") == ""
    return found[answered & found["among"]]


def refused(found: pd.DataFrame) -> list[str]:
    """Reasons why the simulation refused one of the `predictions`, each once."""
    return sorted(set(found["refused"]) - {""})


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


def picks(found: pd.DataFrame, every: pd.DataFrame) -> pd.DataFrame:
    """Policy that each way picks at each load and metric: `rule`, `best` (on the live engine), `ratio`, live, of the
    pick over the best, `confirmed` (the same, or not shown to be worse), and `chance`, the share of policies
    that would be confirmed. A way without a prediction of the metric picks nothing.

    `found`: `live`; `every`: predictions that are `compared`.
    """
    entries = []
    taken = _last(found)
    for (model, per_second, name), group in every[every["metric"].isin(aims(every))].groupby(
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


def alone(
    seen: Observed, found: pd.DataFrame, predicted: pd.DataFrame, known: dict[str, StepModel], pace: pd.Series
) -> pd.DataFrame:
    """One machine at loads that no way knows, one row per process: its `pace`, and the share of requests served in
    time, `measured`, predicted by each of WAYS without the pace, and `paced`, simulated with it.

    `found`: `live`; `predicted`: `predictions`; `known` and `pace`: as `observed.paced` gives them.
    """
    entries = []
    predicted = predicted[(predicted["metric"] == "well") & ~predicted["among"]]
    taken = found.drop_duplicates(PROCESS, keep="last").set_index(PROCESS)["well"].sort_index()
    used = seen.traffic.drop_duplicates(["model", "per_second", "label"])
    for row in used[~used["per_second"].isin(seen.loads) & (used["label"] != SPLIT)].itertuples():
        said = predicted[(predicted[LOADED] == [row.model, row.per_second, row.label]).all(axis=1)].set_index("way")[
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
