"""GGUF files with random weights in a model's exact shapes, for speed, and the embedded models in the types asked for.

Every weight is q · step with q a whole number in -127..127 (triangular) and one step per 32 weights, itself a
whole number 5..16 times a power of two. Such a product fits F32, F16 and Q8_0 exactly, so these three files of
one seed hold equal numbers; BF16 rounds. Only exact or correctly rounded arithmetic is used and each tensor has
its own random stream, so the same spec, type and seed give the same bytes on any machine.

The weights are noise scaled so that activations keep a size of about one.

A model whose mini is `trained` in data/models.toml has its F16 file in the repository (model card:
data/models/README.md); its other types are written from that.
"""

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from llama_meter.disk import growing
from llama_meter.errors import StudyError
from llama_meter.models import recipes, registry, tensors
from llama_meter.models.registry import ModelSpec
from llama_meter.models.tensors import TensorInfo

Progress = Callable[[int, int], None]  # bytes done, bytes in all
BLOCK = 32  # weights that share one scale in Q8_0
STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of an F32
    "Q8_0": np.dtype([("scale", "<f2"), ("q", "i1", BLOCK)]),
}
COMMITTED = Path(__file__).resolve().parents[3] / "data" / "models"  # where, when PLAMO_STUDY_ROOT names another tree
SOURCE = "F16"  # the type that is committed
COPIED_KEYS = ("general.name", "general.description", "general.license")
WORDS_SPACE = 16 << 20  # bytes on disk for header and vocabulary, with room to spare
CHUNK = 1 << 12  # blocks generated at a time: 128 Ki weights stay in the processor's cache
Q_STD = math.sqrt((128**2 - 1) / 6)  # of the difference of two uniform draws from 128 whole numbers

# Norms have the sizes the converter leaves in released files (offsets 1, 1/5 and 1/5^1.5), with two exceptions.
# Query and key norms above one keep attention from averaging thousands of random values, which magnifies rounding.
# Small embeddings and a large final norm keep tied models from echoing their input; logits spread by their product.
NORMS = {
    "post_attention_norm": 1 / 5,
    "post_ffw_norm": 1 / (5 * math.sqrt(5)),
    "attn_q_norm": 1.5,
    "attn_k_norm": 1.5,
    "output_norm": 8.0,
}
GAINS = {"token_embd": 0.25, "output": 0.25, "ssm_dt": 0.5}  # of the weights' spread 1 / sqrt(inputs)


def make(name: str, scale: str, dtype: str, progress: Progress | None = None) -> Path:
    """The path of a registered model, written if missing: with random weights (seed 0), or the trained ones.

    Raises StudyError when an existing file is damaged, differs from its pinned hash (mini) or lacks the planned
    tensors (shape), and for everything `write`, `convert` and `registry.spec` raise it for.
    """
    spec, path = registry.spec(name, scale), recipes.model_path(name, scale, dtype)
    if spec.trained:
        return _trained(spec, dtype, progress)
    if not path.exists():
        return write(spec, dtype, path, progress=progress)
    pin = spec.sha256.get(dtype)
    if pin and tensors.read_sha256(path) != pin:
        raise StudyError(str(path), "differs from the hash in data/models.toml", tensors.REMAKE)
    if not pin and tensors.tensor_table(path) != tensors.planned_table(spec, dtype):
        raise StudyError(str(path), "does not have this model's tensors", tensors.REMAKE)
    return path


def write(
    spec: ModelSpec,
    dtype: str,
    path: Path,
    seed: int = 0,
    progress: Progress | None = None,
    head_count_array: bool = False,
) -> Path:
    """Write a synthetic GGUF of `spec` with tensors of type `dtype` (F32, F16, BF16 or Q8_0) and return `path`.

    Memory stays constant; nothing is left behind on failure. `progress` is called with (bytes done, bytes in all).
    `head_count_array` writes the per-layer head count of official conversions, which makes the engine lose RoPE
    (and hang on its CPU backend): for tests of that defect only.
    Raises StudyError for a folder that cannot be written, or too little free space.
    """
    table = tensors.planned_table(spec, dtype)
    with writing(path, spec.arch) as writer:
        _add_metadata(writer, spec, dtype, head_count_array)
        _add_vocabulary(writer, spec.vocab)
        check_space(path, sum(t.n_bytes for t in table) + WORDS_SPACE)
        stream(writer, [(tensor, _values(tensor, seed)) for tensor in table], progress)
    return path


def _values(tensor: TensorInfo, seed: int) -> Iterator[NDArray[Any]]:
    return iter([_small(tensor, seed)]) if tensors.stays_f32(tensor.name) else _chunks(tensor, seed)


def _spread(tensor: TensorInfo) -> float:
    """Standard deviation of a tensor's weights."""
    return GAINS.get(tensor.kind, 1.0) / math.sqrt(tensor.shape[-1])


