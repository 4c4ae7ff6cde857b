"""Whether a GGUF can be trusted for a measurement: everything that can be checked without an engine.

It does not know how an engine handles the file (measure/checking.py does), nor whether finite, well-formed weights are
the released ones: a pinned SHA-256 does.
"""

import re
from pathlib import Path

from plamo_study.errors import StudyError
from plamo_study.models import mistaken, roles, tensors
from plamo_study.models.expected import read_spec, rope_findings
from plamo_study.models.finding import AGAIN, Finding
from plamo_study.models.finite import finite_findings
from plamo_study.models.header import Header, HeaderError, read
from plamo_study.models.tensor_check import layout_findings, tensor_findings
from plamo_study.models.tokenizer_check import tokenizer_findings


def inspect(path: Path, sha256: str = "") -> tuple[list[Finding], Header | None]:
    """Findings about a file, without an engine, and its header if it can be read.

    `sha256`: the expected 64 hex digits. Raises StudyError when the file is missing or `sha256` is no hash.
    """
    found = _hash_findings(path, sha256)
    try:
        header = read(path)
    except HeaderError as damage:
        return [*found, Finding("blocking", damage.code, damage.why, damage.mend)], None
    return found + _static_findings(header), header


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
    found = tensors.sha256(path)
    if found == sha256.lower():
        return []
    return [Finding("blocking", "hash", f"SHA-256 is {found}, not {sha256.lower()}", AGAIN)]


def _static_findings(header: Header) -> list[Finding]:
    """Findings from the file itself. Weights are read only if every tensor is in its place."""
    if what := roles.not_a_model(header):
        return [what]
    spec, found = read_spec(header)
    layout = layout_findings(header)
    found += layout
    if spec:
        found += tensor_findings(header, spec) + rope_findings(spec)
    if not any(finding.code == "architecture" for finding in found):
        found += tokenizer_findings(header)
    return found if layout else found + finite_findings(header)
