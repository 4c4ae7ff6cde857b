"""A file is refused in one sentence or found right; the head counts that lose rotation are found and repaired."""

import os
import random
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import HYBRID, mini_file
from gguf import GGUFValueType as Kind

from llama_meter.errors import StudyError
from llama_meter.measure import checking, machine, runner
from llama_meter.measure.checking import check
from llama_meter.measure.process import Outcome
from llama_meter.models import check as checks, header, registry, synthetic, tensors
from llama_meter.models.check import Finding, blocking, repair, requested, ssm_out_findings
from llama_meter.rows import Failure, Measured
from plamo_study.cli import main

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


DAMAGED = {
    "a page": b"<!doctype html>",
    "endless keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
    "no type": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + struct.pack("<I", 99) + bytes(8),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_whole_gguf_is_one_sentence_with_file_and_mend(name, tmp_path):
    path = tmp_path / "a & [b] | 文.gguf"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(StudyError, match="文"):
        requested([str(path)])
    (found,) = check(path)
    assert (found.severity, bool(found.mend)) == ("blocking", True)
    assert found.evidence.isprintable()


def test_what_is_no_file_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for name, why in {"no": "no such file", ".": "a folder", "pipe": "no regular", "/dev/zero": "no regular"}.items():
        for read in (header.read, lambda path: requested([str(path)]), check):
            with pytest.raises(StudyError, match=why):
                read(Path(name))


FAULTS = [
    ("architecture", {"keys": {"general.architecture": ("x", Kind.STRING)}}),
    ("split", {"keys": {"split.count": (3, Kind.UINT16), "split.no": (1, Kind.UINT16)}}),
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


@pytest.mark.whole
def test_a_lost_rope_is_found_before_the_engine_meets_it_and_would_hang(without_rope, monkeypatch):
    (found,) = blocking(check(without_rope))
    assert (found.code, "--repair" in found.mend) == ("head-count-array", True)
    monkeypatch.setattr(checks, "_checked", lambda heads: [])
    (caught,) = checking.through_the_gate(requested(str(without_rope))[0], time_limit_s=3.0)
    assert (caught.code, "no answer within" in caught.evidence) == ("engine-hang", True)


def test_logits_that_are_not_finite_close_the_gate(tmp_path):
    found = check(changed(tmp_path / "m.gguf", weights={"blk.0.ssm_d": 1e30}))
    assert codes(blocking(found)) == {("blocking", "logits-not-finite")}


@pytest.mark.parametrize("said", ["RuntimeError: can't start new thread", "MemoryError: ", "std::bad_alloc"])
def test_an_engine_that_lacked_memory_says_nothing_against_the_file_or_the_build(said, monkeypatch):
    ended = Outcome(status="error", pid=1, evidence=(), failure=Failure(stage="load", exit_code=1, message=said))
    for module in (checking, runner):
        monkeypatch.setattr(module, "work", lambda *_, **__: ended)
    (found,) = checking.through_the_gate(requested(str(mini_file()))[0])
    assert (found.code, "ulimit" in found.mend) == ("memory", True)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/somewhere")
    with pytest.raises(StudyError, match="ulimit"):
        runner.engine_facts()


def test_a_fetched_file_is_held_against_its_hash(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: mini_file())
    main.fetch("owner/name", "a.gguf", sha256=tensors.read_sha256(mini_file()))
    assert tensors.read_sha256(mini_file()) in capsys.readouterr().out
    with pytest.raises(StudyError, match="its SHA-256 is"):
        main.fetch("owner/name", "a.gguf", sha256="0" * 64)


def test_disagreement_with_the_oracle_and_rotation_by_nothing_are_blocking():
    checks = {"n_rot": 0, "parts_error": 0.7, "parts_agrees": False, "parts_tolerance": 0.01}
    found = checking._objections(Measured(checks=checks, valid=False), "CPU")
    assert codes(found) == {("blocking", "rope-lost"), ("blocking", "oracle")}


def test_a_repaired_file_keeps_every_tensor_byte_for_byte_and_matches_the_oracle(without_rope, files, tmp_path):
    out = tmp_path / "new" / "repaired.gguf"
    assert repair(without_rope, out) == f"{HEADS} is 4 instead of an array that starts with 0"
    assert out.read_bytes() == files["F16"].read_bytes(), "the file that was never wrong"
    found = check(out)
    assert not blocking(found)
    assert "of the oracle" in next(f.evidence for f in found if f.code == "gate")


def test_a_repair_is_never_in_place_and_of_nothing(without_rope, tmp_path):
    (tmp_path / "link.gguf").symlink_to(without_rope)
    with pytest.raises(StudyError, match="never in place"):
        repair(without_rope, tmp_path / "link.gguf")
    with pytest.raises(StudyError, match="nothing that can be repaired"):
        repair(mini_file(), tmp_path / "out.gguf")
