"""What may stand in a released folder: configurations, tokenizers, and everything that must be refused."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import released
import safetensors.numpy
from conftest import ATTENTION, HYBRID
from hf_folders import contents, edit, edit_rows, linked, make_files, refused, rewrite, same_tensors, spec_of

from plamo_study.errors import StudyError
from plamo_study.models import convert, hf, hf_config, numbers, registry, synthetic, tensors

# The configuration of pfnet/plamo-2-1b as published copies of it agree.
PLAMO_2_1B = {
    "architectures": ["Plamo2ForCausalLM"],
    "model_type": "plamo2",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "rms_norm_eps": 1e-06,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "hidden_size_per_head": 128,
    "max_position_embeddings": 10485760,
    "attention_window_size": 2048,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_num_heads": 32,
    "mamba_step": 2,
    "mamba_enabled": True,
    "intermediate_size": 8192,
    "vocab_size": 100000,
}
PLAMO_2_8B = PLAMO_2_1B | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "mamba_num_heads": 64,
    "intermediate_size": 16384,
}
PLAMO_3_8B = {
    "architectures": ["Plamo3ForCausalLM"],
    "model_type": "plamo3",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-06,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "window_size": 2048,
    "sliding_window_pattern": 8,
    "rope_theta": 1000000,
    "rope_local_theta": 10000,
    "intermediate_size": 16384,
    "vocab_size": 107520,
}
CONFIGURATIONS = {
    "plamo-2-1b": PLAMO_2_1B,
    "plamo-2-8b": PLAMO_2_8B,
    "plamo-2-translate": PLAMO_2_8B | {"vocab_size": 100032, "tie_word_embeddings": False},
    "plamo-2.1-2b": PLAMO_2_8B | {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 100032},
    "plamo-3-nict-8b": PLAMO_3_8B,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def source(files: SimpleNamespace, tmp_path: Path) -> Path:
    """A folder of links to a good one, so that a test replaces what it changes."""
    return linked(files.repository(HYBRID, shards=2), tmp_path / "source")


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_published_configurations_give_the_registered_shapes(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGURATIONS[name]))
    spec = hf_config.read(tmp_path).spec
    assert spec.tensor_shapes() == registry.spec(name, "shape").tensor_shapes()
    assert spec.n_params == registry.spec(name, "shape").parameters


@pytest.mark.parametrize(
    ("changes", "theta", "window"),
    [
        ({}, 1e4, 2048),  # the first releases have no rope key
        ({"rope_theta": 1e6}, 1e6, 2048),
        ({"rope_theta": 1e4, "rope_local_theta": 1e6}, 1e6, 2048),  # no layer is full
        ({"rope_theta": 1e4, "rope_local_theta": 1e6, "full_attention_idx": [*range(1, 16, 2)]}, 1e4, 0),
        ({"rope_theta": 1e6, "rope_local_theta": 1e6, "full_attention_idx": [1, 3]}, 1e6, 2048),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, 1e5, 2048),
    ],
)
def test_plamo_2_rotates_as_the_reference_does(changes, theta, window, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAMO_2_1B | changes))
    found = hf_config.read(tmp_path)
    assert (found.spec.rope_theta, found.window) == (theta, window)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1e6, 1e4, 2048, None)),
        ({"rope_theta": 5e5, "rope_local_theta": 2e4, "window_size": 128}, (5e5, 2e4, 128, None)),
        ({"window_size": None, "sliding_window": 512}, (1e6, 1e4, 512, None)),
        ({"window_size": None, "sliding_window": ([512] * 7 + [None]) * 4}, (1e6, 1e4, 512, None)),
        ({"rope_theta": None, "rope_global_theta": 3e6}, (3e6, 1e4, 2048, None)),
        ({"rope_scaling_factor": 4.0, "initial_context_length": 4096}, (1e6, 1e4, 2048, (4.0, 4096))),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 3e6}, "sliding_attention": {"rope_theta": 3e4}}},
            (3e6, 3e4, 2048, None),
        ),
    ],
)
def test_plamo_3_has_the_thetas_windows_and_scaling_of_its_configuration(changes, expected, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in (PLAMO_3_8B | changes).items() if v is not None})
    )
    found = hf_config.read(tmp_path)
    spec = found.spec
    assert (spec.rope_theta, spec.rope_theta_swa, spec.window, found.yarn) == expected


def test_a_window_that_the_engine_ignores_is_said_in_the_file(files, tmp_path):
    source = linked(files.repository(HYBRID), tmp_path / "source")
    edit(source / "config.json", full_attention_idx=None, attention_window_size=1024)
    made = convert.convert(source, tmp_path / "model.gguf", "Q8_0")
    assert "looks back 1,024 tokens" in tensors.metadata(made)["general.description"]


def test_rope_scaling_is_written(files, tmp_path):
    source = linked(files.repository(ATTENTION), tmp_path / "source")
    edit(source / "config.json", rope_scaling_factor=4, initial_context_length=1024)
    facts = tensors.metadata(convert.convert(source, tmp_path / "model.gguf", "Q8_0"))
    assert facts["plamo3.rope.scaling.type"] == "yarn"
    assert facts["plamo3.rope.scaling.factor"] == 4
    assert facts["plamo3.rope.scaling.original_context_length"] == 1024


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: is .'LlamaForCausalLM'"),
        ({"architectures": None, "model_type": "plamo2vl"}, "architectures"),
        ({"architectures": [{}]}, "architectures"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"hidden_size": "2048"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": -4}, "num_hidden_layers"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"vocab_size": 1 << 30}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": []}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8}}, "rope_scaling"),
        ({"full_attention_idx": 7}, "full_attention_idx"),
        ({"mamba_step": 4}, "mamba_step"),
        ({"mamba_enabled": False}, "mamba_enabled"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_a_configuration_the_engine_cannot_follow_names_its_key(changes, match, source, tmp_path):
    edit(source / "config.json", **changes)
    refused(source, tmp_path, match)


def test_two_rotary_bases_in_one_plamo_2_are_refused(tmp_path):
    mixed = {"rope_theta": 1e4, "rope_local_theta": 1e6, "full_attention_idx": [1, 3]}
    (tmp_path / "config.json").write_text(json.dumps(PLAMO_2_1B | mixed))
    with pytest.raises(StudyError, match="the engine has one for all"):
        hf_config.read(tmp_path)


@pytest.mark.parametrize("windows", [[], [None] * 32, [512] * 32, [512] * 8, "512", [{}] * 32])
def test_windows_that_the_engine_cannot_have_are_refused(windows, tmp_path):
    config = {k: v for k, v in PLAMO_3_8B.items() if k != "window_size"} | {"sliding_window": windows}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StudyError, match="sliding_window"):
        hf_config.read(tmp_path)


@pytest.mark.parametrize("key", ["rope_theta", "rope_local_theta", "window_size", "sliding_window_pattern", "head_dim"])
def test_plamo_3_needs_every_key_whose_default_is_not_agreed_on(key, files, tmp_path):
    source = linked(files.repository(ATTENTION), tmp_path / "source")
    edit(source / "config.json", **{key: None})
    refused(source, tmp_path, key if key != "window_size" else "sliding_window")


# ---------------------------------------------------------------- tokenizer


def test_special_tokens_come_from_the_configuration_or_the_reference_tokenizer(source, tmp_path):
    rewrite(
        source / "tokenizer_config.json",
        json.dumps({"eos_token": {"content": "<|plamo:op|>"}, "sep_token": "a", "add_bos_token": True}),
    )
    facts = tensors.metadata(convert.convert(source, tmp_path / "m.gguf", "Q8_0"))
    ids = {name: facts[f"tokenizer.ggml.{name}_token_id"] for name in ("unknown", "bos", "eos", "padding", "eot")}
    assert ids == {"unknown": 0, "bos": 1, "eos": 4, "padding": 3, "eot": 4}
    assert facts["tokenizer.ggml.seperator_token_id"] == 261 + ord("a") - ord(" ")
    assert facts["tokenizer.ggml.add_bos_token"] is True


def test_a_short_vocabulary_is_padded_with_tokens_that_no_text_becomes(source, tmp_path):
    edit_rows(source, lambda rows: rows.__delitem__(slice(500, None)))
    facts = contents(convert.convert(source, tmp_path / "m.gguf", "Q8_0"))
    assert facts["tokenizer.ggml.tokens"][499:502] == [facts["tokenizer.ggml.tokens"][499], "[PAD1]", "[PAD2]"]
    assert set(facts["tokenizer.ggml.scores"][500:]) == {-999.0}
    assert set(facts["tokenizer.ggml.token_type"][500:]) == {gguf.TokenType.UNUSED}


@pytest.mark.parametrize(
    ("file", "configured", "expected"),
    [
        ("from the file", "from the configuration", "from the file"),
        (None, "from the configuration", "from the configuration"),
        (None, [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        (None, [3, {"name": []}], None),
        (None, None, None),
    ],
)
def test_chat_template_is_the_file_or_the_configurations(file, configured, expected, source, tmp_path):
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
        (lambda rows: rows[400].__setitem__(1, "0"), "score '0'"),
        (lambda rows: rows[400].__setitem__(0, "\ud800"), "line 401"),
        (lambda rows: rows[400].__setitem__(0, ""), "a row must be"),
        (lambda rows: rows[9].__setitem__(2, "NORMAL"), "1 of 256 byte tokens"),
        (lambda rows: rows[2].__setitem__(0, "</s>"), "eos_token"),
        (lambda rows: rows.__setitem__(7, {}), "line 8"),
    ],
)
def test_a_vocabulary_the_engine_would_misread_is_refused(change, match, source, tmp_path):
    edit_rows(source, change)
    refused(source, tmp_path, match)


# ---------------------------------------------------------------- hostile files


def safetensors_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**entry: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry}


HOSTILE = {
    "empty": b"",
    "cut in the length": b"\x08\0\0",
    "length beyond the file": safetensors_file({}, length=1 << 20),
    "length beyond memory": safetensors_file({}, length=(1 << 64) - 1),
    "header cut short": safetensors_file(one())[:30],
    "no JSON": safetensors_file(b"\xff\xfe\0{[not json" * 9),
    "JSON list": safetensors_file([1, 2]),
    "deep JSON": safetensors_file(b"[" * 100_000),
    "huge number": safetensors_file(b'{"x":' + b"9" * 10_000 + b"}"),
    "entry is no table": safetensors_file({"x": 3}),
    "entry is empty": safetensors_file({"x": {}}),
    "shape is negative": safetensors_file(one(shape=[-2]), bytes(8)),
    "shape is absurd": safetensors_file(one(shape=[1 << 61] * 4), bytes(8)),
    "shape is no list": safetensors_file(one(shape=8), bytes(8)),
    "shape holds text": safetensors_file(one(shape=["2"]), bytes(8)),
    "offsets negative": safetensors_file(one(data_offsets=[-8, 0]), bytes(8)),
    "offsets reversed": safetensors_file(one(data_offsets=[8, 0]), bytes(8)),
    "offsets beyond the file": safetensors_file(one(data_offsets=[1 << 40, (1 << 40) + 8]), bytes(8)),
    "offsets overlap": safetensors_file(one() | {"y": one(data_offsets=[4, 12])["x"]}, bytes(12)),
    "gap between tensors": safetensors_file(one() | {"y": one(data_offsets=[12, 20])["x"]}, bytes(20)),
    "data cut short": safetensors_file(one(), bytes(7)),
    "data too long": safetensors_file(one(), bytes(9)),
    "unknown type": safetensors_file(one(dtype="I32"), bytes(8)),
    "type is no text": safetensors_file(one(dtype=["F32"]), bytes(8)),
}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_shard_is_refused(case, source, tmp_path):
    shard = source / "model-00002-of-00002.safetensors"
    rewrite(shard, HOSTILE[case])
    refused(source, tmp_path, shard.name)


@pytest.mark.timeout(5)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", hf.INDEX])
@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'{"a":', b"[" * 100_000, b"\xff" * 99, b" " * (9 << 20)])
def test_json_nonsense_is_refused(name, content, source, tmp_path):
    rewrite(source / name, content)
    refused(source, tmp_path, name)


@pytest.mark.timeout(5)
@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\n", b'["a"', b"[]\n" * 9, b'"' + b"a" * (1 << 20)])
def test_vocabulary_nonsense_is_refused(content, source, tmp_path):
    rewrite(source / "tokenizer.jsonl", content)
    refused(source, tmp_path, r"tokenizer\.jsonl")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.jsonl", "tokenizer_config.json", "model-00001-of-00002.safetensors"]
)
def test_a_missing_file_is_named(name, source, tmp_path):
    (source / name).unlink()
    refused(source, tmp_path, f"{name}: no such file")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x\0.safetensors", 3]
)
def test_an_index_may_only_name_files_of_its_folder(name, source, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(safetensors_file({}))
    rewrite(source / hf.INDEX, json.dumps({"weight_map": {"x": name}}))
    refused(source, tmp_path, r"which is no safetensors file of this folder|x\W+\.safetensors")


def test_a_pipe_in_place_of_a_file_is_refused(source, tmp_path):
    (source / "model-00001-of-00002.safetensors").unlink()
    os.mkfifo(source / "model-00001-of-00002.safetensors")
    refused(source, tmp_path, "no such file")


def test_an_index_that_disagrees_with_its_shards_names_the_tensor(source, tmp_path):
    listed = json.loads((source / hf.INDEX).read_text())
    listed["weight_map"].pop("model.norm.weight")
    rewrite(source / hf.INDEX, json.dumps(listed))
    refused(source, tmp_path, r"tensor model\.norm\.weight: is not in the index")


def write_tensors(folder: Path, held: dict[str, np.ndarray]) -> None:
    """One file by the format's own library instead of whatever the folder has."""
    remove_weights(folder)
    safetensors.numpy.save_file(held, folder / hf.SINGLE)


