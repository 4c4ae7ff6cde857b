"""The batch API as the studies use it: chosen slots, saved states, tails."""

import ctypes

import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from plamo_study.engine.library import capture_log
from plamo_study.engine.session import EngineError, Session, SessionConfig, model_params
from plamo_study.oracle.compare import relative_error

PROMPTS = {seq: np.random.default_rng(seq).integers(5, 512, 24) for seq in range(4)}


@pytest.fixture(params=[HYBRID, ATTENTION])
def session(request):
    capture_log([])
    with Session(mini_file(request.param), SessionConfig(n_ctx_seq=64, n_seq_max=4, n_gpu_layers=0)) as opened:
        opened.hybrid = request.param == HYBRID
        yield opened


def test_a_state_put_back_continues_bit_for_bit(session):
    session.prefill({0: PROMPTS[0]})
    state = session.get_state(0)
    session.decode({0: 7})
    expected = session.logits()
    session.clear()
    session.set_state(0, state, len(PROMPTS[0]))
    session.decode({0: 7})
    assert np.array_equal(session.logits(), expected)


def test_only_attention_can_drop_a_tail(session):
    session.prefill({0: PROMPTS[0]})
    assert session.remove_tail(0, 20) is not session.hybrid
    assert session.n_past[0] == (24 if session.hybrid else 20)


def test_every_slot_decodes_as_if_it_were_alone_after_a_prefill_per_sequence(session):
    alone = {}
    for seq, prompt in PROMPTS.items():
        session.clear()
        session.prefill({0: prompt})
        session.decode({0: 9})
        alone[seq] = session.logits()
    session.clear()
    session.prefill(PROMPTS)
    session.decode(dict.fromkeys(PROMPTS, 9))
    for row, seq in enumerate(PROMPTS):
        assert relative_error(session.logits(row), alone[seq]) < 1e-2


def test_a_long_prompt_is_cut_at_n_batch_and_only_its_end_is_returned():
    config = SessionConfig(n_ctx_seq=128, n_batch=32, n_ubatch=32, n_gpu_layers=0)
    tokens = np.arange(5, 105)
    with Session(mini_file(), config) as cut, Session(mini_file(), SessionConfig(128, n_gpu_layers=0)) as whole:
        short, long = cut.prefill({0: tokens})[0], whole.prefill({0: tokens})[0]
        assert short.shape == long.shape == (1, cut.n_vocab)
        assert cut.n_evaluated == whole.n_evaluated == 100
        assert relative_error(short, long) < 1e-2
        cut.clear()
        assert cut.prefill({0: tokens}, every=True)[0].shape == (100, cut.n_vocab)


def test_a_full_context_is_an_engine_error(session):
    longer_than_the_context = np.arange(400) % 500 + 5
    with pytest.raises(EngineError, match="llama_decode returned"):
        session.prefill({0: longer_than_the_context})


def test_without_layers_on_a_gpu_the_engine_is_given_none():
    for asked in (SessionConfig(64), SessionConfig(64, n_gpu_layers=0)):  # what imatrices and scores are taken with
        params = model_params(asked)
        assert params.n_gpu_layers == 0
        assert ctypes.c_void_p.from_address(params.devices).value is None
    assert not model_params(SessionConfig(64, n_gpu_layers=-1)).devices
