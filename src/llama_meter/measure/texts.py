"""The texts of data/corpus: read, identified, and cut into chunks as llama-perplexity cuts them.

There is no tokenizer here: callers pass tokens.
"""

import hashlib

import numpy as np

from llama_meter import paths
from llama_meter.errors import StudyError

CORPUS = paths.DATA / "corpus"
PROMPT_LINES = 8  # lines of a text that end where a continuation begins


def read(name: str) -> bytes:
    """The bytes of a text of data/corpus, by its name with or without the suffix."""
    return (CORPUS / f"{name.removesuffix('.txt')}.txt").read_bytes()


def sha256(text: bytes) -> str:
    """SHA-256 of a text, hexadecimal: its identity."""
    return hashlib.sha256(text).hexdigest()


def chunks(tokens: np.ndarray, n_ctx: int, n_chunks: int = 0, bos: int | None = None) -> np.ndarray:
    """The first `n_chunks` (0: all) whole pieces of `n_ctx` tokens, (n_chunks, n_ctx) int32, fewer in a short text.

    As llama-perplexity does it, pieces do not overlap, the tail is left out, and in each the first token is replaced
    by `bos` where the model wants one (`Session.bos`). Raises StudyError when the text has no whole piece.
    """
    whole = len(tokens) // n_ctx
    if not whole:
        raise StudyError("the text", f"is {len(tokens)} tokens long, one chunk takes {n_ctx}", "ask for smaller chunks")
    n = min(n_chunks or whole, whole)
    pieces = np.array(tokens[: n * n_ctx], dtype=np.int32).reshape(n, n_ctx)
    if bos is not None:
        pieces[:, 0] = bos
    return pieces


def excerpts(text: bytes, n: int, n_lines: int) -> list[bytes]:
    """`n` pieces of `n_lines` whole lines, evenly spaced over a text: prompts to continue.

    Raises StudyError when the text has fewer than `n` + `n_lines` lines.
    """
    lines = text.splitlines(keepends=True)
    if len(lines) < n + n_lines:
        why = f"has {len(lines)} lines, {n} prompts of {n_lines} lines take {n + n_lines}"
        raise StudyError("the text", why, "ask for fewer prompts")
    starts = np.linspace(0, len(lines) - n_lines, n).astype(int)
    return [b"".join(lines[start : start + n_lines]) for start in starts.tolist()]
