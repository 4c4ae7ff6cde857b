"""Every defect that is planted is found by name, before the engine meets it; what metadata can mend is mended."""

import dataclasses
import hashlib
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from hostile import Parts, array, scalar, take_apart, tensor

from plamo_study.errors import StudyError
from plamo_study.measure import checkup
from plamo_study.measure.checking import check
from plamo_study.measure.rows import Measured
from plamo_study.models import finite, header, registry, repair, synthetic
from plamo_study.models.finding import Finding, blocking
from plamo_study.models.header import HeaderError
from plamo_study.models.repair import repair as mend
from plamo_study.models.tensor_check import ssm_out_findings

U32, I32, F32, STRING = 4, 5, 6, 8
Change = Callable[[Parts], None]


@pytest.fixture(scope="module")
def without_rope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """D1: head_count as an array that starts with 0, as official conversions write it."""
    path = tmp_path_factory.mktemp("defects") / "array.gguf"
    return synthetic.write(registry.spec(HYBRID, "mini"), "F16", path, head_count_array=True)


def changed(path: Path, change: Change, model: str = HYBRID) -> Path:
    """A copy of an embedded model with one thing changed."""
    parts = take_apart(mini_file(model))
    change(parts)
    path.write_bytes(parts.build())
    return path


def key(name: str, record: bytes | None) -> Change:
    """Replace or remove a record; a name that is not in the file is added."""

    def change(parts: Parts) -> None:
        names = list(parts.header.records)
        at = names.index(name) if name in names else len(names)
        parts.records[at : at + 1] = [] if record is None else [record]

    return change


def value(name: str, kind: int, value: object) -> Change:
    return key(name, scalar(name, kind, value))


def tensor_with(name: str, /, **fields: object) -> Change:
    """Replace fields of a tensor's record."""

    def change(parts: Parts) -> None:
        at = next(i for i, t in enumerate(parts.header.tensors) if t.name == name)
        t = dataclasses.replace(parts.header.tensors[at], **fields)
        parts.tensors[at] = tensor(t.name, t.dims, t.type_id, t.offset)

    return change


def weights(name: str, raw: bytes, at: int = 0) -> Change:
    """Overwrite bytes of a tensor."""

    def change(parts: Parts) -> None:
        t = next(t for t in parts.header.tensors if t.name == name)
        start = t.offset + at
        parts.data = parts.data[:start] + raw + parts.data[start + len(raw) :]

    return change


def codes(found: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.severity, finding.code) for finding in found}


# ---------------------------------------------------------------- files that are right


@pytest.mark.parametrize("dtype", registry.DTYPES)
@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_a_right_file_has_no_finding_but_its_ssm_out_type(model, dtype, tmp_path):
    path = synthetic.write(registry.spec(model, "mini"), dtype, tmp_path / "m.gguf")
    assert codes(check(path, gate=False)) <= {("note", "ssm-out-type"), ("warning", "ssm-out-type")}


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_the_gate_loads_decodes_and_holds_a_right_file_against_the_oracle(model):
    found = check(mini_file(model))
    assert not blocking(found), found
    (passed,) = (f for f in found if f.code == "gate")
    assert "of the oracle" in passed.evidence


def test_the_header_reader_agrees_with_the_format_s_own_on_every_key_and_tensor():
    ours, theirs = header.read(mini_file(HYBRID)), gguf.GGUFReader(mini_file(HYBRID))
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


