"""Released weights become GGUF files: the same tensors, metadata and logits; everything else is refused by name."""

import ctypes
import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import mutated_folders
import numpy as np
import pytest
import released
import safetensors.numpy
from built import measured
from conftest import ATTENTION, HYBRID, mini

from llama_meter.engine.ggml import ggml
from llama_meter.errors import StudyError
from llama_meter.models import convert, hf, hf_config, registry, synthetic, tensors, values as numbers
from llama_meter.models.registry import ModelSpec

MODELS = (HYBRID, ATTENTION)
NORM, EMBEDDINGS, LAYER = "model.norm.weight", "model.embed_tokens.weight", "model.layers.layers.0."


def spec_of(name: str, tied: bool = True) -> ModelSpec:
    """Small enough to convert in a tenth of a second, with both kinds of layer."""
    return replace(registry.spec(name, "mini"), layers=2, window_pattern=2 if name == ATTENTION else 0, tied=tied)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`gguf(model, type, tied)` and `repository(model, type, shards, tied)`: paths of files written once."""
    folder = tmp_path_factory.mktemp("files")

    def gguf_file(name: str, dtype: str = "F32", tied: bool = True) -> Path:
        path = folder / f"{name}.{dtype}.{tied}.gguf"
        return path if path.exists() else synthetic.write(spec_of(name, tied), dtype, path)

    def repository(name: str, dtype: str = "F32", shards: int = 1, tied: bool = True) -> Path:
        path = folder / f"{name}.{dtype}.{tied}.{shards}"
        return path if path.exists() else released.write_released(gguf_file(name, dtype, tied), path, shards, dtype)

    return SimpleNamespace(gguf=gguf_file, repository=repository)


@pytest.fixture
def copy_of(files, tmp_path):
    """A folder of links to a good one of two shards, so that a test replaces what it changes."""

    def copied(name: str) -> Path:
        (tmp_path / "source").mkdir()
        for file in files.repository(name, shards=2).iterdir():
            (tmp_path / "source" / file.name).symlink_to(file)
        return tmp_path / "source"

    return copied


def rewrite(path: Path, content: str | bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    value = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}
    rewrite(path, json.dumps(value))


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a folder, whose files are removed."""
    shards = sorted(folder.glob("*.safetensors"))
    held = {name: value for path in shards for name, value in safetensors.numpy.load_file(path).items()}
    for path in (*shards, folder / hf.INDEX):
        path.unlink(missing_ok=True)
    return held


def same_tensors(one: Path, other: Path) -> None:
    for a, b in zip(gguf.GGUFReader(one).tensors, gguf.GGUFReader(other).tensors, strict=True):
        assert (a.name, a.tensor_type, a.shape.tolist()) == (b.name, b.tensor_type, b.shape.tolist())
        np.testing.assert_array_equal(a.data.view(np.uint8), b.data.view(np.uint8), err_msg=a.name)


def contents(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    return {key: fields[key].contents() for key in fields if not key.startswith("GGUF.")}


def refused(source: Path, out: Path, match: str, dtype: str = "F16") -> None:
    with pytest.raises(StudyError, match=match):
        convert.convert(source, out / "model.gguf", dtype)
    assert not out.exists() or not list(out.iterdir())


# ---------------------------------------------------------------- there and back


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "shards", "dtype", "tied"),
    [
        (HYBRID, "F32", 1, "F32", True),
        (HYBRID, "BF16", 3, "BF16", False),
        (ATTENTION, "F16", 1, "F16", True),
        (ATTENTION, "F32", 2, "F16", False),
    ],
)
def test_a_converted_file_is_the_original(name, kind, shards, dtype, tied, files, tmp_path):
    calls: list[tuple[int, int]] = []
    source = files.repository(name, kind, shards, tied)
    made = convert.convert(source, tmp_path / "model.gguf", dtype, progress=lambda *call: calls.append(call))
    original = files.gguf(name, dtype, tied)
    same_tensors(made, original)
    total = sum(tensor.n_bytes for tensor in tensors.tensor_table(made))
    assert (calls[-1], calls) == ((total, total), sorted(calls))
    found, expected = contents(made), contents(original)
    differing = {key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)}
    assert differing == {"general.description", "tokenizer.ggml.add_space_prefix"}  # the latter is llama.cpp's habit


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_q8_0_is_what_gguf_makes_of_the_same_weights_and_engine_and_oracle_agree_on_f16(name, files, tmp_path):
    path = convert.convert(files.repository(name), tmp_path / "model.gguf", "Q8_0")
    for a, b in zip(gguf.GGUFReader(path).tensors, gguf.GGUFReader(files.gguf(name)).tensors, strict=True):
        assert a.tensor_type.name == ("F32" if tensors.stays_f32(a.name) else "Q8_0")
        expected = gguf.quantize(b.data, a.tensor_type)
        np.testing.assert_array_equal(a.data.view(np.uint8), expected.view(np.uint8), err_msg=a.name)
    half = convert.convert(files.repository(name, "BF16"), tmp_path / "half.gguf", "F16")
    assert measured(mini("gate", name), half).checks["n_rot"] == registry.spec(name, "mini").head_dim


