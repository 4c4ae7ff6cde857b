"""The next turn of a conversation: what is evaluated again, and whether a wrong state is noticed."""

import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from llama_meter.cells import Turns
from llama_meter.engine.session import EngineError, Session, SessionConfig
from llama_meter.models import registry
from llama_meter.serve import server
from plamo_study.studies.next_turn import work
from plamo_study.studies.next_turn.conversation import MOVES, drawn, questions
from plamo_study.studies.next_turn.law import Slot, foretold

N = 300  # tokens of a conversation


def cell(model: str = HYBRID, **fields: object) -> Turns:
    return Turns(model=model, scale="mini", dtype="F16", n_prompt=N, n_gen=4, **fields)


def row(of: Turns, series: dict[str, list[float]]) -> dict[str, object]:
    return {name: getattr(of, name) for name in of.__struct_fields__} | {"series": series}


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
@pytest.mark.parametrize("reuse", ["states", "bindings", "slot", "saved"])
def test_a_move_evaluates_what_the_source_says_and_answers_as_from_nothing(model, reuse):
    if reuse in ("slot", "saved") and not server.find():
        pytest.skip("llama-server is not built here")
    measured = work.run(of := cell(model, reuse=reuse, away=reuse == "saved"), mini_file(model), lambda stage: None)
    spec = registry.spec(model, "mini")
    assert measured.series["evaluated"] == foretold(row(of, measured.series), spec.window, bool(spec.mamba_heads))
    assert measured.valid
    assert len(measured.series["evaluated"]) == len(MOVES)


def test_a_state_one_token_off_is_noticed():
    measured = work.run(cell(reuse="states", planted=True), mini_file(), lambda stage: None)
    assert measured.valid is False


def test_the_state_of_another_conversation_is_noticed_and_one_of_another_cache_is_refused():
    one, other = (np.arange(N, 2 * N, dtype=np.int32) % 2000, np.arange(2 * N, 3 * N, dtype=np.int32) % 2000)
    with Session(mini_file(), SessionConfig(2 * N)) as session:
        right = session.prefill({0: one})[0][0]
        session.clear()
        session.prefill({0: other[:-1]})
        state = session.read_state(0)
        session.clear()
        session.set_state(0, state, N - 1)
        wrong = session.prefill({0: one[-1:]})[0][0]
        assert np.linalg.norm(wrong - right) > 0.1 * np.linalg.norm(right)
    with (
        Session(mini_file(), SessionConfig(2 * N, type_k="f32")) as session,
        pytest.raises(EngineError, match="refused"),
    ):
        session.set_state(0, state, N - 1)


@pytest.mark.parametrize(
    ("n", "after_an_edit", "checkpoints"), [(400, 401, 32), (2500, 516, 32), (2500, 2501, 0), (400, 401, 0)]
)
def test_the_law_of_a_recurrent_slot_agrees_with_a_harness_of_other_hands(n, after_an_edit, checkpoints):
    slot = Slot(window=0, recurrent=True, n_checkpoints=checkpoints)
    assert slot.evaluate(n + 1, 0, []) == n + 1
    slot.hold(n + 24)
    assert slot.evaluate(n + 1, n - 10, []) == after_an_edit


def test_a_server_that_knows_the_questions_reads_an_edited_one_alone():
    slot = Slot(window=0, recurrent=True, n_checkpoints=32)
    slot.evaluate(N, 0, questions(N))
    assert slot.evaluate(N, N - 50, questions(N)) == N - questions(N)[-1]


def test_moves_keep_what_they_say_they_keep():
    talk = drawn(np.arange(5000, dtype=np.int32), np.array([7, 8]), N, np.random.default_rng(1))
    answer = np.arange(4, dtype=np.int32)
    kept = {move: talk.after(move, answer) for move in MOVES}
    assert all(len(prompt) in (N, N + 4 + 64, N + 2 + 64) for prompt in kept.values())
    assert (kept["regenerated"] == talk.tokens).all()
    assert (kept["appended"][:N] == talk.tokens).all()
    assert (kept["edited"][: questions(N)[-1] + 2] == talk.tokens[: questions(N)[-1] + 2]).all()
    assert (kept["other chat"][: questions(N)[0]] == talk.tokens[: questions(N)[0]]).all()
