"""Files that a user gives by path: named, judged and measured where they lie, or refused with a reason and a mend."""

import hashlib
import os
import shutil
from pathlib import Path

import foreign_models
import pytest
from gguf import GGUFReader

from llama_meter import paths
from llama_meter.cells import Gate
from llama_meter.engine import builds
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.errors import StudyError
from llama_meter.measure import machine, plan as shared, proof, request
from llama_meter.measure.files import model_fact
from llama_meter.models import registry, synthetic, tensors
from llama_meter.models.check import paths_of, requested
from plamo_study.measurements import measurements
from plamo_study.studies.latency import plan as latency
from plamo_study.studies.right_answers import hybrids
from plamo_study.studies.serving import plan as serving
from plamo_study.studies.speculative import plan as speculative
from plamo_study.studies.your_machine import plan as your_machine

MINI = paths.MODELS / "plamo-2-1b.mini.F16.gguf"


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """Nothing is remembered from other tests or written into the checkout, and ceilings are measured in a moment."""
    monkeypatch.setattr(paths, "MODELS", tmp_path / "models")
    monkeypatch.setattr(paths, "MEASURED", tmp_path / "measured")
    monkeypatch.setattr(registry, "FILES", {})
    monkeypatch.setitem(shared.MATMUL_SIZE, "file", 256)
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 20)


@pytest.fixture
def llama(tmp_path):
    return foreign_models.write(tmp_path / "llama, tiny.gguf")


def test_a_file_is_named_and_typed_by_its_header_wherever_it_lies(tmp_path):
    folder = tmp_path / "some dir"
    folder.mkdir()
    path = shutil.copy(MINI, folder / "モデル.Q4_K_M.gguf")
    [found] = requested(str(path))
    assert found.spec.arch == "plamo2"
    assert found.dtype == "F16", "the header says so, whatever the name says"
    assert found.file == (found.spec.name, "file", "F16")
    assert found.has_oracle
    assert (found.n_bytes, found.sha256) == (path.stat().st_size, tensors.sha256(path))
    assert sorted(folder.iterdir()) == [path], "nothing is written beside it"


def test_a_file_without_a_name_bears_its_own_and_one_without_a_suffix_is_read(tmp_path, llama):
    blob = foreign_models.write(tmp_path / "blob.gguf", layers=3).rename(tmp_path / "sha256-0a1b")
    link = tmp_path / "linked.Q8_0.gguf"
    link.symlink_to(foreign_models.write(tmp_path / "else.gguf", layers=4).rename(tmp_path / "sha256-0a1c"))
    assert [each.spec.name for each in requested([str(llama)])] == ["llama, tiny"]
    assert requested(str(blob))[0].spec.name == "sha256-0a1b"
    assert requested(str(link))[0].spec.name.startswith("linked")


def test_several_files_are_told_apart_even_by_one_name(tmp_path):
    a = foreign_models.write(tmp_path / "a.gguf", name="same")
    b = foreign_models.write(tmp_path / "b.gguf", name="same", layers=3)
    first, second = requested(f"{a}, {b}")
    assert first.spec.name == "same"
    assert second.spec.name == f"same {second.sha256[:6]}"
    assert requested([str(a), str(a)]) == [first]


