"""The texts that quality is measured on: read, identified, and cut into chunks as llama-perplexity cuts them.

Any UTF-8 file will do, prose in any language or code. There is no tokenizer here: callers pass tokens. A tokenizer
takes a second and 20 MB of memory for each megabyte, so callers tokenize the part of a long text that they need.
"""

import codecs
import hashlib
from pathlib import Path

import numpy as np

from llama_meter import paths
from llama_meter.disk import content
from llama_meter.errors import StudyError

CORPUS = paths.DATA / "corpus"
LONGER = "give a longer text, or smaller chunks"
PIECE = 1 << 20  # bytes that are looked at together; a text of so many is never cut
TOKEN = 64  # bytes: no text's tokens are longer on average
SPACED = 16 * PIECE  # bytes from which excerpts are taken
CONTINUED = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character
PROMPT_LINES = 8  # lines of a text that end where a continuation begins


def read(name: str | Path) -> bytes:
    """The bytes of a text: one of data/corpus, with or without its suffix, or any file's.

    Raises StudyError when there is none, or when it is empty or not UTF-8.
    """
    path = find(name)
    text = content(path)
    if not text or text.isspace():
        raise StudyError(str(path), "is empty", "name a text of some 100 kB: more text, narrower intervals")
    decoder, start = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        for piece in range(0, len(text), PIECE):
            start = piece - len(decoder.getstate()[0])
            decoder.decode(text[piece : piece + PIECE], final=piece + PIECE >= len(text))
    except UnicodeDecodeError as error:
        at = start + error.start
        why = f"is not UTF-8 (byte {at} is 0x{text[at]:02x})"
        raise StudyError(str(path), why, f"iconv -f ENCODING -t UTF-8 {path} > TEXT") from error
    return text


def beginning(text: bytes, n_tokens: int) -> bytes:
    """The part of a UTF-8 text that holds its first `n_tokens` tokens, of whole characters; all of it for 0."""
    n = max(PIECE, n_tokens * TOKEN)
    if not n_tokens or n >= len(text):
        return text
    while text[n] in CONTINUED:
        n -= 1
    return text[:n]


def ending(text: bytes, n_tokens: int) -> bytes:
    """The part of a UTF-8 text that holds its last `n_tokens` tokens, of whole characters."""
    n = max(PIECE, n_tokens * TOKEN)
    return text if n >= len(text) else text[-n:].lstrip(CONTINUED)


def planned(name: str, expected: str) -> bytes:
    """The bytes of a text that a cell names, checked against its planned SHA-256 where it has one.

    Raises StudyError for another text under the same name, and as `read` does.
    """
    text = read(name)
    if expected and sha256(text) != expected:
        why = f"is not the text that was planned: its SHA-256 is {sha256(text)[:12]}, not {expected[:12]}"
        raise StudyError(f"text {name!r}", why, "run the study again: it plans for the text that is here")
    return text


def find(name: str | Path) -> Path:
    """Where a text lies: data/corpus/<name>, or the file itself. StudyError when there is neither."""
    texts = sorted(path for path in CORPUS.glob("*.txt") if path.is_file())
    for path in texts:
        if str(name) in (path.name, path.stem):
            return path
    if not Path(name).exists():
        why = f"is neither a file nor a text of data/corpus (known: {', '.join(p.stem for p in texts) or 'none'})"
        raise StudyError(f"text {str(name)!r}", why, "name a UTF-8 text file")
    return Path(name)


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
        raise StudyError("the text", f"is {len(tokens)} tokens long, one chunk takes {n_ctx}", LONGER)
    n = min(n_chunks or whole, whole)
    pieces = np.array(tokens[: n * n_ctx], dtype=np.int32).reshape(n, n_ctx)
    if bos is not None:
        pieces[:, 0] = bos
    return pieces


def excerpts(text: bytes, n: int, n_lines: int) -> list[bytes]:
    """`n` pieces of `n_lines` whole lines, evenly spaced over a text's first 16 MiB: prompts to continue.

    Raises StudyError when the text has fewer than `n` + `n_lines` lines.
    """
    lines = text[:SPACED].splitlines(keepends=True)
    if len(lines) < n + n_lines:
        why = f"has {len(lines)} lines, {n} prompts of {n_lines} lines take {n + n_lines}"
        raise StudyError("the text", why, "give a longer text, or ask for fewer prompts")
    starts = np.linspace(0, len(lines) - n_lines, n).astype(int)
    return [b"".join(lines[start : start + n_lines]) for start in starts.tolist()]
