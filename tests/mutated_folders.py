"""Released folders as strangers might send them: damaged in many ways, each decided by a seed and a number.

As a script it converts many of them within a limit of memory and prints how each one ended:
python tests/mutated_folders.py FOLDER SCRATCH SEED N
"""

import json
import random
import re
import resource
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy

from plamo_study.errors import StudyError
from plamo_study.models import check, convert, finding, hf_config, hf_names, tensors

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


def word_changed(rng: random.Random, raw: bytes) -> bytes:
    """A number or a quoted text of a text or of a safetensors header; the header's length follows."""
    binary = raw[:1] not in (b"{", b"[")
    length = struct.unpack("<Q", raw[:8])[0] if binary else len(raw)
    text, rest = (raw[8 : 8 + length], raw[8 + length :]) if binary else (raw, b"")
    found = list(re.finditer(rng.choice([rb"(?<=[ \[:,])-?\d+(\.\d+)?", rb'"[^"\n]{1,200}"']), text[: 1 << 16]))
    if not found:
        return raw
    at = rng.choice(found)
    texts = at.group().startswith(b'"')
    new = rng.choice([*TEXTS, rng.choice(found).group()]) if texts else rng.choice(NUMBERS).encode()
    text = text[: at.start()] + new + text[at.end() :]
    return (struct.pack("<Q", len(text)) if binary else b"") + text + rest


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


def mutate(source: Path, target: Path, seed: int, number: int) -> str:
    """Make `target` the `number`-th mutation of `source`; says which file was changed and how."""
    rng = random.Random(f"{seed}/{number}")
    shutil.copytree(source, target)
    file, change = rng.choice(sorted(target.iterdir())), rng.choice(list(CHANGES))
    raw = file.read_bytes()
    file.unlink()
    if rng.random() > 0.05:  # else it is missing
        file.write_bytes(CHANGES[change](rng, raw))
    return f"{number} {change} {file.name}"


def wrong(folder: Path, made: Path) -> str:
    """What is not right about the F32 file made of a folder, as other readers see both; "" for nothing."""
    found, _ = check.inspect(made)
    if blocking := finding.blocking(found):
        return f"check: {blocking[0]}"
    spec = hf_config.read(folder).spec
    held = {name: value for path in folder.glob("*.safetensors") for name, value in load(path).items()}
    rules = hf_names.rules(spec)
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
    """Print how often each outcome occurred, as JSON."""
    if Path("/proc/self/statm").exists():  # where memory can be told, 1 GiB more than the interpreter has
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + GIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    outcomes = Counter[str]()
    folder, out = scratch / "source", scratch / "out" / "model.gguf"
    for number in range(n):
        what = mutate(source, folder, seed, number)
        try:
            convert.convert(folder, out, "F32")
            fault = wrong(folder, out)
            outcomes[f"{what}: wrong {fault}" if fault else "right"] += 1
            out.unlink()
        except StudyError as error:
            outcomes["refused" if len(str(error)) < 4000 else f"{what}: a message of {len(str(error))} characters"] += 1
        except Exception as error:
            outcomes[f"{what}: {type(error).__name__} {error}"[:300]] += 1
        if list(out.parent.glob("*")):
            outcomes[f"{what}: left a file"] += 1
        shutil.rmtree(folder)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
