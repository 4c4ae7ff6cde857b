"""Notebook 12: every gain comes from the rows it names, and the ranking is Amdahl's law and nothing else."""

import json
import tomllib
from dataclasses import replace

import msgspec
import pandas as pd
import pytest

from plamo_study import paths
from plamo_study.analysis import stats
from plamo_study.analysis.stats import Estimate
from plamo_study.errors import StudyError
from plamo_study.studies.levers import gains, stacked, traffic
from plamo_study.studies.levers.traffic import Effect, Traffic
from plamo_study.studies.serving.probe import Binding, Budget, Interval, Report, Rightness

HYBRID, LARGE = "plamo-2-1b", "plamo-3-nict-2b"
DEEP, HUGE = "[" * 100_000, "1" + "0" * 400


@pytest.fixture(scope="module")
def known():
    return gains.recordings("recorded", "shape")


def ranked(known, model, asked):
    return traffic.ranked(known, model, asked).set_index("lever")


def estimate(value, n=5):
    return Estimate(value, value * 0.9, value * 1.1, n)


def test_every_lever_says_what_it_is_and_where_that_was_read():
    levers = tomllib.loads((paths.PUBLISHED / "levers.toml").read_text(encoding="utf-8"))["lever"]
    assert [lever["key"] for lever in levers] == list(gains.LEVERS)
    for lever in levers:
        assert set(lever) == {"key", "name", "idea", "status", "as_of", "read", "needs"}
        assert all(lever.values())


@pytest.mark.parametrize("study", gains.STUDIES)
def test_a_gain_is_there_only_with_the_rows_it_names_and_changes_with_no_others(known, study):
    every = {(gain.lever, gain.model): gain for gain in gains.gains(known)}
    without = {(gain.lever, gain.model): gain for gain in gains.gains({n: r for n, r in known.items() if n != study})}
    gone = {lever for lever, (studies, _) in gains.LEVERS.items() if study in studies}
    assert {key[0] for key in every.keys() - without.keys()} == gone
    assert all(every[key] == gain for key, gain in without.items())


def test_every_gain_moves_with_the_times_in_its_rows(known):
    """Slower by one third wherever a lever is not pulled: no gain is a number that somebody wrote down."""
    rows = known["03-batch-scaling"].rows
    alone = (rows["workload"] == "decode") & (rows["n_seq"] == 1)
    slower = rows["samples_ns"].where(~alone, rows["samples_ns"].map(lambda s: [[t * 1.5 for t in p] for p in s]))
    planted = replace(known["03-batch-scaling"], rows=rows.assign(samples_ns=slower))
    before, after = (
        {line.model: line.gain.value for line in gains.batch(r)} for r in (known["03-batch-scaling"], planted)
    )
    assert before.keys() == after.keys()
    assert all(after[model] == pytest.approx(1.5 * before[model], rel=1e-6) for model in before)


def test_a_lever_that_is_not_measured_is_named_with_the_study_it_waits_for(known):
    without = {name: recording for name, recording in known.items() if name != "07-replicas"}
    assert gains.lacking(without) == {"replicas": ("07-replicas",)}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_request_gains_as_amdahl_says(share):
    effect = Effect("", "", "", "", reading=estimate(4.0), writing=estimate(0.5))
    seconds = share / 4.0 + (1 - share) / 0.5
    assert traffic.whole(effect, share).value == pytest.approx(1 / seconds)
    assert traffic.whole(effect, share).low <= 1 / seconds <= traffic.whole(effect, share).high


def test_long_prompts_favour_what_reads_faster_and_long_answers_what_writes_faster(known):
    def types(asked):
        found = ranked(known, HYBRID, asked)["tokens"]
        return found["bits: Q5_K_M"].value / found["bits: Q4_0"].value

    read, written = (dict(zip(("prefill", "decode"), ratios, strict=True)) for ratios in _ratios(known))
    assert read["prefill"] > written["prefill"], "one of the two reads faster"
    assert read["decode"] < written["decode"], "and the other writes faster"
    assert types(Traffic(8000, 1, 1)) > 1 > types(Traffic(1, 2000, 1))


def _ratios(known):
    rows = known["04-quantization"].rows
    for dtype in ("Q5_K_M", "Q4_0"):
        yield [gains.types.ratio(rows, phase, f"{HYBRID}*", dtype, gains.BITS).value for phase in ("prefill", "decode")]


def test_what_is_put_back_need_not_be_read(known):
    found = ranked(known, HYBRID, Traffic(4000, 1, 1, shared=0.75))["reading"]
    assert 3.5 < found["reuse"].value < 4.0
    assert "reuse" not in ranked(known, HYBRID, Traffic(4000, 1, 1)).index


