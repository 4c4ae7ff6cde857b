"""Chapter 8: a draft changes nothing but the time, however it is taken back; and what it costs comes out right."""

import itertools

import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from scipy import special

from llama_meter import cells
from llama_meter.cells import TERMS, Speculate
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.measure import tolerance
from llama_meter.models import synthetic
from plamo_study.studies.speculative import law as drafting, plan as plan, speculation, work as speculative

K = 4
KEYS = itertools.count()


def speculate(model=HYBRID, **fields):
    usual = {"depth": 24, "n_gen": 24, "n_draft": K, "drafter": "even"}
    return Speculate(model=model, scale="mini", dtype="F16", **usual | fields)


def run(cell):
    others = [synthetic.make(*file) for file in cell.files[1:]]
    measured = speculative.run(cell, mini_file(cell.model), lambda stage: None, *others)
    assert measured.valid, measured.checks
    return measured


def as_often(counts, expected):
    """Whether numbers, (n,), come as often as expected, by a chi-square test."""
    return special.chdtrc(len(counts) - 1, ((counts - expected) ** 2 / expected).sum()) > 1e-3


@pytest.mark.parametrize(
    ("model", "way"), [(HYBRID, "tail"), (HYBRID, "full"), (ATTENTION, "tail"), (ATTENTION, "part")]
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


def test_sequences_side_by_side_and_real_drafters_leave_every_answer_as_it_is():
    assert set(run(speculate(n_seq=3, n_gen=12)).series["sequence"]) == {0.0, 1.0, 2.0}
    usual = {"text": "python-heldout", "repetitions": 2, "depth": 48}
    assert len(run(speculate(drafter="lookup", **usual)).samples_ns) == 2
    for draft in (HYBRID, ATTENTION):
        assert sum(run(speculate(drafter="model", draft=draft, draft_dtype="F16", **usual)).series["accepted"]) > 0


def test_a_state_that_comes_back_wrong_fails_the_row(monkeypatch):
    """The last layer's state as it would be a few tokens later or earlier: other numbers of the usual size."""
    right = Session.set_state

    def damaged(session, seq, state, n, part="everything"):
        found = np.frombuffer(state, np.uint8).copy()
        tail = found[-(1 << 15) :].view(np.float32)
        tail[:] = tail[::-1] if part == "fixed" else tail
        right(session, seq, found, n, part)

    monkeypatch.setattr(Session, "set_state", damaged)
    measured = speculative.run(speculate(back="part"), mini_file(HYBRID), lambda stage: None)
    assert not measured.valid
    assert not measured.checks["second_path"]


def test_the_text_drafts_what_it_said_before_and_nothing_where_it_never_did():
    text = np.array([7, 8, 9, 10, 11, 5, 7, 8, 9], dtype=np.int32)
    assert speculation.lookup(text, 2).tolist() == [10, 11]
    assert speculation.lookup(text, 8).tolist() == [10, 11, 5, 7, 8, 9]
    assert speculation.lookup(np.arange(5, 20, dtype=np.int32), 4).tolist() == []


def test_a_forced_acceptance_is_reached_and_every_number_comes_equally_often():
    rng, draws = np.random.default_rng(0), 2_000
    counts = speculation.accepted(0.7, K, rng)
    drawn = np.array([next(counts) for _ in range(draws)])
    expected = draws * drafting.probabilities(np.array([0.7]), K)[:, 0]
    assert as_often(np.bincount(drawn, minlength=K + 1), expected)
    answers = [speculation.accepted(0.7, K, np.random.default_rng(n)) for n in range(50)]
    means = [np.mean(list(itertools.islice(answer, 16))) for answer in answers]
    assert np.std(means) < 0.5 * drawn.std() / 16**0.5  # of one answer, than of independent draws
    even = speculation.evenly(K, rng)
    assert np.bincount([next(even) for _ in range(50)]).tolist() == [10] * (K + 1)


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
    a = found["from"].value
    assert drafting.tokens(np.array([a]), K)[0] == pytest.approx(2.0, abs=0.02)
    (later,) = break_even(frame(back=1.0)).to_dict("records")
    assert later["from"].value > a
    assert break_even(frame(verify=9.0))["from"].tolist() == [None], "never"
    assert break_even(frame(verify=0.5, back=0.0))["from"].tolist() == [None], "always"
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
        reference = speculation.Reference(session, prompt, 12)
        place = 30
        other = int(np.argsort(reference.expected(place))[-2])
        gap, rounding = speculative._explained(speculate(), session, reference, place, other)
        assert gap > tolerance.BOTH_MOVE * rounding
        assert 0 < rounding < 1e-2
