"""The batching law says what facts say, and what the engine does."""

import msgspec
import pytest
from built import measured
from conftest import ATTENTION, HYBRID

from llama_meter import journal
from llama_meter.cells import Decode
from llama_meter.measure import plan, runner
from llama_meter.measure.request import Request
from plamo_study.measurements import answers, answers_of, recording
from plamo_study.read import frame
from plamo_study.studies.right_answers import (
    law as law_check,
    plan as batching_law,
    work as workload,
)
from plamo_study.studies.right_answers.law import DEFECTS, micro_batches, replay


def steps(slots, n=2):
    return [[(slot, 1) for slot in slots]] * n


@pytest.mark.parametrize(("n_prompt", "n_batch"), [(512, 512), (512, 1024), (512, 2048), (128, 2048)])
def test_more_sequences_never_heal_an_abort(n_prompt, n_batch):
    aborting = [
        replay(batching_law.packed(list(enumerate([n_prompt] * n)), n_batch), n)[0] == "abort" for n in range(1, 33)
    ]
    assert aborting == sorted(aborting)


def per_sequence(prompts, n_batch):
    """The calls of a prefill with separate calls for every prompt."""
    pieces = [[min(n_batch, length - at) for at in range(0, length, n_batch)] for length in prompts]
    return [[(seq, n)] for seq, own in enumerate(pieces) for n in own]


def test_a_replay_is_right_wrong_or_aborts_by_the_slots_that_step():
    prefilled = per_sequence([16] * 4, 2048)
    for slots, outcome, wrong in (((0, 1), "right", set()), ((1, 2), "wrong", {1, 2, 3}), ((2, 3), "abort", None)):
        came, sequences = replay(prefilled + steps(slots) + [[(slot, 1)] for slot in range(4)], 4)
        assert came == outcome
        assert wrong is None or set().union(*sequences) == wrong
    first, second = replay(prefilled + steps((1, 2)), 4)[1][-2:]
    assert (first, second) == (frozenset(), {1, 2}), "the first token after a misplaced state is still right"
    for n in (1, 2, 5, 16):
        assert replay(per_sequence([100] * n, 64) + steps(range(n)), n)[0] == "right"
    packed = batching_law.packed(list(enumerate([512] * 8)), 1024)
    assert replay(packed + steps((3, 4)), 8, defects=frozenset())[0] == "right"


def test_micro_batches_hold_equal_sequences_with_rising_numbers():
    assert micro_batches([(0, 3), (1, 5)], 512) == [([0, 1], 3), ([1], 2)]
    assert micro_batches([(0, 1), (2, 1)], 512) == [([0], 1), ([2], 1)]
    assert micro_batches([(1, 1), (0, 1)], 512) == [([1], 1), ([0], 1)]
    assert micro_batches([(0, 300), (1, 300)], 512) == [([0, 1], 256), ([0, 1], 44)]


def test_a_build_meets_the_defects_it_does_not_correct():
    hybrid, attention = {"shape": {"arch": "plamo2"}}, {"shape": {"arch": "plamo3"}}
    assert law_check.defects(hybrid, {}) == DEFECTS
    assert law_check.defects(hybrid, {"corrects": ["D2"]}) == {"D3"}
    assert law_check.defects(attention, {}) == set()


@pytest.mark.whole
def test_the_engine_fails_the_three_tests_on_the_hybrid_alone_and_aborts_where_the_law_says(tmp_path):
    """The map's smallest abort comes in the second call; slots that left before it are asked too."""
    tests = (*batching_law.three_tests(HYBRID), *batching_law.three_tests(ATTENTION))
    first = tuple(((seq, 16),) for seq in range(4))
    wrong_then_abort = (*first, ((1, 1), (2, 1)), ((3, 1),), ((0, 0),), ((2, 1), (3, 1)))
    aborting = tuple(
        plan.change(tests[0], calls=calls, n_tokens=32, question="")
        for calls in (wrong_then_abort, (*first, ((2, 1), (3, 1))), (((0, 16), (1, 16)), ((2, 1), (3, 1))))
    )
    anchor = plan.of_kind(Decode, tests[0], n_seq=1, depth=16, n_gen=4)
    asked = plan.Plan("tests", "mini", (*tests, *aborting), (), anchor, 1, 0, 60.0)
    rows = runner.sweep(asked, tmp_path / "j.jsonl").rows
    known = frame.facts(journal.read(tmp_path / "j.jsonl"))
    every = frame.frame(rows, known)
    errors = law_check.three_tests(every)
    hybrid, attention = (errors[errors["model"] == model] for model in (HYBRID, ATTENTION))
    assert len(hybrid) == len(attention) == len(batching_law.TESTS)
    assert (hybrid["error"] > hybrid["limit"]).all()  # 0.08 to 1: trained weights forget
    assert (attention["error"] <= attention["limit"]).all()
    table = law_check.checked(every, known)
    aborted = table[table["question"] == ""]
    assert (aborted["observed"] == "abort").all()
    assert aborted["exact"].all()
    assert any(any(calls) for calls in aborted["foretold"])
    row = next(row for row in rows if row.cell in aborting and "4/1" in row.checks)
    row = msgspec.structs.replace(row, checks=row.checks | {"4/1": 0.9})
    worse = law_check.checked(frame.frame([row], known), known)
    assert not worse["exact"].any(), "a sequence wrong before the abort counts against the law"


def test_each_prompt_is_asked_beside_other_neighbours_and_at_another_place_in_every_turn():
    for n, at_once in ((32, 2), (32, 16), (4, 2)):
        calls = workload.calls(n, at_once)
        assert all(len(call) == at_once for call in calls)
        beside = {prompt: [set(call) - {prompt} for call in calls if prompt in call] for prompt in range(n)}
        places = {prompt: {call.index(prompt) for call in calls if prompt in call} for prompt in range(n)}
        assert all(len(found) == workload.TURNS and found[0] != found[1] for found in beside.values())
        assert all(len(found) == workload.TURNS for found in places.values())


def test_prompts_that_share_a_call_change_answers_of_the_hybrid_and_of_no_other():
    asked = batching_law.answers("mini").cells[0]
    small = plan.change(asked, n_requests=4, n_prompt=24, n_gen=8, lengths="drawn")
    where = "plamo_study.studies.right_answers.work"
    mixed, own = (measured(plan.change(small, model=m), workload=where, right=False) for m in (HYBRID, ATTENTION))
    assert (mixed.valid, own.valid) == (False, True)
    assert mixed.checks["prompts"] == own.checks["prompts"] == 4
    alone = measured(plan.change(small, n_clients=1), workload=where)
    assert set(alone.series["differs"]) == {workload.SAME}, "the same prompt alone gets the same answer"


def test_recorded_answers_are_those_to_distinct_prompts_and_count_by_prompt():
    rows = recording("04-answers", Request(scale="mini")).rows
    asked = answers("04-answers", Request(scale="mini"))
    loads = asked.groupby(["build", "model", "n_clients", "n_prompt"])
    assert (loads["prompt"].nunique() >= 200).all()
    assert (rows[rows.workload == "answers"].checks.map(lambda c: c.get("answers_alone", 32)) == 32).all()
    row = rows[(rows.workload == "answers") & rows.verdict.eq("valid")].iloc[0]
    for gap, answer in ((0.1, "near-tie"), (0.3, "changed")):
        planted = row.series | {"differs": [3.0, *row.series["differs"][1:]], "gap": [gap, *row.series["gap"][1:]]}
        one = answers_of(rows.loc[[row.name]].assign(series=[planted]))
        assert one.answer.iloc[0] == answer
