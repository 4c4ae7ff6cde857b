"""Class, bytes and FLOPs of a graph node, and the sums of a recorded request by class.

A product is classed by the weight it multiplies with, everything else by its operation. Unrecognised nodes are "other",
never left out. Bytes and FLOPs are those of products: their sources and result once, and two operations a weight.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

from llama_meter.engine.timeline import Node, Timeline

PRODUCTS = ("attn_qkv", "attn_output", "ffn_up", "ffn_down", "ssm_in", "ssm_x", "ssm_dt", "ssm_out", "head")
ATTENTION = ("flash_attention", "kq", "softmax", "kqv", "rope", "kv_write")
STATE = ("ssm_scan", "ssm_conv", "state")
REST = ("norm", "embedding", "elementwise", "copy", "other")
CLASSES = (*PRODUCTS, *ATTENTION, *STATE, *REST)
GROUPS = {
    "FFN products": ("ffn_up", "ffn_down"),
    "attention products": ("attn_qkv", "attn_output"),
    "Mamba products": ("ssm_in", "ssm_x", "ssm_dt", "ssm_out"),
    "head": ("head",),
    "attention": ATTENTION,
    "scan and convolution": STATE,
    "norms, copies, other": REST,
}
HEAD = ("output.weight", "token_embd.weight")  # a tied head multiplies with the embedding
WEIGHT = re.compile(r"blk\.\d+\.([a-z0-9_]+)(?:\.weight)?")
RECURRENT = re.compile(r"cache_[rs]_l\d|mamba_conv1d_state|mamba_ssm_states")  # the graph renames what it writes
BY_OP = {
    "FLASH_ATTN_EXT": "flash_attention",
    "SOFT_MAX": "softmax",
    "ROPE": "rope",
    "SET_ROWS": "kv_write",
    "SSM_SCAN": "ssm_scan",
    "SSM_CONV": "ssm_conv",
    **dict.fromkeys(("NORM", "RMS_NORM", "L2_NORM", "GROUP_NORM"), "norm"),
    **dict.fromkeys(("CPY", "CONT", "DUP", "CONCAT", "REPEAT", "GET_ROWS"), "copy"),
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV", "SCALE", "SQR", "CLAMP"), "elementwise"),
    **dict.fromkeys(("SILU", "GELU", "RELU", "SIGMOID", "EXP", "SOFTPLUS", "SWIGLU", "GEGLU", "REGLU"), "elementwise"),
}


@dataclass(frozen=True)
class Work:
    """What a class of nodes did in one or more phases: nanoseconds, bytes, FLOPs, and how many nodes."""

    ns: int = 0
    n_bytes: float = 0.0
    n_flops: float = 0.0
    nodes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.ns + other.ns, self.n_bytes + other.n_bytes, self.n_flops + other.n_flops, self.nodes + other.nodes
        )


def operator_class(node: Node) -> str:
    """The class of a node, one of CLASSES."""
    names = [source.name for source in node.sources]
    if node.op == "MUL_MAT":
        return _product(names[0], node.result.name)
    if node.op == "GET_ROWS" and names[0] == HEAD[1]:
        return "embedding"
    if node.op == "MUL" and any(name.removesuffix(".weight").endswith("_norm") for name in names):
        return "norm"
    if node.op in ("CPY", "GET_ROWS", "SCALE") and any(map(RECURRENT.search, (node.result.name, *names))):
        return "state"
    return BY_OP.get(node.op, "other")


def counted(node: Node) -> tuple[float, float]:
    """(bytes read and written, floating-point operations) of a matrix product; none of another node."""
    if node.op != "MUL_MAT":
        return 0.0, 0.0
    moved = sum(source.n_bytes for source in dict.fromkeys(node.sources)) + node.result.n_bytes
    return float(moved), 2.0 * node.sources[0].shape[0] * node.result.n_elements


def sums(timeline: Timeline) -> dict[str, dict[str, Work]]:
    """Work by phase, "prefill" and "decode" (all steps), and by class or kind of span around the nodes."""
    costs = [(operator_class(node), *counted(node)) for node in timeline.nodes]
    totals: dict[str, defaultdict[str, Work]] = {"prefill": defaultdict(Work), "decode": defaultdict(Work)}
    for phase in timeline.phases:
        entry = totals["prefill" if phase.name == "PREFILL" else "decode"]
        for span in phase.spans:
            if span.kind == "operator":
                name, n_bytes, n_flops = costs[span.node]
                entry[name] += Work(span.duration, n_bytes, n_flops, 1)
            else:
                entry[span.kind] += Work(span.duration)
    return {kind: dict(entry) for kind, entry in totals.items() if entry}


def _product(weight: str, result: str) -> str:
    if weight in HEAD:
        return "head"
    match = WEIGHT.fullmatch(weight)
    kind = match.group(1) if match else result.split("-")[0]
    return kind if kind in PRODUCTS or kind in ("kq", "kqv") else "other"
