"""The vocabulary of a PLaMo, read from a GGUF and written to one. It does not tokenize."""

from dataclasses import dataclass, field
from typing import Any

import gguf
from gguf import TokenType

SENTINEL = -10_000_000  # score · 1e4 that ends the engine's search early
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
