"""Types: files of any are made, proved with a tolerance of their own, and rounded as each backend does."""

import os

import numpy as np
import pytest
from built import measured
from conftest import ATTENTION, HYBRID, mini, mini_file
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from llama_meter import paths
from llama_meter.engine import ggml, kernels, library
from llama_meter.journal import latest_rows, read
from llama_meter.measure import files, proof, tolerance
from llama_meter.measure.plan import Plan
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from llama_meter.models import recipes, tensors
from llama_meter.oracle import weights
from llama_meter.oracle.compare import relative_error


def planned(*dtypes, model=HYBRID, **fields):
    cells = tuple(mini("decode", model=model, dtype=dtype, n_gen=2, **fields) for dtype in dtypes)
    return Plan("test", "mini", cells, (), cells[0], 1, 0, 60.0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A models folder of its own that holds the embedded F16 file."""
    os.link(mini_file(), tmp_path / mini_file().name)
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    return tmp_path


def test_files_of_any_recipe_are_made_from_the_f16_file_and_stand_until_it_is_newer(folder):
    files.make_models(planned("Q4_0-ssm_out-F16"))
    made = recipes.model_path(HYBRID, "mini", "Q4_0-ssm_out-F16")
    types = {tensor.kind: tensor.dtype for tensor in tensors.tensor_table(made)}
    assert (types["ssm_out"], types["ffn_up"]) == ("F16", "Q4_0")
    made.write_bytes(b"stands")
    files.make_models(planned("Q4_0-ssm_out-F16"))
    assert made.read_bytes() == b"stands"
    os.utime(made, (1, 1))
    files.make_models(planned("Q4_0-ssm_out-F16"))
    assert tensors.tensor_table(made)


@pytest.mark.parametrize(
    ("dtype", "roughest"),
    [("F16", "F16"), ("Q4_K_M", "Q4_K"), ("Q8_0-ssm_out-BF16", "Q8_0"), ("F16-ffn_up-Q2_K", "Q2_K")],
)
def test_a_recipe_is_proved_with_the_tolerance_of_its_roughest_type(dtype, roughest):
    assert tolerance.tolerance(mini("gate", dtype=dtype)) == tolerance.TOLERANCE[roughest]


def test_what_a_gpu_rounds_otherwise_is_allowed_for_there_alone_and_a_fault_is_still_far_outside():
    def part(dtype, backend):
        return tolerance.part_tolerance(mini("gate", dtype=dtype, n_gpu_layers=-1), backend)

    f16 = mini("gate", dtype="F16", n_gpu_layers=-1)
    assert tolerance.tolerance(f16) == tolerance.OFFLOADED["F16"] < 0.4 / 2, "of the defects guarded against"
    assert tolerance.part_tolerance(f16) == tolerance.OFFLOADED_PART["F16"] < 0.04, "of the fault that hides best"
    assert [part(dtype, "CUDA") for dtype in ("Q4_0", "Q4_K_M")] == [*tolerance.CUDA_PART.values()]
    assert {part("Q4_0", "Metal"), part("Q4_0", ""), part("Q8_0", "CUDA")} == {tolerance.LOOSEST_PART}
    rows = latest_rows(read(paths.MEASURED / "others" / "05-quantization.shape.jsonl"))
    gates = [row for row in rows if row.cell.workload == "gate" and row.cell.model == ATTENTION]  # the hybrid's failed
    errors = {row.cell.dtype: row.checks["parts_error"] for row in gates}
    assert errors["Q4_0"] < tolerance.CUDA_PART["Q4_0"], "measured on an H200"
    assert errors["Q4_K_M"] < tolerance.CUDA_PART["Q4_K"]


def test_the_oracle_rounds_as_the_backend_that_it_judges(monkeypatch):
    files.make_models(planned("Q4_K_M"))
    monkeypatch.setattr(library, "gpus", lambda: [{"name": "CUDA0", "chip": "Board"}])
    assert proof.computed_on(mini("gate", n_gpu_layers=0)) == "CPU"
    assert proof.computed_on(mini("gate", n_gpu_layers=-1)) == "CUDA"
    x, path = np.random.default_rng(0).normal(size=(2, 256)).astype("f"), recipes.model_path(HYBRID, "mini", "Q4_K_M")
    name = next(each.name for each in tensors.tensor_table(path) if (each.dtype, each.shape[1:]) == ("Q4_K", (256,)))
    found = {each: weights.Weights(path, each).linear(x, name) for each in ("", "CPU", "CUDA", "Metal")}
    alone = weights.Weights(path, "CUDA", stepped_from=0)
    q8_0 = weights.rounded(x, GGMLQuantizationType.Q8_0) @ weights.Weights(path).array(name).T
    assert np.array_equal(alone.linear(x, name), q8_0), "blocks of 32 numbers"
    assert np.array_equal(found["Metal"], found[""]), "inputs stay in F32"
    assert relative_error(found["CPU"], found["CUDA"]) > 1e-3, "blocks of 256 numbers"


OFFSETS = {  # of a block of 32 weights, from its stored bytes: (out, in / 32)
    "Q4_0": lambda blocks: -8 * halves(blocks, 0),
    "Q5_1": lambda blocks: halves(blocks, 2),
    "Q5_K": lambda blocks: minima(blocks),
}


def halves(blocks, at):
    """The F16 number at a byte of each block."""
    return blocks[..., at : at + 2].copy().view(np.float16)[..., 0].astype(np.float32)


def minima(blocks):
    """Of each eighth of a block: its minimum, whose 6 bits lie as ggml-quants.c's get_scale_min_k4 takes them."""
    packed = blocks[..., 4:16].astype(int)
    low, high = packed[..., 4:8] & 63, (packed[..., 8:12] >> 4) | ((packed[..., 4:8] >> 6) << 4)
    return -(halves(blocks, 2)[..., None] * np.concatenate([low, high], axis=-1)).reshape(len(blocks), -1)


BEFORE_ROUNDING = {  # which of ggml-cuda's kernels meet sums of inputs that were not rounded: alone, together
    "Q4_0": (True, False),
    "Q5_1": (True, True),
    "Q5_K": (False, True),
    "Q8_0": (False, False),
}


def stored_as(name):
    """(256, n) weights of a type as stored: of the embedded model where `gguf` cannot quantize to it."""
    if name == "Q5_K":
        files.make_models(planned("Q5_K_M"))
        path = recipes.model_path(HYBRID, "mini", "Q5_K_M")
        return next(each.data for each in GGUFReader(path).tensors if each.tensor_type.name == name)
    return quantize(np.random.default_rng(0).normal(size=(256, 512)).astype("f"), GGMLQuantizationType[name])


@pytest.mark.parametrize("name", BEFORE_ROUNDING)
def test_cuda_adds_an_offset_times_the_inputs_before_rounding_in_the_kernels_that_do(tmp_path, name):
    """As ggml-cuda/vecdotq.cuh and mmq.cuh do: scale times (what the bits give with rounded inputs), plus the offset
    times the sum of a block before rounding, in F16. Tokens from the fifth on are evaluated alone."""
    kind, stored = GGMLQuantizationType[name], stored_as(name)
    path = tmp_path / "one.gguf"
    writer = GGUFWriter(path, "plamo2")
    writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weight = dequantize(stored, kind)
    x = np.random.default_rng(1).normal(size=(8, weight.shape[1])).astype(np.float32)
    rounded = weights.rounded(x, GGMLQuantizationType.Q8_0)
    expected = rounded @ weight.T
    if name in OFFSETS:
        blocks = stored.reshape(len(stored), -1, GGML_QUANT_SIZES[kind][1])
        sums = [each.reshape(8, -1, 32).sum(-1) for each in (rounded, x)]
        more = (sums[1].astype(np.float16).astype(np.float32) - sums[0]) @ OFFSETS[name](blocks).T
        alone, together = BEFORE_ROUNDING[name]
        expected[:4] += together * more[:4]
        expected[4:] += alone * more[4:]
        assert relative_error(rounded @ weight.T + more, rounded @ weight.T) > 0.003, "the ways differ"
    found = weights.Weights(path, "CUDA", stepped_from=4)
    assert relative_error(found.linear(x, "blk.0.ffn_up.weight"), expected) < 1e-5
    pieces = [found.linear(x[i : i + 2], "blk.0.ffn_up.weight", np.arange(i, i + 2)) for i in range(0, 8, 2)]
    assert relative_error(np.concatenate(pieces), expected) < 1e-5, "rows know which tokens they are"
    assert found.depends_on_calls == (len(set(BEFORE_ROUNDING[name])) > 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "dtype"),
    [*((HYBRID, dtype) for dtype in ("Q6_K", "Q5_0", "Q4_0", "Q3_K_M", "Q2_K")), (ATTENTION, "Q4_K_M")],
)
def test_the_oracle_agrees_on_every_type(model, dtype):
    files.make_models(planned(dtype, model=model))
    cell = mini("gate", model=model, dtype=dtype, n_prompt=24, n_gen=4)
    assert measured(cell).checks["prefill_error"] <= tolerance.tolerance(cell)


PACKED = {"Q4_0": "AVX2 = 1", "Q4_K": "AVX2 = 1", "Q2_K": "AVX512 = 1"}  # what packing needs: repack.cpp


def test_every_type_has_a_kernel_that_takes_time_and_the_known_packing_is_the_engines():
    engine = work(Job(), 60.0).measured.facts
    for dtype in ggml.TYPES:
        times, taken = kernels.matmul_times(dtype, (256, 256, 2), 1, False, 1, packed=True)
        assert min(times + kernels.matmul_times(dtype, (64, 256, 2), 1, False, 1, packed=False)[0]) > 0
        if "AVX2 = 1" in engine["build"] and "REPACK = 1" in engine["build"]:
            assert (taken == "packed") == (PACKED.get(dtype, "none") in engine["build"])