def test_memory_stays_below_the_largest_tensor(tmp_path):
    spec = replace(spec_of(ATTENTION), layers=1, window_pattern=1, ffn=1 << 14)  # ffn_up has 32 MiB as F32
    source = tmp_path / "wide.gguf"
    synthetic.write(spec, "Q8_0", source)
    folder = released.write_released(source, tmp_path / "hf", dtype="BF16")
    tracemalloc.start()
    convert.convert(folder, tmp_path / "model.gguf", "Q8_0")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


@pytest.mark.parametrize("name", MODELS)
def test_names_are_those_of_llama_cpp(name):
    spec = replace(spec_of(name), layers=4, tied=False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[spec.arch.upper()], spec.layers)
    renamed = {f".{x}_norm_weight": f".{x}_norm.weight" for x in ("dt", "B", "C")}  # as conversion/plamo.py does
    renamed |= {".q_weight": ".q.weight", ".k_weight": ".k.weight", ".dt_bias": ".dt_proj.bias"}
    for ours, rule in hf.rules(spec).items():
        theirs = rule.name
        for end, new in renamed.items():
            theirs = theirs.removesuffix(end) + new if theirs.endswith(end) else theirs
        assert names.get_name(theirs, try_suffixes=(".weight", ".bias")) == ours


@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q8_0"])
def test_narrowing_and_widening_have_the_bytes_of_gguf_and_of_the_engine(dtype):
    rng = np.random.default_rng(0)
    halves = rng.integers(-253, 254, (512, 32)) / 2  # quotients on and beside halves, where rounding is decided
    near = np.nextafter(halves.astype(np.float32), rng.choice([-200, 200], halves.shape).astype(np.float32))
    halves[:, 0] = near[:, 0] = 127
    normal = rng.standard_normal((512, 32)) * 10.0 ** rng.integers(-6, 4, (512, 1))
    values = np.concatenate([normal, halves, near, np.zeros((2, 32))]).astype(np.float32)
    items, kind = numbers.narrow(values.ravel(), dtype), gguf.GGMLQuantizationType[dtype]
    np.testing.assert_array_equal(items.view(np.uint8).ravel(), gguf.quantize(values, kind).view(np.uint8).ravel())
    expected = gguf.dequantize(items if dtype == "F16" else items.view(np.uint8), kind)
    np.testing.assert_array_equal(numbers.widen(items, dtype), expected.ravel())
    if dtype == "Q8_0":
        theirs, library = np.zeros(len(values) * 34, np.uint8), ggml("ggml-base")
        library.quantize_row_q8_0_ref.restype = None
        pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (values, theirs)]
        library.quantize_row_q8_0_ref(*pointers, ctypes.c_int64(values.size))
        np.testing.assert_array_equal(items.view(np.uint8), theirs)


def test_a_release_all_in_bf16_is_widened_before_offsets_and_exponentials(copy_of, tmp_path):
    source = copy_of(HYBRID)
    weights, header, data = weights_of(source), {}, b""
    halves = {name: numbers.narrow(value.astype(np.float32).ravel(), "BF16") for name, value in weights.items()}
    for name, half in halves.items():
        offsets = [len(data), len(data) + half.nbytes]
        header[name] = {"dtype": "BF16", "shape": weights[name].shape, "data_offsets": offsets}
        data += half.tobytes()
    text = json.dumps(header).encode()
    (source / hf.SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data)
    made = {t.name: t.data for t in gguf.GGUFReader(convert.convert(source, tmp_path / "m.gguf", "F32")).tensors}
    exact = {name: numbers.widen(half, "BF16").astype(np.float64) for name, half in halves.items()}
    for ours, expected in {
        "token_embd.weight": exact[EMBEDDINGS],
        "output_norm.weight": exact[NORM] + 1,
        "blk.0.post_attention_norm": exact[LAYER + "post_mixer_norm.weight"] + np.float32(1 / 5),
        "blk.0.ssm_a": -np.exp(exact[LAYER + "mixer.A_log"]),
    }.items():
        np.testing.assert_array_equal(made[ours].ravel(), expected.astype(np.float32), err_msg=ours)


