"""Chapter 8: a draft changes nothing but the time, however it is taken back; and what it costs comes out right."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from scipy import special

from llama_meter import cells
from llama_meter.cells import TERMS, Speculate
from llama_meter.engine import builds
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.errors import StudyError
from llama_meter.measure import tolerance
from llama_meter.measure.process import work
from llama_meter.measure.tolerance import TOLERANCE
from llama_meter.measure.worker import Job
from llama_meter.models import synthetic
from plamo_study.studies.speculative import drafters, law as drafting, plan as plan, speculation, work as speculative

K = 4
KEYS = itertools.count()


def speculate(model=HYBRID, **fields):
    usual = {"depth": 24, "n_gen": 24, "n_draft": K, "drafter": "even"}
    return Speculate(model=model, scale="mini", dtype="F16", **usual | fields)


def run(cell, engine=""):
    """Measure a cell here or, with another engine, in a process that has it."""
    path, others = mini_file(cell.model), [synthetic.make(*file) for file in cell.files[1:]]
    if engine:
        outcome = work(Job(cell=cell, path=str(path)), 100.0, engine, workload=plan.WORKLOAD)
        assert outcome.status == "ok", outcome.failure
    measured = outcome.measured if engine else speculative.run(cell, path, lambda stage: None, *others)
    assert measured.valid, measured.checks
    return measured


def as_often(counts, expected):
    """Whether numbers, (n,), come as often as expected, by a chi-square test."""
    return special.chdtrc(len(counts) - 1, ((counts - expected) ** 2 / expected).sum()) > 1e-3


@pytest.fixture(scope="module")
def native():
    """The build that takes tokens back from a recurrent state, where it has been made."""
    folder = builds.folder("rollback")
    if not (folder / "engine.toml").exists():
        pytest.skip("plamo-study engine build rollback")
    return str(folder)


@pytest.mark.parametrize(
    ("model", "way"),
    [(HYBRID, "tail"), (HYBRID, "full"), (HYBRID, "joined"), (ATTENTION, "tail"), (ATTENTION, "part")],
)
def test_however_a_draft_is_taken_back_the_answer_is_the_target_s_own(model, way):
    measured = run(speculate(model, back=way))
    assert measured.checks["removes"] == (way == "tail" and model == ATTENTION)
    taken_back = sum(n < K for n in measured.series["accepted"])
    replays = sum(ns > 0 for ns in measured.series["replay"])
    assert taken_back
    assert replays == 0 if measured.checks["removes"] else replays <= taken_back
    assert measured.samples_ns[0] == [sum(terms) for terms in zip(*(measured.series[t] for t in TERMS), strict=True)]
    assert len(measured.series["plain ns"]) == speculative.STEPS, "plain decode is timed on the same weights"
    assert min(measured.series["plain ns"]) > 0


def test_sequences_that_draft_side_by_side_each_get_their_own_answer():
    assert set(run(speculate(n_seq=3, n_gen=12)).series["sequence"]) == {0.0, 1.0, 2.0}


def test_plain_decode_is_a_token_a_call():
    measured = run(speculate(n_draft=0, drafter=""))
    assert measured.n_evaluated == measured.checks["tokens"] == len(measured.samples_ns[0]) == 24
    assert "plain ns" not in measured.series


def test_a_state_that_comes_back_wrong_fails_the_row(monkeypatch):
    put_back = Session.set_state
    monkeypatch.setattr(
        Session,
        "set_state",
        lambda self, seq, state, n, part="everything": put_back(
            self, seq, _damaged(state) if part == "fixed" else state, n, part
        ),
    )
    measured = speculative.run(speculate(back="part"), mini_file(HYBRID), lambda stage: None)
    assert not measured.valid
    assert not measured.checks["second_path"]


def _damaged(state):
    """The last layer's state as it would be a few tokens later or earlier: other numbers of the usual size."""
    found = np.frombuffer(state, np.uint8).copy()
    tail = found[-(1 << 15) :].view(np.float32)
    tail[:] = tail[::-1]
    return found


def test_the_text_drafts_what_it_said_before_and_nothing_where_it_never_did():
    text = np.array([7, 8, 9, 10, 11, 5, 7, 8, 9], dtype=np.int32)
    assert drafters.lookup(text, 2).tolist() == [10, 11]
    assert drafters.lookup(text, 8).tolist() == [10, 11, 5, 7, 8, 9]
    assert drafters.lookup(np.arange(5, 20, dtype=np.int32), 4).tolist() == []


