"""Whether llama.cpp's plamo2 tokenizer can be built from a file's vocabulary and segments text correctly with it.

Rules from src/llama-vocab.cpp (`llm_tokenizer_plamo2`): every byte token must exist, of type byte, and not at id 0;
two tokens with one text abort; a score is multiplied by 1e4, where -1000 means "unknown character" and below -2000
means "no token". It does not know which tokens a model was trained with.
"""

import re
from collections.abc import Iterator

import numpy as np

from llama_meter.models.finding import AGAIN, Finding, block, listed
from llama_meter.models.header import ARRAY, FLOAT32, INT32, STRING, UINT32, Header
from llama_meter.models.vocabulary import DEFAULTS, GGUF_ROLE

PREFIX = "tokenizer.ggml."
UNUSED, BYTE = 5, 6  # llama.h, enum llama_token_type
NO_WORDS = ("test", "no_vocab", "none")  # files that llama.cpp's generator of random models writes, and others like it
SENTINEL = -1000.0
LONGEST = 512  # bytes of a token: building the tokenizer takes time cubic in it
SPECIAL = {f"{GGUF_ROLE.get(role, role)}_token_id": text.encode() for role, text in DEFAULTS.items()}  # key → text
REPAIR = "plamo-study models check FILE --repair OUT"


def tokenizer_findings(header: Header) -> list[Finding]:
    """Everything wrong with the vocabulary. Needs no weights."""
    if (model := header.text(f"{PREFIX}model")) in NO_WORDS:
        return [
            Finding(
                "warning", "tokenizer-none", f"{PREFIX}model is {model}: it can be timed, and writes no text", AGAIN
            )
        ]
    if findings := list(_lists(header)):
        return findings
    tokens: list[bytes] = header.value(f"{PREFIX}tokens")
    scores, types = header.value(f"{PREFIX}scores"), header.value(f"{PREFIX}token_type")
    findings = [*_texts(tokens), *_bytes(tokens, types), *_scores(scores, types)]
    return findings + list(_special(header, tokens))


def special_ids(header: Header) -> dict[str, int]:
    """Missing or invalid special-token keys, with the ids of their known texts where these exist."""
    words = header.records.get(f"{PREFIX}tokens")
    if words is None or (words.kind, words.item) != (ARRAY, STRING):
        return {}
    tokens: list[bytes] = header.value(words.key)
    missing = {}
    for name, text in SPECIAL.items():
        record = header.records.get(PREFIX + name)
        usable = record and record.kind == UINT32 and int(header.value(record.key)) < len(tokens)
        if not usable and text in tokens:
            missing[PREFIX + name] = tokens.index(text)
    return missing


def _lists(header: Header) -> Iterator[Finding]:
    if (model := header.text(f"{PREFIX}model")) != "plamo2":
        yield block("tokenizer-model", f"{PREFIX}model is {model!r:.40}, not 'plamo2'")
    lengths = {}
    for name, item in (("tokens", STRING), ("scores", FLOAT32), ("token_type", INT32)):
        record = header.records.get(PREFIX + name)
        if record is None or (record.kind, record.item) != (ARRAY, item):
            what = record.type_name if record else "missing"
            yield block("tokenizer-lists", f"{PREFIX}{name} is {what}")
        else:
            lengths[name] = record.count
    if len(set(lengths.values())) > 1:
        yield block("tokenizer-lists", f"the lists have different lengths: {lengths}")


def _texts(tokens: list[bytes]) -> Iterator[Finding]:
    if len(set(tokens)) < len(tokens):
        first: dict[bytes, int] = {}
        again: list[bytes] = []
        for number, text in enumerate(tokens):
            again += [text] if first.setdefault(text, number) != number else []
        yield block("token-duplicate", f"texts that stand for several ids: {listed(again)}; llama.cpp aborts on these")
    if long := [i for i, text in enumerate(tokens) if len(text) > LONGEST]:
        yield block("token-length", f"tokens longer than {LONGEST} bytes: ids {listed(long)}; loading would not end")
    if empty := [i for i, text in enumerate(tokens) if not text]:
        yield Finding("warning", "token-empty", f"tokens without text: ids {listed(empty)}", AGAIN)
    if broken := [i for i, text in enumerate(tokens) if not _is_utf8(text)]:
        yield Finding("warning", "token-text", f"tokens that are not UTF-8: ids {listed(broken)}", AGAIN)


def _bytes(tokens: list[bytes], types: np.ndarray) -> Iterator[Finding]:
    names = {f"<0x{b:02X}>".encode(): b for b in range(256)}
    where = {text: i for i, text in enumerate(tokens) if text in names and types[i] == BYTE}
    if missing := sorted(names.keys() - where.keys()):
        yield block("byte-tokens", f"{len(missing)} byte tokens are missing or not of type byte: {listed(missing)}")
    if where and min(where.values()) == 0:
        yield block("byte-tokens", "a byte token has id 0, which llama.cpp reads as none")
    odd = [i for i in np.flatnonzero(types == BYTE).tolist() if not re.fullmatch(rb"<0x[0-9A-F]{2}>", tokens[i])]
    if odd:
        yield Finding("warning", "byte-tokens", f"tokens of type byte that name no byte: ids {listed(odd)}", AGAIN)


def _scores(scores: np.ndarray, types: np.ndarray) -> Iterator[Finding]:
    used = types != UNUSED
    if wrong := np.flatnonzero(used & ~np.isfinite(scores)).tolist():
        why = f"scores that are not finite: llama.cpp never uses ids {listed(wrong)}"
        yield Finding("warning", "token-scores", why, AGAIN)
    if low := np.flatnonzero(used & (scores <= SENTINEL)).tolist():
        why = f"scores of {SENTINEL:g} or below, which mean no token: ids {listed(low)}"
        yield Finding("warning", "token-scores", why, AGAIN)
    if high := np.flatnonzero(scores > 2e5).tolist():
        yield block("token-scores", f"scores too large for llama.cpp's 32-bit sum: ids {listed(high)}")


def _special(header: Header, tokens: list[bytes]) -> Iterator[Finding]:
    mendable = special_ids(header)
    for name, text in SPECIAL.items():
        record, label = header.records.get(PREFIX + name), text.decode()
        if record is None:
            mend = REPAIR if PREFIX + name in mendable else AGAIN
            yield Finding("warning", "token-id", f"{PREFIX}{name} is missing; {label} belongs there", mend)
        elif record.kind != UINT32:
            yield block("token-id", f"{PREFIX}{name} is {record.type_name}, not u32", REPAIR)
        elif (value := int(header.value(record.key))) >= len(tokens):
            yield Finding("warning", "token-id", f"{PREFIX}{name} is {value:,} of {len(tokens):,} tokens", REPAIR)
        elif tokens[value] != text:
            why = f"{PREFIX}{name} names {listed([tokens[value]])}, not {label}"
            yield Finding("warning", "token-id", why, "use it if the model's authors mean it so")


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
