"""Small random files of other architectures, written with the gguf package: a llama, a Jamba."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB, LAYERS = 64, 128, 4, 2, 320, 2
HEAD = HIDDEN // HEADS
D_INNER, D_STATE, D_CONV, DT_RANK = 2 * HIDDEN, 8, 4, 16


def write(
    path: Path, arch: str = "llama", name: str = "", file_type: int = 1, layers: int = LAYERS, size: float = 1.0
) -> Path:
    """A model of `arch` (llama or jamba) in F16; `name`: its general.name, none by default.

    Every second layer of a jamba is Mamba. `size`: of the numbers in the feed-forward layers; from some hundreds on
    what they compute overflows F16.
    """
    writer = GGUFWriter(path, arch)
    if name:
        writer.add_name(name)
    writer.add_file_type(file_type)
    mamba = {layer for layer in range(layers) if arch == "jamba" and layer % 2}
    _sizes(writer, layers, mamba)
    _words(writer)
    rng = np.random.default_rng(0)

    def matrix(key: str, *shape: int, size: float = 1.0, kind: type = np.float16) -> None:
        writer.add_tensor(key, (size * rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(kind))

    def ones(key: str, n: int) -> None:
        writer.add_tensor(key, np.ones(n, np.float32))

    def attention(block: str) -> None:
        for part, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS), ("output", HEADS)):
            matrix(f"{block}attn_{part}.weight", n * HEAD, HIDDEN)

    def scan(block: str) -> None:
        inputs = {"in": HIDDEN, "x": D_INNER, "dt": DT_RANK, "out": D_INNER}
        outputs = {"in": 2 * D_INNER, "x": DT_RANK + 2 * D_STATE, "dt": D_INNER, "out": HIDDEN}
        for part, n in inputs.items():
            matrix(f"{block}ssm_{part}.weight", outputs[part], n)
        matrix(block + "ssm_conv1d.weight", D_INNER, D_CONV, kind=np.float32)
        units = {"conv1d.bias": D_INNER, "dt.bias": D_INNER, "d": D_INNER}
        units |= {"dt_norm.weight": DT_RANK, "b_norm.weight": D_STATE, "c_norm.weight": D_STATE}
        for part, n in units.items():
            ones(f"{block}ssm_{part}", n)
        writer.add_tensor(block + "ssm_a", -np.ones((D_INNER, D_STATE), np.float32))

    matrix("token_embd.weight", VOCAB, HIDDEN)
    for layer in range(layers):
        block = f"blk.{layer}."
        ones(block + "attn_norm.weight", HIDDEN)
        (scan if layer in mamba else attention)(block)
        ones(block + "ffn_norm.weight", HIDDEN)
        matrix(block + "ffn_gate.weight", FFN, HIDDEN, size=size)
        matrix(block + "ffn_up.weight", FFN, HIDDEN, size=size)
        matrix(block + "ffn_down.weight", HIDDEN, FFN)
    ones("output_norm.weight", HIDDEN)
    matrix("output.weight", VOCAB, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(writer: GGUFWriter, layers: int, mamba: set[int]) -> None:
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([0 if layer in mamba else KV_HEADS for layer in range(layers)] if mamba else KV_HEADS)
    if mamba:
        writer.add_ssm_inner_size(D_INNER)
        writer.add_ssm_state_size(D_STATE)
        writer.add_ssm_conv_kernel(D_CONV)
        writer.add_ssm_time_step_rank(DT_RANK)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10000.0)


def _words(writer: GGUFWriter) -> None:
    """A vocabulary of bytes and letters that llama's tokenizer takes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    words += [f"w{n}" for n in range(VOCAB - len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(n) for n in range(VOCAB)])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (VOCAB - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