def test_the_type_in_use_is_what_others_are_held_against(known):
    over = {dtype: ranked(known, HYBRID, Traffic(2000, 200, 8, dtype)) for dtype in ("Q8_0", "Q4_K_M")}
    for phase in ("reading", "writing"):
        chained = over["Q8_0"][phase]["bits: Q4_K_M"].value * over["Q4_K_M"][phase]["bits: Q5_K_M"].value
        assert chained == pytest.approx(over["Q8_0"][phase]["bits: Q5_K_M"].value, rel=0.05)  # medians of pairs
    took = {dtype: traffic.spent(known, f"{HYBRID}*", Traffic(2000, 200, 8, dtype)) for dtype in over}
    faster = over["Q8_0"]["reading"]["bits: Q4_K_M"].value
    assert took["Q8_0"].reading == pytest.approx(faster * took["Q4_K_M"].reading)
    with pytest.raises(StudyError, match=r"there are: .*Q4_0"):
        traffic.ranked(known, HYBRID, Traffic(1, 1, 1, "Q9_9"))


def test_a_request_takes_what_its_tokens_take_at_their_depths(known):
    short, long = (traffic.spent(known, f"{HYBRID}*", Traffic(n, 10, 1)) for n in (100, 10_000))
    assert long.reading > 100 * short.reading, "deep tokens take longer"
    assert long.alone > short.alone
    assert short.alone == pytest.approx(short.writing), "one answer shares nothing"


def test_a_batch_gains_less_where_most_of_the_time_is_reading(known):
    asked = (Traffic(n_prompt, 200, 8) for n_prompt in (100, 8000))
    few, many = (ranked(known, LARGE, each)["tokens"]["batch"] for each in asked)
    assert few.value > many.value > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_prompt": 0},
        {"n_gen": -1},
        {"n_users": 0},
        {"accepts": 1.0},
        {"shared": 1.0},
        {"shared": -0.1},
        {"n_prompt": "2000"},
        {"n_gen": 2.5},
        {"n_users": None},
        {"accepts": float("nan")},
        {"reading": 5},
    ],
)
def test_a_traffic_that_cannot_be_is_refused(wrong):
    with pytest.raises(StudyError, match=next(iter(wrong))):
        Traffic(**({"n_prompt": 1, "n_gen": 1, "n_users": 1} | wrong))


def test_an_unknown_objective_model_or_scale_is_refused_with_those_there_are(known):
    with pytest.raises(StudyError, match="one of: tokens, reading"):
        traffic.ranked(known, HYBRID, Traffic(1, 1, 1), "joy")
    with pytest.raises(StudyError, match=f"one of: {HYBRID}"):
        traffic.ranked(known, "gpt", Traffic(1, 1, 1), "tokens")
    with pytest.raises(StudyError, match="huge"):
        gains.recordings("recorded", "huge")
    with pytest.raises(StudyError, match="elsewhere"):
        gains.recordings("elsewhere", "mini")


def test_where_nothing_was_measured_the_command_that_does_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    with pytest.raises(StudyError, match="plamo-study study --scale mini"):
        gains.recordings("live", "mini")


def report(**shares):
    each = {name: Interval(share, share, share) for name, share in shares.items()}
    return Report(
        url="http://127.0.0.1:1", server="llama-server", model="m", budget=Budget(1, 1, 1.0), requests=1, seconds=1.0,
        right=Rightness(verdict="cannot tell", why=""), phase=Binding(verdict="decode", why="", shares=each),
    )  # fmt: skip


def test_a_probe_s_report_says_what_requests_are_made_of(tmp_path):
    path = tmp_path / "probe.json"
    path.write_bytes(msgspec.json.encode(report(prefill=0.15, decode=0.45, queue=0.4)))
    assert traffic.probed(str(path), Traffic(1, 1, 1)).reading == pytest.approx(0.25)


def test_of_the_engine_s_time_answers_written_together_take_less_than_each_of_them_waits(known, tmp_path):
    """What a probe sees and what the rows say of the same traffic lead to the same share."""
    asked = Traffic(2000, 200, 8)
    took = traffic.spent(known, f"{HYBRID}*", asked)
    path = tmp_path / "probe.json"
    path.write_bytes(msgspec.json.encode(report(prefill=took.reading, decode=8 * took.writing)))
    seen = traffic.probed(str(path), asked)
    assert seen.reading == pytest.approx(traffic.reading_share(known, f"{HYBRID}*", asked))
    assert "batch" not in ranked(known, HYBRID, seen).index, "a server that was probed answers together already"


def test_what_lies_beyond_the_rows_is_refused(known):
    for asked in (Traffic(100_000, 1, 1), Traffic(1, 1, 1000)):
        with pytest.raises(StudyError, match="beyond"):
            traffic.ranked(known, HYBRID, asked)


def test_few_blocks_at_full_size_do_not_replace_a_finished_recording(known, monkeypatch):
    rows = known["03-batch-scaling"].rows
    few = replace(known["03-batch-scaling"], rows=rows[rows["block"] < 1])
    shown = {"shape": few, "mini": known["07-replicas"]}
    monkeypatch.setattr(gains, "read", lambda study, source, scale: shown[scale])
    assert all(each is known["07-replicas"] for each in gains.recordings("recorded", "shape").values())