def test_a_forced_acceptance_is_reached_and_every_number_comes_equally_often():
    rng, draws = np.random.default_rng(0), 2_000
    counts = drafters.accepted(0.7, K, rng)
    drawn = np.array([next(counts) for _ in range(draws)])
    expected = draws * drafting.probabilities(np.array([0.7]), K)[:, 0]
    assert as_often(np.bincount(drawn, minlength=K + 1), expected)
    answers = [drafters.accepted(0.7, K, np.random.default_rng(n)) for n in range(50)]
    means = [np.mean(list(itertools.islice(answer, 16))) for answer in answers]
    assert np.std(means) < 0.5 * drawn.std() / 16**0.5  # of one answer, than of independent draws
    even = drafters.evenly(K, rng)
    assert np.bincount([next(even) for _ in range(50)]).tolist() == [10] * (K + 1)


def test_real_drafters_leave_the_answer_as_it_is():
    usual = {"text": "python-heldout", "repetitions": 2, "depth": 48}
    assert len(run(speculate(drafter="lookup", **usual)).samples_ns) == 2
    by_model = run(speculate(drafter="model", draft=ATTENTION, draft_dtype="F16", **usual))
    assert sum(by_model.series["accepted"]) > 0


def test_a_model_that_drafts_gives_the_same_draft_however_often_it_is_asked():
    with Session(mini_file(HYBRID), SessionConfig(n_ctx_seq=128)) as session:
        model = drafters.Model(session)
        text = np.random.default_rng(0).integers(5, session.n_vocab, 40, dtype=np.int32)
        expected = {}
        for n in (20, 21, 24, 40):
            model.clear()
            expected[n] = model(text[:n], K).tolist()
        model.clear()
        assert {n: model(text[:n], K).tolist() for n in expected} == expected


def test_rejection_sampling_leaves_the_target_s_distribution():
    """Draws of three tokens from two drafters: by chi-square against what the target alone gives."""
    rng, n_vocab, draws = np.random.default_rng(1), 4, 2_000
    p, q = (speculation.probabilities(rng.normal(0, 1.5, (n_vocab, n_vocab)), 0.7) for _ in range(2))
    counts, sure = np.zeros((n_vocab, n_vocab)), np.zeros(n_vocab)
    for _ in range(draws):
        first = rng.choice(n_vocab, p=q[0])
        second = rng.choice(n_vocab, p=q[first])
        n, after = speculation.verified(np.array([first, second]), q[[0, first]], p[[0, first, second]], rng)
        given = [*[first, second][:n], after]
        if len(given) == 1:
            given.append(rng.choice(n_vocab, p=p[given[0]]))
        counts[given[0], given[1]] += 1
        n, after = speculation.verified(np.array([2]), speculation.one_hot(np.array([2]), n_vocab), p[[0, 2]], rng)
        sure[2 if n else after] += 1
    expected = draws * p[0][:, None] * p
    assert as_often(counts.ravel(), expected.ravel())
    assert as_often(sure, draws * p[0])


def test_a_draft_that_cannot_be_held_is_refused_before_anything_is_loaded():
    refused = (
        ({"n_draft": 64, "n_batch": 32}, "a call holds 32"),
        ({"n_draft": 64}, "longer than the context"),
        ({"accepts": 1.5}, "means nothing"),
        ({"drafter": "model"}, "no model"),
        ({"back": "joined", "n_seq": 2}, "one sequence"),
    )
    for fields, said in refused:
        with pytest.raises(StudyError, match=said):
            speculative.run(speculate(**fields), mini_file(HYBRID), lambda stage: None)


def test_a_draft_model_of_another_vocabulary_is_refused(monkeypatch):
    small = SessionConfig(n_ctx_seq=32)
    with Session(mini_file(HYBRID), small) as target, Session(mini_file(ATTENTION), small) as draft:
        drafters.check_vocabulary(target, draft)
        monkeypatch.setattr(draft, "piece", lambda token: b"other" if token == 300 else target.piece(token))
        with pytest.raises(StudyError, match="differs at 1 tokens; 300 is b'other'"):
            drafters.check_vocabulary(target, draft)
        draft.n_vocab += 1
        with pytest.raises(StudyError, match="2049 tokens, the target 2048"):
            drafters.check_vocabulary(target, draft)


# The build that keeps the states of its last positions.


def test_that_build_takes_back_what_it_drafted_and_says_so(native):
    measured = run(speculate(n_draft=8, n_gen=48), native)
    assert measured.checks["removes"]
    assert not sum(measured.series["replay"])
    assert run(speculate(n_seq=4), native).checks["removes"]


