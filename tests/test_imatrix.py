"""Importance matrices: sums the oracle confirms, a file llama.cpp reads, and a quantization that heeds them."""

import ctypes
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from gguf.quants import dequantize

from llama_meter.engine.ggml import GgufParams, ggml
from llama_meter.engine.library import capture_log
from llama_meter.engine.nodes import InputSquares
from llama_meter.engine.session import SessionConfig
from llama_meter.errors import StudyError
from llama_meter.measure import quantizing
from llama_meter.measure.worker import ORPHANED
from llama_meter.models import header as headers, imatrix, recipes, registry, synthetic, tensors
from llama_meter.models.imatrix import Imatrix
from llama_meter.models.recipes import Recipe
from llama_meter.oracle.forward import Oracle

CHUNK = 32
BOS = 1
TEXT = "".join(f"{a} and {b}, " for a, b in zip("abcdefghijklm" * 2, "nopqrstuvwxyz" * 2, strict=True)) + "あいう 猫"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[HYBRID, ATTENTION])
def computed(request, text, tmp_path_factory):
    """An embedded model, its importance matrix, and what progress was told."""
    told, model, out = [], mini_file(request.param), tmp_path_factory.mktemp("computed") / "matrix.gguf"
    quantizing.compute_imatrix(model, text, out, lambda *at: told.append(at), chunk=CHUNK)
    return model, out, told


@pytest.fixture(scope="module")
def without_rope(tmp_path_factory):
    path = tmp_path_factory.mktemp("defects") / "array.gguf"
    return synthetic.write(registry.spec(HYBRID, "mini"), "F16", path, head_count_array=True)


@pytest.fixture
def small(tmp_path):
    """A matrix made by hand, and its file."""
    sums = {"blk.1.b.weight": np.array([3, 6], np.float32), "blk.0.a.weight": np.arange(4, dtype=np.float32)}
    matrix = Imatrix(sums, {"blk.1.b.weight": 3, "blk.0.a.weight": 0}, "text.txt", 3, 1)
    return matrix, imatrix.write(tmp_path / "small.gguf", matrix)


def oracle_sums(path, chunks):
    """What the oracle multiplies each matrix with: sums of squares by tensor name."""
    oracle, sums = Oracle(path), {}
    linear = oracle._weights.linear

    def summing(x, name, *at):
        sums[name] = sums.get(name, 0) + np.square(x, dtype=np.float64).sum(axis=0)
        return linear(x, name, *at)

    oracle._weights.linear = summing
    for tokens in chunks:
        oracle.logits(tokens)
    return sums


# ---------------------------------------------------------------- the sums


def test_the_sums_are_those_of_the_oracle_and_progress_counts_the_bytes_of_the_text(text, computed):
    model, out, told = computed
    capture_log([])
    with InputSquares(model, SessionConfig(CHUNK, n_gpu_layers=0)) as engine:
        tokens = engine.tokenize(text.read_bytes())
    whole = len(tokens) // CHUNK
    assert whole >= 3
    assert len(tokens) % CHUNK, "the tail that is left out is tested only when there is one"
    chunks = tokens[: whole * CHUNK].reshape(whole, CHUNK).copy()
    chunks[:, 0] = BOS  # as llama-imatrix does where the model wants it
    expected = {name: sums for name, sums in oracle_sums(model, chunks).items() if name.startswith("blk.")}
    found = imatrix.read(out)
    matrices = [t for t in tensors.tensor_table(model) if t.layer is not None and len(t.shape) > 1]
    assert found.sums.keys() == expected.keys() == {t.name for t in matrices if not tensors.stays_f32(t.name)}
    assert set(found.counts.values()) == {whole * CHUNK}
    assert (found.chunks, found.chunk_size, found.dataset) == (whole, CHUNK, "text.txt")
    for name, sums in expected.items():
        assert np.linalg.norm(found.sums[name] - sums) / np.linalg.norm(sums) < 5e-3, name
    size = text.stat().st_size
    assert (told[0], told[-1], len(told)) == ((0, size), (size, size), whole + 1)


# ---------------------------------------------------------------- the file


def test_a_file_read_back_is_what_was_written(small):
    matrix, path = small
    back = imatrix.read(path)
    assert (back.counts, back.dataset, back.chunks, back.chunk_size) == (matrix.counts, "text.txt", 3, 1)
    assert all(np.array_equal(back.sums[name], matrix.sums[name]) for name in matrix.sums)
    assert back.means()["blk.1.b.weight"].tolist() == [1, 2]
    assert back.means()["blk.0.a.weight"].tolist() == [1, 1, 1, 1], "nothing counted: every column weighs the same"


def test_llama_cpps_own_reader_opens_it(small):
    base = ggml("ggml-base")
    file = base.gguf_init_from_file(str(small[1]).encode(), GgufParams(True, None))
    assert file
    names = [base.gguf_get_tensor_name(file, i) for i in range(4)]
    assert names == [
        f"{name}.weight.{what}".encode() for name in ("blk.0.a", "blk.1.b") for what in ("in_sum2", "counts")
    ]
    assert all(base.gguf_find_key(ctypes.c_void_p(file), key.encode()) >= 0 for key in (*imatrix.KEYS, "general.type"))
    base.gguf_free(file)
    assert list(small[1].parent.iterdir()) == [small[1]]


