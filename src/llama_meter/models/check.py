"""Whether a GGUF can be trusted for a measurement: everything that can be checked without an engine.

Infinities and NaNs among the weights are searched in pieces of constant memory. Float types are checked number by
number, block types by their F16 scales, as llama.cpp's own validation does (ggml-quants.c, ggml_validate_row_data): to
dequantize every weight would take a hundred times as long. It does not know how an engine handles the file
(measure/checking.py does), nor whether finite weights are the released ones: a pinned SHA-256 does.
"""

import re
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llama_meter.errors import StudyError
from llama_meter.models import mistaken, roles, tensors
from llama_meter.models.expected import read_spec, rope_findings
from llama_meter.models.finding import AGAIN, Finding, listed
from llama_meter.models.header import Header, HeaderError, TensorRecord, read
from llama_meter.models.tensor_check import layout_findings, tensor_findings
from llama_meter.models.tokenizer_check import tokenizer_findings

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
    findings = []
    if bad:
        shown = listed(f"{name} ({n:,})" for name, n in bad.items())
        findings.append(Finding("blocking", "not-finite", f"infinities or NaNs in {len(bad)} tensors: {shown}", AGAIN))
    if unknown:
        why = f"weights of type {listed(sorted(unknown))} were not searched for NaNs"
        findings.append(Finding("note", "not-searched", why, "trust the gate instead"))
    return findings


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


def inspect(path: Path, sha256: str = "") -> tuple[list[Finding], Header | None]:
    """Findings about a file, without an engine, and its header if it can be read.

    `sha256`: the expected 64 hex digits. Raises StudyError when the file is missing or `sha256` is no hash.
    """
    findings = _hash_findings(path, sha256)
    try:
        header = read(path)
    except HeaderError as damage:
        return [*findings, Finding("blocking", damage.code, damage.why, damage.mend)], None
    return findings + _static_findings(header), header


def anything(header: Header) -> list[Finding]:
    """Findings that hold for any part of any GGUF: tensors in their places, and finite scales and weights."""
    layout = layout_findings(header)
    return layout or finite_findings(header)


def _hash_findings(path: Path, sha256: str) -> list[Finding]:
    if not sha256:
        return []
    if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise StudyError(f"hash {sha256[:80]!r}", "is not 64 hex digits", "copy the SHA-256 as its publisher gives it")
    mistaken.check_path(path)
    digest = tensors.sha256(path)
    if digest == sha256.lower():
        return []
    return [Finding("blocking", "hash", f"SHA-256 is {digest}, not {sha256.lower()}", AGAIN)]


def _static_findings(header: Header) -> list[Finding]:
    """Findings from the file itself. Weights are read only if every tensor is in its place."""
    if what := roles.not_a_model(header):
        return [what]
    spec, findings = read_spec(header)
    layout = layout_findings(header)
    findings += layout
    if spec:
        findings += tensor_findings(header, spec) + rope_findings(spec)
    if not any(finding.code == "architecture" for finding in findings):
        findings += tokenizer_findings(header)
    return findings if layout else findings + finite_findings(header)
