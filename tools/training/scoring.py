"""The quality of a finished file: bits per byte of held-out text and a greedy continuation, through the engine."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llama_meter.engine.library import capture_log
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.engine.tokenizer import Tokenizer

WINDOW = 1024  # tokens that are predicted from one empty context
# A prompt must end where a token may: pieces span a line's end and the next line's indentation.
PROMPT = 'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a file without their ends."""\n    '


def bits_per_byte(path: Path, texts: Sequence[str], window: int = WINDOW, n_threads: int = 1) -> float:
    """Total -log2 p of all tokens of `texts`, each text after a bos, over their length in UTF-8 bytes; on the CPU.

    Windows of `window` tokens do not overlap; the first token of a window is predicted from the one before it alone.
    """
    capture_log([])
    config = SessionConfig(window, n_batch=window, n_threads=n_threads, n_threads_batch=n_threads)
    total = 0.0
    with Tokenizer(path) as tokenizer, Session(path, config) as session:
        for text in texts:
            ids = np.concatenate([[tokenizer.bos], tokenizer.encode(text)])
            for start in range(0, len(ids) - 1, window):
                part = ids[start : start + window + 1]
                session.clear()
                logits = session.prefill({0: part[:-1]}, every=True)[0]
                total += surprise(logits, part[1:])
    return total / sum(len(text.encode()) for text in texts)


def surprise(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> float:
    """Sum of -log2 p over positions: logits (n_tokens, n_vocab), targets (n_tokens,)."""
    values = logits.astype(np.float64)
    top = values.max(axis=1)
    log_sum = top + np.log(np.exp(values - top[:, None]).sum(axis=1))
    return float((log_sum - values[np.arange(len(targets)), targets]).sum()) / math.log(2)


def continuation(path: Path, prompt: str = PROMPT, n_tokens: int = 120) -> str:
    """The greedy continuation of `prompt`, up to `n_tokens` tokens; ends early at the end of text."""
    capture_log([])
    with Tokenizer(path) as tokenizer, Session(path, SessionConfig(2048)) as session:
        ids = [tokenizer.bos, *tokenizer.encode(prompt).tolist()]
        said: list[int] = []
        token = int(session.prefill({0: ids})[0][-1].argmax())
        while len(said) < n_tokens and token not in (tokenizer.bos, tokenizer.eos):
            said.append(token)
            session.decode({0: token})
            token = int(session.logits().argmax())
        return tokenizer.decode(np.array(said, np.int32)).decode(errors="replace")
