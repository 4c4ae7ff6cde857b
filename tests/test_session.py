"""The batch API as the studies use it: chosen slots, saved states, tails."""

import ctypes
import re

import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from gguf import GGUFWriter

from llama_meter.engine import library
from llama_meter.engine.session import EngineError, Session, SessionConfig, model_params
from llama_meter.oracle.compare import relative_error

PROMPTS = {seq: np.random.default_rng(seq).integers(5, 512, 24) for seq in range(4)}


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_slots_states_and_tails_behave_as_if_each_sequence_were_alone(model):
    library.capture_log([])
    with Session(mini_file(model), SessionConfig(64, n_seq_max=4)) as session:
        alone = {}
        for seq, prompt in PROMPTS.items():
            session.clear()
            session.prefill({0: prompt})
            session.decode({0: 9})
            alone[seq] = session.logits()
        session.clear()
        session.prefill(PROMPTS)
        state = session.get_state(0)
        session.decode(dict.fromkeys(PROMPTS, 9))
        for row, seq in enumerate(PROMPTS):
            assert relative_error(session.logits(row), alone[seq]) < 1e-2
        session.clear()
        session.prefill({0: PROMPTS[0]})
        session.decode({0: 9})
        expected = session.logits()
        session.clear()
        session.set_state(0, state, len(PROMPTS[0]))
        session.decode({0: 9})
        assert np.array_equal(session.logits(), expected), "a state put back continues bit for bit"
        assert session.remove_tail(0, 20) is (model == ATTENTION), "only attention can drop a tail"
        assert session.n_past[0] == (20 if model == ATTENTION else 25)
        with pytest.raises(EngineError, match="llama_decode returned"):
            session.prefill({0: np.arange(400) % 500 + 5})


def test_a_long_prompt_is_cut_at_n_batch_and_only_its_end_is_returned():
    library.capture_log([])
    tokens = np.arange(5, 105)
    with Session(mini_file(), SessionConfig(128, n_batch=32, n_ubatch=32)) as cut:
        with Session(cut, SessionConfig(128)) as whole:  # on the same loaded model, which outlives it
            short, long = cut.prefill({0: tokens})[0], whole.prefill({0: tokens})[0]
            assert cut.n_evaluated == whole.n_evaluated == 100
        assert short.shape == long.shape == (1, cut.n_vocab)
        assert relative_error(short, long) < 1e-2
        cut.clear()
        assert cut.prefill({0: tokens}, every=True)[0].shape == (100, cut.n_vocab)


def test_without_layers_on_a_gpu_the_engine_is_given_none():
    params = model_params(SessionConfig(64))  # what imatrices and scores are taken with
    assert params.n_gpu_layers == 0
    assert ctypes.c_void_p.from_address(params.devices).value is None
    assert not model_params(SessionConfig(64, n_gpu_layers=-1)).devices


def test_an_architecture_that_llama_cpp_does_not_know_is_named(tmp_path):
    writer = GGUFWriter(path := tmp_path / "strange.gguf", "nonesuch")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    library.capture_log([])
    with pytest.raises(EngineError, match=r"strange\.gguf: .*unknown model architecture: 'nonesuch'"):
        Session(path, SessionConfig(16))


def test_a_call_that_a_gpu_did_not_complete_is_no_result(monkeypatch):
    """Metal: `llama_decode` returns 0, and its driver's words stand in the log alone."""
    monkeypatch.setattr(library, "gpu_failures", [])
    library.capture_log([])
    said = (
        b"ggml_metal_synchronize: error: command buffer 1 failed with status 5\n",
        b"error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)\n",
    )
    with Session(mini_file(), SessionConfig(64)) as session:
        session.prefill({0: np.arange(4)})
        for line in said:
            library._keep_alive[-1](4, line, None)
        with pytest.raises(EngineError, match=r"failed with status 5; Insufficient Memory"):
            session.decode({0: 1})


@pytest.mark.parametrize(("offered", "fits"), [((1000,), False), ((1 << 40,), True), ((1 << 22, 1 << 22), True)])
def test_a_file_that_is_larger_than_a_gpu_s_memory_is_not_loaded(offered, fits, monkeypatch):
    boards = [{"name": f"MTL{n}", "chip": "Apple M4", "memory_bytes": n_bytes} for n, n_bytes in enumerate(offered)]
    monkeypatch.setattr(library, "gpus", lambda: boards)
    config = SessionConfig(64, n_gpu_layers=-1)
    if fits:
        Session(mini_file(), config).__exit__(None, None, None)
    else:
        with pytest.raises(EngineError, match=r"does not fit on the GPU: it needs .* GB there, and MTL0 offers"):
            Session(mini_file(), config)


def test_memory_is_the_sum_of_a_context_s_caches_and_the_most_of_several_contexts():
    lines = []
    library.capture_log(lines)
    library._buffers.clear()
    for n_ctx in (256, 64):  # PLaMo 3 has two caches
        with Session(mini_file(ATTENTION), SessionConfig(n_ctx)):
            pass
    told = [(kind, float(mib)) for kind, mib in re.findall(r"(\w+) +buffer size = +([\d.]+) MiB", "".join(lines))]
    first = told[: len(told) // 2]
    assert sum(kind == "KV" for kind, _ in first) == 2
    assert library.buffer_bytes() == pytest.approx(2**20 * sum(mib for _, mib in first), rel=0.02)
