"""The registry, the synthetic files and what is read back from them."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.models import recipes, registry, synthetic, tensors, values

MINIS = ("plamo-2-1b", "plamo-3-nict-2b")
F32 = gguf.GGMLQuantizationType.F32
RANDOM = {  # what random weights in the shapes of the embedded models hash to, on any machine
    ("plamo-2-1b", "F32"): "704d78f6e2099eadd727fa350b0605b70875d3c7a8899a09dc372f2f40d19275",
    ("plamo-2-1b", "F16"): "3cdcf771360450e566a01e902257fccd0ee66bc2ee1a7f7c9e82df098d67ff13",
    ("plamo-2-1b", "BF16"): "fc90044196cafdb8ad6109070af6ab8a517a8f9042ddd6488876774e869994ec",
    ("plamo-2-1b", "Q8_0"): "8715351aec24a02697ab9eb74f565948710a476786fdca8ec90921252ad18298",
    ("plamo-3-nict-2b", "F32"): "74ec37fe14f1aec6792b56155505e6d44c126ff427b088b90327d50dcabda5c9",
    ("plamo-3-nict-2b", "F16"): "78044b4324c43bc424c87fa47954288bae5b995eeb5e001eb0f02a20d6af5e7a",
    ("plamo-3-nict-2b", "BF16"): "153f8e0c353f6fc1dc81cc90902e61c46ee93956a0ddf59507e111e7f406cfd8",
    ("plamo-3-nict-2b", "Q8_0"): "ee86a237123f230c273d3ce1c537d985d9cc7ae7738b1494e61e86b7a07a8ba3",
}

# A child process, because a crash of the engine must fail one test: loads, prefills 512 tokens, reports.
ENGINE = """
import json, re, sys
import llama_cpp as C
import numpy as np
log = []
sink = C.llama_log_callback(lambda level, text, data: log.append(text.decode(errors="replace")))
C.llama_log_set(sink, None)
model = C.llama_load_model_from_file(sys.argv[1].encode(), C.llama_model_default_params())
params = C.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_threads_batch = 1024, 512, 2
context = C.llama_init_from_model(model, params)
n_vocab = C.llama_n_vocab(C.llama_model_get_vocab(model))
tokens = np.random.default_rng(0).integers(5, n_vocab, 512)
batch = C.llama_batch_init(512, 0, 1)
batch.n_tokens = 512
for i, token in enumerate(tokens.tolist()):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
    batch.seq_id[i][0] = 0
code = C.llama_decode(context, batch)
logits = np.ctypeslib.as_array(C.llama_get_logits(context), (512, n_vocab))
top = logits.argmax(1)
info = dict(re.findall(r"(n_rot|n_swa|model type) += (\\w+)", "".join(log)))
info |= {"code": code, "finite": bool(np.isfinite(logits).all()), "std": float(logits.std())}
info |= {"distinct": len(set(top.tolist())), "echo": float((top == tokens).mean())}
print(json.dumps(info))
"""


@pytest.fixture(scope="module")
def minis(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Every mini file, freshly written: (name, type) → path."""
    folder = tmp_path_factory.mktemp("minis")
    pairs = [(name, dtype) for name in MINIS for dtype in registry.DTYPES]
    return {
        (name, dtype): synthetic.write(registry.spec(name, "mini"), dtype, folder / f"{name}.{dtype}.gguf")
        for name, dtype in pairs
    }


# ---------------------------------------------------------------- registry


def test_shape_specs_have_the_published_parameter_counts():
    shapes = [s for (_, scale), s in registry.load().items() if scale == "shape"]
    assert {s.name: s.n_params for s in shapes} == {s.name: s.parameters for s in shapes}
    assert registry.spec("plamo-2-1b", "shape").n_params == 1_291_441_920
    assert registry.spec("plamo-3-nict-8b", "shape").n_params == 8_091_348_992


def test_unpublished_hyper_parameters_are_named_as_assumptions():
    assert any("not confirmed" in text for text in registry.spec("plamo-3-nict-2b", "shape").assumptions)