# ---------------------------------------------------------------- llama.cpp's own conversion

SCRIPT, PYTHON = (os.environ.get(key, "") for key in ("PLAMO_STUDY_CONVERT_HF_TO_GGUF", "PLAMO_STUDY_TORCH_PYTHON"))
ON_PURPOSE = {"plamo2.attention.head_count", "general.description"}  # an array there makes the engine lose RoPE (D1)
NAMING = {f"general.{key}" for key in ("name", "type", "size_label", "basename", "finetune")}


@pytest.mark.skipif(
    not (SCRIPT and PYTHON),
    reason="needs PLAMO_STUDY_CONVERT_HF_TO_GGUF (the script in llama.cpp's "
    "sources) and PLAMO_STUDY_TORCH_PYTHON (a Python with torch and transformers)",
)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_converts_to_the_same_tensors_and_metadata(name, dtype, tmp_path):
    spec = replace(spec_of(name), head_dim=128, heads=2, kv_heads=1)  # one head size for attention and Mamba
    folder = released.write_released(synthetic.write(spec, "F32", tmp_path / "a.gguf"), tmp_path / "hf", 2)
    theirs, ours = tmp_path / "theirs.gguf", convert.convert(folder, tmp_path / "ours.gguf", dtype)
    subprocess.run([PYTHON, SCRIPT, folder, "--outtype", dtype.lower(), "--outfile", theirs], check=True)
    a, b = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (ours, theirs))
    assert a.keys() == b.keys()
    for tensor, one in a.items():
        other = b[tensor]
        assert (one.tensor_type, one.shape.tolist()) == (other.tensor_type, other.shape.tolist())
        if tensor.endswith("ssm_a"):  # PyTorch rounds exp of a rounded logarithm, this project rounds once
            np.testing.assert_array_max_ulp(one.data, other.data, 3)
        else:
            np.testing.assert_array_equal(one.data.view(np.uint8), other.data.view(np.uint8), err_msg=tensor)
    found, expected = contents(ours), contents(theirs)
    differing = {key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)}
    assert differing - NAMING <= ON_PURPOSE, {key: (found.get(key), expected.get(key)) for key in differing}


# ---------------------------------------------------------------- configurations

ROWS = {  # of published copies: hidden, layers, heads, key/value heads, feed-forward, vocabulary, context
    "plamo-2-1b": (2048, 16, 16, 1, 8192, 100000, 10485760),
    "plamo-2-8b": (4096, 32, 32, 4, 16384, 100000, 10485760),
    "plamo-2-translate": (4096, 32, 32, 4, 16384, 100032, 10485760),
    "plamo-2.1-2b": (2048, 32, 32, 4, 5632, 100032, 10485760),
    "plamo-3-nict-8b": (4096, 32, 32, 4, 16384, 107520, 4096),
}
PLAMO_2 = {
    "architectures": ["Plamo2ForCausalLM"], "rms_norm_eps": 1e-06, "hidden_size_per_head": 128,
    "attention_window_size": 2048, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_step": 2, "mamba_enabled": True,
}  # fmt: skip
PLAMO_3 = {
    "architectures": ["Plamo3ForCausalLM"], "rms_norm_eps": 1e-06, "head_dim": 128, "window_size": 2048,
    "sliding_window_pattern": 8, "rope_theta": 1000000, "rope_local_theta": 10000,
}  # fmt: skip


def configured(folder: Path, name: str, **changes: Any) -> hf_config.Configuration:
    """What the published configuration of a model says with these changes; None removes a key."""
    config = dict(zip(hf_config.COMMON.values(), ROWS[name], strict=True))
    config |= PLAMO_3 if "plamo-3" in name else PLAMO_2 | {"mamba_num_heads": 32 if name == "plamo-2-1b" else 64}
    config |= {"tie_word_embeddings": name != "plamo-2-translate"} | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return hf_config.read(folder)


@pytest.mark.parametrize("name", ROWS)
def test_published_configurations_give_the_registered_shapes(name, tmp_path):
    found = configured(tmp_path, name).spec
    assert found.tensor_shapes() == registry.spec(name, "shape").tensor_shapes()
    assert found.n_params == registry.spec(name, "shape").parameters


