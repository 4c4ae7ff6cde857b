"""The search for infinities and NaNs among a file's weights, in pieces of constant memory.

Float types are checked number by number, block types by their F16 scales, as llama.cpp's own validation does
(ggml-quants.c, ggml_validate_row_data): to dequantize every weight would take a hundred times as long. It does not know
whether finite weights are the right ones.
"""

from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from plamo_study.models.finding import AGAIN, Finding, listed
from plamo_study.models.header import Header, TensorRecord

PIECE = 8 << 20  # bytes read at a time
# A number is infinite or NaN when all bits of its exponent are set; by type, its words and these bits.
EXPONENT = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
# Byte offsets of the F16 scales in a block (ggml-common.h)
SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q1_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


def finite_findings(header: Header) -> list[Finding]:
    """Findings on tensors with non-finite numbers. Check the layout first: every byte is read once."""
    bad: dict[str, int] = {}
    unknown: set[str] = set()
    with header.path.open("rb") as file:
        for tensor in header.tensors:
            if tensor.type_name not in EXPONENT.keys() | SCALES.keys():
                unknown.add(tensor.type_name)
            elif n := _count(file, header.data_start + tensor.offset, tensor):
                bad[tensor.name] = n
    found = []
    if bad:
        shown = listed(f"{name} ({n:,})" for name, n in bad.items())
        found.append(Finding("blocking", "not-finite", f"infinities or NaNs in {len(bad)} tensors: {shown}", AGAIN))
    if unknown:
        why = f"weights of type {listed(sorted(unknown))} were not searched for NaNs"
        found.append(Finding("note", "not-searched", why, "trust the gate instead"))
    return found


def _count(file: BinaryIO, start: int, tensor: TensorRecord) -> int:
    """The count of non-finite numbers, or of non-finite block scales."""
    _, size = tensor.block
    file.seek(start)
    n = 0
    for first in range(0, tensor.n_bytes, step := PIECE // size * size):
        piece = np.fromfile(file, np.uint8, min(step, tensor.n_bytes - first))
        n += not_finite(piece, tensor.type_name, size)
    return n


def not_finite(piece: NDArray[np.uint8], type_name: str, size: int) -> int:
    """The count of non-finite numbers among whole blocks of `size` bytes, or of their non-finite scales."""
    if type_name in EXPONENT:
        word, exponent = EXPONENT[type_name]
        return int(np.count_nonzero((piece.view(word) & exponent) == exponent))
    highs = piece.reshape(-1, size)[:, [at + 1 for at in SCALES[type_name]]]  # with the exponent of each F16
    return int(np.count_nonzero((highs & 0x7C) == 0x7C))