def _chunks(tensor: TensorInfo, seed: int) -> Iterator[NDArray[Any]]:
    plus, minus, step = (_bits(seed, tensor.name, part) for part in ("plus", "minus", "step"))
    unit, k0 = _step(_spread(tensor))
    n_blocks = tensor.n_elements // BLOCK
    for start in range(0, n_blocks, CHUNK):
        n = min(CHUNK, n_blocks - start)
        q = _quants(plus, minus, n * BLOCK).reshape(n, BLOCK)
        steps = (k0 - (_bytes(step, n) & 3)).astype(np.float32) * np.float32(unit)
        yield _encode(tensor.dtype, q, steps)


def _encode(dtype: str, q: NDArray[np.int8], steps: NDArray[np.float32]) -> NDArray[Any]:
    """Blocks (n, 32) of whole numbers and their n steps, as items of a GGML type."""
    if dtype == "Q8_0":
        blocks = np.empty(len(q), STORED[dtype])
        blocks["scale"], blocks["q"] = steps, q
        return blocks
    return narrow((q * steps[:, None]).ravel(), dtype)


def _step(std: float) -> tuple[float, int]:
    """A power of two `unit` and k0 in 8..16 such that steps (k0-3..k0) · unit spread the weights by `std`."""
    mantissa, exponent = math.frexp(std / Q_STD / (1 - 1.5 / 12))
    return math.ldexp(1.0, exponent - 4), round(mantissa * 16)


def _small(tensor: TensorInfo, seed: int) -> NDArray[np.float32]:
    """Norms, Mamba scalars and convolution: around their natural size, each entry slightly different."""
    n, kind = tensor.n_elements, tensor.kind
    q = _quants(_bits(seed, tensor.name, "plus"), _bits(seed, tensor.name, "minus"), n).astype(np.float64)
    if kind == "ssm_a":  # decay rates from slow to fast
        values = -(1 + 15 * np.arange(n) / (n - 1))
    elif kind == "ssm_dt.bias":  # softplus of -6.9 is 0.001, of -2.25 is 0.1; shuffled against the decay rates
        values = -6.9 + 4.65 * (np.arange(n) * 7 % n) / (n - 1)
    elif kind == "ssm_conv1d":
        values = q / Q_STD / math.sqrt(tensor.shape[-1])
    else:
        values = NORMS.get(kind, 1.0) * (1 + q / 512)
    return values.astype("<f4")