def test_a_path_with_commas_and_a_list_are_read_as_meant(tmp_path, llama, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths_of(str(llama)) == [llama]
    assert paths_of("~/llama, tiny.gguf") == [llama]
    assert paths_of(f'["{llama}", "x.gguf"]') == [llama, Path("x.gguf")]
    assert paths_of("a.gguf,b.gguf") == [Path("a.gguf"), Path("b.gguf")]


@pytest.fixture
def read(monkeypatch):
    """The files whose bytes are read for a hash."""
    found, sha256 = [], tensors.read_sha256
    monkeypatch.setattr(tensors, "read_sha256", lambda path: found.append(path) or sha256(path))
    return found


def change_in_place(path):
    """Another byte, and the time of before."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [lambda path: os.utime(path, ns=(1, 1)), change_in_place])
def test_a_file_is_hashed_once_as_long_as_it_looks_the_same(change, llama, read):
    requested(str(llama))
    read.clear()
    requested(str(llama))
    assert read == []
    change(llama)
    after = requested(str(llama))[0].sha256
    assert read == [llama]
    assert after == hashlib.sha256(llama.read_bytes()).hexdigest()


def test_a_file_of_the_project_s_own_is_hashed_once_and_its_pin_is_held_against_its_bytes_each_time(read):
    path = synthetic.make("plamo-2-1b", "mini", "F16")
    first = model_fact("plamo-2-1b", "mini", "F16")
    read.clear()
    assert model_fact("plamo-2-1b", "mini", "F16") == first
    assert read == []
    change_in_place(path)
    with pytest.raises(StudyError, match=r"models\.toml"):
        synthetic.make("plamo-2-1b", "mini", "F16")
    assert model_fact("plamo-2-1b", "mini", "F16")["sha256"] != first["sha256"]


def test_its_fact_says_what_it_is_and_not_where_it_lies(tmp_path, llama):
    [found] = requested(str(llama))
    fact = model_fact(*found.file)
    assert fact["sha256"] == found.sha256
    assert fact["shape"]["layers"] == foreign_models.LAYERS
    assert fact["n_params"] == sum(int(t.n_elements) for t in GGUFReader(llama).tensors)
    assert str(tmp_path) not in str(fact)


def test_a_file_that_only_a_repair_makes_measurable_is_refused_with_the_command(tmp_path):
    path = synthetic.write(registry.spec("plamo-2-1b", "mini"), "F16", tmp_path / "arrays.gguf", head_count_array=True)
    with pytest.raises(StudyError, match="models check FILE --repair"):
        requested(str(path))


def test_users_rates_and_slots_reach_a_server_of_the_file(llama):
    how = {"n_clients": "3", "rates": "0.5,4", "n_prompt": "16", "n_gen": "4", "n_threads": "1", "n_gpu_layers": "0"}
    varied = request.sweep(files=str(llama), n_seq="2,5", **how)
    loads = [cell for cell in serving.serving("shape", gpu=True, sweep=varied).cells if cell.workload == "serving"]
    assert {cell.files[0] for cell in loads} == set(varied.files)
    assert {(cell.n_prompt, cell.n_gen, cell.n_threads, cell.n_gpu_layers) for cell in loads} == {(16, 4, 1, 0)}
    together = {(cell.n_seq, cell.n_clients) for cell in loads if cell.n_clients}
    rates = {cell.per_second: cell.n_requests for cell in loads if not cell.n_clients}
    assert together >= {(n_seq, n) for n_seq in (2, 5) for n in (1, 3)}
    assert {n for _, n in together} == {1, 3}
    assert set(rates) == {0.5, 4.0}
    assert rates[0.5] < rates[4.0], "a load lasts a time and is no number of requests"
    with pytest.raises(StudyError, match="type_k"):
        serving.serving("shape", sweep=request.sweep(files=str(llama), type_k="q8_0"))


def test_settings_and_lengths_reach_the_cells(llama):
    varied = request.sweep(files=str(llama), n_prompt="64", n_seq="2", type_k="q8_0", flash_attn="on", n_threads="1")
    cells = [cell for cell in your_machine.your_machine("shape", sweep=varied).cells if cell.files]
    assert {cell.files[0] for cell in cells} == set(varied.files)
    assert {(cell.type_k, cell.flash_attn, cell.n_threads) for cell in cells} == {("q8_0", "on", 1)}
    assert {cell.n_prompt for cell in cells if cell.workload == "prefill"} == {64}
    assert {cell.n_seq for cell in cells} == {1, 2}


@pytest.mark.whole
def test_a_file_of_another_architecture_is_judged_by_its_consistency_and_measured_once(llama):
    varied = request.sweep(files=str(llama), n_prompt="16", n_gen="4", n_seq="2")
    m = measurements("your-machine", request.Request("live", "mini", 0, "cpu", varied))
    of_file = m[m.file != ""]
    assert set(of_file.verdict) == {"consistent"}
    assert {"prefill", "step"} <= set(of_file.metric)
    wider = request.sweep(files=str(llama), n_prompt="16,32", n_gen="4", n_seq="2")
    again = measurements("your-machine", request.Request("live", "mini", 0, "cpu", wider))
    assert set(m.key) <= set(again.key), "a cell measured once is reused by another sweep"


def test_lengths_of_drafts_acceptances_and_a_file_that_drafts_reach_the_cells(llama):
    drafter = paths.ROOT / "data/models/plamo-2-draft.mini.F16.gguf"
    varied = request.sweep(files=str(MINI), draft_file=str(drafter), n_draft="3,5", acceptance="0.6", n_threads="1")
    cells = speculative.speculative("shape", sweep=varied).cells
    assert {cell.files[0] for cell in cells} == set(varied.files)
    assert {cell.n_draft for cell in cells} == {3, 5}
    assert {cell.accepts for cell in cells if cell.drafter == ""} == {0.6}
    assert {cell.n_threads for cell in cells} == {1}
    on_text = speculative.drafters("shape", sweep=varied).cells
    assert {cell.files[1:] for cell in on_text if cell.drafter == "model"} == {varied.draft_file}
    assert {cell.drafter for cell in on_text} == {"lookup", "model"}
    own = speculative.drafters("mini", sweep=request.sweep(n_draft="2")).cells
    assert {cell.n_draft for cell in own if cell.drafter == "lookup"} == {2}


def test_a_draft_of_another_vocabulary_or_that_no_call_holds_is_refused_before_anything_is_measured(llama):
    with pytest.raises(StudyError, match="would mean another text"):
        speculative.drafters("mini", sweep=request.sweep(files=str(MINI), draft_file=str(llama)))
    with pytest.raises(StudyError, match="longer than the context"):
        speculative.speculative("mini", sweep=request.sweep(n_draft="200"))


def test_shipped_lengths_reach_the_cells_and_our_own_give_way_to_a_short_context(llama):
    varied = request.sweep(files=str(llama), n_prompt="16,48")
    cells = [cell for cell in latency.disaggregation("shape", sweep=varied).cells if cell.workload == "shipment"]
    assert {cell.n_prompt for cell in cells} == {16, 48}
    usual = latency.disaggregation("shape", sweep=request.sweep(files=str(llama)))
    longest = registry.FILES[varied.files[0]].spec.context_length
    assert all(sum(cell.shape[1:]) <= longest for cell in usual.cells)


@pytest.mark.skipif(not (builds.folder("architectures") / "engine.toml").exists(), reason="the generator is not built")
@pytest.mark.parametrize("name", ["plamo2-dense", "qwen3next-moe"])
def test_a_hybrid_of_the_engine_s_own_generator_is_taken_as_a_file_and_judged_by_its_consistency(name, tmp_path):
    [found] = requested(str(hybrids.write(name, tmp_path)))
    assert found.spec.name == name, "its header says that it has no name"
    assert not found.has_oracle, "PLaMo's own have scales and ropes that the oracle does not compute"
    wanted = request.sweep(files=str(found.path), n_prompt="16", n_gen="4")
    [gate] = your_machine.your_machine("shape", sweep=wanted).gates
    assert gate.judges == "consistent"
    with Session(found.path, SessionConfig(gate.n_prompt)) as session:
        measured = proof.gate(gate, session, [], found.path)
    assert measured.valid is True, measured.checks


def test_a_mixing_engine_is_no_consistent_one(llama, monkeypatch):
    """Planted: sequences see one another's tokens."""
    usual = Session.decode

    def mixed(self, tokens):
        swapped = dict(zip(tokens, reversed(tokens.values()), strict=True))
        usual(self, swapped if len(tokens) > 1 else tokens)

    gate = Gate(model="x", scale="file", dtype="F16", n_prompt=24, judges="consistent")
    with Session(llama, SessionConfig(24)) as session:
        assert proof.gate(gate, session, [], llama).valid is True
        monkeypatch.setattr(Session, "decode", mixed)
        measured = proof.gate(gate, session, [], llama)
    assert measured.valid is False
    assert not measured.checks["together_agrees"]
