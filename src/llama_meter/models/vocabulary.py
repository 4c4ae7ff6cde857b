"""The vocabulary of a PLaMo, read from tokenizer.jsonl and tokenizer_config.json or from a GGUF, written to a GGUF.

Rules follow llama.cpp's conversion (`_set_vocab_plamo` of the locked release), with three differences. Padding entries
score -999 instead of -1000, the score that the engine reads as the end of its candidates. A special token that
tokenizer_config.json does not name gets the reference tokenizer's default instead of being left out. And add_bos_token
and add_eos_token are kept where it sets them. The locked engine's tokenizer of PLaMo ignores both: it puts nothing
around a text. llama.cpp's b11318 mends that (#29734).

It does not tokenize.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import TokenType

from llama_meter.errors import StudyError
from llama_meter.models import hf

TOKENS_LIMIT = 128 << 20  # bytes of tokenizer.jsonl; the released ones are below 16 MiB
LINE_LIMIT = 1 << 16  # bytes of one of its lines
PADDING_SCORE = -999.0  # worse than any segmentation of a text
SENTINEL = -10_000_000  # score · 1e4 that ends the engine's search early
LARGEST_SCORE = 1e5  # beyond it the engine's integers overflow
TYPES = {"UNKNOWN": TokenType.UNKNOWN, "CONTROL": TokenType.CONTROL, "BYTE": TokenType.BYTE}
DEFAULTS = {  # of the reference tokenizer; the last one ends a turn and has no key of its own
    "unk": "<|plamo:unk|>",
    "bos": "<|plamo:bos|>",
    "eos": "<|plamo:eos|>",
    "pad": "<|plamo:pad|>",
    "eot": "<|plamo:op|>",
}
KEY = "tokenizer.ggml."
GGUF_ROLE = {"unk": "unknown", "pad": "padding", "sep": "seperator"}  # the format's names, one misspelt


@dataclass(frozen=True)
class Vocabulary:
    """Tokens with scores (log-probabilities) and GGUF token types by id; ids of special tokens by role.

    `flags`: add_bos_token and add_eos_token if the source sets them.
    """

    tokens: list[str]
    scores: list[float]
    types: list[int]
    special: dict[str, int]
    flags: dict[str, bool] = field(default_factory=dict)
    chat_template: str = ""

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Add the tokenizer's metadata to a GGUF."""
        writer.add_tokenizer_model("plamo2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(self.tokens)
        writer.add_token_scores(self.scores)
        writer.add_token_types(self.types)
        for role, token in self.special.items():
            writer.add_uint32(f"{KEY}{GGUF_ROLE.get(role, role)}_token_id", token)
        for name, value in self.flags.items():
            writer.add_bool(KEY + name, value)
        writer.add_add_space_prefix(False)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def read_hf(folder: Path, n_vocab: int) -> Vocabulary:
    """The vocabulary of a folder in Hugging Face layout, padded to `n_vocab` tokens.

    Raises StudyError for missing or damaged files, texts that repeat, scores the engine misreads, missing byte
    tokens, special tokens that are not in the vocabulary, and more tokens than `n_vocab`.
    """
    path = folder / "tokenizer.jsonl"
    config = hf.read_json(folder / "tokenizer_config.json")
    rows = _rows(path, n_vocab)
    rows += [(f"[PAD{i}]", PADDING_SCORE, TokenType.UNUSED) for i in range(1, n_vocab - len(rows) + 1)]
    tokens, scores, types = (list(column) for column in zip(*rows, strict=True))
    ids = {token: i for i, token in enumerate(tokens)}
    _check(path, tokens, types, ids)
    return Vocabulary(
        tokens=tokens,
        scores=scores,
        types=[int(kind) for kind in types],
        special=_special(folder / "tokenizer_config.json", config, ids),
        flags={key: config[key] for key in ("add_bos_token", "add_eos_token") if isinstance(config.get(key), bool)},
        chat_template=_chat_template(folder, config),
    )


def read_gguf(reader: gguf.GGUFReader) -> Vocabulary:
    """The vocabulary of one of this project's GGUF files. KeyError for a missing field."""

    def value(name: str) -> Any:
        entry = reader.get_field(KEY + name)
        return None if entry is None else entry.contents()

    template = reader.get_field("tokenizer.chat_template")
    special = {role: value(f"{GGUF_ROLE.get(role, role)}_token_id") for role in (*DEFAULTS, "sep")}
    flags = {name: value(name) for name in ("add_bos_token", "add_eos_token")}
    return Vocabulary(
        tokens=reader.fields[KEY + "tokens"].contents(),
        scores=reader.fields[KEY + "scores"].contents(),
        types=reader.fields[KEY + "token_type"].contents(),
        special={role: token for role, token in special.items() if token is not None},
        flags={name: flag for name, flag in flags.items() if flag is not None},
        chat_template="" if template is None else template.contents(),
    )


def _rows(path: Path, n_vocab: int) -> list[tuple[str, float, TokenType]]:
    if hf.size_of(path) > TOKENS_LIMIT:
        raise hf.damaged(path, f"has more than {TOKENS_LIMIT:,} bytes")
    rows: list[tuple[str, float, TokenType]] = []
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(LINE_LIMIT):
                number += 1
                if line.strip():
                    rows.append(_row(json.loads(line)))
                if len(rows) > n_vocab:
                    raise ValueError(f"more tokens than the {n_vocab:,} of config.json")
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise hf.damaged(f"{path}, line {number}", f"is no vocabulary ({error})") from error
    return rows


def _row(row: Any) -> tuple[str, float, TokenType]:
    """[text, score, type, ...]; the type may be missing. ValueError for anything else."""
    if not isinstance(row, list) or len(row) < 2 or not isinstance(row[0], str) or not row[0]:
        raise ValueError("a row must be [text, score, type]")
    if type(row[1]) not in (int, float):
        raise ValueError(f"score {row[1]!r:.40}")
    text, score = row[0], float(row[1])
    text.encode()
    if math.isfinite(score) and (abs(score) > LARGEST_SCORE or round(np.float32(score) * 1e4) == SENTINEL):
        raise ValueError(f"score {score:g}, which the engine misreads")
    kind = row[2] if len(row) > 2 else ""
    control = text.startswith("<|plamo:") and text.endswith("|>")
    return text, score, TYPES.get(str(kind), TokenType.CONTROL if control else TokenType.NORMAL)


def _check(path: Path, tokens: list[str], types: list[TokenType], ids: dict[str, int]) -> None:
    if len(ids) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise hf.damaged(path, f"token {twice!r:.60} is there twice")
    names = (f"<0x{byte:02X}>" for byte in range(256))
    missing = [name for name in names if types[ids.get(name, 0)] != TokenType.BYTE or not ids.get(name)]
    if missing:
        raise hf.damaged(path, f"{len(missing)} of 256 byte tokens are missing, the first is {missing[0]}")


def _special(path: Path, config: dict[str, Any], ids: dict[str, int]) -> dict[str, int]:
    """Role → id, from keys such as bos_token, whose value is a text or a table with `content`."""
    special: dict[str, int] = {}
    for role in (*DEFAULTS, "sep"):
        given = config.get(f"{role}_token") if role != "eot" else None
        text = given.get("content") if isinstance(given, dict) else given
        text = DEFAULTS.get(role) if text is None else text
        if text is None:
            continue
        if not isinstance(text, str) or text not in ids:
            raise StudyError(
                f"{path}, {role}_token", f"{text!r:.60} is not in tokenizer.jsonl", f"fetch both again: {hf.FETCH}"
            )
        special[role] = ids[text]
    return special


def _chat_template(folder: Path, config: dict[str, Any]) -> str:
    """chat_template.jinja, else the one in the configuration (of several, the one named default). May be empty."""
    path = folder / "chat_template.jinja"
    if hf.is_there(path):
        if hf.size_of(path) > hf.JSON_LIMIT:
            raise hf.damaged(path, f"has more than {hf.JSON_LIMIT:,} bytes")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise hf.damaged(path, f"is no text ({error})") from error
    given = config.get("chat_template")
    if isinstance(given, list):
        named = [c.get("template") for c in given if isinstance(c, dict) and c.get("name") == "default"]
        given = named[-1] if named else None
    return given if isinstance(given, str) and _encodable(given) else ""


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