def test_the_translator_is_published_with_a_window_and_a_rotary_base_of_its_own(tmp_path):
    changes = {"rope_theta": 1e6, "rope_local_theta": 1e6, "attention_window_size": 32768, "full_attention_idx": []}
    found = configured(tmp_path, "plamo-2-translate", **changes)
    assert found.spec.rope_theta == registry.spec("plamo-2-translate", "shape").rope_theta
    assert found.window == 32768
    assert registry.spec("plamo-2-1b", "shape").rope_theta != found.spec.rope_theta


FULL = {"rope_theta": 1e4, "rope_local_theta": 1e6, "full_attention_idx": [*range(1, 16, 2)]}
NESTED = {"full_attention": {"rope_theta": 3e6}, "sliding_attention": {"rope_theta": 3e4}}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),  # base of full and of sliding layers, window, scaling
    [
        ("plamo-2-1b", {}, (1e4, 0, 2048, None)),  # the first releases have no rope key
        ("plamo-2-1b", FULL | {"full_attention_idx": None}, (1e6, 0, 2048, None)),  # no layer is full
        ("plamo-2-1b", FULL, (1e4, 0, 0, None)),
        ("plamo-2-1b", FULL | {"rope_theta": 1e6, "full_attention_idx": [1, 3]}, (1e6, 0, 2048, None)),
        ("plamo-2-1b", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, (1e5, 0, 2048, None)),
        ("plamo-3-nict-8b", {}, (1e6, 1e4, 2048, None)),
        ("plamo-3-nict-8b", {"window_size": None, "sliding_window": 512}, (1e6, 1e4, 512, None)),
        (
            "plamo-3-nict-8b",
            {"window_size": None, "sliding_window": ([512] * 7 + [None]) * 4},
            (1e6, 1e4, 512, None),
        ),
        ("plamo-3-nict-8b", {"rope_theta": None, "rope_global_theta": 3e6}, (3e6, 1e4, 2048, None)),
        ("plamo-3-nict-8b", {"rope_parameters": NESTED}, (3e6, 3e4, 2048, None)),
        (
            "plamo-3-nict-8b",
            {"rope_scaling_factor": 4.0, "initial_context_length": 4096},
            (1e6, 1e4, 2048, (4.0, 4096)),
        ),
    ],
)
def test_rotary_bases_windows_and_scaling_are_those_of_the_reference(name, changes, expected, tmp_path):
    found = configured(tmp_path, name, **changes)
    window = found.spec.window or found.window
    assert (found.spec.rope_theta, found.spec.rope_theta_swa, window, found.yarn) == expected


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("plamo-2-1b", {"architectures": ["LlamaForCausalLM"]}, "architectures: is .'LlamaForCausalLM'"),
        ("plamo-2-1b", {"hidden_size": None}, "hidden_size: is missing"),
        ("plamo-2-1b", {"hidden_size": True}, "hidden_size"),
        ("plamo-2-1b", {"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ("plamo-2-1b", {"num_key_value_heads": 3}, "num_attention_heads"),
        ("plamo-2-1b", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("plamo-2-1b", {"rope_parameters": [1]}, "rope_parameters"),
        ("plamo-2-1b", {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type"),
        ("plamo-2-1b", {"rope_scaling_factor": 2, "initial_context_length": 8}, "rope_scaling"),
        ("plamo-2-1b", {"full_attention_idx": 7}, "full_attention_idx"),
        ("plamo-2-1b", FULL | {"full_attention_idx": [1, 3]}, "the engine has one for all"),
        ("plamo-2-1b", {"mamba_step": 4}, "mamba_step"),
        ("plamo-3-nict-8b", {"window_size": None, "sliding_window": []}, "sliding_window"),
        ("plamo-3-nict-8b", {"window_size": None, "sliding_window": [512] * 32}, "sliding_window"),
        ("plamo-3-nict-8b", {"rope_local_theta": None}, "rope_local_theta"),
    ],
)
def test_a_configuration_the_engine_cannot_follow_names_its_key(name, changes, match, tmp_path):
    with pytest.raises(StudyError, match=match):
        configured(tmp_path, name, **changes)


def test_a_window_that_the_engine_ignores_is_said_in_the_file(copy_of, tmp_path):
    source = copy_of(HYBRID)
    edit(source / "config.json", full_attention_idx=None, attention_window_size=1024)
    made = convert.convert(source, tmp_path / "model.gguf", "Q8_0")
    assert "looks back 1,024 tokens" in tensors.metadata(made)["general.description"]


def test_rope_scaling_is_written(copy_of, tmp_path):
    source = copy_of(ATTENTION)
    edit(source / "config.json", rope_scaling_factor=4, initial_context_length=1024)
    facts = tensors.metadata(convert.convert(source, tmp_path / "model.gguf", "Q8_0"))
    written = [facts[f"plamo3.rope.scaling.{key}"] for key in ("type", "factor", "original_context_length")]
    assert written == ["yarn", 4, 1024]


# ---------------------------------------------------------------- tokenizers


def edit_rows(folder: Path, change) -> None:
    path = folder / "tokenizer.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    rewrite(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_special_tokens_and_padding_are_the_configurations_or_the_reference_tokenizers(copy_of, tmp_path):
    source = copy_of(HYBRID)
    config = {"eos_token": {"content": "<|plamo:op|>"}, "sep_token": "a", "add_bos_token": True}
    rewrite(source / "tokenizer_config.json", json.dumps(config))
    edit_rows(source, lambda rows: rows.__delitem__(slice(500, None)))
    facts = contents(convert.convert(source, tmp_path / "m.gguf", "Q8_0"))
    ids = {name: facts[f"tokenizer.ggml.{name}_token_id"] for name in ("unknown", "bos", "eos", "padding", "eot")}
    assert ids == {"unknown": 0, "bos": 1, "eos": 4, "padding": 3, "eot": 4}
    assert facts["tokenizer.ggml.seperator_token_id"] == 261 + ord("a") - ord(" ")
    assert facts["tokenizer.ggml.add_bos_token"] is True
    assert facts["tokenizer.ggml.tokens"][500:502] == ["[PAD1]", "[PAD2]"]
    assert set(facts["tokenizer.ggml.scores"][500:]) == {-999.0}
    assert set(facts["tokenizer.ggml.token_type"][500:]) == {gguf.TokenType.UNUSED}


@pytest.mark.parametrize(
    ("file", "configured", "expected"),
    [
        ("from the file", "from the configuration", "from the file"),
        (None, [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        (None, [3, {"name": []}], None),
    ],
)
def test_chat_template_is_the_file_or_the_configurations(file, configured, expected, copy_of, tmp_path):
    source = copy_of(HYBRID)
    edit(source / "tokenizer_config.json", chat_template=configured)
    if file:
        (source / "chat_template.jinja").write_text(file)
    facts = tensors.metadata(convert.convert(source, tmp_path / "m.gguf", "Q8_0"))
    assert facts.get("tokenizer.chat_template") == expected


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda rows: rows.append(["one more", 0.0]), "more tokens"),
        (lambda rows: rows[400].__setitem__(0, rows[401][0]), "is there twice"),
        (lambda rows: rows[400].__setitem__(1, -1000.0), "score -1000"),
        (lambda rows: rows[400].__setitem__(1, 1e300), "score 1e"),
        (lambda rows: rows[400].__setitem__(0, "\ud800"), "line 401"),
        (lambda rows: rows[9].__setitem__(2, "NORMAL"), "1 of 256 byte tokens"),
        (lambda rows: rows[2].__setitem__(0, "</s>"), "eos_token"),
    ],
)
def test_a_vocabulary_the_engine_would_misread_is_refused(change, match, copy_of, tmp_path):
    source = copy_of(HYBRID)
    edit_rows(source, change)
    refused(source, tmp_path / "out", match)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.pop(NORM), r"tensor model\.norm\.weight: is missing"),
        (lambda w: w.update({"model.extra": np.zeros(2, "f4")}), r"tensor model\.extra: is not part"),
        (lambda w: w.update({NORM: np.zeros((2, 128), "f4")}), r"norm\.weight: has shape \(2, 128\)"),
        (lambda w: w.update({NORM: np.zeros(256, "i8")}), "has type 'I64'"),
        (lambda w: w[NORM].__setitem__(3, np.nan), "not finite"),
        (lambda w: w[EMBEDDINGS].__setitem__((3, 3), 1e5), "F16 cannot hold"),
        (lambda w: w[LAYER + "mixer.A_log"].__setitem__(0, 1e3), "F32 cannot hold"),
    ],
)
def test_wrong_tensors_are_named_and_an_older_file_stays(change, match, copy_of, tmp_path):
    source, out = copy_of(HYBRID), tmp_path / "out" / "model.gguf"
    weights = weights_of(source)
    change(weights)
    safetensors.numpy.save_file(weights, source / hf.SINGLE)
    out.parent.mkdir()
    out.write_text("older")
    with pytest.raises(StudyError, match=match):
        convert.convert(source, out, "F16")
    assert [(path, path.read_text()) for path in out.parent.iterdir()] == [(out, "older")]