def _bits(seed: int, name: str, part: str) -> np.random.PCG64:
    """A random stream of one tensor: NumPy keeps the raw output of a bit generator the same in every version."""
    digest = hashlib.sha256(f"{seed}/{name}/{part}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest, "little"))


def _bytes(bits: np.random.PCG64, n: int) -> NDArray[np.uint8]:
    return bits.random_raw(-(-n // 8)).astype("<u8", copy=False).view(np.uint8)[:n]


def _quants(plus: np.random.PCG64, minus: np.random.PCG64, n: int) -> NDArray[np.int8]:
    """n whole numbers in -127..127, symmetric and triangular, so that the weights have mean zero."""
    q = _bytes(plus, n) >> 1
    q -= _bytes(minus, n) >> 1
    return q.view(np.int8)


def _add_metadata(writer: gguf.GGUFWriter, spec: ModelSpec, dtype: str, head_count_array: bool) -> None:
    writer.add_name(f"Synthetic {spec.name} ({spec.scale} scale, random weights)")
    notes = ["Random weights in the tensor shapes of the named model; not its released weights.", *spec.assumptions]
    writer.add_description(" ".join(notes))
    by_layer = [0 if spec.is_mamba(layer) else spec.heads for layer in range(spec.layers)]
    add_shape(writer, spec, dtype, by_layer if head_count_array else None)


def _add_vocabulary(writer: gguf.GGUFWriter, vocab: int) -> None:
    """A vocabulary the plamo2 tokenizer accepts: 5 special tokens, 256 bytes, then characters and letter strings."""
    special = [f"<|plamo:{name}|>" for name in ("unk", "bos", "eos", "pad", "op")]
    byte = [f"<0x{b:02X}>" for b in range(256)]
    characters = [chr(c) for c in chain(range(0x20, 0x7F), range(0x3041, 0x3097))]  # ASCII and hiragana
    words = ("".join(letters) for n in (2, 3, 4) for letters in product(ascii_lowercase, repeat=n))
    text = list(islice(chain(characters, words), vocab - len(special) - len(byte)))
    writer.add_tokenizer_model("plamo2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*special, *byte, *text])
    writer.add_token_scores([0.0] * 261 + [-1 - i / 1024 for i in range(len(text))])  # -1000 would be a sentinel
    writer.add_token_types([2] + [3] * 4 + [6] * 256 + [1] * len(text))  # unknown, control, byte, normal
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    writer.add_eot_token_id(4)


def _trained(spec: ModelSpec, dtype: str, progress: Progress | None = None) -> Path:
    """The path of a trained model's file: the committed one, or one written from it if missing.

    Raises StudyError when a file differs from its pin, and when the committed one is not here.
    """
    path = recipes.model_path(spec.name, spec.scale, dtype)
    if not path.exists():
        if dtype != SOURCE:
            return convert(spec, _trained(spec, SOURCE), path, dtype, progress)
        _copy(spec, path)
    if tensors.read_sha256(path) != spec.sha256.get(dtype):
        mend = f"git checkout -- {path}" if dtype == SOURCE else tensors.REMAKE
        raise StudyError(str(path), "differs from the hash in data/models.toml", mend)
    return path


def convert(spec: ModelSpec, source: Path, path: Path, dtype: str, progress: Progress | None = None) -> Path:
    """Write `source`, an F16 file of `spec`, with matrices of type `dtype`, and return `path`.

    F32 holds the same numbers; BF16 and Q8_0 round them as llama.cpp does. The same bytes on every machine.
    Raises StudyError for a folder that cannot be written.
    """
    reader = gguf.GGUFReader(source)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    table = tensors.planned_table(spec, dtype)
    check_space(path, sum(tensor.n_bytes for tensor in table) + WORDS_SPACE)
    with writing(path, spec.arch) as writer:
        for key in COPIED_KEYS:
            if field := reader.get_field(key):
                writer.add_string(key, field.contents())
        add_shape(writer, spec, dtype)
        for key, field in reader.fields.items():
            if key.startswith("tokenizer."):
                writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        numbers = [np.ascontiguousarray(stored[tensor.name].data, np.float32).ravel() for tensor in table]
        narrowed = [iter([narrow(each, tensor.dtype)]) for each, tensor in zip(numbers, table, strict=True)]
        stream(writer, list(zip(table, narrowed, strict=True)), progress)
    return path


def _copy(spec: ModelSpec, path: Path) -> None:
    committed = COMMITTED / path.name
    if not committed.exists():
        why = f"the trained model of {spec.name} is committed, and it is not here"
        raise StudyError(str(path), why, f"git checkout -- data/models/{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with growing(path) as partial:
        shutil.copyfile(committed, partial)


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Float32 numbers, one dimension, as the items of a GGML type (see `STORED`).

    The `gguf` package rounds, bit for bit as llama.cpp does. Numbers beyond F16's range become infinite.
    """
    with np.errstate(all="ignore"):
        return gguf.quantize(values, gguf.GGMLQuantizationType[dtype]).view(STORED[dtype])


def check_space(path: Path, n_bytes: int) -> None:
    """Make the folder of `path`; StudyError unless its disk has `n_bytes` free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < n_bytes:
        raise StudyError(str(path), f"needs {n_bytes:,} bytes, only {free:,} are free", f"free space in {path.parent}")


@contextmanager
def writing(path: Path, arch: str) -> Iterator[gguf.GGUFWriter]:
    """A writer whose file becomes `path` when the block succeeds; nothing is left behind when it fails."""
    with growing(path) as partial, closing(gguf.GGUFWriter(partial, arch)) as writer:
        yield writer


def add_shape(writer: gguf.GGUFWriter, spec: ModelSpec, dtype: str, heads: list[int] | None = None) -> None:
    """Add the keys that llama.cpp's loader reads, as they follow from a spec and its weights' type.

    head_count is a scalar: an array with 0 at layer 0, which `heads` can pass, makes the engine lose RoPE.
    """
    kv_heads = [spec.kv_heads_of(layer) for layer in range(spec.layers)]
    writer.add_file_type(recipes.KINDS[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(spec.vocab)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(heads or spec.heads)
    writer.add_head_count_kv(kv_heads if spec.arch == "plamo2" else spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    _add_mamba(writer, spec) if spec.arch == "plamo2" else _add_window(writer, spec)


def stream(
    writer: gguf.GGUFWriter, parts: Sequence[tuple[TensorInfo, Iterator[NDArray[Any]]]], progress: Progress | None
) -> None:
    """Write everything, tensors in chunks: `GGUFWriter.write_tensor_data` needs whole tensors of up to 0.4 GB."""
    for t, _ in parts:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes, gguf.GGMLQuantizationType[t.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file, done, total = writer.fout[0], 0, sum(tensor.n_bytes for tensor, _ in parts)
    writer.write_padding(file, file.tell())
    for tensor, chunks in parts:
        for chunk in chunks:
            file.write(chunk.data)
            done += chunk.nbytes
            if progress:
                progress(done, total)
        writer.write_padding(file, tensor.n_bytes)
    writer.close()


def _add_mamba(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_ssm_state_size(spec.d_state)
    writer.add_ssm_conv_kernel(spec.d_conv)
    writer.add_ssm_time_step_rank(spec.mamba_heads)
    writer.add_ssm_inner_size(spec.d_inner)
    writer.add_ssm_group_count(0)


def _add_window(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_sliding_window(spec.window)
    writer.add_sliding_window_pattern(spec.window_pattern)
    writer.add_rope_freq_base_swa(spec.rope_theta_swa)
