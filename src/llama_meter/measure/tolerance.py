"""Largest error of a correct engine against its reference, by the types of weights and cache.

All tolerances are here: workers judge by them, and what is printed beside an old row's verdict comes from here too.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from llama_meter.models.registry import FILE_TYPES

# Relative error of logits that rounding explains. The engine rounds activations to the weights' type, keeps keys and
# values in F16 and, on the CPU, sums attention in F16. The defects guarded against cause errors of 0.4 and more.
# K types round activations in blocks of 256 instead of 32, so an outlier costs more neighbours their precision. The
# largest errors measured on full-size random weights: F32 0.001, F16 0.003, BF16 0.016, Q8_0 0.05, Q4_0 0.05, K 0.09.
TOLERANCE = {"F32": 1e-2, "F16": 1e-2, "BF16": 6e-2}
TOLERANCE |= dict.fromkeys(("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "MXFP4"), 0.15)
TOLERANCE |= dict.fromkeys(("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"), 0.2)  # and all others, which round inputs as these
LOOSEST = max(TOLERANCE.values())
EXACT_CACHE = 5e-3  # for F32 and F16 weights with keys and values in F32 and no flash attention
# Backends of GPUs also multiply F16 weights in F16. Largest measured, on Vulkan: logits 0.024, parts 0.0092.
OFFLOADED, OFFLOADED_PART = {"F16": 6e-2}, {"F16": 2e-2}
# On the CPU flash attention sums values in F16. The roundings of n keys add up as a random walk, to some 5.5e-4 times
# the root of n. Largest errors of correct attention parts: 0.068 at 16,392 tokens in F16 at mini, 0.036 at 4,104 in
# Q8_0 at full size (without flash attention 0.0004). The limits, 0.14 and 0.08, leave two times. The least planted
# fault at 16,392 tokens shows as 0.17.
FLASH_WALK = 1e-3
# Added for a depth cell with flash attention, which adds so much to logits. Largest of correct rows, over both models,
# four depths and two paths: F16 0.016 with it and 0.0005 without, Q8_0 0.11 and 0.025. So the limits, 0.02 and 0.16,
# leave 1.3 and 1.4 times. A token lost far down shows as 0.04: more than the first, less than what 8 bits round; there
# only its part shows it.
DEEP = 1e-2

# The same for one part of a layer, given the engine's own input to it: rounding cannot grow from part to part.
# Largest measured: F16 0.0034, at full size Q8_0 0.0057. A fault that hides best, one lost token far down: 0.04.
PART_TOLERANCE = {"F32": 1e-2, "F16": 1e-2}
LOOSEST_PART = 1.5e-2
# CUDA adds an offset of these types times the sum of the inputs before rounding to a product with the rounded ones
# (ggml-cuda/vecdotq.cuh, vec_dot_q4_0_q8_1_impl; mmq.cuh, MMQ_Q8_1_DS_LAYOUT_DS4). On an H200 parts of PLaMo 3 were off
# by 0.033 in Q4_0 and 0.067 in Q4_K_M from an oracle that did not. It does now (`weights.STEPPED`, `weights.TOGETHER`);
# until a GPU has shown that this is all, the allowance stays. The fault that hides best hides here.
CUDA_PART = {"Q4_0": 5e-2, "Q4_K": 8e-2}

# Nats between the two likeliest tokens within which rounding may decide between them. The coarsest type in which
# engines compute logits is BF16, with 8 bits of significand: from 16 to 32, where the largest logits lie, its numbers
# are 2 ** -3 apart. Rounded the other way, each of two logits moves by one such step, so the lead moves by two.
NEAR_TIE = 0.25
BOTH_MOVE = 2  # times the rounding of a logit: the gap that rounding of two logits can close


def near_tie(lead: Any, limit: float = NEAR_TIE) -> Any:
    """Whether rounding may decide between the two likeliest tokens, by the lead of one over the other in nats.

    `lead`: a number, an array or a Series; below zero or NaN where it is not known, which is no near-tie. `limit`: the
    lead that rounding can close, where it was measured.
    """
    return (lead >= 0) & (lead < limit)


# ------------------------------------------------------------------ an answer given alone, and together with others
# Both are greedy, so they should match. But batches of different shapes round differently, and between two nearly
# equally likely tokens rounding decides: such a difference proves nothing.

SAME = -1  # the first differing token of two answers that do not differ, and in rows a lead that is not known


class Parting(NamedTuple):
    """Where an answer parts from the one alone: `token` from 0, SAME for nowhere, and the likeliest one's lead there.

    `lead` in nats, by the logits alone; below zero or NaN where it is not known, which is no near-tie.
    """

    token: int = SAME
    lead: float = float("nan")

    @property
    def verdict(self) -> Literal["same", "near-tie", "other"]:
        """Whether the answer is the one alone, may have been turned by rounding, or is another."""
        if self.token < 0:
            return "same"
        return "near-tie" if near_tie(self.lead) else "other"


def parting(
    alone: Sequence[Any] | np.ndarray,
    together: Sequence[Any] | np.ndarray,
    leads: Sequence[float] | np.ndarray = (),
    pieces: Sequence[str] = (),
) -> Parting:
    """First token at which an answer given together differs from the one alone.

    `alone`, `together`: tokens; or texts, and then `pieces` is the text of each token alone. `leads`: of the likeliest
    token over the second at each token alone, in nats.
    """
    shorter, longer = sorted((len(alone), len(together)))
    at = next((i for i, (a, b) in enumerate(zip(alone, together, strict=False)) if a != b), shorter)
    if at == longer:
        return Parting()
    if pieces:
        ends = np.cumsum([len(piece) for piece in pieces])
        at = min(int(np.searchsorted(ends, at, side="right")), len(pieces) - 1)
    return Parting(at, float(leads[at]) if at < len(leads) else float("nan"))


# ------------------------------------------------------------------ logits and parts of layers


def tolerance(cell: Any) -> float:
    """Largest relative error of logits that rounding explains, for a cell or a row of a frame: by its coarsest type."""
    if judged := getattr(cell, "checks", {}).get("tolerance"):
        return float(judged)  # by which a row was judged
    limits = TOLERANCE | (OFFLOADED if cell.n_gpu_layers else {})
    exact = limits.get(cell.dtype) == TOLERANCE["F16"]
    exact = exact and (cell.type_k, cell.type_v, cell.flash_attn) == ("f32", "f32", "off")
    usual = EXACT_CACHE if exact else max(limits.get(name, LOOSEST) for name in _types(cell.dtype))
    return usual + (DEEP if cell.workload == "depth" and not cell.text and cell.flash_attn != "off" else 0)


def attention_tolerance(cell: Any, part: float) -> float:
    """Largest relative error of an attention part at a gate's depth; `part`: that of other parts."""
    return part if cell.flash_attn == "off" or cell.n_gpu_layers else part + FLASH_WALK * cell.n_prompt**0.5


def part_tolerance(cell: Any, backend: str = "") -> float:
    """Largest relative error of one part's output that rounding explains, for a cell or a row of a frame.

    `backend`: that of the GPU which holds the weights, for a cell that is being judged.
    """
    if judged := getattr(cell, "checks", {}).get("parts_tolerance"):
        return float(judged)
    limits = PART_TOLERANCE | (OFFLOADED_PART if cell.n_gpu_layers else {}) | (CUDA_PART if backend == "CUDA" else {})
    return max(limits.get(name, LOOSEST_PART) for name in _types(cell.dtype))


def _types(dtype: str) -> tuple[str, ...]:
    """The tensor types a type or recipe asks for; a publisher's own name is its own type."""
    file_type, *words = dtype.split("-")
    return FILE_TYPES.get(file_type, file_type), *words[1::2]
