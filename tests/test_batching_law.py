"""The batching law says what facts say, and what the engine does."""

import msgspec
import pytest
from conftest import ATTENTION, HYBRID

from plamo_study.measure import frame, journal, plan, runner
from plamo_study.studies.batching_law import analysis as law_check, bisection, grid
from plamo_study.studies.batching_law.law import Engine, micro_batches, packed, per_sequence, replay, smallest_abort


def steps(slots, n=2):
    return [[(slot, 1) for slot in slots]] * n


@pytest.mark.parametrize(
    ("n_prompt", "n_batch", "first_abort"),
    [(512, 512, None), (512, 1024, 4), (512, 2048, 6), (512, 4096, 10), (512, 8192, 18), (128, 2048, 18)],
)
def test_the_smallest_aborting_number_of_sequences(n_prompt, n_batch, first_abort):
    assert smallest_abort(n_prompt, n_batch) == first_abort
    outcomes = [replay(packed([n_prompt] * n, n_batch), n).outcome for n in range(1, 33)]
    aborting = [outcome == "abort" for outcome in outcomes]
    assert aborting == sorted(aborting), "bisection needs that more sequences never heal an abort"


@pytest.mark.parametrize(
    ("slots", "outcome", "wrong"), [((0, 1), "right", set()), ((1, 2), "wrong", {1, 2, 3}), ((2, 3), "abort", None)]
)
def test_decoding_some_slots_of_four(slots, outcome, wrong):
    verdict = replay(per_sequence([16] * 4, 2048) + steps(slots) + [[(slot, 1)] for slot in range(4)], 4)
    assert verdict.outcome == outcome
    assert wrong is None or set().union(*verdict.wrong) == wrong


def test_the_first_token_after_a_misplaced_state_is_still_right():
    verdict = replay(per_sequence([16] * 4, 2048) + steps((1, 2)), 4)
    assert verdict.wrong[-2:] == [frozenset(), frozenset({1, 2})]


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_a_prefill_per_sequence_and_all_slots_together_is_right(n):
    assert replay(per_sequence([100] * n, 64) + steps(range(n)), n).outcome == "right"


def test_a_corrected_engine_is_right_everywhere():
    fixed = Engine(mixes_tokens=False, misplaces_states=False)
    assert replay(packed([512] * 8, 1024) + steps((3, 4)), 8, engine=fixed).outcome == "right"


def test_micro_batches_hold_equal_sequences_with_rising_numbers():
    assert micro_batches([(0, 3), (1, 5)], 512) == [([0, 1], 3), ([1], 2)]
    assert micro_batches([(0, 1), (2, 1)], 512) == [([0], 1), ([2], 1)]
    assert micro_batches([(1, 1), (0, 1)], 512) == [([1], 1), ([0], 1)]
    assert micro_batches([(0, 300), (1, 300)], 512) == [([0, 1], 256), ([0, 1], 44)]


def test_the_hybrid_fails_what_attention_passes(tmp_path):
    cells = tuple(grid.three_tests(test, model) for test in grid.TESTS for model in (HYBRID, ATTENTION))
    anchor = plan.change(cells[0], workload="decode", n_seq=1, depth=16, n_gen=4)
    asked = plan.Plan("tests", "mini", cells, (), anchor, 1, 0, 60.0)
    rows = runner.sweep(asked, tmp_path / "j.jsonl").rows
    errors = law_check.three_tests(frame.frame(rows, frame.facts(journal.read(tmp_path / "j.jsonl"))))
    assert len(errors) == 2 * len(grid.TESTS)
    hybrid, attention = (errors[errors["model"] == model] for model in (HYBRID, ATTENTION))
    assert (hybrid["error"] > hybrid["limit"]).all()  # 0.08 to 1: trained weights forget
    assert (attention["error"] <= attention["limit"]).all()


def test_bisection_finds_the_abort_the_law_predicts_in_few_processes():
    assert bisection.smallest_abort(HYBRID, 512, 2048, most=16) == (6, 5)
    assert bisection.smallest_abort(HYBRID, 64, 2048, most=8) == (None, 1)


def test_a_batch_that_aborts_is_judged_by_sequence_up_to_the_call_that_aborts(tmp_path):
    """The map's smallest abort comes in the second call; slots that left before it are asked too."""
    first = tuple(((seq, 16),) for seq in range(4))
    wrong_then_abort = (*first, ((1, 1), (2, 1)), ((3, 1),), ((0, 0),), ((2, 1), (3, 1)))
    cells = tuple(
        plan.change(grid.three_tests("identity", HYBRID), calls=calls, n_tokens=32, question="")
        for calls in (wrong_then_abort, (*first, ((2, 1), (3, 1))), (((0, 16), (1, 16)), ((2, 1), (3, 1))))
    )
    anchor = plan.change(cells[0], workload="decode", n_seq=1, depth=16, n_gen=4)
    asked = plan.Plan("tests", "mini", cells, (), anchor, 1, 0, 60.0)
    rows = runner.sweep(asked, tmp_path / "j.jsonl").rows
    known = frame.facts(journal.read(tmp_path / "j.jsonl"))
    table = law_check.checked(frame.frame(rows, known), known)
    assert (table["observed"] == "abort").all()
    assert table["judged"].all()
    assert table["exact"].all()
    assert any(any(calls) for calls in table["foretold"])
    row = next(row for row in rows if "4/1" in row.checks)
    worse = frame.frame([msgspec.structs.replace(row, checks=row.checks | {"4/1": 0.9})], known)
    assert not law_check.checked(worse, known)["exact"].any(), (
        "a sequence wrong before the abort counts against the law"
    )
