"""The oracle agrees with the engine, and would not if it (or the engine) computed anything else."""

from functools import cache
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from conftest import mini
from gguf.quants import dequantize, quantize

from llama_meter import journal, paths
from llama_meter.engine import library
from llama_meter.engine.library import capture_log
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.errors import StudyError
from llama_meter.measure import proof, tolerance
from llama_meter.measure.files import make_models
from llama_meter.measure.plan import Plan
from llama_meter.models import recipes, registry, synthetic, tensors
from llama_meter.oracle import forward, layers, weights
from llama_meter.oracle.compare import NOT_FINITE, agreement, relative_error
from llama_meter.oracle.forward import Oracle

MODELS = {"plamo2": "plamo-2-1b", "plamo3": "plamo-3-nict-2b"}
ARCHS = tuple(MODELS)
PREFILL, TEXT = 560, np.random.default_rng(0).integers(5, 512, 600).tolist()  # beyond twice the window of 256 tokens

# Float32 all the way leaves summation order only (measured 2e-5); each narrower type adds its rounding (measured with
# rounded activations on x86: F16 2.3e-3, BF16 1.2e-2, Q8_0 5e-2). Every mutation below is above 0.4.
TOLERANCE = {"F32": 3e-4, "F16": 5e-3, "BF16": 2.5e-2, "Q8_0": 1e-1}
EXACT_CACHE = SessionConfig(1024, type_k="f32", type_v="f32", flash_attn="off")
DEFAULT_CACHE = SessionConfig(1024)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write = lambda arch, dtype: synthetic.write(  # noqa: E731 # a name for what is remembered
        registry.spec(MODELS[arch], "mini"), dtype, folder / f"{arch}.{dtype}.gguf"
    )
    return cache(write)


@pytest.fixture(scope="module")
def engine(files):
    """Logits of one model after every token of a prompt, of decode steps, and after one token alone, computed once."""
    capture_log([])

    @cache
    def computed(arch, dtype, config=EXACT_CACHE):
        with Session(files(arch, dtype), config) as session:
            whole = session.prefill({0: TEXT}, every=True)[0]
            session.clear()
            session.prefill({0: TEXT[:PREFILL]})
            decoded = []
            for token in TEXT[PREFILL:]:
                session.decode({0: token})
                decoded.append(session.logits())
            session.clear()
            single = session.prefill({0: TEXT[:1]})[0]
            return SimpleNamespace(whole=whole, decoded=np.stack(decoded), single=single)

    return computed


@pytest.mark.long
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_engine_agrees_at_every_position_after_one_token_and_in_decode(arch, dtype, files, engine):
    theirs, tolerance = engine(arch, dtype), TOLERANCE[dtype]
    ours = Oracle(files(arch, dtype), rounds_as="CPU").logits(TEXT)
    for logits, expected in ((theirs.whole, ours), (theirs.decoded, ours[PREFILL:]), (theirs.single, ours[:1])):
        verdict = agreement(logits, expected, tolerance)
        assert verdict.ok, verdict
    assert agreement(theirs.whole, ours, tolerance).top1_checked > len(TEXT) / 4
    if dtype != "F32":
        exact = Oracle(files(arch, dtype)).logits(TEXT)
        explained = relative_error(theirs.whole, ours) < 0.7 * relative_error(theirs.whole, exact)
        assert explained, "rounding activations as the CPU does explains most of the gap"
    if dtype == "F16":  # F16 cache; flash attention sums values in F16 when it decodes on the CPU
        usual = engine(arch, "F16", DEFAULT_CACHE)
        assert agreement(usual.whole, ours, 1e-2).ok
        assert agreement(usual.decoded, ours[PREFILL:], 1e-2).ok


# The right functions, kept before a mutation replaces them
gate, rms_norm, rotate, visible = layers.gate, layers.rms_norm, layers.rotate, layers.visible
convolution, split_zx, split_bcdt, scan = layers.causal_convolution, layers.split_zx, layers.split_bcdt, layers.scan
array = weights.Weights.array
ALL, HYBRID, SLIDING = ARCHS, ("plamo2",), ("plamo3",)