def claiming(data, name, n):
    """The file, but that an array or a tensor has so many entries."""
    at = data.index(name) + len(name) + (8 if name.startswith(b"imatrix") else 4)  # types, or the number of dimensions
    return data[:at] + struct.pack("<Q", n) + data[at + 8 :]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:60], "bytes are left"),
        (lambda data: data[:-30], "cut short or damaged"),
        (lambda data: claiming(data, b"imatrix.datasets", 1 << 32), "entries of imatrix.datasets"),
        (lambda data: claiming(data, b"blk.1.b.weight.in_sum2", 1 << 60), "its tensors take"),
        (lambda data: data.replace(b"a.weight.counts", b"a.weight.coun_s"), "counts is missing"),
        (lambda data: data.replace(struct.pack("<2f", 3, 6), struct.pack("<2f", 3, np.nan)), "not finite"),
        (lambda data: data.replace(b"imatrix.chunk_size", b"imatrix.chunk_siz_"), "no importance matrix"),
        (lambda data: mini_file().read_bytes(), "no importance matrix"),
        (lambda data: b"\x02\0\0\0\x0e\0\0\0blk.0.a.weight" + data, r"older format[\s\S]*--in-file"),
        (lambda data: b"<html>", "web page"),
    ],
)
def test_a_damaged_matrix_is_refused(small, spoil, message):
    path = small[1]
    path.write_bytes(spoil(path.read_bytes()))
    tracemalloc.start()
    with pytest.raises(StudyError, match=message):
        imatrix.read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * headers.MAX_HEADER


# ---------------------------------------------------------------- what it does to a quantized file


@pytest.mark.long
def test_a_matrix_lowers_the_error_it_weighs_and_is_named_in_the_file(computed, tmp_path):
    (source, matrix, _), made_by = computed, Recipe("Q4_K_M")
    plain = quantizing.quantize(source, tmp_path / "plain.gguf", made_by)
    heeded = quantizing.quantize(source, tmp_path / "heeded.gguf", made_by, imatrix=matrix)
    found = imatrix.read(matrix)
    means = found.means()
    exact, without, with_it = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (source, plain, heeded))

    def weighed(file, name):
        error = dequantize(file[name].data, file[name].tensor_type) - exact[name].data.astype(np.float32)
        return float(np.sum(means[name] * np.square(error)))

    for kind in {name.split(".", 2)[2] for name in means}:
        names = [name for name in means if name.endswith("." + kind)]
        assert sum(weighed(with_it, name) for name in names) < sum(weighed(without, name) for name in names), kind
    assert np.array_equal(without["token_embd.weight"].data, with_it["token_embd.weight"].data), "it has no entry"
    facts = {"file": "matrix.gguf", "dataset": "text.txt", "entries_count": len(means), "chunks_count": found.chunks}
    facts = {f"quantize.imatrix.{key}": value for key, value in facts.items()}
    assert facts.items() <= tensors.metadata(heeded).items()
    assert not facts.keys() & tensors.metadata(plain).keys()


def test_a_matrix_of_another_model_is_refused_where_it_is_needed(small, tmp_path):
    with pytest.raises(StudyError, match="computed on another model"):
        quantizing.quantize(mini_file(), tmp_path / "out.gguf", Recipe("Q4_0"), imatrix=small[1])
    assert not (tmp_path / "out.gguf").exists()
    assert recipes.plan_sizes(mini_file(), Recipe("BF16"), small[0]), "a float type needs no entry"


# ---------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"caf\xe9", "is not UTF-8"),
        (b"short", "tokens long, one piece takes 512"),
        (b"", "0 tokens"),
    ],
)
def test_a_text_that_does_not_do_is_named_with_its_mend(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StudyError, match=message) as refused:
        quantizing.compute_imatrix(mini_file(), path, tmp_path / "out.gguf")
    assert str(path) in refused.value.what
    assert [found for found in tmp_path.iterdir() if found != path] == []


@pytest.mark.long
def test_a_model_that_hangs_the_engine_is_given_up(without_rope, text, tmp_path):
    with pytest.raises(StudyError, match="no sign of life for 3 s") as stopped:
        quantizing.compute_imatrix(without_rope, text, tmp_path / "out.gguf", chunk=CHUNK, silence_s=3)
    assert "models check" in stopped.value.mend
    assert list(tmp_path.iterdir()) == []


def test_activations_that_are_not_finite_end_it_with_the_tensors_name(text, tmp_path):
    source = Path(shutil.copy(mini_file(), tmp_path / "huge.gguf"))
    norm = next(tensor for tensor in gguf.GGUFReader(source, "r+").tensors if tensor.name == "blk.2.attn_norm.weight")
    norm.data[:] = 3e38
    with pytest.raises(StudyError, match=re.escape("blk.2.ssm_in.weight is not finite")):
        quantizing.compute_imatrix(source, text, tmp_path / "out.gguf", chunk=CHUNK)
    assert list(tmp_path.iterdir()) == [source]


def test_the_process_ends_with_its_parent_even_inside_the_engine(without_rope, text, tmp_path):
    job = quantizing.Evaluating(
        source=str(without_rope), text=str(text), out=str(tmp_path / "o"), chunk=CHUNK, n_threads=1
    )
    command = [sys.executable, "-m", "llama_meter.measure.worker", "0", quantizing.__name__]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdin.write(msgspec.json.encode(job) + b"\n")
    child.stdin.flush()
    assert any(line.startswith(b"@chunk 0 ") for line in child.stderr), "it evaluates, and would for ever"
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(timeout=30) == ORPHANED