def remove_weights(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), folder / hf.INDEX):
        file.unlink(missing_ok=True)


def held(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in safetensors.numpy.load_file(path).items()
    }


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.pop("model.norm.weight"), r"tensor model\.norm\.weight: is missing"),
        (lambda w: w.update({"model.extra": np.zeros(2, "f4")}), r"tensor model\.extra: is not part"),
        (
            lambda w: w.update({"model.norm.weight": np.zeros((2, 128), "f4")}),
            r"model\.norm\.weight: has shape \(2, 128\)",
        ),
        (lambda w: w["model.norm.weight"].__setitem__(3, np.nan), "not finite"),
        (lambda w: w["model.embed_tokens.weight"].__setitem__((3, 3), np.inf), "not finite"),
        (lambda w: w["model.embed_tokens.weight"].__setitem__((3, 3), 1e5), "F16 cannot hold"),
        (lambda w: w["model.layers.layers.0.mixer.A_log"].__setitem__(0, 1e3), "F32 cannot hold"),
        (lambda w: w.update({"model.norm.weight": np.zeros(256, "i8")}), "has type 'I64'"),
    ],
)
def test_wrong_tensors_are_named(change, match, source, tmp_path):
    weights = held(source)
    change(weights)
    write_tensors(source, weights)
    refused(source, tmp_path, match)


