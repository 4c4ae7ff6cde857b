"""A prompt read by one file and written by another: states that are taken, and states that must not pass."""

import msgspec
import numpy as np
import psutil
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from llama_meter.cells import Handover, Relay
from llama_meter.engine.library import capture_log
from llama_meter.engine.parts import CACHE, CONVOLUTION, PARTS, RECURRENT, parts, spliced
from llama_meter.engine.session import EngineError, Session
from llama_meter.errors import StudyError
from llama_meter.measure import quantizing, watch
from llama_meter.measure.asked import sweep
from llama_meter.models import recipes, registry
from plamo_study.arithmetic import states
from plamo_study.studies.quantization import work as quality
from plamo_study.studies.quantization.quality_plan import TEXT
from plamo_study.studies.two_files import plan as plan, relay, work as handover

CELL = Handover(
    model=HYBRID,
    scale="mini",
    dtype="F16",
    n_ctx=48,
    n_gen=16,
    n_chunks=2,
    n_threads=1,
    text=TEXT,
    stranger=ATTENTION,
    candidates=("Q4_K_M",),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both models' files, each beside its quantized one."""
    folder = tmp_path_factory.mktemp("pairs")
    for model in (HYBRID, ATTENTION):
        own = folder / f"{model}.mini.F16.gguf"
        own.symlink_to(mini_file(model))
        quantizing.quantize(own, folder / f"{model}.mini.Q4_K_M.gguf", recipes.recipe("Q4_K_M"))
    return folder


def measured(cell, folder):
    own, stranger = (folder / f"{model}.mini.F16.gguf" for model in (cell.model, cell.stranger))
    return handover.run(cell, own, lambda _: None, stranger)


@pytest.mark.parametrize(("model", "stranger"), [(HYBRID, ATTENTION), (ATTENTION, HYBRID)])
def test_every_pair_is_measured_and_every_planted_state_is_seen(model, stranger, folder):
    found = measured(msgspec.structs.replace(CELL, model=model, stranger=stranger), folder)
    assert found.valid
    assert found.checks["state_identical"]
    assert found.checks["stranger_refused"]
    assert found.checks["other_cache_refused"]
    assert found.checks["truncated_refused"]
    kld = {pair: sum(found.series[f"kld/{pair}"]) for pair in ("F16>F16", "F16>Q4_K_M", "Q4_K_M>F16", "Q4_K_M>Q4_K_M")}
    assert kld["F16>F16"] < 0.01 * min(kld[pair] for pair in kld if pair != "F16>F16")
    assert kld["Q4_K_M>F16"] < kld["Q4_K_M>Q4_K_M"]
    assert len(found.series["distance/Q4_K_M>F16"]) == CELL.n_gen // handover.STEP
    assert sum(found.series["distance/Q4_K_M>F16"]) * handover.STEP == pytest.approx(kld["Q4_K_M>F16"] / CELL.n_chunks)


def test_few_pairs_are_those_with_the_reference_and_each_file_alone():
    cell = msgspec.structs.replace(CELL, candidates=("Q8_0", "Q4_0"), paired="few")
    assert {f"{read}>{write}" for read, write in handover.pairs(cell)} == {
        "F16>F16",
        "F16>Q8_0",
        "F16>Q4_0",
        "Q8_0>F16",
        "Q8_0>Q8_0",
        "Q4_0>F16",
        "Q4_0>Q4_0",
    }


def read_by(dtype, tokens, folder, model=HYBRID):
    capture_log([])
    with Session(folder / f"{model}.mini.{dtype}.gguf", quality.config(CELL, 64)) as session:
        return handover.read(session, tokens)


TOKENS = np.arange(10, 50, dtype=np.int32)


def test_parts_are_as_large_as_the_model_s_shape_says_and_cover_what_differs(folder):
    own, other = (read_by(dtype, TOKENS, folder) for dtype in ("F16", "Q4_K_M"))
    spec = registry.spec(HYBRID, "mini")
    shape = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    sizes = {name: sum(part.stop - part.start for part in where) for name, where in parts(own).items()}
    expected, inner = states.size(shape, len(TOKENS)), spec.mamba_heads * spec.mamba_head_dim
    mamba = (spec.layers + 1) // 2
    assert sizes[CACHE] == expected.full
    assert sizes[CONVOLUTION] == 4 * mamba * inner * (spec.d_conv - 1)
    assert sizes[RECURRENT] == 4 * mamba * inner * spec.d_state
    assert sum(sizes.values()) + expected.described == len(own)
    inside = np.zeros(len(own), bool)
    for part in (part for where in parts(own).values() for part in where):
        inside[part] = True
    differs = np.frombuffer(own, np.uint8) != np.frombuffer(other, np.uint8)
    assert differs[inside].any()
    assert not differs[~inside].any()


def test_a_splice_of_all_parts_is_the_other_state_and_of_one_part_neither(folder):
    own, other = (read_by(dtype, TOKENS, folder) for dtype in ("F16", "Q4_K_M"))
    assert spliced(own, other, PARTS) == other
    assert spliced(own, other, ()) == own
    assert len({own, other, *(spliced(own, other, (part,)) for part in PARTS)}) == 2 + len(PARTS)


def test_states_of_another_length_of_another_kind_or_cut_are_not_spliced(folder):
    own = read_by("F16", TOKENS, folder)
    with pytest.raises(EngineError, match="two layouts"):
        spliced(own, read_by("F16", TOKENS[:-1], folder), PARTS)
    for wrong in (own[:-1], own[: len(own) // 2], read_by("F16", TOKENS, folder, ATTENTION)):
        with pytest.raises(EngineError, match="hybrid"):
            parts(wrong)


def test_parts_of_a_state_add_up_to_about_the_whole(folder):
    found = measured(msgspec.structs.replace(CELL, compares="parts"), folder)
    assert found.valid
    assert found.checks["fixed_is_tail"]
    kld = {part: sum(found.series[f"kld/Q4_K_M>F16/{part}"]) for part in ("none", "all", *PARTS)}
    assert kld["none"] < 0.01 * kld["all"]
    assert 0 < min(kld[part] for part in PARTS) < max(kld[part] for part in PARTS) < 1.5 * kld["all"]


def test_a_part_that_is_not_spliced_makes_the_row_wrong(monkeypatch, folder):
    monkeypatch.setattr(handover, "spliced", lambda own, other, names: own)
    found = measured(msgspec.structs.replace(CELL, compares="parts"), folder)
    assert not found.checks["all_is_other"]
    assert not found.checks["other_convolution"]
    assert not found.valid


def test_a_free_answer_of_the_reference_is_its_own_to_the_end(folder):
    found = measured(msgspec.structs.replace(CELL, compares="free"), folder)
    assert found.valid
    assert found.series["same/F16>F16"] == [CELL.n_gen] * CELL.n_chunks
    assert all(0 <= same <= CELL.n_gen for same in found.series["same/Q4_K_M>Q4_K_M"])
    whole = sum(found.series["under/F16>F16"])
    assert 0 < whole <= sum(found.series["under/Q4_K_M>Q4_K_M"]) * 1.2


def test_a_state_that_is_not_handed_over_makes_the_row_wrong(monkeypatch, folder):
    monkeypatch.setattr(handover, "read", lambda session, prompt: lost(session, prompt[::-1]))
    found = measured(CELL, folder)
    assert not found.checks["undivided"]
    assert not found.valid


def lost(session, prompt):
    """The state of other tokens."""
    session.clear()
    session.prefill({0: prompt})
    return session.get_state(0)


def test_a_state_that_the_engine_takes_though_it_should_not_makes_the_row_wrong(monkeypatch, folder):
    monkeypatch.setattr(handover, "refuses", lambda *_: False)
    assert not measured(CELL, folder).valid


def test_a_whole_state_is_not_refused():
    capture_log([])
    with Session(mini_file(), quality.config(CELL, 64)) as session:
        state = handover.read(session, np.arange(10, 30, dtype=np.int32))
        assert not handover.refuses(session, state, 20)
        assert handover.refuses(session, state[:-1], 20)


def test_random_weights_are_refused():
    with pytest.raises(StudyError, match="--scale mini"):
        plan.pairs("shape")


REQUEST = Relay(model=HYBRID, scale="mini", dtype="F16", n_prompt=40, n_gen=8, writer=HYBRID, writer_dtype="Q4_K_M")


def relayed(cell, folder):
    paths = [folder / f"{model}.mini.{dtype}.gguf" for model, _, dtype in cell.files]
    return relay.run(cell, paths[0], lambda _: None, *paths[1:])


@pytest.mark.parametrize("n_seq", [1, 3])
@pytest.mark.parametrize("writer", ["", HYBRID])
def test_a_request_is_answered_and_each_answer_is_right(writer, n_seq, folder):
    cell = msgspec.structs.replace(REQUEST, n_seq=n_seq, writer=writer, writer_dtype="Q4_K_M" if writer else "")
    found = relayed(cell, folder)
    assert found.valid
    assert found.n_evaluated == n_seq * (cell.n_prompt + cell.n_gen - 1)
    read, save, load, write = found.samples_ns[0]
    assert min(read, write) > 0
    assert (save > 0, load > 0) == (bool(writer), bool(writer))
    assert len(found.series["resident"]) == len(cell.files) + 1


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_a_reader_in_a_process_of_its_own_ships_states_that_the_answers_rest_on(model, folder):
    cell = msgspec.structs.replace(REQUEST, model=model, writer=model, n_seq=1, n_processes=2)
    found = relayed(cell, folder)
    assert found.valid
    assert found.checks["state_identical"]
    assert found.n_evaluated == cell.n_prompt + cell.n_gen - 1
    assert min(found.samples_ns[0]) > 0
    before, reader, both = found.series["resident"]
    assert before == 0 < reader < both


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_a_reader_reads_on_while_answers_are_written_and_each_answer_stays_right(model, folder, monkeypatch):
    batches, usual = [], Session.decode

    def seen(session, tokens):
        batches.append(sorted(tokens))
        usual(session, tokens)

    monkeypatch.setattr(Session, "decode", seen)
    cell = msgspec.structs.replace(REQUEST, model=model, writer=model, n_seq=3, n_gen=24, n_processes=2)
    found = relayed(cell, folder)
    assert found.valid
    assert found.checks["state_identical"]
    assert found.n_evaluated == 3 * (cell.n_prompt + cell.n_gen - 1)
    read, *_ = found.samples_ns[0]
    assert read > 0, "until the first state is here"
    own = batches[relay.WARM_STEPS :]
    assert sum(map(len, own)) == 3 * cell.n_gen, "every answer whole, none twice"
    assert all(batch == list(range(batch[0], batch[-1] + 1)) for batch in own), "they join and leave in order"


@pytest.mark.parametrize("n_seq", [1, 3])
def test_what_a_reader_computes_in_a_process_of_its_own_is_no_other_program_s(n_seq, folder, monkeypatch):
    counted, usual = [], watch.timed

    def seen(*helpers):
        counted.append([psutil.Process(pid).cmdline() for pid in helpers])
        return usual(*helpers)

    monkeypatch.setattr(watch, "timed", seen)
    relayed(msgspec.structs.replace(REQUEST, n_seq=n_seq, n_processes=2), folder)
    assert counted
    assert all(any("relay" in word for word in command) for (command,) in counted)


def test_a_reader_that_dies_while_answers_are_written_is_named(folder, monkeypatch):
    usual, begin, begun = relay.There.next, relay.peers.Peer.__init__, []

    def dying(reader):
        came = usual(reader)
        begun[0].process.kill()
        return came

    def kept(peer, *what):
        begin(peer, *what)
        begun.append(peer)

    monkeypatch.setattr(relay.peers.Peer, "__init__", kept)
    monkeypatch.setattr(relay.There, "next", dying)
    cell = msgspec.structs.replace(REQUEST, model=HYBRID, writer=HYBRID, n_seq=3, n_prompt=400, n_processes=2)
    with pytest.raises(StudyError, match="the reader: ended by itself"):
        relayed(cell, folder)


def test_a_reader_process_that_cannot_load_its_file_is_named(folder, tmp_path):
    damaged = tmp_path / f"{HYBRID}.mini.F16.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(StudyError, match="the reader: ended by itself"):
        relay.run(
            msgspec.structs.replace(REQUEST, n_processes=2),
            damaged,
            lambda _: None,
            folder / f"{HYBRID}.mini.Q4_K_M.gguf",
        )


def test_a_writer_that_got_a_damaged_state_is_seen(monkeypatch, folder):
    usual, calls = Session.set_state, []

    def damaged(session, seq, state, n_past, part="everything"):
        calls.append(n_past)
        given = bytearray(bytes(state))
        if len(calls) == 3:  # after the warm-up of each file
            for where in (part for each in parts(bytes(state)).values() for part in each):
                given[where] = bytes(where.stop - where.start)
        usual(session, seq, bytes(given), n_past, part)

    monkeypatch.setattr(Session, "set_state", damaged)
    found = relayed(REQUEST, folder)
    assert calls[2] == REQUEST.n_prompt - 1
    assert not found.checks["second_path"]
    assert not found.valid


def test_files_of_two_models_and_one_file_are_refused(tmp_path):
    hybrid, other = mini_file(HYBRID), mini_file(ATTENTION)
    for study in (plan.pairs, plan.requests):
        with pytest.raises(StudyError, match="2 models"):
            study("mini", sweep=sweep(files=[str(hybrid), str(other)]))
        with pytest.raises(StudyError, match="two are needed"):
            study("mini", sweep=sweep(files=str(hybrid)))


def test_two_files_of_one_model_are_paired_as_they_are_given(folder, tmp_path):
    own = tmp_path / "二つ の モデル"
    own.mkdir()
    paths = [own / f"モデル {dtype}.gguf" for dtype in ("F16", "Q4_K_M")]
    for path, dtype in zip(paths, ("F16", "Q4_K_M"), strict=True):
        path.write_bytes((folder / f"{HYBRID}.mini.{dtype}.gguf").read_bytes())
    asked = sweep(files=[str(path) for path in paths], n_prompt="48", n_gen="16")
    (cell,) = plan.pairs("shape", sweep=asked).cells
    assert cell.files[0][2] == "F16"
    assert (cell.candidates, cell.n_ctx, cell.n_gen, cell.stranger) == (("Q4_K_M",), 48, 16, "")
    found = handover.run(msgspec.structs.replace(cell, n_chunks=2, n_threads=1), paths[0], lambda _: None, paths[1])
    assert found.valid
    assert "stranger_refused" not in found.checks
    kinds = [(cell.dtype, cell.writer_dtype) for cell in plan.requests("shape", sweep=asked).cells]
    assert kinds == [("F16", ""), ("F16", "Q4_K_M"), ("Q4_K_M", "")]


def test_lengths_and_types_that_are_asked_for_are_those_that_are_planned():
    cells = plan.pairs("mini", sweep=sweep(dtypes="Q8_0", n_prompt="32,64", n_gen="16")).cells
    assert {(cell.model, cell.candidates, cell.n_ctx, cell.n_gen) for cell in cells} == {
        (model, ("Q8_0",), n, 16) for model in (HYBRID, ATTENTION) for n in (32, 64)
    }
    shapes = {
        (cell.n_prompt, cell.n_gen) for cell in plan.requests("shape", sweep=sweep(n_prompt="32", n_gen="8")).cells
    }
    assert shapes == {(32, 8), (plan.READ_EACH, plan.WRITTEN_EACH)}
