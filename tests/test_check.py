"""A file is refused in one sentence or found right; the head counts that lose rotation are found and repaired."""

import errno
import os
import random
import shutil
import socket
import struct
import time
from collections import namedtuple
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from gguf import GGUFValueType as Kind

from llama_meter.errors import StudyError
from llama_meter.measure import checking, machine, quantizing, runner
from llama_meter.measure.checking import check
from llama_meter.measure.process import Outcome
from llama_meter.models import given, header, registry, synthetic
from llama_meter.models.check import repair, ssm_out_findings
from llama_meter.models.finding import Finding, blocking
from llama_meter.models.recipes import Recipe
from llama_meter.rows import Failure, Measured

HEADS = "plamo2.attention.head_count"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Right files of the hybrid model, by type."""
    folder, spec = tmp_path_factory.mktemp("right"), registry.spec(HYBRID, "mini")
    return {dtype: synthetic.write(spec, dtype, folder / f"{dtype}.gguf") for dtype in registry.DTYPES}


@pytest.fixture(scope="module")
def without_rope(tmp_path_factory):
    """D1: head_count as an array that starts with 0, as official conversions write it."""
    path = tmp_path_factory.mktemp("defects") / "array.gguf"
    return synthetic.write(registry.spec(HYBRID, "mini"), "F16", path, head_count_array=True)


def changed(path, keys=None, without=(), names=None, weights=None, model=HYBRID):
    """A copy of an embedded model: `keys` set to (value, kind), tensors left out, renamed, with other first numbers."""
    reader = gguf.GGUFReader(mini_file(model))
    fields = {k: (f.contents(), f.types[0], f.types[-1]) for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    fields |= {
        key: (value, Kind.ARRAY if isinstance(value, list) else kind, kind)
        for key, (value, kind) in (keys or {}).items()
    }
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture")[0])
    for key, (value, kind, item) in fields.items():
        writer.add_key_value(key, value, kind, item if kind == Kind.ARRAY else None)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name in (weights or {}):
            data.ravel()[:4] = weights[tensor.name]
        if tensor.name not in without:
            writer.add_tensor((names or {}).get(tensor.name, tensor.name), data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def codes(found: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.severity, finding.code) for finding in found}


@pytest.mark.parametrize("dtype", registry.DTYPES)
def test_a_right_file_has_no_finding_but_an_ssm_out_type_that_can_overflow(dtype, files):
    for gpu, severity in ((False, "note"), (True, "warning")):
        found = ssm_out_findings(header.read(files[dtype]), gpu)
        assert [f.severity for f in found] == ([] if dtype == "BF16" else [severity])
    assert codes(check(files[dtype])) <= {("note", "gate"), ("note", "ssm-out-type"), ("warning", "ssm-out-type")}


def test_the_gate_loads_decodes_and_holds_a_right_file_against_the_oracle():
    found = check(mini_file(ATTENTION))
    assert not blocking(found), found
    assert "of the oracle" in next(f.evidence for f in found if f.code == "gate")


OPENING = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
KEY = struct.pack("<Q", 1) + b"x"
DAMAGED = {
    "a page": b"<!doctype html>",
    "nothing": b"",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "its first bytes": b"GGUF\3\0",
    "endless keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
    "an endless text": OPENING + KEY + struct.pack("<IQ", Kind.STRING, 2**63),
    "an endless list": OPENING + KEY + struct.pack("<IIQ", Kind.ARRAY, Kind.UINT8, 2**62),
    "no type": OPENING + KEY + struct.pack("<I", 99) + bytes(8),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_whole_gguf_is_one_sentence_with_file_and_mend(name, tmp_path):
    path = tmp_path / "a & [b] | 文.gguf"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(StudyError, match="文"):
        given.give([str(path)])
    (found,) = check(path)
    assert (found.severity, bool(found.mend)) == ("blocking", True)
    assert found.evidence.isprintable()


def test_what_is_no_file_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    wrong = {"no": "no such file", ".": "a folder", "x" * 5000: "no such file"}
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("s")
        for name, why in (wrong | dict.fromkeys(("pipe", "s", "/dev/zero"), "no regular file")).items():
            for read in (header.read, lambda path: given.give([str(path)]), check):
                with pytest.raises(StudyError, match=why):
                    read(Path(name))


FAULTS = [
    ("architecture", {"keys": {"general.architecture": ("x", Kind.STRING)}}),
    ("no-model", {"keys": {"general.type": ("mmproj", Kind.STRING)}}),
    ("no-model", {"names": {"output_norm.weight": "output_norm.weight.lora_a"}}),
    ("split", {"keys": {"split.count": (3, Kind.UINT16), "split.no": (1, Kind.UINT16)}}),
    ("unusable", {"keys": {"plamo2.block_count": (2**31 - 1, Kind.UINT32)}}),
    ("unusable", {"keys": {"plamo2.block_count": ("two", Kind.STRING)}}),
    ("unusable", {"keys": {"plamo2.embedding_length": (float("inf"), Kind.FLOAT32)}}),
    ("rope-dimensions", {"keys": {"plamo2.rope.dimension_count": (0, Kind.UINT32)}}),
    ("tensor-missing", {"without": ["output_norm.weight"]}),
    ("tensor-extra", {"names": {"output_norm.weight": "evil\x1b[2J"}}),
    ("tensor-shape", {"keys": {"plamo2.feed_forward_length": (64, Kind.UINT32)}}),
]


@pytest.mark.parametrize(("code", "how"), FAULTS, ids=[f"{i}-{code}" for i, (code, _) in enumerate(FAULTS)])
def test_a_file_that_is_no_whole_plamo_is_found_and_its_text_reaches_no_terminal(code, how, tmp_path):
    found = check(changed(tmp_path / "m.gguf", **how))
    assert ("blocking", code) in codes(found), found
    assert all(f.evidence.isprintable() for f in found)


def test_mutated_headers_end_in_a_finding_in_little_time_and_memory(tmp_path):
    whole, path = mini_file().read_bytes(), tmp_path / "m.gguf"
    end, before = header.read(mini_file()).data_offset, machine.peak_rss()
    for seed in range(40):
        rng, made = random.Random(seed), bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            at = rng.choice((rng.randrange(4, 2000), rng.randrange(end - 2000, end)))
            made[at : at + 8] = rng.choice((0, 2**31, 2**62, 2**64 - 1, rng.randrange(2**64))).to_bytes(8, "little")
        path.write_bytes(made[: rng.choice((None, None, rng.randrange(end)))])
        start = time.process_time()
        assert all(finding.evidence.isprintable() for finding in check(path))
        assert time.process_time() - start < 5
    assert machine.peak_rss() - before < 1 << 28


def test_a_part_and_an_adapter_are_no_source_to_quantize(tmp_path):
    path = changed(tmp_path / "m.gguf", keys={"split.count": (3, Kind.UINT16)})
    with pytest.raises(StudyError, match="part 1 of 3"):
        quantizing.quantize(path, tmp_path / "out.gguf", Recipe("Q8_0"))
    assert not (tmp_path / "out.gguf").exists()


# ---------------------------------------------------------------- the gate


@pytest.mark.whole
def test_a_lost_rope_is_found_before_the_engine_meets_it_and_would_hang(without_rope, monkeypatch):
    (found,) = blocking(check(without_rope))
    assert (found.code, "--repair" in found.mend) == ("head-count-array", True)
    monkeypatch.setattr(given, "_checked", lambda heads: [])
    (caught,) = checking.through_the_gate(without_rope, time_limit_s=3.0)
    assert (caught.code, "no answer within" in caught.evidence) == ("engine-hang", True)


def test_logits_that_are_not_finite_close_the_gate(tmp_path):
    found = check(changed(tmp_path / "m.gguf", weights={"blk.0.ssm_d": 1e30}))
    assert codes(blocking(found)) == {("blocking", "logits-not-finite")}


def test_a_refusal_of_the_engine_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(given, "_checked", lambda heads: [])
    (found,) = checking.through_the_gate(changed(tmp_path / "m.gguf", without=["output_norm.weight"]))
    assert (found.code, "output_norm" in found.evidence) == ("engine-error", True)


@pytest.mark.parametrize("said", ["RuntimeError: can't start new thread", "MemoryError: ", "std::bad_alloc"])
def test_an_engine_that_lacked_memory_says_nothing_against_the_file_or_the_build(said, monkeypatch):
    ended = Outcome(status="error", pid=1, evidence=(), failure=Failure(stage="load", exit_code=1, message=said))
    for module in (checking, runner):
        monkeypatch.setattr(module, "work", lambda *_, **__: ended)
    (found,) = checking.through_the_gate(mini_file())
    assert (found.code, "ulimit" in found.mend) == ("memory", True)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/somewhere")
    with pytest.raises(StudyError, match="ulimit"):
        runner.engine_facts()


def test_disagreement_with_the_oracle_and_rotation_by_nothing_are_blocking():
    checks = {"n_rot": 0, "parts_error": 0.7, "parts_agrees": False, "parts_tolerance": 0.01}
    found = checking._objections(Measured(checks=checks, valid=False), "CPU")
    assert codes(found) == {("blocking", "rope-lost"), ("blocking", "oracle")}


# ---------------------------------------------------------------- repair


def test_a_repaired_file_keeps_every_tensor_byte_for_byte_and_matches_the_oracle(without_rope, files, tmp_path):
    out = tmp_path / "new" / "repaired.gguf"
    assert repair(without_rope, out) == [f"{HEADS} is 4 instead of an array that starts with 0"]
    assert out.read_bytes() == files["F16"].read_bytes(), "the file that was never wrong"
    found = check(out)
    assert not blocking(found)
    assert "of the oracle" in next(f.evidence for f in found if f.code == "gate")


def test_a_repair_sets_the_rotary_base_and_keeps_what_it_does_not_know(tmp_path):
    odd = {"somebody.else": ("kept", Kind.STRING), "plamo2.rope.freq_base": (1e6, Kind.FLOAT32)}
    path = changed(tmp_path / "m.gguf", keys=odd)
    (found,) = (f for f in check(path) if f.code == "rope-theta")
    assert (found.severity, "--rope-theta 10000" in found.mend) == ("warning", True)
    assert repair(path, tmp_path / "out.gguf", 1e4) == ["plamo2.rope.freq_base is 10000 instead of 1000000.0"]
    before, after = gguf.GGUFReader(path), gguf.GGUFReader(tmp_path / "out.gguf")
    assert after.fields["somebody.else"].contents() == "kept"
    assert after.fields.keys() == before.fields.keys()
    assert [(t.name, t.data.tobytes()) for t in before.tensors] == [(t.name, t.data.tobytes()) for t in after.tensors]
    assert codes(check(tmp_path / "out.gguf")) <= {("note", "gate"), ("note", "ssm-out-type")}


@pytest.mark.parametrize(
    ("how", "theta", "message"),
    [
        ({}, None, "nothing that can be repaired"),
        ({}, float("nan"), "no rotary base"),
        ({"without": ["output_norm.weight"]}, 1e6, "would stay unusable"),
    ],
)
def test_what_cannot_be_repaired_is_said_and_nothing_is_written(how, theta, message, tmp_path):
    path = changed(tmp_path / "m.gguf", **how)
    with pytest.raises(StudyError, match=message):
        repair(path, tmp_path / "out" / "out.gguf", rope_theta=theta)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["m.gguf"]


def test_a_repair_is_never_in_place(without_rope, tmp_path):
    source = shutil.copy(without_rope, tmp_path / "m.gguf")
    (tmp_path / "link.gguf").symlink_to(source)
    (tmp_path / "hard.gguf").hardlink_to(source)
    for out in (source, tmp_path / "link.gguf", tmp_path / "hard.gguf"):
        with pytest.raises(StudyError, match="never in place"):
            repair(source, out)
    assert source.read_bytes() == without_rope.read_bytes()


def test_a_full_disk_or_a_broken_write_leaves_nothing_behind(without_rope, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(1000))
    with pytest.raises(StudyError, match="only 1,000 are free"):
        repair(without_rope, tmp_path / "out.gguf")
    monkeypatch.undo()

    def fill_up(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fill_up)
    with pytest.raises(OSError, match="No space left"):
        repair(without_rope, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []
