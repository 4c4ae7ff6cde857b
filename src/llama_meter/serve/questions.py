"""Prompts for servers: distinct pieces of a text with given token counts."""

from collections.abc import Sequence
from pathlib import Path

from llama_meter.engine.tokenizer import Tokenizer
from llama_meter.measure import texts
from llama_meter.serve.client import Prompt

TEXT = "python-heldout"
STRIDE = 613  # characters between pieces; no line of the text repeats with this period


def of_lengths(model: Path, n_prompts: Sequence[int], n_gens: Sequence[int], seed: int = 0) -> list[Prompt]:
    """Prompts with the given prompt and answer lengths in tokens of the model's own; all prompts begin differently."""
    text, n = texts.read(TEXT).decode(), len(n_prompts)
    with Tokenizer(model) as tokenizer:
        return [
            Prompt(str(i), _piece(tokenizer, text, (seed * n + i) * STRIDE, n_prompt), n_gen)
            for i, (n_prompt, n_gen) in enumerate(zip(n_prompts, n_gens, strict=True))
        ]


def _piece(tokenizer: Tokenizer, text: str, start: int, n_tokens: int) -> str:
    at = start % (len(text) // 2)
    ids = tokenizer.encode(text[at : at + 12 * n_tokens + 64])
    return tokenizer.decode(ids[:n_tokens]).decode(errors="ignore")


def of_characters(n: int, n_characters: int, n_gen: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts of `n_characters` characters, for a server with an unknown tokenizer."""
    text = texts.read(TEXT).decode()
    places = [(seed * n + i) * STRIDE % (len(text) // 2) for i in range(n)]
    repeated = text * (1 + n_characters // (len(text) // 2))
    return [Prompt(str(i), repeated[at : at + n_characters], n_gen) for i, at in enumerate(places)]
