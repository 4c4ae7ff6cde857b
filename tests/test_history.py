"""Chapter 10: what every build answered, since when it is right, and files that older builds can read."""

import pandas as pd
import pytest

from plamo_study.read.recording import read
from plamo_study.studies.builds import law as history, plan as plans


@pytest.fixture(scope="module")
def recorded():
    found = read(plans.STUDY, "recorded", "mini")
    assert found
    return found


def test_every_build_was_asked_every_question_of_the_plan(recorded):
    answers = history.answers(recorded)
    asked = plans.builds("mini").cells
    assert set(answers.groupby("build").size()) == {len(asked)}
    assert answers.version.nunique() >= 12


def test_an_answer_is_one_word_from_a_crash_a_refusal_an_error_or_a_file_that_was_not_loaded(recorded):
    row = recorded.rows[recorded.rows.question.eq("equal") & recorded.rows.status.eq("ok")].iloc[0].to_dict()
    usual = row["checks"] | {"refused": False, "wrong": 0.0}
    unread = {"status": "error", "failure": "load: EngineError: llama.cpp cannot load a.gguf: unknown architecture"}
    changed = [
        ({"checks": usual}, "right"),
        ({"checks": usual | {"wrong": 1.0}}, "wrong"),
        ({"checks": usual | {"refused": True}}, "refused"),
        ({"verdict": "invalid"}, "wrong"),
        ({"status": "abort", "failure": "GGML_ASSERT"}, "abort"),
        ({"status": "hang", "failure": ""}, "hang"),
        (unread, history.UNKNOWN),
    ]
    assert [history._answer(row | change) for change, _ in changed] == [answer for _, answer in changed]


def test_users_may_share_only_where_every_question_was_asked_and_no_answer_is_wrong():
    def of(answer):
        first, *others = plans.SHARED
        answers = {first: answer} | dict.fromkeys(others, "right")
        return pd.DataFrame({"question": list(answers), "answer": list(answers.values())})

    assert history.safe(of("right"))
    assert history.safe(of("refused"))
    assert not any(history.safe(of(bad)) for bad in (*history.BAD, history.UNKNOWN))
    assert not history.safe(of("right").iloc[1:]), "one was not asked"
    alone = pd.DataFrame({"question": ["copied"], "answer": ["wrong"]})
    assert history.safe(pd.concat([of("right"), alone])), "of one user alone"


def test_the_planted_defects_are_noticed_by_the_page_s_own_questions(recorded):
    answers = history.answers(recorded)
    of = answers[answers.architecture.eq("plamo2") & answers.question.isin(plans.SHARED)]
    safe = {build: history.safe(each) for build, each in of.groupby("build")}
    assert safe["corrected"]
    assert not safe["corrected-prompts"]
    assert not safe["corrected-states"]