def test_every_value_type_is_understood(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "plamo2")
    values = {"u8": 255, "i8": -1, "u16": 65535, "i16": -2, "u32": 2**32 - 1, "i32": -3, "u64": 2**64 - 1, "i64": -4}
    names = {"u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64"}
    for name, value in values.items():
        getattr(writer, f"add_{names.get(name, name.replace('i', 'int'))}")(name, value)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("bool", True)
    writer.add_string("string", "文字")
    writer.add_array("strings", ["a", "", "b"])
    writer.add_array("floats", [0.5, 1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    read = header.read(tmp_path / "types.gguf")
    more = {"f32": 0.5, "f64": 1e300, "bool": 1, "string": "文字", "strings": ["a", "", "b"], "floats": [0.5, 1.5]}
    assert {k: plain(read.value(k)) for k in (values | more)} == values | more
    assert {read.records[k].type_name for k in values} == set(values)


# ---------------------------------------------------------------- damaged headers


def opening(version: int = 3, n_tensors: int = 0, n_keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


NESTED = struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, 9, 1)
DAMAGES = {
    "not-gguf": b"PK\3\4 and more",
    "empty": b"",
    "byte-order": b"GGUF\0\0\0\3" + bytes(16),
    "version": opening(version=4),
    "old version": opening(version=1),
    "cut-short": b"GGUF\3\0",
    "absurd-count": opening(n_keys=2**63),
    "absurd tensors": opening(n_tensors=2**64 - 1),
    "value-type": opening(n_keys=1) + struct.pack("<Q", 1) + b"x" + struct.pack("<I", 99) + bytes(8),
    "nested-array": opening(n_keys=1) + NESTED + bytes(16),
    "duplicate-key": opening(n_keys=2) + scalar("x", 0, 1) * 2,
    "name": opening(n_keys=1) + scalar("", 4, 1),
    "alignment": opening(n_keys=1) + scalar("general.alignment", U32, 3),
    "dimensions": opening(n_tensors=1) + tensor("x", (2,) * 5, 0, 0),
    "negative": opening(n_tensors=1) + tensor("x", (-1,), 0, 0),
    "too many weights": opening(n_tensors=1) + tensor("x", (2**32, 2**32), 0, 0),
    "duplicate-tensor": opening(n_tensors=2) + tensor("x", (2,), 0, 0) * 2,
    "tensor name": opening(n_tensors=1) + tensor("x" * 64, (2,), 0, 0),
    "header-too-long": opening(n_keys=1) + scalar("x", STRING, bytes(header.MAX_HEADER)),
    "string": opening(n_keys=1) + struct.pack("<Q", 1) + b"x" + struct.pack("<IQ", STRING, 2**40) + bytes(8),
    "strings": opening(n_keys=1) + struct.pack("<Q", 1) + b"x" + struct.pack("<IIQQ", 9, STRING, 1, 2**63) + bytes(8),
}
SAME_CODE = {
    "empty": "not-gguf", "old version": "version", "absurd tensors": "absurd-count", "negative": "dimensions",
    "too many weights": "dimensions", "tensor name": "name", "string": "cut-short", "strings": "cut-short",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_kind_of_damage_has_its_own_clear_error(damage, tmp_path):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(DAMAGES[damage])
    with pytest.raises(HeaderError, match=r"damaged\.gguf") as caught:
        header.read(path)
    assert caught.value.code == SAME_CODE.get(damage, damage)
    (found,) = check(path)
    assert (found.severity, found.code) == ("blocking", caught.value.code)
    assert "plamo-study models" in found.mend


def test_what_is_no_file_is_an_error_that_names_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "absent.gguf", tmp_path / "pipe.gguf"):
        with pytest.raises(StudyError, match="no such file"):
            check(path)


# ---------------------------------------------------------------- metadata


METADATA = {
    "another architecture": ("architecture", value("general.architecture", STRING, "x")),
    "no block count": ("key-missing", key("plamo2.block_count", None)),
    "no layers": ("key-range", value("plamo2.block_count", U32, 0)),
    "a width of the wrong type": ("key-type", value("plamo2.embedding_length", 10, 256)),
    "no head": ("key-range", value("plamo2.attention.head_count", U32, 0)),
    "head counts of too few layers": (
        "key-type",
        key("plamo2.attention.head_count", array("plamo2.attention.head_count", I32, [4, 4])),
    ),
    "attention without heads": (
        "key-range",
        key("plamo2.attention.head_count", array("plamo2.attention.head_count", I32, [4, 0, 4, 4])),
    ),
    "heads that share unevenly": (
        "key-range",
        value("plamo2.attention.head_count", U32, 5),
    ),
    "an epsilon that is NaN": (
        "key-range",
        value("plamo2.attention.layer_norm_rms_epsilon", F32, np.nan),
    ),
    "no rotary dimensions": (
        "rope-dimensions",
        value("plamo2.rope.dimension_count", U32, 0),
    ),
    "a state sized by groups": ("key-range", value("plamo2.ssm.group_count", U32, 2**20)),
    "one part of several": ("split", value("split.count", 2, 3)),
    "an unknown rope scaling": ("key-range", value("plamo2.rope.scaling.type", STRING, "x")),
}  # fmt: skip


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_the_engine_cannot_use_is_blocking(case, tmp_path):
    code, change = METADATA[case]
    found = check(changed(tmp_path / "m.gguf", change))
    assert ("blocking", code) in codes(found), found


def test_a_rotary_base_unlike_the_model_s_is_a_warning_that_repair_can_mend(tmp_path):
    change = value("plamo2.rope.freq_base", F32, 1e6)
    path = changed(tmp_path / "theta.gguf", change)
    (found,) = (f for f in check(path, gate=False) if f.severity == "warning")
    assert (found.code, "--rope-theta 10000" in found.mend) == ("rope-theta", True)
    assert "1e+06" in found.evidence
    assert mend(path, tmp_path / "mended.gguf", rope_theta=1e4) == [
        "plamo2.rope.freq_base is 10000 instead of 1000000.0"
    ]
    assert "rope-theta" not in {f.code for f in check(tmp_path / "mended.gguf", gate=False)}


def test_a_window_unlike_the_model_s_is_a_warning(tmp_path):
    change = value("plamo3.attention.sliding_window", U32, 64)
    found = check(changed(tmp_path / "m.gguf", change, ATTENTION), gate=False)
    assert ("warning", "window") in codes(found)


# ---------------------------------------------------------------- tensors


def without_last_tensor(parts: Parts) -> None:
    del parts.tensors[-1]


def with_another_tensor(parts: Parts) -> None:
    parts.tensors.append(tensor("rope_freqs.weight", (32,), 0, len(parts.data)))
    parts.data += bytes(128)


def cut(parts: Parts) -> None:
    parts.data = parts.data[:-100]


def offset_of(name: str, move: int) -> Change:
    def change(parts: Parts) -> None:
        t = next(t for t in parts.header.tensors if t.name == name)
        tensor_with(name, offset=t.offset + move)(parts)

    return change


TENSORS = {
    "missing": ("tensor-missing", without_last_tensor),
    "additional": ("tensor-extra", with_another_tensor),
    "turned": ("tensor-shape", tensor_with("blk.0.ffn_down.weight", dims=(128, 512))),
    "of an unknown type": ("tensor-type", tensor_with("blk.0.ffn_down.weight", type_id=99)),
    "of a type whose blocks do not fit": ("tensor-shape", tensor_with("blk.0.ssm_conv1d.weight", type_id=8)),
    "of whole numbers": ("tensor-type", tensor_with("blk.0.ffn_down.weight", type_id=25)),
    "beyond the end": ("cut-short", cut),
    "overlapping": ("tensor-offset", offset_of("blk.0.ffn_down.weight", -64)),
    "behind a gap": ("tensor-offset", offset_of("blk.0.ffn_down.weight", 64)),
    "misaligned": ("tensor-offset", offset_of("blk.0.ffn_down.weight", 2)),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_those_of_the_model_are_blocking(case, tmp_path):
    code, change = TENSORS[case]
    found = check(changed(tmp_path / "m.gguf", change))
    assert ("blocking", code) in codes(found), found


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", registry.DTYPES)
def test_one_number_that_is_not_finite_is_found_in_every_type(dtype, value, tmp_path, monkeypatch):
    path = synthetic.write(registry.spec(HYBRID, "mini"), dtype, tmp_path / "m.gguf")
    place = header.read(path)
    t = next(t for t in place.tensors if t.name == "blk.1.ffn_up.weight")
    size = {"F32": 4, "F16": 2, "BF16": 2, "Q8_0": 34}[dtype]
    bits = (
        np.float32(value).tobytes()[2:] if dtype == "BF16" else np.array(value, "<f4" if size == 4 else "<f2").tobytes()
    )
    raw = bytearray(path.read_bytes())
    start = place.data_start + t.offset + t.n_bytes - size
    raw[start : start + len(bits)] = bits
    path.write_bytes(raw)
    monkeypatch.setattr(finite, "PIECE", 1001 * size)
    (found,) = blocking(check(path))
    assert (found.code, "blk.1.ffn_up.weight (1)" in found.evidence) == ("not-finite", True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", sorted(finite.SCALES.keys() - {"Q1_0"}))  # gguf dequantizes all but this one
def test_the_scales_of_a_block_lie_where_dequantizing_reads_them(name):
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    block = np.full(size, 0x11, np.uint8)
    assert finite._not_finite(block, name, size) == 0
    assert np.isfinite(gguf.dequantize(block[None], kind)).all()
    for at in finite.SCALES[name]:
        planted = block.copy()
        planted[at : at + 2] = 0x00, 0x7C
        assert finite._not_finite(planted, name, size) == 1
        assert not np.isfinite(gguf.dequantize(planted[None], kind)).all()


@pytest.mark.parametrize(
    ("dtype", "gpu", "severity", "limit"),
    [
        ("F16", False, "note", "65,504"),
        ("Q8_0", False, "note", "8,319,008"),
        ("BF16", False, "", ""),
        ("F32", False, "", ""),
        ("Q8_0", True, "warning", "65,504"),
        ("BF16", True, "", ""),
    ],
)
def test_an_ssm_out_type_that_can_overflow_on_this_backend_is_named_with_the_limit(
    dtype, gpu, severity, limit, tmp_path
):
    path = synthetic.write(registry.spec(HYBRID, "mini"), dtype, tmp_path / "m.gguf")
    found = ssm_out_findings(header.read(path), gpu)
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert all(limit in f.evidence and "--keep ssm_out=bf16" in f.mend for f in found)


# ---------------------------------------------------------------- tokenizer


def vocabulary(name: str, change: Callable[[list], None]) -> Change:
    def spoil(parts: Parts) -> None:
        field = f"tokenizer.ggml.{name}"
        values = list(parts.header.value(field))
        change(values)
        key(field, array(field, parts.header.records[field].item, values))(parts)

    return spoil


def put(at: int, value: object) -> Callable[[list], None]:
    return lambda values: values.__setitem__(at, value)


def both_lists(parts: Parts) -> None:
    """Byte token 0 changes places with the token at id 0."""
    vocabulary("tokens", lambda v: v.__setitem__(slice(0, 6), [v[5], *v[1:5], v[0]]))(parts)
    vocabulary("token_type", lambda v: v.__setitem__(slice(0, 6), [v[5], *v[1:5], v[0]]))(parts)


MORE = (
    ("tokens", lambda values: values.append(b"extra")),
    ("scores", lambda values: values.append(-1.0)),
    ("token_type", lambda values: values.append(1)),
)
TOKENIZER = {
    "a missing byte": ("blocking", "byte-tokens", vocabulary("tokens", put(70, b"x70"))),
    "a byte of another type": ("blocking", "byte-tokens", vocabulary("token_type", put(70, 1))),
    "a byte at id 0": ("blocking", "byte-tokens", both_lists),
    "the same text twice": ("blocking", "token-duplicate", vocabulary("tokens", put(300, b"<|plamo:bos|>"))),
    "an endless text": ("blocking", "token-length", vocabulary("tokens", put(300, b"a" * 10_000))),
    "lists of different lengths": ("blocking", "tokenizer-lists", vocabulary("scores", lambda v: v.pop())),
    "no scores": ("blocking", "tokenizer-lists", key("tokenizer.ggml.scores", None)),
    "another tokenizer": ("blocking", "tokenizer-model", value("tokenizer.ggml.model", STRING, "gpt2")),
    "more tokens than embeddings": (
        "blocking",
        "tensor-shape",
        lambda parts: [vocabulary(n, more)(parts) for n, more in MORE],
    ),
    "a score that is NaN": ("warning", "token-scores", vocabulary("scores", put(300, np.nan))),
    "the sentinel as a score": ("warning", "token-scores", vocabulary("scores", put(300, -1000.0))),
    "a score beyond 32 bits": ("blocking", "token-scores", vocabulary("scores", put(300, 3e5))),
    "a text that is not UTF-8": ("warning", "token-text", vocabulary("tokens", put(300, b"\xff"))),
    "an empty text": ("warning", "token-empty", vocabulary("tokens", put(300, b""))),
    "no BOS": ("warning", "token-id", key("tokenizer.ggml.bos_token_id", None)),
    "an EOS outside the vocabulary": ("warning", "token-id", value("tokenizer.ggml.eos_token_id", U32, 2048)),
    "another token as EOT": ("warning", "token-id", value("tokenizer.ggml.eot_token_id", U32, 300)),
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENIZER)
def test_a_fault_of_the_tokenizer_is_found(case, tmp_path):
    severity, code, change = TOKENIZER[case]
    found = check(changed(tmp_path / "m.gguf", change), gate=False)
    assert (severity, code) in codes(found), found


def test_padding_may_have_the_sentinel_as_its_score(tmp_path):
    def pad(parts: Parts) -> None:
        vocabulary("scores", put(511, -1000.0))(parts)
        vocabulary("token_type", put(511, 5))(parts)

    assert not {f.code for f in check(changed(tmp_path / "m.gguf", pad), gate=False)} - {"ssm-out-type"}


# ---------------------------------------------------------------- hash and order


def test_a_hash_is_compared_and_a_wrong_one_blocks(tmp_path):
    right = hashlib.sha256(mini_file(HYBRID).read_bytes()).hexdigest()
    assert not blocking(check(mini_file(HYBRID), sha256=right.upper(), gate=False))
    (found,) = blocking(check(mini_file(HYBRID), sha256="0" * 64))
    assert (found.code, right in found.evidence) == ("hash", True)
    with pytest.raises(StudyError, match="64 hex digits"):
        check(mini_file(HYBRID), sha256="abc")


def test_the_worst_comes_first(tmp_path):
    change = value("plamo2.rope.freq_base", F32, 1e6)
    found = check(changed(tmp_path / "m.gguf", change), sha256="0" * 64, gate=False)
    assert [f.severity for f in found][:2] == ["blocking", "warning"]


def test_a_stranger_s_text_reaches_no_terminal(tmp_path):
    found = check(changed(tmp_path / "m.gguf", tensor_with("output_norm.weight", name="\x1b[2Jevil")), gate=False)
    assert any("evil" in f.evidence for f in found)
    assert all(f.evidence.isprintable() for f in found)


# ---------------------------------------------------------------- the gate


def test_a_lost_rope_is_found_before_the_engine_meets_it_and_would_hang(without_rope):
    (found,) = blocking(check(without_rope))
    assert (found.code, "--repair" in found.mend) == ("head-count-array", True)
    (caught,) = checkup.gate(without_rope, time_limit_s=3.0).findings
    assert (caught.code, "no answer within 3 s" in caught.evidence) == ("engine-hang", True)


def test_logits_that_are_not_finite_close_the_gate(tmp_path):
    huge = np.full(4, 1e30, "<f4").tobytes()  # of the F16 model: the input of ssm_out overflows (D5)
    found = check(changed(tmp_path / "m.gguf", weights("blk.0.ssm_d", huge)))
    assert codes(blocking(found)) == {("blocking", "logits-not-finite")}


def test_a_refusal_of_the_engine_is_a_finding_with_its_words(tmp_path):
    path = changed(tmp_path / "m.gguf", without_last_tensor)
    (found,) = checkup.gate(path).findings
    assert found.code == "engine-error"
    assert "output_norm" in found.evidence


def test_an_engine_out_of_memory_is_a_finding():
    (found,) = checkup.gate(mini_file(HYBRID), memory_limit=32 << 20).findings
    assert found.severity == "blocking"
    assert found.code in ("memory", "engine-error", "engine-abort", "engine-killed")


def test_disagreement_with_the_oracle_and_rotation_by_nothing_are_blocking():
    checks = {
        "gpu": False,
        "finite_cpu": True,
        "n_rot": 0,
        "oracle_error": 0.7,
        "oracle_agrees": False,
        "tolerance": 0.01,
    }
    found = checkup._verdicts(Measured(checks=checks), 1.0)
    assert codes(found) == {("blocking", "rope-lost"), ("blocking", "oracle")}


# ---------------------------------------------------------------- repair


def tensor_hashes(path: Path) -> dict[str, str]:
    return {t.name: hashlib.sha256(t.data.tobytes()).hexdigest() for t in gguf.GGUFReader(path).tensors}


def facts(path: Path) -> dict[str, object]:
    return {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}


def test_a_repaired_file_keeps_every_tensor_byte_for_byte_and_matches_the_oracle(without_rope, tmp_path):
    out = tmp_path / "new" / "repaired.gguf"
    said = mend(without_rope, out)
    assert said == ["plamo2.attention.head_count is 4 instead of an array that starts with 0"]
    assert tensor_hashes(out) == tensor_hashes(without_rope)
    assert {k for k, v in facts(out).items() if facts(without_rope)[k] != v} == {"plamo2.attention.head_count"}
    right = synthetic.write(registry.spec(HYBRID, "mini"), "F16", tmp_path / "right.gguf")
    assert out.read_bytes() == right.read_bytes(), "the file that was never wrong"
    found = check(out)
    assert not blocking(found)
    assert "of the oracle" in next(f.evidence for f in found if f.code == "gate")


def test_missing_ids_of_special_tokens_are_added_where_their_texts_are_known(tmp_path):
    def forget(parts: Parts) -> None:
        names = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot")]
        parts.records = [r for k, r in zip(parts.header.records, parts.records, strict=True) if k not in names]

    path = changed(tmp_path / "m.gguf", forget)
    assert len(mend(path, tmp_path / "out.gguf")) == 3
    assert facts(tmp_path / "out.gguf") == facts(mini_file(HYBRID))
    assert tensor_hashes(tmp_path / "out.gguf") == tensor_hashes(mini_file(HYBRID))


def test_a_key_this_project_does_not_know_survives_a_repair(without_rope, tmp_path):
    parts = take_apart(without_rope)
    parts.records.append(scalar("somebody.else", STRING, "kept"))
    (tmp_path / "m.gguf").write_bytes(parts.build())
    mend(tmp_path / "m.gguf", tmp_path / "out.gguf")
    assert facts(tmp_path / "out.gguf")["somebody.else"] == "kept"


def test_a_repair_is_never_in_place(without_rope, tmp_path):
    source = tmp_path / "m.gguf"
    source.write_bytes(without_rope.read_bytes())
    (tmp_path / "link.gguf").symlink_to(source)
    (tmp_path / "hard.gguf").hardlink_to(source)
    for out in (source, tmp_path / "link.gguf", tmp_path / "hard.gguf"):
        with pytest.raises(StudyError, match="never in place"):
            mend(source, out)
    assert source.read_bytes() == without_rope.read_bytes()


@pytest.mark.parametrize(
    ("spoil", "theta", "message"),
    [
        (None, None, "nothing that can be repaired"),
        (None, float("nan"), "no rotary base"),
        (without_last_tensor, 1e6, "would stay unusable"),
        (weights("output_norm.weight", b"\0\0\xc0\x7f"), 1e6, "would stay unusable"),
    ],
)
def test_what_cannot_be_repaired_is_said_and_nothing_is_written(spoil, theta, message, tmp_path):
    path = changed(tmp_path / "m.gguf", spoil or (lambda parts: None))
    with pytest.raises(StudyError, match=message):
        mend(path, tmp_path / "out" / "out.gguf", rope_theta=theta)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["m.gguf"]


def test_a_full_disk_or_a_broken_write_leaves_nothing_behind(without_rope, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage())
    with pytest.raises(StudyError, match="only 1,000 are free"):
        mend(without_rope, tmp_path / "out.gguf")
    monkeypatch.undo()
    monkeypatch.setattr(repair, "_copy", _break)
    with pytest.raises(StudyError, match="No space left"):
        mend(without_rope, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


class _Usage:
    free = 1000


def _break(source: object, target: object) -> None:
    raise OSError(28, "No space left on device")