@pytest.mark.parametrize(
    "text", ["", "[]", "{", json.dumps({"phase": {"shares": {}}}), "null", '{"phase": 3}', DEEP, HUGE]
)
def test_a_file_that_is_no_report_is_refused_with_the_command_that_writes_one(tmp_path, text):
    path = tmp_path / "probe.json"
    path.write_text(text)
    with pytest.raises(StudyError, match=r"plamo-study probe URL --json > probe\.json"):
        traffic.probed(str(path), Traffic(1, 1, 1))
    with pytest.raises(StudyError, match=r"missing\.json"):
        traffic.probed(str(tmp_path / "missing.json"), Traffic(1, 1, 1))


@pytest.mark.parametrize(("prefill", "decode"), [(float("nan"), 0.5), (-0.1, 0.5), (0.5, -0.1), (0.0, 0.0), (0.5, 0.0)])
def test_a_report_whose_shares_cannot_be_is_refused(tmp_path, prefill, decode):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(msgspec.to_builtins(report(prefill=prefill, decode=decode))))
    with pytest.raises(StudyError, match="told the phases apart"):
        traffic.probed(str(path), Traffic(1, 1, 1))


def test_an_interval_that_is_not_known_does_not_spoil_a_report(tmp_path):
    path = tmp_path / "probe.json"
    unknown = msgspec.structs.replace(report().phase, elasticities={"load": Interval(1.0, float("nan"), float("nan"))})
    said = msgspec.structs.replace(
        report(prefill=0.5, decode=0.5),
        phase=msgspec.structs.replace(unknown, shares=report(prefill=0.5, decode=0.5).phase.shares),
    )
    path.write_text(json.dumps(msgspec.to_builtins(said)))
    assert traffic.probed(str(path), Traffic(1, 1, 1)).reading == 0.5


def test_what_is_predicted_has_no_part_in_what_it_is_held_against(known):
    """The gains beside another lever change with their own rows, and leave those alone as they are."""
    rows = known["04-quantization"].rows
    several = (rows["workload"] == "decode") & (rows["n_seq"] > 1) & (rows["dtype"] == "Q4_0")
    twice = rows["samples_ns"].where(~several, rows["samples_ns"].map(lambda s: [[t * 2 for t in p] for p in s]))
    planted = {**known, "04-quantization": replace(known["04-quantization"], rows=rows.assign(samples_ns=twice))}
    before, after = (stacked.stacked(each).set_index(["lever", "kind", "model", "beside"]) for each in (known, planted))
    for key, row in after.iterrows():
        factor = 2 if key[1] == "Q4_0" else 1
        assert row["alone"].value == pytest.approx(before.loc[key, "alone"].value)
        assert row["measured"].value == pytest.approx(before.loc[key, "measured"].value / factor)


def test_only_pairs_of_types_that_a_batch_tells_apart_are_counted():
    alone, beside = [1.0, 2.0, 3.0], [1.0, 1.05, 3.0]
    lines = [
        {"lever": "bits", "kind": f"type {n}", "model": "m", "alone": estimate(a), "measured": estimate(b)}
        for n, (a, b) in enumerate(zip(alone, beside, strict=True))
    ]
    found = stacked.order(pd.DataFrame(lines)).iloc[0]
    assert (found["best"], found["best_beside"], found["pairs"], found["kept"]) == ("type 2", "type 2", 2, 2)
    turned = stacked.order(pd.DataFrame(lines).assign(measured=[estimate(b) for b in reversed(beside)])).iloc[0]
    assert (turned["best_beside"], turned["pairs"], turned["kept"]) == ("type 0", 2, 0)


def test_drafts_are_held_against_drafts_of_the_same_length(known):
    found = stacked.stacked(known)
    drafted = found[found["pair"] == stacked.DRAFTS]
    every = stacked.drafts.curves(gains.drafted(known)[1].rows, (gains.ACCEPTED,))
    every = every[
        (every["n_seq"] == 1) & (every["n_prompt"] == every["n_prompt"].min()) & (every["how"] != "all put back")
    ]
    alone = every.set_index(["build", "model", "n_draft"])["speed"]
    for row in drafted.itertuples():
        assert row.alone.value == alone[gains.BUILDS[row.lever], row.model, int(row.kind.split()[0])].value
    assert set(drafted["beside"]) == {"4 answers", "8 answers"}


def test_how_requests_share_an_engine_is_never_computed_for_a_traffic(known):
    sharing = {"chunked", "split", "replicas"}
    assert sharing <= {gain.lever for gain in gains.gains(known)}
    assert not sharing & set(ranked(known, HYBRID, Traffic(2000, 200, 8)).index)


def test_the_first_lever_has_an_interval_for_all_it_was_chosen_from(known):
    first, found = traffic.best(known, HYBRID, Traffic(2000, 200, 8)), ranked(known, HYBRID, Traffic(2000, 200, 8))
    own = found.loc[first["lever"]]
    for phase in ("reading", "writing"):
        assert first[phase] == stats.selected(own[phase], 2 * len(found))
        assert first[phase].high - first[phase].low > own[phase].high - own[phase].low
    assert first["tokens"] == traffic.whole(Effect("", "", "", "", first["reading"], first["writing"]), first["share"])
