"""The registry, the synthetic files and what is read back from them."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import foreign_models
import gguf
import numpy as np
import pytest

from llama_meter import paths
from llama_meter.errors import StudyError
from llama_meter.models import recipes, registry, synthetic, tensors

MINIS = ("plamo-2-1b", "plamo-3-nict-2b")
F32 = gguf.GGMLQuantizationType.F32
RANDOM = {  # what random weights in the shapes of the embedded models hash to, on any machine
    ("plamo-2-1b", "F16"): "3cdcf771360450e566a01e902257fccd0ee66bc2ee1a7f7c9e82df098d67ff13",
    ("plamo-2-1b", "Q8_0"): "8715351aec24a02697ab9eb74f565948710a476786fdca8ec90921252ad18298",
    ("plamo-3-nict-2b", "F16"): "78044b4324c43bc424c87fa47954288bae5b995eeb5e001eb0f02a20d6af5e7a",
    ("plamo-3-nict-2b", "Q8_0"): "ee86a237123f230c273d3ce1c537d985d9cc7ae7738b1494e61e86b7a07a8ba3",
}


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


@pytest.mark.parametrize(
    ("model", "scale", "dtype", "listed"),
    [
        ("plamo-9", "mini", "F16", "plamo-3-nict-2b"),
        ("plamo-2-1b", "huge", "F16", "plamo-2-1b .mini."),
        *(
            ("plamo-2-1b", "mini", dtype, "known: F32, F16, BF16, Q8_0")
            for dtype in ("q4_0", "Q4_0-ssm_out", "Q4_0-ssm_out-Q9_0", "../Q4_0")
        ),
    ],
)
def test_unknown_model_scale_or_type_lists_the_known_ones(model, scale, dtype, listed):
    with pytest.raises(StudyError, match=listed):
        recipes.model_path(model, scale, dtype)


# ---------------------------------------------------------------- synthetic files


def test_minis_have_the_pinned_hash_and_the_planned_table(minis):
    assert {pair: tensors.read_sha256(minis[pair]) for pair in RANDOM} == RANDOM
    for (name, dtype), path in minis.items():
        assert tensors.tensor_table(path) == tensors.planned_table(registry.spec(name, "mini"), dtype)


def test_every_type_holds_the_same_numbers_of_mean_zero_and_the_intended_spread(minis):
    every = [gguf.GGUFReader(minis["plamo-2-1b", dtype]).tensors for dtype in ("F32", "F16", "Q8_0", "BF16")]
    for f32, f16, q8, bf16 in zip(*every, strict=True):
        np.testing.assert_array_equal(f32.data, f16.data.astype(np.float32))
        np.testing.assert_array_equal(f32.data, gguf.dequantize(q8.data, q8.tensor_type))
        rounded = gguf.quantize(f32.data, bf16.tensor_type)
        np.testing.assert_array_equal(bf16.data.view(np.uint8).ravel(), rounded.view(np.uint8).ravel())
        if f32.name.endswith(("ffn_up.weight", "ssm_in.weight", "attn_qkv.weight")):
            assert abs(f32.data.mean()) < 0.02 * f32.data.std()
            assert 0.9 < f32.data.std() * np.sqrt(f32.data.shape[1]) < 1.1


def test_a_full_disk_or_a_folder_that_cannot_be_written_is_a_readable_error(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"file/m.gguf"):
        synthetic.write(registry.spec("plamo-2-1b", "mini"), "F16", tmp_path / "file" / "m.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(StudyError, match="only 1,000 are free"):
        synthetic.write(registry.spec("plamo-2-1b", "shape"), "Q8_0", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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


def test_q8_0_of_the_1b_shape_has_the_size_of_a_real_file():
    table = tensors.planned_table(registry.spec("plamo-2-1b", "shape"), "Q8_0")
    assert sum(t.n_bytes for t in table) == pytest.approx(1_375_194_496, rel=0.002)  # the rest is vocabulary
    assert {t.kind for t in table if t.dtype == "F32"} >= {"ssm_a", "ssm_conv1d", "attn_q_norm", "post_ffw_norm"}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda path, mini: path.write_bytes(mini.read_bytes()[:-100]), "cut short"),
        (lambda path, mini: path.write_bytes(mini.read_bytes()[:9000]), "cut short"),
        (lambda path, mini: foreign_models.write(path), "architecture is 'llama'"),
    ],
    ids=["cut-weights", "cut-vocabulary", "architecture"],
)
def test_an_unusable_file_names_itself_the_reason_and_the_way_out(minis, tmp_path, build, reason):
    path = tmp_path / "bad.gguf"
    build(path, minis["plamo-2-1b", "Q8_0"])
    with pytest.raises(StudyError, match=rf"bad\.gguf.*({reason})[\s\S]*mend: \w"):
        tensors.tensor_table(path)
