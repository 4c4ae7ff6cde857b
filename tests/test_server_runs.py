"""Concurrent requests against a stand-in for llama-server: same answers, a neighbour's answers, a death."""

import misbehaving
import pytest
from conftest import HYBRID, mini_file

from plamo_study.errors import StudyError
from plamo_study.measure import serving


@pytest.fixture
def served(tmp_path):
    """A function that asks a server, which misbehaves in a way, alone and then three at a time."""

    def serve(way=""):
        binary = misbehaving.as_llama_server(tmp_path, way)
        return serving.serve(binary, mini_file(HYBRID), "stock", None, slots=4, at_once=3, rounds=2)

    return serve


def test_a_server_that_keeps_requests_apart_lives_and_answers_alike_and_its_run_is_kept_once(
    served, tmp_path, monkeypatch
):
    run = served()
    assert (run.differ, run.answers, run.rounds_done, run.exit, run.said) == (0, 6, 2, None, "")
    assert run.version == "version: 1 (stand-in)"
    monkeypatch.setattr(serving, "RECORD", tmp_path / "runs.json")
    assert serving.recorded() == []
    serving.record([run])
    serving.record([run])
    assert serving.recorded() == [run]


def test_answers_that_depend_on_neighbours_are_counted_with_their_gaps(served):
    run = served("mixes")
    assert run.differ == len(run.gaps) > 0
    assert run.gaps[0] == pytest.approx(1.9)
    assert run.near_ties == 0


def test_a_death_is_recorded_with_its_assertion_and_the_round(served):
    run = served("dies_together")
    assert (run.exit, run.rounds_done, run.said) == (-6, 0, "GGML_ASSERT(fits) failed")
    assert run.answers < 3


def test_what_is_no_server_is_refused(tmp_path):
    with pytest.raises(StudyError, match="cannot be run"):
        serving.serve(tmp_path / "nothing", mini_file(HYBRID), "stock", None, slots=4, at_once=3, rounds=2)