def test_minis_have_both_kinds_of_layer():
    hybrid, sliding = (registry.spec(name, "mini") for name in MINIS)
    assert [hybrid.is_mamba(i) for i in range(hybrid.layers)] == [True, False, True, False]
    assert [sliding.is_sliding(i) for i in range(sliding.layers)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (("plamo-9", "mini", "F16"), "plamo-3-nict-2b"),
        (("plamo-2-8b", "mini", "F16"), "plamo-2-1b"),
        (("plamo-2-1b", "huge", "F16"), "mini, shape"),
        (("plamo-2-1b", "mini", "Q3"), "F32, F16, BF16, Q8_0"),
    ],
)
def test_unknown_model_scale_or_type_lists_the_known_ones(arguments: tuple[str, str, str], listed: str):
    with pytest.raises(StudyError, match=listed):
        recipes.model_path(*arguments)


@pytest.mark.parametrize(
    "text", ["models = [", '[models.x]\narch = "plamo2"\n[models.x.mini]\nhiden = 4', "[models.x.mini]\nhidden = 4"]
)
def test_a_broken_registry_names_the_file(tmp_path: Path, text: str):
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(StudyError, match=r"models\.toml"):
        registry.load(path)


# ---------------------------------------------------------------- synthetic files


@pytest.mark.parametrize("dtype", registry.DTYPES)
@pytest.mark.parametrize("name", MINIS)
def test_minis_have_the_pinned_hash(minis: dict[tuple[str, str], Path], name: str, dtype: str):
    assert tensors.sha256(minis[name, dtype]) == RANDOM[name, dtype]


@pytest.mark.parametrize("kind", [values.LIFELIKE, values.DENORMAL, values.AGAIN, values.SCALES])
@pytest.mark.parametrize("name", MINIS)
def test_other_values_lie_in_the_same_tensors(minis: dict[tuple[str, str], Path], tmp_path: Path, name: str, kind: str):
    spec = replace(registry.spec(name, "mini"), values=kind)
    other = synthetic.write(spec, "Q8_0", tmp_path / "other.gguf")
    usual = minis[name, "Q8_0"]
    assert tensors.tensor_table(other) == tensors.tensor_table(usual)
    assert tensors.sha256(other) != tensors.sha256(usual)
    assert synthetic.write(spec, "Q8_0", tmp_path / "again.gguf").read_bytes() == other.read_bytes()
    read = {tensor.name: tensor.data for tensor in gguf.GGUFReader(other).tensors if tensor.tensor_type == F32}
    tiny = {key for key, data in read.items() if ((data != 0) & (np.abs(data) < np.finfo(np.float32).tiny)).any()}
    assert bool(tiny) == (kind == values.DENORMAL)
    assert all(np.isfinite(data).all() for data in read.values())


@pytest.mark.parametrize(
    ("kind", "few"), [("", True), (values.AGAIN, True), (values.SCALES, False), (values.LIFELIKE, False)]
)
def test_only_some_values_have_a_scale_for_every_block(tmp_path: Path, kind: str, few: bool):
    spec = replace(registry.spec("plamo-2-1b", "mini"), values=kind)
    path = synthetic.write(spec, "Q8_0", tmp_path / "file.gguf")
    matrix = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight")
    scales = np.unique(matrix.data.reshape(-1, 34)[:, :2].copy().view("<f2"))
    assert (len(scales) <= 4) == few
    assert few or len(scales) > 100


@pytest.mark.parametrize("model", ["plamo-2-1b", "plamo-3-nict-2b"])
def test_a_model_that_is_like_another_has_its_shape_and_says_what_differs(model: str):
    usual, other = (registry.spec(f"{model}{end}", "shape") for end in ("", "-lifelike"))
    assert other.tensor_shapes() == usual.tensor_shapes()
    assert any("lifelike" in text for text in other.assumptions)
    assert not other.hub


