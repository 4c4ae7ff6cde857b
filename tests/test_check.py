"""Every defect that is planted is found by name, before the engine meets it; what metadata can mend is mended."""

import errno
import hashlib
import os
import re
import shutil
import struct
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from hostile import Parts, opening, record, take_apart, tensor

from llama_meter.errors import StudyError
from llama_meter.measure import bench, checking, quantizing
from llama_meter.measure.checking import check
from llama_meter.measure.process import Outcome
from llama_meter.models import check as finite, header, registry, synthetic
from llama_meter.models.finding import Finding, blocking
from llama_meter.models.header import ARRAY, FLOAT32, INT32, STRING, UINT32, HeaderError
from llama_meter.models.recipes import Recipe
from llama_meter.models.repair import repair
from llama_meter.models.tensor_check import ssm_out_findings
from llama_meter.rows import Failure, Measured

Change = Callable[[Parts], None]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Right files of the hybrid model, by type."""
    folder, spec = tmp_path_factory.mktemp("right"), registry.spec(HYBRID, "mini")
    return {dtype: synthetic.write(spec, dtype, folder / f"{dtype}.gguf") for dtype in registry.DTYPES}


@pytest.fixture(scope="module")
def without_rope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """D1: head_count as an array that starts with 0, as official conversions write it."""
    path = tmp_path_factory.mktemp("defects") / "array.gguf"
    return synthetic.write(registry.spec(HYBRID, "mini"), "F16", path, head_count_array=True)


def changed(path: Path, *changes: Change, model: str = HYBRID) -> Path:
    """A copy of an embedded model with something changed."""
    parts = take_apart(mini_file(model))
    for change in changes:
        change(parts)
    path.write_bytes(parts.build())
    return path


def value(name: str, kind: int, value: object) -> Change:
    return lambda parts: parts.put(name, kind, value)


def without(*names: str) -> Change:
    return lambda parts: [parts.records.pop(name) for name in names]


def tensor_with(name: str, /, **fields: object) -> Change:
    """Replace fields of a tensor's record; `move` shifts its offset."""

    def change(parts: Parts) -> None:
        at = next(i for i, t in enumerate(parts.tensors) if t.name == name)
        t = parts.tensors[at]
        parts.tensors[at] = replace(t, offset=t.offset + fields.pop("move", 0), **fields)

    return change


def weights(name: str, raw: bytes) -> Change:
    """Overwrite the first bytes of a tensor."""

    def change(parts: Parts) -> None:
        start = next(t.offset for t in parts.tensors if t.name == name)
        parts.data = parts.data[:start] + raw + parts.data[start + len(raw) :]

    return change


def words(name: str, change: Callable[[list], object]) -> Change:
    """Change one of the vocabulary's lists."""

    def spoil(parts: Parts) -> None:
        field = f"tokenizer.ggml.{name}"
        values = list(parts.header.value(field))
        change(values)
        parts.put(field, parts.header.records[field].item, values)

    return spoil


def token(name: str, at: int, value: object) -> Change:
    return words(name, lambda values: values.__setitem__(at, value))


def codes(found: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.severity, finding.code) for finding in found}


# ---------------------------------------------------------------- files that are right


@pytest.mark.parametrize("dtype", registry.DTYPES)
def test_a_right_file_has_no_finding_but_an_ssm_out_type_that_can_overflow(dtype, files):
    for gpu, severity in ((False, "note"), (True, "warning")):
        found = ssm_out_findings(header.read(files[dtype]), gpu)
        assert [f.severity for f in found] == ([] if dtype == "BF16" else [severity])
        assert all("65,504" in f.evidence and "--keep ssm_out=bf16" in f.mend for f in found)
    assert codes(check(files[dtype], gate=False)) <= {("note", "ssm-out-type"), ("warning", "ssm-out-type")}