def test_a_head_beside_tied_embeddings_and_rotary_tables_are_ignored(files, copy_of, tmp_path):
    source = copy_of(HYBRID)
    weights = weights_of(source)
    weights["lm_head.weight"] = weights[EMBEDDINGS] * 0
    weights["model.layers.layers.1.mixer.rotary_emb.inv_freq"] = np.zeros(4, "f4")
    safetensors.numpy.save_file(weights, source / hf.SINGLE)
    same_tensors(convert.convert(source, tmp_path / "m.gguf", "F16"), files.gguf(HYBRID, "F16"))


def test_rows_that_are_no_multiple_of_32_refuse_q8_0_only(tmp_path):
    spec = replace(spec_of(ATTENTION), ffn=48)
    folder = released.write_released(synthetic.write(spec, "F32", tmp_path / "a.gguf"), tmp_path / "hf")
    refused(folder, tmp_path / "out", "multiples of 32", "Q8_0")
    assert convert.convert(folder, tmp_path / "b.gguf", "F16").exists()


# ---------------------------------------------------------------- hostile folders


def test_an_index_may_only_name_what_lies_in_files_of_its_folder(copy_of, tmp_path):
    source = copy_of(HYBRID)
    index = json.loads((source / hf.INDEX).read_text())["weight_map"]
    safetensors.numpy.save_file({"x": np.zeros(1)}, tmp_path / "x.safetensors")
    for name in ("../x.safetensors", str(tmp_path / "x.safetensors"), "..", 3):
        rewrite(source / hf.INDEX, json.dumps({"weight_map": {"x": name}}))
        refused(source, tmp_path / "out", "tensor x lies in .* no safetensors file of this folder")
    rewrite(source / hf.INDEX, json.dumps({"weight_map": {"x": "x\0.safetensors"}}))
    refused(source, tmp_path / "out", r"x\W+\.safetensors")
    del index[NORM]
    rewrite(source / hf.INDEX, json.dumps({"weight_map": index}))
    refused(source, tmp_path / "out", r"tensor model\.norm\.weight: is not in the index")


