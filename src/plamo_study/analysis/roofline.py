"""Bytes and FLOPs of a forward pass from a model's tensor table, and the time the machine's ceilings allow for them.

A model is its fact: `shape` (hyper-parameters) and `tensors` (kind -> type, count, n_elements, n_bytes).
"""

from dataclasses import dataclass
from typing import Any

Model = dict[str, Any]
KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
STATE_BYTES = 4  # llama.cpp keeps recurrent and convolution state in F32
NO_MATMUL = {"token_embd", "output", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_dt.bias"}
SCAN_FLOPS = 6  # per state element and token: decay, input, add (3), output multiply-add (2), and exp's multiply


@dataclass(frozen=True)
class Ceilings:
    """The machine's limits: bytes per second read, FLOPs per second in the engine's matrix product."""

    read: float
    matmul: float


@dataclass(frozen=True)
class Band:
    """Predicted seconds: `low` = max(compute, memory), perfect overlap; `high` = their sum, no overlap."""

    compute: float
    memory: float

    @property
    def low(self) -> float:
        """Time with perfect overlap of compute and memory."""
        return max(self.compute, self.memory)

    @property
    def high(self) -> float:
        """Time with no overlap at all."""
        return self.compute + self.memory

    @property
    def bound(self) -> str:
        """Which of the two ceilings is nearer."""
        return "compute" if self.compute > self.memory else "memory"


def layers(model: Model) -> tuple[int, int, int]:
    """Numbers of (Mamba, sliding-window, full-attention) layers."""
    shape = model["shape"]
    mamba = model["tensors"].get("ssm_in", {"count": 0})["count"]
    attention = shape["layers"] - mamba
    full = attention // shape["window_pattern"] if shape["window"] else attention
    return mamba, attention - full, full


def weight_bytes(model: Model) -> int:
    """Bytes of weights one decode step reads. A tied embedding is read as the head; an untied one is not read."""
    untied = "output" in model["tensors"]
    return sum(t["n_bytes"] for kind, t in model["tensors"].items() if not (untied and kind == "token_embd"))


def kv_bytes_per_token(model: Model, type_kv: str = "f16") -> float:
    """Bytes of key and value that one token adds in one attention layer."""
    shape = model["shape"]
    return 2 * shape["kv_heads"] * shape["head_dim"] * KV_BYTES[type_kv]


def state_bytes(model: Model) -> int:
    """Bytes of recurrent state per sequence: scan, d_inner x d_state, and convolution, d_inner x (d_conv - 1)."""
    shape = model["shape"]
    d_inner = shape["mamba_heads"] * shape["mamba_head_dim"]
    return layers(model)[0] * d_inner * (shape["d_state"] + max(shape["d_conv"] - 1, 0)) * STATE_BYTES


def decode_bytes(model: Model, depth: float, n_seq: int = 1, type_kv: str = "f16") -> float:
    """Bytes one decode step moves: weights + n_seq * (KV read at `depth` + KV written + state read and written)."""
    _, sliding, full = layers(model)
    window = model["shape"]["window"] or depth
    seen = full * depth + sliding * min(depth, window)
    per_token = kv_bytes_per_token(model, type_kv)
    return weight_bytes(model) + n_seq * (per_token * (seen + sliding + full) + 2 * state_bytes(model))


def matmul_weights(model: Model) -> int:
    """Weights a token is multiplied with in every block: all matrices but embedding and head."""
    tensors = model["tensors"].items()
    return sum(t["n_elements"] for kind, t in tensors if kind not in NO_MATMUL and not kind.endswith("_norm"))


def head_weights(model: Model) -> int:
    """Weights of the output head, n_vocab x hidden."""
    return model["shape"]["vocab"] * model["shape"]["hidden"]


def prefill_flops(model: Model, n_tokens: int) -> float:
    """FLOPs of one prompt from an empty context, the head for its last token only.

    2 per weight and token; 4 * heads * head_dim per visible key (q.k and p.v, causal, window-limited); the scan.
    """
    shape = model["shape"]
    mamba, sliding, full = layers(model)
    window = min(shape["window"] or n_tokens, n_tokens)
    causal = n_tokens * (n_tokens + 1) / 2
    windowed = window * (window + 1) / 2 + (n_tokens - window) * window
    attention = 4 * shape["heads"] * shape["head_dim"] * (full * causal + sliding * windowed)
    scan = SCAN_FLOPS * mamba * shape["mamba_heads"] * shape["mamba_head_dim"] * shape["d_state"] * n_tokens
    return 2 * matmul_weights(model) * n_tokens + 2 * head_weights(model) + attention + scan


def decode_flops(model: Model, depth: float, n_seq: int = 1) -> float:
    """FLOPs of one decode step of `n_seq` sequences at `depth`."""
    shape = model["shape"]
    mamba, sliding, full = layers(model)
    seen = full * depth + sliding * min(depth, shape["window"] or depth)
    scan = SCAN_FLOPS * mamba * shape["mamba_heads"] * shape["mamba_head_dim"] * shape["d_state"]
    attention = 4 * shape["heads"] * shape["head_dim"] * seen
    return n_seq * (2 * (matmul_weights(model) + head_weights(model)) + attention + scan)


def prefill_bytes(model: Model, n_tokens: int, n_ubatch: int = 512) -> float:
    """Bytes of weights one prefill reads: all of them once per micro-batch."""
    return -(-n_tokens // n_ubatch) * weight_bytes(model)


def band(flops: float, moved: float, ceilings: Ceilings) -> Band:
    """Predicted seconds of so many FLOPs and bytes."""
    return Band(flops / ceilings.matmul, moved / ceilings.read)


def prefill_band(model: Model, n_tokens: int, ceilings: Ceilings, n_ubatch: int = 512) -> Band:
    """Predicted seconds of a prefill."""
    return band(prefill_flops(model, n_tokens), prefill_bytes(model, n_tokens, n_ubatch), ceilings)


def decode_band(model: Model, depth: float, ceilings: Ceilings, n_seq: int = 1) -> Band:
    """Predicted seconds of one decode step."""
    return band(decode_flops(model, depth, n_seq), decode_bytes(model, depth, n_seq), ceilings)