def test_the_gate_loads_decodes_and_holds_a_right_file_against_the_oracle():
    found = check(mini_file(ATTENTION))
    assert not blocking(found), found
    (passed,) = (f for f in found if f.code == "gate")
    assert "of the oracle" in passed.evidence


def test_the_header_reader_agrees_with_the_format_s_own_on_every_key_type_and_tensor(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "plamo2")
    whole = {"uint8": 255, "int8": -1, "uint16": 65535, "int16": -2, "uint32": 2**32 - 1, "int32": -3, "int64": -4}
    for name, number in (whole | {"uint64": 2**64 - 1, "float32": 0.5, "float64": 1e300, "bool": True}).items():
        getattr(writer, f"add_{name}")(name, number)
    writer.add_string("string", "文字")
    writer.add_array("strings", ["a", "", "b"])
    writer.add_array("floats", [0.5, 1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    for path in (tmp_path / "types.gguf", mini_file()):
        ours, theirs = header.read(path), gguf.GGUFReader(path)
        assert {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")} == {
            k: plain(ours.value(k)) for k in ours.records
        }
        assert [(t.name, t.tensor_type, t.data_offset, t.n_bytes) for t in theirs.tensors] == [
            (t.name, t.type_id, ours.data_start + t.offset, t.n_bytes) for t in ours.tensors
        ]


def plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [text.decode() for text in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- files that are not


X = struct.pack("<Q", 1) + b"x"
DAMAGES = [
    ("not-gguf", b"PK\3\4 and more"),
    ("not-gguf", b""),
    ("byte-order", b"GGUF\0\0\0\3" + bytes(16)),
    ("version", opening(version=4)),
    ("version", opening(version=1)),
    ("cut-short", b"GGUF\3\0"),
    ("absurd-count", opening(n_keys=2**63)),
    ("absurd-count", opening(n_tensors=2**64 - 1)),
    ("value-type", opening(n_keys=1) + X + struct.pack("<I", 99) + bytes(8)),
    ("nested-array", opening(n_keys=1) + X + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(16)),
    ("duplicate-key", opening(n_keys=2) + record("x", 0, 1) * 2),
    ("name", opening(n_keys=1) + record("", UINT32, 1)),
    ("name", opening(n_keys=1) + record(b"\xff", UINT32, 1)),
    ("name", opening(n_tensors=1) + tensor("x" * 64, (2,), 0, 0)),
    ("alignment", opening(n_keys=1) + record("general.alignment", UINT32, 3)),
    ("dimensions", opening(n_tensors=1) + tensor("x", (2,) * 5, 0, 0)),
    ("dimensions", opening(n_tensors=1) + tensor("x", (-1,), 0, 0)),
    ("dimensions", opening(n_tensors=1) + tensor("x", (2**32, 2**32), 0, 0)),
    ("duplicate-tensor", opening(n_tensors=2) + tensor("x", (2,), 0, 0) * 2),
    ("header-too-long", opening(n_keys=1) + record("x", STRING, bytes(header.MAX_HEADER))),
    ("cut-short", opening(n_keys=1) + X + struct.pack("<IQ", STRING, 2**40) + bytes(8)),
    ("cut-short", opening(n_keys=1) + X + struct.pack("<IIQQ", ARRAY, STRING, 1, 2**63) + bytes(8)),
]


@pytest.mark.parametrize(("code", "content"), DAMAGES, ids=range(len(DAMAGES)))
def test_each_kind_of_damage_has_its_own_clear_error(code, content, tmp_path):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(HeaderError, match=r"damaged\.gguf") as caught:
        header.read(path)
    assert caught.value.code == code
    (found,) = check(path)
    assert (found.severity, found.code) == ("blocking", code)
    assert found.mend


def test_what_is_no_file_is_an_error_that_names_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    os.symlink(tmp_path / "gone", tmp_path / "link.gguf")
    for name, why in {"absent": "no such file", "pipe": "no regular file", "link": "a link to nothing"}.items():
        with pytest.raises(StudyError, match=why):
            check(tmp_path / f"{name}.gguf")
    with pytest.raises(StudyError, match="no such file"):
        check(tmp_path / ("x" * 5000))


def test_of_a_folder_its_gguf_files_are_named_and_its_weights_to_convert(tmp_path):
    with pytest.raises(StudyError, match="is a folder without a GGUF file"):
        check(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(StudyError, match="weights in safetensors format"):
        check(tmp_path)
    (tmp_path / "own.gguf").write_bytes(b"")
    with pytest.raises(StudyError, match=r"is a folder; GGUF files in it: own\.gguf") as caught:
        check(tmp_path)
    assert str(tmp_path / "own.gguf") in caught.value.mend


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 8601238080\n" % 0
TORCH = b"PK\3\4" + bytes(26) + b"archive/data.pkl" + bytes(40)
FOREIGN = {
    "lfs": (LFS, "8,601,238,080", "git lfs pull"),
    "annex": (b"/annex/objects/SHA256E-s8601238080--%064d.gguf\n" % 0, "git-annex", "annex get"),
    "page": (b"<!doctype html>\n<html><title>Sign in \x1b[2J</title>", r"web page \(Sign in \\x1b", "fetch it again"),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code>', "server in XML", "fetch it again"),
    "json": (b'{"error":"Invalid username or password."}', "is JSON", "fetch it again"),
    "refusal": (b"Access to model x is restricted.", "message of a server", "fetch it again"),
    "empty": (b"", "is empty", "fetch it again"),
    "zeros": (bytes(10_000), "begins with zeros", "curl"),
    "zip": (b"PK\3\4 and more", "zip archive", "unzip"),
    "gzip": (b"\x1f\x8b\x08 and more", "gzip", "gunzip"),
    "safetensors": (struct.pack("<Q", 20) + b'{"x":{"dtype":"F16"}' + bytes(200), "safetensors", "convert_hf_to_gguf"),
    "torch": (TORCH, "PyTorch", "convert_hf_to_gguf"),
    "pickle": (b"\x80\x02}q\x00X", "pickle", "convert_hf_to_gguf"),
    "ggjt": (b"tjgg\x03\0\0\0" + bytes(100), "before GGUF", "fetch it again"),
}


@pytest.mark.case(12)
@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_gguf_is_called_what_it_is_with_what_brings_the_file(name, tmp_path):
    content, why, mend = FOREIGN[name]
    path = tmp_path / "plamo-2-1b.Q8_0.gguf"
    path.write_bytes(content)
    (found,) = check(path)
    assert (found.severity, found.code) == ("blocking", "not-gguf")
    assert re.search(why, found.evidence), found.evidence
    assert mend in found.mend
    assert "/resolve/" not in mend or "mmnga/plamo-2-1b-gguf" in found.mend


@pytest.mark.case(12)
def test_a_length_read_from_noise_is_no_number_in_a_message(tmp_path):
    long_name = opening(n_keys=1) + struct.pack("<Q", 2**60)
    for content in (opening(n_keys=2**63), long_name, *(content for code, content in DAMAGES if code == "cut-short")):
        (tmp_path / "m.gguf").write_bytes(content)
        (found,) = check(tmp_path / "m.gguf")
        assert not re.search(r"\d,\d{3},\d{3},\d{3}", found.evidence), found.evidence


def part(number: int, count: int) -> Change:
    return lambda parts: [value(f"split.{key}", 2, n)(parts) for key, n in (("no", number), ("count", count))]


def adapter(parts: Parts) -> None:
    parts.tensors = [replace(t, name=f"{t.name}.lora_a") for t in parts.tensors]


def without_tensors(parts: Parts) -> None:
    parts.tensors, parts.data = [], b""


NO_MODELS = {
    "no-model-adapter": [value("general.type", STRING, "adapter"), adapter],
    "no-model-mmproj": [value("general.type", STRING, "mmproj"), value("general.architecture", STRING, "clip")],
    "no-model-clip": [value("general.architecture", STRING, "clip")],
    "no-model-imatrix": [value("general.type", STRING, "imatrix")],
    "no-weights": [without_tensors],
    "split": [part(1, 3)],
}


@pytest.mark.case(13)
@pytest.mark.parametrize("code", NO_MODELS)
def test_a_gguf_that_is_no_whole_model_has_one_finding_and_is_no_source(code, tmp_path):
    path = changed(tmp_path / "m-00002-of-00003.gguf", *NO_MODELS[code])
    assert [(f.severity, f.code) for f in check(path)] == [("blocking", code)]
    with pytest.raises(StudyError, match=r"m-00002-of-00003\.gguf"):
        quantizing.quantize(path, tmp_path / "out.gguf", Recipe("Q8_0"))
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.case(13)
def test_an_adapter_is_known_by_its_tensors_alone(tmp_path):
    (found,) = check(changed(tmp_path / "m.gguf", adapter))
    assert (found.code, "llama-export-lora" in found.mend) == ("no-model-adapter", True)


def test_the_parts_that_are_not_beside_a_part_are_named(tmp_path):
    changed(tmp_path / "m-00001-of-00003.gguf", part(0, 3))
    (found,) = check(changed(tmp_path / "m-00003-of-00003.gguf", part(2, 3)))
    assert "m-00002-of-00003.gguf" in found.evidence
    assert f"--merge {tmp_path / 'm-00001-of-00003.gguf'}" in found.mend


def another_tensor(parts: Parts) -> None:
    parts.tensors.append(header.TensorRecord("rope_freqs.weight", (32,), 0, len(parts.data)))
    parts.data += bytes(128)


def last_tensor_missing(parts: Parts) -> None:
    del parts.tensors[-1]


def cut(parts: Parts) -> None:
    parts.data = parts.data[:-100]


def byte_at_0(parts: Parts) -> None:
    """Byte token 0 changes places with the token at id 0."""
    for name in ("tokens", "token_type"):
        words(name, lambda v: v.__setitem__(slice(0, 6), [v[5], *v[1:5], v[0]]))(parts)


def more_tokens(parts: Parts) -> None:
    for name, more in (("tokens", b"extra"), ("scores", -1.0), ("token_type", 1)):
        words(name, lambda values, more=more: values.append(more))(parts)


HEADS, DOWN = "plamo2.attention.head_count", "blk.0.ffn_down.weight"
BLOCKING = [
    # metadata
    ("architecture", value("general.architecture", STRING, "x")),
    ("key-missing", without("plamo2.block_count")),
    ("key-range", value("plamo2.block_count", UINT32, 0)),
    ("key-type", value("plamo2.embedding_length", 10, 256)),
    ("key-range", value(HEADS, UINT32, 0)),
    ("key-type", value(HEADS, INT32, [4, 4])),  # of too few layers
    ("key-range", value(HEADS, INT32, [4, 0, 4, 4])),  # attention without heads
    ("key-range", value(HEADS, UINT32, 5)),  # shared unevenly
    ("key-range", value("plamo2.attention.layer_norm_rms_epsilon", FLOAT32, np.nan)),
    ("rope-dimensions", value("plamo2.rope.dimension_count", UINT32, 0)),
    ("key-range", value("plamo2.ssm.group_count", UINT32, 2**20)),
    ("split", value("split.count", 2, 3)),
    ("key-range", value("plamo2.rope.scaling.type", STRING, "x")),
    # tensors
    ("tensor-missing", last_tensor_missing),
    ("tensor-extra", another_tensor),
    ("tensor-shape", tensor_with(DOWN, dims=(128, 512))),  # turned
    ("tensor-type", tensor_with(DOWN, type_id=99)),
    ("tensor-type", tensor_with(DOWN, type_id=42)),  # Q2_0, newer than the gguf package
    ("tensor-shape", tensor_with("blk.0.ssm_conv1d.weight", type_id=8)),  # blocks do not fit
    ("tensor-type", tensor_with(DOWN, type_id=25)),  # whole numbers
    ("cut-short", cut),
    ("tensor-offset", tensor_with(DOWN, move=-64)),  # overlapping
    ("tensor-offset", tensor_with(DOWN, move=64)),  # behind a gap
    ("tensor-offset", tensor_with(DOWN, move=2)),  # misaligned
    # tokenizer
    ("byte-tokens", token("tokens", 70, b"x70")),
    ("byte-tokens", token("token_type", 70, 1)),
    ("byte-tokens", byte_at_0),
    ("token-duplicate", token("tokens", 300, b"<|plamo:bos|>")),
    ("token-length", token("tokens", 300, b"a" * 10_000)),
    ("tokenizer-lists", words("scores", lambda values: values.pop())),
    ("tokenizer-lists", without("tokenizer.ggml.scores")),
    ("tokenizer-model", value("tokenizer.ggml.model", STRING, "gpt2")),
    ("tensor-shape", more_tokens),
    ("token-scores", token("scores", 300, 3e5)),  # beyond 32 bits
]
WARNINGS = [
    ("token-scores", token("scores", 300, np.nan)),
    ("token-scores", token("scores", 300, -1000.0)),  # the engine's sentinel
    ("token-text", token("tokens", 300, b"\xff")),
    ("token-empty", token("tokens", 300, b"")),
    ("token-id", without("tokenizer.ggml.bos_token_id")),
    ("token-id", value("tokenizer.ggml.eos_token_id", UINT32, 2048)),
    ("token-id", value("tokenizer.ggml.eot_token_id", UINT32, 300)),
]
FAULTS = [("blocking", *fault) for fault in BLOCKING] + [("warning", *fault) for fault in WARNINGS]


@pytest.mark.parametrize(("severity", "code", "change"), FAULTS, ids=[f"{i}-{f[1]}" for i, f in enumerate(FAULTS)])
def test_what_the_engine_cannot_use_or_misreads_is_found_by_name(severity, code, change, tmp_path):
    found = check(changed(tmp_path / "m.gguf", change), gate=False)
    assert (severity, code) in codes(found), found


def test_padding_may_have_the_sentinel_as_its_score(tmp_path):
    path = changed(tmp_path / "m.gguf", token("scores", 511, -1000.0), token("token_type", 511, 5))
    assert {f.code for f in check(path, gate=False)} <= {"ssm-out-type"}


def test_a_window_unlike_the_model_s_is_a_warning(tmp_path):
    path = changed(tmp_path / "m.gguf", value("plamo3.attention.sliding_window", UINT32, 64), model=ATTENTION)
    assert ("warning", "window") in codes(check(path, gate=False))


@pytest.mark.parametrize("dtype", registry.DTYPES)
def test_one_number_that_is_not_finite_is_found_in_every_type(dtype, files, tmp_path, monkeypatch):
    path = shutil.copy(files[dtype], tmp_path / "m.gguf")
    t = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    size = gguf.GGML_QUANT_SIZES[t.tensor_type][1]
    infinite = {"F32": np.float32(-np.inf), "BF16": np.uint16(0xFF80)}.get(dtype, np.float16(np.nan))
    with path.open("r+b") as file:
        file.seek(t.data_offset + t.n_bytes - size)  # the last number, or block
        file.write(infinite.tobytes())
    monkeypatch.setattr(finite, "PIECE", 1001 * size)
    (found,) = blocking(check(path))
    assert (found.code, "blk.1.ffn_up.weight (1)" in found.evidence) == ("not-finite", True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_scales_of_a_block_lie_where_dequantizing_reads_them():
    for name in finite.SCALES.keys() - {"Q1_0"}:  # gguf dequantizes all but this one
        kind = gguf.GGMLQuantizationType[name]
        block = np.full(gguf.GGML_QUANT_SIZES[kind][1], 0x11, np.uint8)
        assert finite.not_finite(block, name, block.size) == 0
        assert np.isfinite(gguf.dequantize(block[None], kind)).all()
        for at in finite.SCALES[name]:
            planted = block.copy()
            planted[at : at + 2] = 0x00, 0x7C
            assert finite.not_finite(planted, name, block.size) == 1
            assert not np.isfinite(gguf.dequantize(planted[None], kind)).all(), (name, at)


# ---------------------------------------------------------------- hash and order


def test_a_hash_is_compared_and_a_wrong_one_blocks():
    right = hashlib.sha256(mini_file().read_bytes()).hexdigest()
    assert not blocking(check(mini_file(), sha256=right.upper(), gate=False))
    (found,) = blocking(check(mini_file(), sha256="0" * 64))
    assert (found.code, right in found.evidence) == ("hash", True)
    with pytest.raises(StudyError, match="64 hex digits"):
        check(mini_file(), sha256="abc")


def test_the_worst_comes_first_and_a_stranger_s_text_reaches_no_terminal(tmp_path):
    evil = tensor_with("output_norm.weight", name="\x1b[2Jevil")
    found = check(changed(tmp_path / "m.gguf", value("plamo2.rope.freq_base", FLOAT32, 1e6), evil), gate=False)
    severities = [f.severity for f in found]
    assert severities == sorted(severities, key=["blocking", "warning", "note"].index)
    assert set(severities) >= {"blocking", "warning"}
    assert any("evil" in f.evidence for f in found)
    assert all(f.evidence.isprintable() for f in found)


# ---------------------------------------------------------------- the gate


@pytest.mark.whole
def test_a_lost_rope_is_found_before_the_engine_meets_it_and_would_hang(without_rope):
    (found,) = blocking(check(without_rope))
    assert (found.code, "--repair" in found.mend) == ("head-count-array", True)
    (caught,) = checking.through_the_gate(without_rope, time_limit_s=3.0).findings
    assert (caught.code, "no answer within 3 s" in caught.evidence) == ("engine-hang", True)


def test_logits_that_are_not_finite_close_the_gate(tmp_path):
    huge = np.full(4, 1e30, "<f4").tobytes()  # of the F16 model: the input of ssm_out overflows (D5)
    found = check(changed(tmp_path / "m.gguf", weights("blk.0.ssm_d", huge)))
    assert codes(blocking(found)) == {("blocking", "logits-not-finite")}


def test_a_refusal_of_the_engine_and_memory_that_runs_out_are_findings(tmp_path):
    (found,) = checking.through_the_gate(changed(tmp_path / "m.gguf", last_tensor_missing)).findings
    assert (found.code, "output_norm" in found.evidence) == ("engine-error", True)
    (found,) = checking.through_the_gate(mini_file(), memory_limit=32 << 20).findings
    assert found.severity == "blocking"
    assert found.code in ("memory", "engine-error", "engine-abort", "engine-killed")


@pytest.mark.parametrize("said", ["RuntimeError: can't start new thread", "MemoryError: ", "std::bad_alloc"])
def test_an_engine_that_lacked_memory_says_nothing_against_the_file_or_the_build(said, monkeypatch):
    ended = Outcome(status="error", pid=1, evidence=(), failure=Failure(stage="load", exit_code=1, message=said))
    for module in (checking, bench):
        monkeypatch.setattr(module, "work", lambda *_, **__: ended)
    (found,) = checking.through_the_gate(mini_file()).findings
    assert (found.code, "ulimit" in found.mend) == ("memory", True)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/somewhere")
    with pytest.raises(StudyError, match="ulimit"):
        bench.engine_facts()


def test_disagreement_with_the_oracle_and_rotation_by_nothing_are_blocking():
    checks = {"finite_cpu": True, "n_rot": 0, "oracle_error": 0.7, "oracle_agrees": False, "tolerance": 0.01}
    found = checking._objections(Measured(checks=checks))
    assert codes(found) == {("blocking", "rope-lost"), ("blocking", "oracle")}


# ---------------------------------------------------------------- repair


def test_a_repaired_file_keeps_every_tensor_byte_for_byte_and_matches_the_oracle(without_rope, files, tmp_path):
    out = tmp_path / "new" / "repaired.gguf"
    assert repair(without_rope, out) == [f"{HEADS} is 4 instead of an array that starts with 0"]
    assert out.read_bytes() == files["F16"].read_bytes(), "the file that was never wrong"
    found = check(out)
    assert not blocking(found)
    assert "of the oracle" in next(f.evidence for f in found if f.code == "gate")


def test_a_repair_sets_the_rotary_base_adds_missing_ids_and_keeps_what_it_does_not_know(tmp_path):
    missing = without(*(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot")))
    odd = [value("somebody.else", STRING, "kept"), value("empty", UINT32, []), token("tokens", 300, b"\xff")]
    path = changed(tmp_path / "m.gguf", missing, *odd, value("plamo2.rope.freq_base", FLOAT32, 1e6))
    (found,) = (f for f in check(path, gate=False) if f.code == "rope-theta")
    assert (found.severity, "--rope-theta 10000" in found.mend, "1e+06" in found.evidence) == ("warning", True, True)
    said = repair(path, tmp_path / "out.gguf", rope_theta=1e4)
    assert (len(said), said[-1]) == (4, "plamo2.rope.freq_base is 10000 instead of 1000000.0")
    before, after = header.read(mini_file()), header.read(tmp_path / "out.gguf")
    assert after.records.keys() == before.records.keys() | {"somebody.else", "empty"}
    assert (after.value("somebody.else"), after.value("tokenizer.ggml.tokens")[300]) == ("kept", b"\xff")
    mended = [key for key in before.records if key.endswith(("_token_id", "freq_base"))]
    assert [after.value(key) for key in mended] == [before.value(key) for key in mended]
    one, other = (
        [(t.name, t.data.tobytes()) for t in gguf.GGUFReader(p).tensors] for p in (path, tmp_path / "out.gguf")
    )
    assert one == other
    assert codes(check(tmp_path / "out.gguf", gate=False)) <= {("note", "ssm-out-type"), ("warning", "token-text")}


def test_a_repair_is_never_in_place(without_rope, tmp_path):
    source = shutil.copy(without_rope, tmp_path / "m.gguf")
    (tmp_path / "link.gguf").symlink_to(source)
    (tmp_path / "hard.gguf").hardlink_to(source)
    for out in (source, tmp_path / "link.gguf", tmp_path / "hard.gguf"):
        with pytest.raises(StudyError, match="never in place"):
            repair(source, out)
    assert source.read_bytes() == without_rope.read_bytes()


@pytest.mark.parametrize(
    ("changes", "theta", "message"),
    [
        ([], None, "nothing that can be repaired"),
        ([], float("nan"), "no rotary base"),
        ([last_tensor_missing], 1e6, "would stay unusable"),
        ([weights("output_norm.weight", b"\0\0\xc0\x7f")], 1e6, "would stay unusable"),
    ],
)
def test_what_cannot_be_repaired_is_said_and_nothing_is_written(changes, theta, message, tmp_path):
    path = changed(tmp_path / "m.gguf", *changes)
    with pytest.raises(StudyError, match=message):
        repair(path, tmp_path / "out" / "out.gguf", rope_theta=theta)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["m.gguf"]


def test_a_full_disk_or_a_broken_write_leaves_nothing_behind(without_rope, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(1000))
    with pytest.raises(StudyError, match="only 1,000 are free"):
        repair(without_rope, tmp_path / "out.gguf")
    monkeypatch.undo()

    def fill_up(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fill_up)
    with pytest.raises(StudyError, match="No space left"):
        repair(without_rope, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []
