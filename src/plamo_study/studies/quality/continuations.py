"""Greedy continuations of a text's prompts, and whether they end in loops. No likelihoods are computed here.

Each prompt is prefilled in its own `llama_decode`; then all sequences decode together from the first slot on, and none
leaves. Only this order gives right batches on PLaMo 2 with stock llama.cpp (mixed prompts and misplaced states).
"""

from pathlib import Path

import numpy as np

from plamo_study.engine.session import Session, SessionConfig
from plamo_study.measure import texts

PROMPT_TOKENS = 160  # the last ones of longer prompts
LEAST_TOKENS, LEAST_TIMES = 2, 3  # of a phrase that counts as a repetition


def loops(path: Path, config: SessionConfig, text: bytes) -> list[float]:
    """Period in tokens of the loop that each prompt's continuation ends in; 0: no loop, -1: logits not finite.

    One prompt for each of `config.n_seq_max` sequences, continued to the end of its context. A prompt's last token is
    dropped: tokens span a line break and the next line's indentation, so a cut after a line makes a token no text has.
    """
    excerpts = texts.excerpts(text, config.n_seq_max, texts.PROMPT_LINES)
    with Session(path, config) as session:
        ends = [texts.ending(excerpt, PROMPT_TOKENS) for excerpt in excerpts]
        prompts = [session.tokenize(end)[:-1][-PROMPT_TOKENS:] for end in ends]
        return [_period(session, tokens) for tokens in continued(session, prompts, config.n_ctx_seq - PROMPT_TOKENS)]


def continued(session: Session, prompts: list[np.ndarray], n_gen: int) -> np.ndarray:
    """The likeliest `n_gen` tokens after each prompt, (n_prompts, n_gen) int32; -1 from where logits are not finite."""
    session.clear()
    logits = session.prefill(dict(enumerate(prompts)))
    rows = np.concatenate(list(logits.values()))
    found = np.empty((n_gen, len(prompts)), dtype=np.int32)
    for step in range(n_gen):
        found[step] = np.where(np.isfinite(rows).all(axis=1), rows.argmax(axis=1), -1)
        session.decode(dict(enumerate(np.maximum(found[step], 0).tolist())))
        rows = session.outputs(len(prompts))
    return found.T


def loop_period(tokens: np.ndarray) -> int:
    """Tokens in the shortest phrase repeated `LEAST_TIMES` times at the end of (n,) token ids; 0: no loop.

    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration": a phrase of at least two tokens counts as a
    repetition if it occurs at least three times in a row at the end of the generated tokens.
    """
    for period in range(LEAST_TOKENS, len(tokens) // LEAST_TIMES + 1):
        end = tokens[-LEAST_TIMES * period :]
        if np.array_equal(end[period:], end[:-period]):
            return period
    return 0


def _period(session: Session, tokens: np.ndarray) -> float:
    if (tokens < 0).any():
        return -1
    ends = [i for i, token in enumerate(tokens.tolist()) if session.is_end(token)]
    return loop_period(tokens[: ends[0]] if ends else tokens)
