"""Notebook 12: every gain comes from the rows it names, and the ranking is Amdahl's law and nothing else."""

import json
from dataclasses import replace

import msgspec
import pandas as pd
import pytest
from built import longer

from plamo_study import paths
from plamo_study.analysis import stats
from plamo_study.analysis.stats import Estimate
from plamo_study.errors import StudyError
from plamo_study.studies.levers import gains, stacked, traffic
from plamo_study.studies.levers.traffic import Effect, Traffic
from plamo_study.studies.serving.probe import Binding, Budget, Interval, Report
from plamo_study.studies.serving.right import Rightness

HYBRID = "plamo-2-1b"


@pytest.fixture(scope="module")
def known():
    return gains.recordings("recorded", "shape")


def ranked(known, asked):
    return traffic.ranked(known, HYBRID, asked).set_index("lever")


def estimate(value, n=5):
    return Estimate(value, value * 0.9, value * 1.1, n)


@pytest.mark.long
def test_a_gain_is_there_only_with_the_rows_it_names(known):
    every = {(gain.lever, gain.model): gain for gain in gains.gains(known)}
    left = gains.Recordings({name: recording for name, recording in known.items() if name != "07-replicas"})
    without = {(gain.lever, gain.model): gain for gain in gains.gains(left)}
    gone = {lever for lever, (studies, _) in gains.LEVERS.items() if "07-replicas" in studies}
    lacking = set(gains.lacking(lever for lever, _ in without))
    assert {lever for lever, _ in every.keys() - without.keys()} == lacking == gone
    assert all(every[key] == gain for key, gain in without.items())


def test_gains_move_with_the_times_in_their_rows_and_what_is_predicted_has_no_part_in_what_it_is_held_against(known):
    batches = known["03-batch-scaling"]
    alone = (batches.rows["workload"] == "decode") & (batches.rows["n_seq"] == 1)
    planted = gains.Recordings({batches.study: replace(batches, rows=longer(batches.rows, alone, 1.5))})
    before, after = ({line.model: line.gain.value for line in gains.batch(each)} for each in (known, planted))
    assert before.keys() == after.keys()
    assert all(after[model] == pytest.approx(1.5 * before[model], rel=1e-6) for model in before)
    rows = known["04-quantization"].rows
    several = (rows["workload"] == "decode") & (rows["n_seq"] > 1) & (rows["dtype"] == "Q4_0")
    types = replace(known["04-quantization"], rows=longer(rows, several, 2))
    planted = gains.Recordings({**known, "04-quantization": types})
    before, after = (stacked.stacked(each).set_index(["lever", "kind", "model", "beside"]) for each in (known, planted))
    for key, row in after.iterrows():
        assert row["alone"].value == pytest.approx(before.loc[key, "alone"].value)
        factor = 2 if key[1] == "Q4_0" else 1
        assert row["measured"].value == pytest.approx(before.loc[key, "measured"].value / factor)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_request_gains_as_amdahl_says(share):
    effect = Effect("", "", "", "", reading=estimate(4.0), writing=estimate(0.5))
    whole, seconds = traffic.whole(effect, share), share / 4.0 + (1 - share) / 0.5
    assert whole.value == pytest.approx(1 / seconds)
    assert whole.low <= 1 / seconds <= whole.high


def test_a_ranking_follows_the_traffic_and_its_first_lever_has_an_interval_for_all_it_was_chosen_from(known):
    def types(asked):
        found = ranked(known, asked)["tokens"]
        return found["bits: Q5_K_M"].value / found["bits: Q4_0"].value

    assert types(Traffic(8000, 1, 1)) > 1 > types(Traffic(1, 2000, 1)), "one type reads faster, the other writes faster"
    few, many = (ranked(known, Traffic(n_prompt, 200, 8))["tokens"]["batch"] for n_prompt in (100, 8000))
    assert few.value > many.value > 1, "reading shares nothing"
    assert 3.5 < ranked(known, Traffic(4000, 1, 1, shared=0.75))["reading"]["reuse"].value < 4.0
    found = ranked(known, Traffic(2000, 200, 8))
    assert not {"reuse", "chunked", "split", "replicas"} & set(found.index), "how requests share an engine is no lever"
    first = traffic.best(known, HYBRID, Traffic(2000, 200, 8))
    for phase in ("reading", "writing"):
        assert first[phase] == stats.selected(found.loc[first["lever"]][phase], 2 * len(found))
    assert first["tokens"] == traffic.whole(Effect("", "", "", "", first["reading"], first["writing"]), first["share"])


