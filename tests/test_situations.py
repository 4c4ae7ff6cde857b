"""Situations from public reports: each ends in one sentence or works, and never in a traceback or a false verdict."""

import os
import subprocess
import sys
from datetime import UTC, datetime

import foreign_models
import nbformat
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from llama_meter import paths
from llama_meter.cells import Prefill
from llama_meter.errors import StudyError
from llama_meter.measure import plan, request
from llama_meter.models import check, header, registry
from plamo_study.cli import notebooks
from plamo_study.studies.your_machine import plan as your_machine


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MODELS", tmp_path / "models")
    monkeypatch.setattr(registry, "FILES", {})


def derived(tmp_path, key, value, kind=None, arch="llama", sub=None):
    """A small model with one key of its header changed; `kind` None: without the key."""
    reader = GGUFReader(foreign_models.write(tmp_path / "source.gguf"))
    path = tmp_path / "derived.gguf"
    writer = GGUFWriter(path, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", key):
            item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=item)
    if kind is not None:
        writer.add_key_value(key, value, kind, sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


UINT32, BOOL, STRING = GGUFValueType.UINT32, GGUFValueType.BOOL, GGUFValueType.STRING


@pytest.mark.parametrize(
    ("arch", "key", "value", "kind", "role"),
    [
        ("llama", "llama.pooling_type", 3, UINT32, "embedding"),
        ("llada-moe", "x", 0, None, "diffusion"),
        ("llama", "diffusion.shift_logits", True, BOOL, "diffusion"),
        ("llama", "llama.attention.causal", False, BOOL, "both ways"),
        ("llama", "llama.attention.causal", True, BOOL, ""),
    ],
)
def test_what_a_file_is_for_is_told_by_its_header(arch, key, value, kind, role, tmp_path):
    said = header.not_judged(header.read(derived(tmp_path, key, value, kind, arch)))
    assert role in said
    assert bool(role) == bool(said)


def test_the_type_is_that_of_the_bytes_where_the_label_is_another(tmp_path):
    assert check.requested(str(derived(tmp_path, "general.file_type", 15, UINT32)))[0].dtype == "F16"


@pytest.mark.parametrize(("value", "kind", "sub"), [("two", STRING, None), (["a"], GGUFValueType.ARRAY, STRING)])
def test_a_number_of_layers_that_is_none_is_one_sentence(value, kind, sub, tmp_path):
    with pytest.raises(StudyError, match="block_count"):
        check.requested(str(derived(tmp_path, "llama.block_count", value, kind, sub=sub)))


def test_a_file_without_a_name_keeps_the_first_that_it_was_given(tmp_path):
    path = derived(tmp_path, "general.name", None)
    first = check.requested(str(path))[0].file
    moved = path.rename(tmp_path / "other.gguf")
    assert check.requested(str(moved))[0].file == first == ("derived", "file", first[2])


@pytest.mark.parametrize(
    ("odd", "code", "message"),
    [
        ({"PYTHONPATH": "numpy/__init__.py"}, 2, "brings numpy"),
        ({"COLUMNS": "0", "LINES": "00"}, 2, "/nope"),
        ({"HOME": ""}, 2, "/nope"),
    ],
)
def test_odd_surroundings_are_named_or_mended_and_hide_no_error(odd, code, message, tmp_path):
    if module := odd.get("PYTHONPATH"):
        (tmp_path / module).parent.mkdir(exist_ok=True)
        (tmp_path / module).write_text("")
        odd = {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "plamo_study.cli.main", "models", "check", "/nope"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | odd)
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


# ------------------------------------------------------------------ notebooks


@pytest.mark.parametrize(
    ("files", "day", "kept"),
    [
        ("/home/me/b.gguf", "today", ["your-machine-{}T100000"]),
        ("", "2026-01-02", ["your-machine-2026-01-02T100000"]),
    ],
)
def test_the_page_of_another_day_or_of_other_files_is_kept(files, day, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "REPORTS", tmp_path)
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    day = today if day == "today" else day
    made = {"parameters": {"files": files}, "start_time": f"{day}T10:00:00"}
    notebook = nbformat.v4.new_notebook(metadata={"papermill": made})
    nbformat.write(notebook, tmp_path / "your-machine.ipynb")
    assert notebooks.is_new({"files": "a.gguf" if files else ""}) == bool(files and files != "a.gguf")
    left = {path.stem for path in tmp_path.iterdir()}
    assert left == ({name.format(today) for name in kept} or {"your-machine"})


def test_a_short_context_is_measured_at_lengths_that_fit_and_others_are_refused_with_some_that_do(tmp_path):
    files = str(derived(tmp_path, "llama.context_length", 256, UINT32))
    own = request.sweep(files=files)
    for varied in (own, your_machine.first_round("shape", own)):
        planned = your_machine.your_machine("shape", sweep=varied)
        assert all(map(plan.fits, planned.every_cell))
        assert any(isinstance(cell, Prefill) and cell.n_prompt == 128 for cell in planned.cells)
    with pytest.raises(StudyError, match="-p n_prompt 64,128"):
        your_machine.your_machine("shape", sweep=request.sweep(files=files, n_prompt="512"))