def test_a_head_beside_tied_embeddings_and_rotary_tables_are_ignored(files, source, tmp_path):
    weights = held(source)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 0
    weights["model.layers.layers.1.mixer.rotary_emb.inv_freq"] = np.zeros(4, "f4")
    write_tensors(source, weights)
    same_tensors(convert.convert(source, tmp_path / "m.gguf", "F16"), files.gguf(HYBRID, "F16"))


def test_a_release_all_in_bf16_is_widened_before_offsets_and_exponentials(source, tmp_path):
    weights, header, data = held(source), {}, b""
    halves = {name: numbers.narrow(value.astype(np.float32).ravel(), "BF16") for name, value in weights.items()}
    for name, half in halves.items():
        offsets = [len(data), len(data) + half.nbytes]
        header[name] = {"dtype": "BF16", "shape": weights[name].shape, "data_offsets": offsets}
        data += half.tobytes()
    remove_weights(source)
    (source / hf.SINGLE).write_bytes(safetensors_file(header, data))
    made = {t.name: t.data for t in gguf.GGUFReader(convert.convert(source, tmp_path / "m.gguf", "F32")).tensors}
    exact = {name: numbers.widen(half, "BF16").astype(np.float64) for name, half in halves.items()}
    layer = "model.layers.layers.0."
    for ours, expected in {
        "token_embd.weight": exact["model.embed_tokens.weight"],
        "output_norm.weight": exact["model.norm.weight"] + 1,
        "blk.0.post_attention_norm": exact[layer + "post_mixer_norm.weight"] + np.float32(1 / 5),
        "blk.0.ssm_a": -np.exp(exact[layer + "mixer.A_log"]),
    }.items():
        np.testing.assert_array_equal(made[ours].ravel(), expected.astype(np.float32), err_msg=ours)


def test_rows_that_are_no_multiple_of_32_refuse_q8_0_only(tmp_path):
    spec = replace(spec_of(ATTENTION), ffn=48)
    folder = released.write_released(synthetic.write(spec, "F32", tmp_path / "a.gguf"), tmp_path / "hf")
    refused(folder, tmp_path, "multiples of 32", "Q8_0")
    assert convert.convert(folder, tmp_path / "b.gguf", "F16").exists()


def test_unknown_type_is_refused_before_anything_is_read(tmp_path):
    refused(tmp_path / "nowhere", tmp_path, "type 'Q4_0'", "Q4_0")


def test_a_disk_too_small_is_said_before_writing(source, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20})())
    refused(source, tmp_path, "only 1,048,576 are free")


def test_a_failure_leaves_an_older_file_as_it_was(source, tmp_path):
    out = tmp_path / "model.gguf"
    out.write_text("older")
    weights = held(source)
    weights["model.norm.weight"][0] = np.inf  # the last tensor of the file
    write_tensors(source, weights)
    with pytest.raises(StudyError, match="not finite"):
        convert.convert(source, out, "F16")
    assert out.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "source"]
