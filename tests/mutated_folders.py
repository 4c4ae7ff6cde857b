"""Released folders as strangers might send them: damaged in many ways, each decided by a seed and a number.

As a script it converts many of them within a limit of memory and prints how each one ended:
python tests/mutated_folders.py FOLDER SCRATCH SEED N
"""

import json
import os
import random
import re
import resource
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy

from llama_meter.errors import StudyError
from llama_meter.models import check, convert, finding, hf, hf_config, tensors

GIB = 1 << 30
NUMBERS = ["-1", "0", "1", "3.5", "1e99", "NaN", "null", '"8"', "[]", "{}", str(1 << 31), str(1 << 63), "9" * 400]
TEXTS = [b'"../../x.safetensors"', b'"\\ud800"', b'"' + b"a" * 5000 + b'"', b'"I64"', b'"F16"', b'""']
WHOLE = [b"", b"null", b"[]", b"{}", b"\0" * 8, b"\xff" * 64, b" " * (9 << 20)]
LENGTHS = [0, 1, 7, 1 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]


def bytes_changed(rng: random.Random, raw: bytes) -> bytes:
    """Some bytes changed, most of them near the beginning, where the headers are."""
    mutable = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        mutable[int(len(raw) * rng.random() ** 4)] = rng.randrange(256)
    return bytes(mutable)


def apart(raw: bytes) -> tuple[bool, bytes, bytes]:
    """Whether a file is a safetensors file; its header, or all of its text; and the rest."""
    if raw[:1] in (b"{", b"["):
        return False, raw, b""
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return True, raw[8:end], raw[end:]


def joined(binary: bool, text: bytes, rest: bytes) -> bytes:
    return (struct.pack("<Q", len(text)) if binary else b"") + text + rest


def word_changed(rng: random.Random, raw: bytes) -> bytes:
    """A number or a quoted text of a text or of a safetensors header; the header's length follows."""
    binary, text, rest = apart(raw)
    found = list(re.finditer(rng.choice([rb"(?<=[ \[:,])-?\d+(\.\d+)?", rb'"[^"\n]{1,200}"']), text[: 1 << 16]))
    if not found:
        return raw
    at = rng.choice(found)
    texts = at.group().startswith(b'"')
    new = rng.choice([*TEXTS, rng.choice(found).group()]) if texts else rng.choice(NUMBERS).encode()
    return joined(binary, text[: at.start()] + new + text[at.end() :], rest)


CHANGES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "cut": lambda rng, raw: raw[: int(len(raw) * rng.random() ** 3)],
    "longer": lambda rng, raw: raw + rng.randbytes(rng.choice([1, 8, 4096])),
    "bytes": bytes_changed,
    "length": lambda rng, raw: struct.pack("<Q", rng.choice(LENGTHS)) + raw[8:],
    "nested": lambda rng, raw: b"[" * rng.choice([10, 100_000]) + raw,
    "whole": lambda rng, raw: rng.choice(WHOLE),
    "word": word_changed,
    "word again": word_changed,
    "another word": word_changed,
}
PLACES: dict[str, Callable[[Path], None]] = {  # what is there in place of a file
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a folder": lambda path: path.symlink_to(".."),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}
KINDS = [*CHANGES, *CHANGES, "twice", "twice", "elsewhere"]


def named_twice(rng: random.Random, raw: bytes) -> bytes:
    """A name of a JSON object or of a safetensors header is there twice."""
    binary, text, rest = apart(raw)
    name = rng.choice(list(re.finditer(rb'"[^"\n]{1,200}": ?([^\[{,}]+|\[[^\]]*\]|\{[^}]*\})', text)))
    return joined(binary, text[: name.start()] + name.group() + b"," + text[name.start() :], rest)


def mutate(source: Path, target: Path, seed: int, number: int) -> tuple[str, bool]:
    """Make `target` the `number`-th mutation of `source`; says what was changed, and whether it must be refused."""
    rng = random.Random(f"{seed}/{number}")
    shutil.copytree(source, target)
    kind = KINDS[number % len(KINDS)]
    named = [path for path in sorted(target.iterdir()) if path.suffix != ".jsonl"]
    file = rng.choice(named if kind == "twice" else sorted(target.iterdir()))
    raw = file.read_bytes()
    file.unlink()
    if kind == "twice":
        file.write_bytes(named_twice(rng, raw))
    elif kind == "elsewhere":
        file.symlink_to(source / file.name)
    else:
        file.write_bytes(CHANGES[kind](rng, raw))
    return f"{number} {kind} {file.name}", kind == "twice"


def replace(source: Path, target: Path, file: str, place: str) -> tuple[str, bool]:
    """Make `target` a copy of `source` with something else in place of a file; returns as `mutate` does."""
    shutil.copytree(source, target)
    (target / file).unlink()
    PLACES[place](target / file)
    return f"{place} {file}", True


def wrong(folder: Path, made: Path) -> str:
    """What is not right about the F32 file made of a folder, as other readers see both; "" for nothing."""
    found, _ = check.inspect(made)
    if blocking := finding.blocking(found):
        return f"check: {blocking[0]}"
    spec = hf_config.read(folder).spec
    held = {name: value for path in folder.glob("*.safetensors") for name, value in load(path).items()}
    rules = hf.rules(spec)
    for tensor in gguf.GGUFReader(made).tensors:
        if not np.array_equal(tensor.data.ravel(), rules[tensor.name].to_gguf(held[rules[tensor.name].name]).ravel()):
            return f"tensor {tensor.name}"
    fields, facts = gguf.GGUFReader(made).fields, tensors.metadata(made)
    lines = [json.loads(line) for line in (folder / "tokenizer.jsonl").read_text().splitlines() if line.strip()]
    if fields["tokenizer.ggml.tokens"].contents()[: len(lines)] != [line[0] for line in lines]:
        return "tokens"
    if facts[f"{spec.arch}.rope.freq_base"] != np.float32(spec.rope_theta):
        return "rope_theta"
    return ""


def load(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path)


def main(source: Path, scratch: Path, seed: int, n: int) -> None:
    """Print how often each outcome occurred in n mutations and with each place of each file, as JSON."""
    if Path("/proc/self/statm").exists():  # where memory can be told, 1 GiB more than the interpreter has
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + GIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    outcomes = Counter[str]()
    folder, out = scratch / "source", scratch / "out" / "model.gguf"
    rounds = [partial(mutate, source, folder, seed, number) for number in range(n)]
    rounds += [partial(replace, source, folder, file.name, place) for file in source.iterdir() for place in PLACES]
    for change in rounds:
        what, hopeless = change()
        try:
            convert.convert(folder, out, "F32")
            fault = "not refused" if hopeless else wrong(folder, out)
            outcomes[f"{what}: wrong {fault}" if fault else "right"] += 1
            out.unlink()
        except StudyError as error:
            clear = len(str(error)) < 4000 and str(folder) in str(error)
            outcomes["refused" if clear else f"{what}: {str(error)[:300]}"] += 1
        except Exception as error:
            outcomes[f"{what}: {type(error).__name__} {error}"[:300]] += 1
        if list(out.parent.glob("*")):
            outcomes[f"{what}: left a file"] += 1
        shutil.rmtree(folder)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