TRIALS = """
import sys
import numpy as np
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.oracle.compare import relative_error

rng, worst = np.random.default_rng(0), 0.0
with Session(sys.argv[1], SessionConfig(n_ctx_seq=64, n_rs_seq=8)) as session:
    for trial in range(int(sys.argv[2])):
        prompt, draft = rng.integers(5, session.n_vocab, 16), rng.integers(5, session.n_vocab, rng.integers(2, 10))
        back = int(rng.integers(1, len(draft)))
        session.clear()
        session.prefill({0: prompt})
        session.verify({0: draft})
        assert session.remove_tail(0, 16 + len(draft) - back)
        assert not session.is_recurrent or not session.remove_tail(0, 15)
        found = session.verify({0: np.array([7])})[0][0].copy()
        session.clear()
        session.prefill({0: prompt})
        session.prefill({0: draft[:-back]})
        worst = max(worst, relative_error(found, session.verify({0: np.array([7])})[0][0]))
print(worst)
"""


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_random_drafts_of_up_to_eight_tokens_leave_no_trace_in_that_build(native, model):
    asked = [sys.executable, "-c", TRIALS, str(mini_file(model)), "100"]
    done = subprocess.run(asked, env=os.environ | {"LLAMA_CPP_LIB_PATH": native}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < TOLERANCE["F16"]


# Made-up rows: plain decode takes a second a token, a verification two, a save a quarter, a way back one.


def made_up(cell, removes=True, blocks=3, verify=2.0, back=1.0):
    accepted = [*range(cell.n_draft + 1)] * 3
    series = {name: [0.0] * len(accepted) for name in TERMS}
    series["verify"] = [verify * 1e9] * len(accepted)
    series["restore"] = [back * 1e9 if n < cell.n_draft else 0.0 for n in accepted]
    series |= {"accepted": accepted, "drafted": [cell.n_draft] * len(accepted), "sequence": [0] * len(accepted)}
    series |= {"gap": [], "rounding": [], "plain ns": [1e9]}
    spent = [sum(series[term][i] for term in TERMS) for i in range(len(accepted))]
    row = cells.columns(cell) | {"status": "ok", "verdict": "valid", "anchor": False, "drift": 0.0}
    row |= {"machine": "m", "build": "stock", "engine": "e", "series": series, "samples_ns": [spent]}
    row["checks"] = {"tokens": sum(accepted) + len(accepted), "removes": float(removes)}
    return [row | {"block": block, "key": str(next(KEYS))} for block in range(blocks)]


def frame(**costs):
    return pd.DataFrame(made_up(speculate(), **costs))


def break_even(rows):
    return drafting.break_even(drafting.speed_ups(rows))


def test_drafting_pays_from_where_a_round_gives_as_many_tokens_as_plain_steps_would():
    """With no cost of going back a round takes two seconds: it pays where it gives more than two tokens."""
    rows = frame(back=0.0)
    (found,) = break_even(rows).to_dict("records")
    assert found["pays"] == "from"
    a = found["from"].value
    assert drafting.tokens(np.array([a]), K)[0] == pytest.approx(2.0, abs=0.02)
    (later,) = break_even(frame(back=1.0)).to_dict("records")
    assert later["from"].value > a
    assert break_even(frame(verify=9.0))["pays"].tolist() == ["never"]
    assert break_even(frame(verify=0.5, back=0.0))["pays"].tolist() == ["always"]
    faster = rows.assign(series=[series | {"plain ns": [0.7e9]} for series in rows["series"]])
    assert break_even(faster)["from"][0].value > a + 0.1, "a faster plain decode makes drafting pay later"


def test_several_sequences_cost_what_each_of_them_takes_back_and_nothing_where_tokens_are_removed():
    n_seq, at = 3, np.array([0.0, 1.0])
    accepted = np.random.default_rng(0).integers(0, K + 1, (40, n_seq))
    seconds = 2 + ((0.5 + 0.25 * (accepted + 1)) * (accepted < K)).sum(axis=1)
    process = pd.Series({"n_draft": K, "n_seq": n_seq, "rounds": seconds, "how": drafting.PART})
    process["series"] = {"accepted": accepted.ravel()}
    assert drafting.round_seconds(process, at).tolist() == pytest.approx([2 + n_seq * 0.75, 2])
    process["how"] = drafting.NATIVE
    assert drafting.round_seconds(process, at).tolist() == [np.median(seconds)] * 2


def test_an_error_that_rounding_does_not_explain_is_no_near_tie():
    with Session(mini_file(HYBRID), SessionConfig(n_ctx_seq=128)) as session:
        prompt = np.random.default_rng(3).integers(5, session.n_vocab, 24, dtype=np.int32)
        reference = speculation.Reference(session, 0, prompt, 12, temperature=0.0, seed=0)
        place = 30
        other = int(np.argsort(reference.expected(place))[-2])
        gap, rounding = speculative._explained(speculate(), session, reference, place, other)
        assert gap > tolerance.BOTH_MOVE * rounding
        assert 0 < rounding < 1e-2