def test_a_request_takes_what_its_tokens_take_at_their_depths_and_in_the_type_in_use(known):
    short, long = (traffic.spent(known, f"{HYBRID}*", Traffic(n, 10, 1)) for n in (100, 10_000))
    assert long.reading > 100 * short.reading, "deep tokens take longer"
    assert long.alone > short.alone == pytest.approx(short.writing), "one answer shares nothing"
    over = {dtype: ranked(known, Traffic(2000, 200, 8, dtype)) for dtype in ("Q8_0", "Q4_K_M")}
    for phase in ("reading", "writing"):
        chained = over["Q8_0"][phase]["bits: Q4_K_M"].value * over["Q4_K_M"][phase]["bits: Q5_K_M"].value
        assert chained == pytest.approx(over["Q8_0"][phase]["bits: Q5_K_M"].value, rel=0.05)  # medians of pairs


def test_what_there_is_not_is_refused_with_what_there_is(known, monkeypatch, tmp_path):
    usual, one = {"n_prompt": 1, "n_gen": 1, "n_users": 1}, Traffic(1, 1, 1)
    wrong = {"n_prompt": 0, "n_gen": 2.5, "n_users": None, "accepts": float("nan"), "shared": -0.1, "reading": 5}
    refusals = {name: lambda name=name: Traffic(**usual | {name: wrong[name]}) for name in wrong}
    refusals |= {
        "one of: tokens, reading": lambda: traffic.ranked(known, HYBRID, one, "joy"),
        f"one of: {HYBRID}": lambda: traffic.ranked(known, "gpt", one),
        "there are: .*Q4_0": lambda: traffic.ranked(known, HYBRID, Traffic(1, 1, 1, "Q9_9")),
        "tokens up to which": lambda: traffic.ranked(known, HYBRID, Traffic(100_000, 1, 1)),
        "answers up to which": lambda: traffic.ranked(known, HYBRID, Traffic(1, 1, 1000)),
        "huge": lambda: gains.recordings("recorded", "huge"),
        "elsewhere": lambda: gains.recordings("elsewhere", "mini"),
    }
    for why, asked in refusals.items():
        with pytest.raises(StudyError, match=why):
            asked()
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    with pytest.raises(StudyError, match="plamo-study study --scale mini"):
        gains.recordings("live", "mini")


def test_few_blocks_at_full_size_do_not_replace_a_finished_recording(known, monkeypatch):
    rows = known["03-batch-scaling"].rows
    shown = {"shape": replace(known["03-batch-scaling"], rows=rows[rows["block"] < 1]), "mini": known["07-replicas"]}
    monkeypatch.setattr(gains, "read", lambda study, source, scale, device: shown[scale])
    assert all(each is known["07-replicas"] for each in gains.recordings("recorded", "shape").values())


def report(**shares):
    """A probe's report as JSON; how long a request takes with more load is not known."""
    each = {name: Interval(share, share, share) for name, share in shares.items()}
    unknown = {"load": Interval(1.0, float("nan"), float("nan"))}
    said = Report(
        url="http://127.0.0.1:1", server="llama-server", model="m", budget=Budget(1, 1, 1.0), requests=1, seconds=1.0,
        right=Rightness(verdict="cannot tell", why=""),
        phase=Binding(verdict="decode", why="", shares=each, elasticities=unknown),
    )  # fmt: skip
    return json.dumps(msgspec.to_builtins(said))


def test_a_probe_s_report_and_the_rows_of_the_same_traffic_lead_to_the_same_share(known, tmp_path):
    path, asked = tmp_path / "probe.json", Traffic(2000, 200, 8)
    took = traffic.spent(known, f"{HYBRID}*", asked)
    path.write_text(report(prefill=took.reading, decode=8 * took.writing, queue=0.4))
    seen = traffic.probed(str(path), asked)
    assert seen.reading == pytest.approx(traffic.reading_share(known, f"{HYBRID}*", asked))
    assert "batch" not in ranked(known, seen).index, "a server that was probed answers together already"
    bad = ["", "[]", '{"phase": {"shares": {}}}', '{"phase": 3}', "[" * 100_000, "1" + "0" * 400]
    bad += [report(prefill=share, decode=0.5) for share in (float("nan"), -0.1)] + [report(prefill=0.5, decode=0.0)]
    for text in bad:
        path.write_text(text)
        with pytest.raises(StudyError, match=r"(?s)told the phases apart.*plamo-study probe URL --json > probe\.json"):
            traffic.probed(str(path), asked)
    with pytest.raises(StudyError, match=r"missing\.json"):
        traffic.probed(str(tmp_path / "missing.json"), asked)


def test_only_pairs_that_a_batch_tells_apart_are_counted():
    lines = [
        {"lever": "bits", "kind": f"type {n}", "model": "m", "alone": estimate(a), "measured": estimate(b)}
        for n, (a, b) in enumerate(((1.0, 1.0), (2.0, 1.05), (3.0, 3.0)))
    ]
    found = stacked.order(pd.DataFrame(lines)).iloc[0]
    assert (found["best"], found["best_beside"], found["pairs"], found["kept"]) == ("type 2", "type 2", 2, 2)