def test_another_seed_gives_other_weights_and_the_same_table(minis: dict[tuple[str, str], Path], tmp_path: Path):
    spec = registry.spec("plamo-2-1b", "mini")
    other = synthetic.write(spec, "Q8_0", tmp_path / "other.gguf", seed=1)
    assert tensors.sha256(other) != RANDOM["plamo-2-1b", "Q8_0"]
    assert tensors.tensor_table(other) == tensors.tensor_table(minis["plamo-2-1b", "Q8_0"])


@pytest.mark.parametrize("name", MINIS)
def test_f32_f16_and_q8_0_hold_the_same_numbers(minis: dict[tuple[str, str], Path], name: str):
    f32, f16, q8 = (gguf.GGUFReader(minis[name, dtype]).tensors for dtype in ("F32", "F16", "Q8_0"))
    for a, b, c in zip(f32, f16, q8, strict=True):
        np.testing.assert_array_equal(a.data, b.data.astype(np.float32))
        np.testing.assert_array_equal(a.data, gguf.dequantize(c.data, c.tensor_type))


def test_bf16_is_f32_rounded_to_nearest_even(minis: dict[tuple[str, str], Path]):
    f32, bf16 = (gguf.GGUFReader(minis["plamo-2-1b", dtype]).tensors for dtype in ("F32", "BF16"))
    expected = gguf.quantize(f32[0].data, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(bf16[0].data.view(np.uint8).ravel(), expected.ravel())


def test_weights_have_mean_zero_and_the_intended_spread(minis: dict[tuple[str, str], Path]):
    for tensor in gguf.GGUFReader(minis["plamo-2-1b", "F32"]).tensors:
        if tensor.name.endswith(("ffn_up.weight", "ssm_in.weight", "attn_qkv.weight")):
            spread = tensor.data.std() * np.sqrt(tensor.data.shape[1])
            assert abs(tensor.data.mean()) < 0.02 * tensor.data.std()
            assert 0.9 < spread < 1.1


def test_head_count_is_a_scalar_unless_the_defect_is_asked_for(minis: dict[tuple[str, str], Path], tmp_path: Path):
    spec = registry.spec("plamo-2-1b", "mini")
    defective = synthetic.write(spec, "F16", tmp_path / "d1.gguf", head_count_array=True)
    assert tensors.metadata(minis["plamo-2-1b", "F16"])["plamo2.attention.head_count"] == 4
    assert tensors.metadata(defective)["plamo2.attention.head_count"] == [0, 4, 0, 4]


def test_a_file_says_that_it_is_synthetic_and_what_it_assumes(tmp_path: Path):
    spec = registry.spec("plamo-3-nict-2b", "mini")
    path = synthetic.write(spec, "Q8_0", tmp_path / "m.gguf")
    facts = tensors.metadata(path)
    assert "Synthetic" in facts["general.name"]
    assert "not its released weights" in facts["general.description"]


def test_progress_ends_at_the_total(tmp_path: Path):
    calls: list[tuple[int, int]] = []
    spec = registry.spec("plamo-2-1b", "mini")
    synthetic.write(spec, "Q8_0", tmp_path / "m.gguf", progress=lambda *call: calls.append(call))
    total = sum(t.n_bytes for t in tensors.planned_table(spec, "Q8_0"))
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_behind_when_writing_stops(tmp_path: Path, failure: type[BaseException]):
    def stop(done: int, total: int) -> None:
        raise failure

    with pytest.raises(failure):
        synthetic.write(registry.spec("plamo-2-1b", "mini"), "F16", tmp_path / "m.gguf", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage())
    with pytest.raises(StudyError, match="only 1,000 are free"):
        synthetic.write(registry.spec("plamo-2-1b", "shape"), "Q8_0", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


class _Usage:
    free = 1000


def test_a_folder_that_cannot_be_written_is_a_readable_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StudyError, match="cannot be written"):
        synthetic.write(registry.spec("plamo-2-1b", "mini"), "F16", tmp_path / "file" / "m.gguf")


def test_make_writes_once_and_checks_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    path = synthetic.make("plamo-3-matched", "mini", "Q8_0")
    written = path.stat().st_mtime_ns
    assert synthetic.make("plamo-3-matched", "mini", "Q8_0").stat().st_mtime_ns == written
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(StudyError, match="differs from the hash"):
        synthetic.make("plamo-3-matched", "mini", "Q8_0")


# ---------------------------------------------------------------- reading back


@pytest.mark.parametrize("dtype", registry.DTYPES)
@pytest.mark.parametrize("name", MINIS)
def test_tensor_table_is_the_planned_one(minis: dict[tuple[str, str], Path], name: str, dtype: str):
    planned = tensors.planned_table(registry.spec(name, "mini"), dtype)
    assert tensors.tensor_table(minis[name, dtype]) == planned


def test_names_split_into_layer_and_kind():
    info = [tensors.TensorInfo(n, "F32", (1,)) for n in ("blk.12.ffn_up.weight", "blk.0.ssm_dt.bias", "output_norm")]
    assert [(t.layer, t.kind) for t in info] == [(12, "ffn_up"), (0, "ssm_dt.bias"), (None, "output_norm")]


def test_q8_0_of_the_1b_shape_has_the_size_of_a_real_file():
    table = tensors.planned_table(registry.spec("plamo-2-1b", "shape"), "Q8_0")
    assert sum(t.n_bytes for t in table) == pytest.approx(1_375_194_496, rel=0.002)  # the rest is vocabulary
    assert {t.kind for t in table if t.dtype == "F32"} >= {"ssm_a", "ssm_conv1d", "attn_q_norm", "post_ffw_norm"}


def test_metadata_leaves_out_only_the_vocabulary(minis: dict[tuple[str, str], Path]):
    ours = tensors.metadata(minis["plamo-3-nict-2b", "F16"])
    theirs = gguf.GGUFReader(minis["plamo-3-nict-2b", "F16"]).fields
    left_out = {"tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"}
    told = {key: field.contents() for key, field in theirs.items() if not key.startswith("GGUF.")}
    assert ours == {key: value for key, value in told.items() if key not in left_out}


def _other_architecture(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda path, mini: None, "no such file"),
        (lambda path, mini: path.mkdir(), "no such file"),
        (lambda path, mini: os.mkfifo(path), "no such file"),
        (lambda path, mini: path.write_bytes(b""), "not a GGUF"),
        (lambda path, mini: path.write_bytes(b"PK\3\4 and more"), "not a GGUF"),
        (lambda path, mini: path.write_bytes(mini.read_bytes()[:-100]), "cut short"),
        (lambda path, mini: path.write_bytes(mini.read_bytes()[:9000]), "bytes are left"),
        (lambda path, mini: path.write_bytes(mini.read_bytes()[:10]), "cut short"),
        (lambda path, mini: _other_architecture(path), "architecture is 'llama'"),
    ],
    ids=["missing", "directory", "pipe", "empty", "zip", "cut-weights", "cut-vocabulary", "cut-header", "architecture"],
)
def test_an_unusable_file_names_itself_the_reason_and_the_way_out(minis, tmp_path, build, reason):
    path = tmp_path / "bad.gguf"
    build(path, minis["plamo-2-1b", "Q8_0"])
    for read in (tensors.tensor_table, tensors.metadata):
        with pytest.raises(StudyError, match=rf"bad\.gguf.*{reason}[\s\S]*plamo-study models make"):
            read(path)


# ---------------------------------------------------------------- engine


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", MINIS)
def test_the_engine_loads_a_mini_and_its_logits_are_sane(minis: dict[tuple[str, str], Path], name: str, dtype: str):
    command = [sys.executable, "-c", ENGINE, str(minis[name, dtype])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    info = json.loads(done.stdout)
    spec = registry.spec(name, "mini")
    assert (int(info["n_rot"]), int(info["n_swa"])) == (spec.head_dim, spec.window)
    assert info["code"] == 0
    assert info["finite"]
    assert 1 < info["std"] < 3
    assert info["distinct"] > 100
    assert info["echo"] < 0.1
