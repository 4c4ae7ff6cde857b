"""Bytes and FLOPs of a forward pass from a model's tensor table, and their shortest time under a machine's ceilings.

A model is its fact: `shape` (hyper-parameters) and `tensors` (kind -> type, count, n_elements, n_bytes). One account,
`parts`, covers both phases: a decode step is one new token per sequence, a prefill many. It counts what must come from
memory: weights, cache and state. Activations and processor caches are left out: for a file that fits a cache, the bytes
are an upper bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from llama_meter.limits import SCAN_FLOPS

Model = dict[str, Any]
KV_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
STATE_BYTES = 4  # llama.cpp keeps recurrent and convolution state in F32
NO_MATMUL = {"token_embd", "output", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_dt.bias"}
HEAD, CACHE, LAYER, CELL = (
    8,
    16,
    24,
    12,
)  # bytes: of a state's kind, of each cache, each of its layers, each token in it
RECURRENT = 20  # of a recurrent state, before its layers


@dataclass(frozen=True)
class Ceilings:
    """The machine's limits: bytes per second read, FLOPs per second in the engine's matrix product."""

    read: float
    matmul: float


@dataclass(frozen=True)
class Part:
    """One part of a forward pass: its computation (FLOPs) and memory traffic (bytes)."""

    name: str
    flops: float
    bytes: float


class Band(NamedTuple):
    """Predicted seconds: `low`, compute and memory overlap fully, so the longer one; `high`, they do not: their sum."""

    low: float
    high: float


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


def head_tensors(model: Model) -> dict[str, Any]:
    """The output head: its own tensor, or the embedding it is tied to."""
    tensors = model["tensors"]
    head: dict[str, Any] = tensors.get("output") or tensors.get("token_embd") or {"type": "", "n_bytes": 0}
    return head


def head_bytes(model: Model) -> int:
    """Bytes of the output head."""
    return int(head_tensors(model)["n_bytes"])


def kv_bytes_per_token(model: Model, type_kv: str = "f16", type_v: str = "") -> float:
    """Bytes of keys and values per token and attention layer; `type_v`: the type of values where it differs."""
    shape = model["shape"]
    return shape["kv_heads"] * shape["head_dim"] * (KV_BYTES[type_kv] + KV_BYTES[type_v or type_kv])


def recurrent(shape: Mapping[str, Any], n_layers: int) -> tuple[int, int]:
    """Bytes of recurrent state per sequence: of the scan, d_inner x d_state in every Mamba layer, and of the
    convolution, d_inner x (d_conv - 1)."""
    of_layers = STATE_BYTES * n_layers * shape["mamba_heads"] * shape["mamba_head_dim"]
    return of_layers * shape["d_state"], of_layers * max(shape["d_conv"] - 1, 0)


def state_bytes(model: Model) -> int:
    """Bytes of recurrent state per sequence: scan and convolution."""
    return sum(recurrent(model["shape"], layers(model)[0]))


def matmul_weights(model: Model) -> int:
    """Weights a token is multiplied with in every block: all matrices except embedding and head."""
    tensors = model["tensors"].items()
    return sum(t["n_elements"] for kind, t in tensors if kind not in NO_MATMUL and not kind.endswith("_norm"))


def head_weights(model: Model) -> int:
    """Weights of the output head, n_vocab x hidden."""
    return model["shape"]["vocab"] * model["shape"]["hidden"]


def parts(
    model: Model,
    n_tokens: int,
    depth: float = 0,
    n_seq: int = 1,
    *,
    n_ubatch: int = 512,
    type_k: str = "f16",
    type_v: str = "f16",
    together: bool = True,
) -> list[Part]:
    """FLOPs and bytes for `n_tokens` new tokens in each of `n_seq` sequences with `depth` tokens before them.

    The head is computed for each sequence's last token. Weights are read once per micro-batch of `n_ubatch` tokens, the
    head's where one ends a sequence; every micro-batch reads the keys and values before it and reads and writes the
    states of its sequences. `together`: one stream for all sequences, else one call each. FLOPs: 2 per weight and
    token; 4 * heads * head_dim per visible key (q.k and p.v, causal, window-limited); scan; convolution. All NaN for
    another architecture that reads otherwise (`uncounted` in its fact).
    """
    if model.get("uncounted"):
        return [Part("all", float("nan"), float("nan"))]
    shape, (mamba, sliding, full) = model["shape"], layers(model)
    total, pieces = n_seq * n_tokens, -(-n_tokens // n_ubatch)
    passes = -(-total // n_ubatch) if together else n_seq * pieces
    ends = {-(-n_tokens * (n + 1) // n_ubatch) for n in range(n_seq)} if together else range(n_seq)
    window = shape["window"] or depth + n_tokens
    pairs = full * _pairs(n_tokens, depth, depth + n_tokens) + sliding * _pairs(n_tokens, depth, window)
    before = [depth + piece * n_ubatch for piece in range(pieces)]
    read = sum(full * past + sliding * min(past, window) for past in before)
    per_key, (of_scan, of_conv) = kv_bytes_per_token(model, type_k, type_v), recurrent(shape, mamba)
    d_inner = shape["mamba_heads"] * shape["mamba_head_dim"]
    scan = SCAN_FLOPS * mamba * d_inner * shape["d_state"]
    row = model["tensors"].get("token_embd", {"n_bytes": 0})["n_bytes"] / max(shape["vocab"], 1)
    head = head_bytes(model)
    return [
        Part("weights of the blocks", 2 * matmul_weights(model) * total, passes * (weight_bytes(model) - head)),
        Part("output head", 2 * head_weights(model) * n_seq, len(ends) * head),
        Part("embedding rows", 0, total * row),
        Part("keys and values read", 4 * shape["heads"] * shape["head_dim"] * n_seq * pairs, n_seq * per_key * read),
        Part("keys and values written", 0, total * per_key * (sliding + full)),
        Part("scan state", scan * total, 2 * n_seq * pieces * of_scan),
        Part(
            "convolution state",
            2 * mamba * d_inner * shape["d_conv"] * total,
            2 * n_seq * pieces * of_conv,
        ),
    ]


def work(model: Model, n_tokens: int, depth: float = 0, n_seq: int = 1, **how: Any) -> tuple[float, float]:
    """(FLOPs, bytes) of all `parts` together, which take the same arguments."""
    account = parts(model, n_tokens, depth, n_seq, **how)
    return sum(part.flops for part in account), sum(part.bytes for part in account)


def step(model: Model, depth: float, n_seq: int = 1) -> tuple[float, float]:
    """(FLOPs, bytes) of one decode step of `n_seq` sequences, without the embedding rows, a few kilobytes."""
    account = [part for part in parts(model, 1, depth, n_seq) if part.name != "embedding rows"]
    return sum(part.flops for part in account), sum(part.bytes for part in account)


def _pairs(n_tokens: int, depth: float, window: float) -> float:
    """Visible (query, key) pairs of `n_tokens` queries after `depth` tokens, each seeing `window` keys at most."""
    growing = min(max(window - depth, 0), n_tokens)
    return growing * depth + growing * (growing + 1) / 2 + (n_tokens - growing) * window


def band(flops: float, moved: float, ceilings: Ceilings) -> Band:
    """Predicted seconds for a number of FLOPs and bytes."""
    compute, memory = flops / ceilings.matmul, moved / ceilings.read
    return Band(max(compute, memory), compute + memory)


@dataclass(frozen=True)
class Size:
    """Bytes of a stored state: `full` and `sliding` keys and values, the `recurrent` part, and their descriptions."""

    full: float
    sliding: float
    recurrent: float
    described: float

    @property
    def total(self) -> float:
        """Bytes of the whole state."""
        return self.full + self.sliding + self.recurrent + self.described


def stored(shape: Mapping[str, Any], n_tokens: int, type_k: str = "f16", type_v: str = "f16") -> Size:
    """Size of the state of `n_tokens` tokens, exactly as llama.cpp 0c1e57098 writes it. `shape`: as in a model's fact.

    Keys and values grow with every token, those of sliding layers up to their window; the recurrent part does not grow.
    """
    n_layers = int(shape["layers"])
    mamba = (n_layers + 1) // 2 if shape["mamba_heads"] else 0
    sliding = n_layers - n_layers // shape["window_pattern"] if shape["window"] else 0
    full, held = n_layers - mamba - sliding, min(n_tokens, int(shape["window"])) if sliding else 0
    row = shape["kv_heads"] * shape["head_dim"] * (KV_BYTES[type_k] + KV_BYTES[type_v])  # of one token in one layer
    described = HEAD + CACHE + LAYER * full + CELL * n_tokens
    described += CACHE + LAYER * sliding + CELL * held if sliding else 0
    described += RECURRENT + LAYER * mamba if mamba else 0
    state = float(sum(recurrent(shape, mamba))) if mamba else 0.0
    return Size(full * n_tokens * row, sliding * held * row, state, float(described))


def miss(measured: float, low: float, high: float) -> float:
    """Ratio of the measured time to the nearest edge of the band; 1 inside it."""
    return measured / high if measured > high else measured / low if measured < low else 1.0