@pytest.mark.parametrize("file", [hf.SINGLE, hf.INDEX, "chat_template.jinja"])
def test_a_link_to_nothing_is_never_taken_for_a_file_that_is_not_there(file, files, copy_of, tmp_path):
    source = copy_of(HYBRID)
    if file != "chat_template.jinja":
        weights_of(source)
    if file == hf.INDEX:  # beside the weights that it would stand for
        (source / hf.SINGLE).symlink_to(files.repository(HYBRID) / hf.SINGLE)
    (source / file).symlink_to("nowhere")
    refused(source, tmp_path / "out", rf"{file}: is neither a file nor a link to one")


@pytest.mark.long
@pytest.mark.parametrize(("seed", "name"), [*enumerate(MODELS, 4)])
def test_every_mutated_folder_is_converted_rightly_or_refused_within_1_gib(seed, name, files, tmp_path):
    n = 2 * len(mutated_folders.KINDS)
    command = [sys.executable, mutated_folders.__file__, files.repository(name, shards=2), tmp_path, str(seed), str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout)
    assert outcomes.keys() == {"right", "refused"}, outcomes
    assert outcomes["right"] > n / 20
    assert outcomes["refused"] - 6 * len(mutated_folders.PLACES) > n / 2


SHORT = """
import resource, sys
from pathlib import Path
from llama_meter.errors import StudyError
from llama_meter.models import hf
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))  # that the process may map
try:
    hf.stored_tensors(Path(sys.argv[1]))
except StudyError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS limits no address space")
def test_a_sound_file_that_does_not_fit_into_memory_is_not_called_damaged(tmp_path):
    size = 8 << 30  # bytes of a file that takes no room on the disk
    header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    (tmp_path / hf.SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(tmp_path / hf.SINGLE, 8 + len(header) + size)
    said = subprocess.run([sys.executable, "-c", SHORT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "memory" in said.stdout, said.stderr
    assert "fetch" not in said.stdout