def rotate_neighbours(x, theta, at):
    halves = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    return rotate(halves, theta, at)[..., np.arange(x.shape[-1]).reshape(2, -1).T.ravel()]


def filled(tensor: str, value: float):
    """A reader that finds one kind of tensor filled with a number: a term left out of the equations."""
    return lambda self, name: np.full_like(array(self, name), value) if tensor in name else array(self, name)


MUTATIONS = {
    "no rope": (ALL, layers, "rotate", lambda x, theta, at: x),
    "rope on neighbouring features": (ALL, layers, "rotate", rotate_neighbours),
    "heads of keys and values dealt in turn": (ALL, layers, "key_value_head", lambda head, n, n_kv: head % n_kv),
    "future visible": (ALL, layers, "visible", lambda n, window, at: np.ones((len(at), n), bool)),
    "norm forgets its mean": (ALL, layers, "rms_norm", lambda x, weight, eps: weight * x),
    "norm forgets its weight": (ALL, layers, "rms_norm", lambda x, w, eps: rms_norm(x, np.ones_like(w), eps)),
    "halves of the gate swapped": (ALL, layers, "gate", lambda up: gate(np.roll(up, up.shape[-1] // 2, axis=-1))),
    "query norm weight forgotten": (ALL, weights.Weights, "array", filled("attn_q_norm", 1)),
    "final norm weight forgotten": (ALL, weights.Weights, "array", filled("output_norm", 1)),
    "post-mixer norm without its fifth": (ALL, weights.Weights, "array", filled("post_attention_norm", 1)),
    "window ignored": (SLIDING, layers, "visible", lambda n, window, at: visible(n, None, at)),
    "window one token too long": (SLIDING, layers, "visible", lambda n, w, at: visible(n, w and w + 1, at)),
    "window one token too short": (SLIDING, layers, "visible", lambda n, w, at: visible(n, w and w - 1, at)),
    "pattern counted from 0": (SLIDING, forward.Oracle, "_slides", lambda self, layer: layer % 4 != 0),
    "one rope base for all layers": (SLIDING, layers, "rotate", lambda x, theta, at: rotate(x, 1e6, at)),
    "z and x swapped": (HYBRID, layers, "split_zx", lambda zx, n: split_zx(zx, n)[::-1]),
    "z and x in halves": (HYBRID, layers, "split_zx", lambda zx, n: zx.reshape(len(zx), 2, n, -1).swapaxes(0, 1)),
    "B and C swapped": (HYBRID, layers, "split_bcdt", lambda x, d: [split_bcdt(x, d)[i] for i in (1, 0, 2)]),
    "dt before B and C": (HYBRID, layers, "split_bcdt", lambda x, d: (x[:, -2 * d : -d], x[:, -d:], x[:, : -2 * d])),
    "convolution backwards": (HYBRID, layers, "causal_convolution", lambda x, k: convolution(x, k[:, ::-1])),
    "convolution late": (HYBRID, layers, "causal_convolution", lambda x, k: convolution(np.roll(x, 1, axis=0), k)),
    "softplus without its bend": (HYBRID, layers, "softplus", lambda x: np.maximum(x, 0)),
    "no decay": (HYBRID, layers, "scan", lambda x, dt, a, B, C: scan(x, dt, 0 * a, B, C)),
    "no state": (HYBRID, layers, "scan", lambda x, dt, a, B, C: dt[:, :, None] * x * (B * C).sum(-1)[:, None, None]),
    "D forgotten": (HYBRID, weights.Weights, "array", filled("ssm_d", 0)),
    "dt bias forgotten": (HYBRID, weights.Weights, "array", filled("ssm_dt.bias", 0)),
    "norm weight of B forgotten": (HYBRID, weights.Weights, "array", filled("ssm_b_norm", 1)),
}


@pytest.mark.long
@pytest.mark.parametrize(("arch", "mutation"), [(arch, name) for name in MUTATIONS for arch in MUTATIONS[name][0]])
def test_a_wrong_forward_pass_disagrees(arch, mutation, files, engine, monkeypatch):
    archs, place, name, replacement = MUTATIONS[mutation]
    text = TEXT if archs == SLIDING else TEXT[:240]  # what a window hides lies further back
    monkeypatch.setattr(place, name, replacement)
    wrong = Oracle(files(arch, "F32")).logits(text)
    assert relative_error(engine(arch, "F32").whole[: len(text)], wrong) > 0.4


def test_a_file_laid_out_otherwise_or_read_in_blocks_has_the_same_logits(files, tmp_path, monkeypatch):
    text, spec = TEXT[:20], registry.spec(MODELS["plamo2"], "mini")
    array = synthetic.write(spec, "F32", tmp_path / "array.gguf", head_count_array=True)
    oracle = Oracle(files("plamo2", "F32"))
    np.testing.assert_array_equal(Oracle(array).logits(text), oracle.logits(text))
    assert relative_error(oracle.logits(text, [3, -1]), oracle.logits(text)[[3, 19]]) < 1e-6
    small = [Oracle(files(arch, "Q8_0")).logits(text) for arch in ARCHS]
    monkeypatch.setattr(weights, "CACHE_ELEMENTS", 0)
    monkeypatch.setattr(weights, "BLOCK_ELEMENTS", 10_000)
    for arch, expected in zip(ARCHS, small, strict=True):
        assert relative_error(Oracle(files(arch, "Q8_0")).logits(text), expected) < 1e-5


def test_what_the_oracle_cannot_use_is_an_error_with_file_reason_and_command(files, tmp_path):
    (tmp_path / "text.gguf").write_text("not a model")
    (tmp_path / "cut.gguf").write_bytes(files("plamo2", "F16").read_bytes()[:-100_000])
    cases = {
        tmp_path / "absent.gguf": "no such file",
        tmp_path / "text.gguf": "cannot be read as a GGUF",
        tmp_path / "cut.gguf": "cut short",
    }
    for path, reason in cases.items():
        with pytest.raises(StudyError, match=reason) as caught:
            Oracle(path)
        assert str(path) in caught.value.what
    oracle = Oracle(files("plamo2", "F16"))
    for tokens in ([], [-1], [2048]):
        with pytest.raises(ValueError, match="ids below 2048"):
            oracle.logits(tokens)
    del oracle._weights._tensors["blk.2.ssm_out.weight"]
    with pytest.raises(StudyError, match=r"tensor blk\.2\.ssm_out\.weight is missing"):
        oracle.logits(TEXT[:4])


def test_agreement_takes_the_worst_position_and_the_first_choice_only_where_it_is_clear():
    oracle = np.array([4.0, 3.0, 0.0])
    for row, error in (
        ([4.0, 3.0, 0.0], 0.0),
        ([3.0, 4.0, 0.0], 2**0.5 / 5),
        ([4.1, 3.0, 0.0], 0.02),
        ([float("nan"), 3.0, 0.0], NOT_FINITE),
        ([float("inf"), 3.0, 0.0], NOT_FINITE),
    ):
        verdict = agreement(np.array(row), oracle)
        assert verdict.max_relative_error == pytest.approx(error)
        assert (verdict.top1_checked, verdict.ok) == (1, error == 0.0)
    near, swapped = np.array([4.0, 3.99, 0.0]), np.array([3.99, 4.0, 0.0])
    assert agreement(swapped, near).ok
    assert not agreement(swapped, near, tolerance=1e-3).ok
    many = np.random.default_rng(1).normal(size=(1000, 64))
    one_wrong = many.copy()
    one_wrong[500] = many[501]
    assert relative_error(one_wrong, many) > 0.5
    with pytest.raises(ValueError, match="do not match"):
        relative_error(many[:2], many)


# ------------------------------------------------------------------ types: rounded and allowed for as each backend does


def made(dtype):
    """The hybrid's embedded file of a type."""
    make_models(Plan("test", "mini", (mini("decode", dtype=dtype, n_gen=2),), (), None, 1, 0, 60.0))
    return recipes.model_path(MODELS["plamo2"], "mini", dtype)


@pytest.mark.parametrize(("dtype", "roughest"), [("Q4_K_M", "Q4_K"), ("F16-ffn_up-Q2_K", "Q2_K")])
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
    rows = journal.latest_rows(journal.read(paths.MEASURED / "others" / "05-quantization.shape.jsonl"))
    gates = [row for row in rows if row.cell.workload == "gate"]
    errors = {row.cell.dtype: row.checks["parts_error"] for row in gates if row.cell.model == MODELS["plamo3"]}
    assert errors["Q4_0"] < tolerance.CUDA_PART["Q4_0"], "measured on an H200"
    assert errors["Q4_K_M"] < tolerance.CUDA_PART["Q4_K"]


def test_the_oracle_rounds_as_the_backend_that_it_judges(monkeypatch):
    monkeypatch.setattr(library, "gpus", lambda: [{"name": "CUDA0", "chip": "Board"}])
    assert proof.computed_on(mini("gate", n_gpu_layers=0)) == "CPU"
    assert proof.computed_on(mini("gate", n_gpu_layers=-1)) == "CUDA"
    x, path = np.random.default_rng(0).normal(size=(2, 256)).astype("f"), made("Q4_K_M")
    name = next(each.name for each in tensors.tensor_table(path) if (each.dtype, each.shape[1:]) == ("Q4_K", (256,)))
    found = {each: weights.Weights(path, each).linear(x, name) for each in ("", "CPU", "CUDA", "Metal")}
    alone = weights.Weights(path, "CUDA", stepped_from=0)
    q8_0 = weights.rounded(x, gguf.GGMLQuantizationType.Q8_0) @ weights.Weights(path).array(name).T
    assert np.array_equal(alone.linear(x, name), q8_0), "blocks of 32 numbers"
    assert np.array_equal(found["Metal"], found[""]), "inputs stay in F32"
    assert relative_error(found["CPU"], found["CUDA"]) > 1e-3, "blocks of 256 numbers"


@pytest.mark.parametrize(
    ("name", "offset", "together"), [("Q4_0", lambda d: -8 * d[0], False), ("Q5_1", lambda d: d[1], True)]
)
def test_cuda_adds_an_offset_times_the_inputs_before_rounding_in_the_kernels_that_do(tmp_path, name, offset, together):
    """As ggml-cuda/vecdotq.cuh and mmq.cuh do: scale times (what the bits give with rounded inputs), plus the offset
    times the sum of a block before rounding, in F16. Tokens from the fifth on are evaluated alone."""
    kind = gguf.GGMLQuantizationType[name]
    stored = quantize(np.random.default_rng(0).normal(size=(256, 512)).astype("f"), kind)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "plamo2")
    writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weight = dequantize(stored, kind)
    x = np.random.default_rng(1).normal(size=(8, weight.shape[1])).astype(np.float32)
    rounded = weights.rounded(x, gguf.GGMLQuantizationType.Q8_0)
    expected = rounded @ weight.T
    blocks = stored.reshape(len(stored), -1, gguf.GGML_QUANT_SIZES[kind][1])
    numbers = [blocks[..., at : at + 2].copy().view(np.float16)[..., 0].astype(np.float32) for at in (0, 2)]
    sums = [each.reshape(8, -1, 32).sum(-1) for each in (rounded, x)]
    more = (sums[1].astype(np.float16).astype(np.float32) - sums[0]) @ offset(numbers).T
    expected[:4] += together * more[:4]
    expected[4:] += more[4:]
    assert relative_error(rounded @ weight.T + more, rounded @ weight.T) > 0.003, "the ways differ"
    found = weights.Weights(path, "CUDA", stepped_from=4)
    assert relative_error(found.linear(x, "blk.0.ffn_up.weight"), expected) < 1e-5
    pieces = [found.linear(x[i : i + 2], "blk.0.ffn_up.weight", np.arange(i, i + 2)) for i in range(0, 8, 2)]
    assert relative_error(np.concatenate(pieces), expected) < 1e-5, "rows know which tokens they are"
    assert found.depends_on_calls == (not together)
