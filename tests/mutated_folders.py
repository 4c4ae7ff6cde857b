"""Released folders as strangers might send them: damaged in many ways, each decided by a seed and a number.

As a script it converts many of them within a limit of memory and reports how each one ended:
python tests/mutated_folders.py FOLDER SCRATCH SEED N
"""

import json
import random
import re
import resource
import shutil
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from plamo_study.errors import StudyError
from plamo_study.models import convert, registry, tensors

GIB = 1 << 30
NUMBERS = ["-1", "0", "1", "3.5", "1e99", "NaN", "null", '"8"', "[]", "{}", str(1 << 31), str(1 << 63), "9" * 400]
Change = Callable[[random.Random, bytes], bytes]


def truncated(rng: random.Random, raw: bytes) -> bytes:
    return raw[: int(len(raw) * rng.random() ** 3)]


def lengthened(rng: random.Random, raw: bytes) -> bytes:
    return raw + rng.randbytes(rng.choice([1, 8, 4096]))


def flipped(rng: random.Random, raw: bytes) -> bytes:
    """Some bytes changed, most of them near the beginning, where the headers are."""
    mutable = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        mutable[int(len(raw) * rng.random() ** 4)] = rng.randrange(256)
    return bytes(mutable)


def length_changed(rng: random.Random, raw: bytes) -> bytes:
    """The first 8 bytes are the header's length in a safetensors file."""
    return struct.pack("<Q", rng.choice([0, 1, 7, 1 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])) + raw[8:]


def number_changed(rng: random.Random, raw: bytes) -> bytes:
    """One of the numbers of a text or of a safetensors header, by an absurd one; the header's length follows."""
    binary = raw[:1] not in (b"{", b"[")
    length = struct.unpack("<Q", raw[:8])[0] if binary else len(raw)
    text, rest = (raw[8 : 8 + length], raw[8 + length :]) if binary else (raw, b"")
    found = list(re.finditer(rb"(?<=[ \[:,])-?\d+(\.\d+)?", text))
    if not found:
        return raw
    at = rng.choice(found)
    text = text[: at.start()] + rng.choice(NUMBERS).encode() + text[at.end() :]
    return (struct.pack("<Q", len(text)) if binary else b"") + text + rest


def text_changed(rng: random.Random, raw: bytes) -> bytes:
    """One quoted text by another of the same file, of another file, or nonsense. Lengths stay, so headers shift."""
    found = list(re.finditer(rb'"[^"\n]{1,200}"', raw[: 1 << 16]))
    if not found:
        return raw
    at, other = rng.choice(found), rng.choice(found)
    new = rng.choice([other.group(), b'"../../x.safetensors"', b'"\\ud800"', b'"' + b"a" * 5000 + b'"', b'"I64"'])
    return raw[: at.start()] + new + raw[at.end() :]


def nested(rng: random.Random, raw: bytes) -> bytes:
    return b"[" * rng.choice([10, 100_000]) + raw


def emptied(rng: random.Random, raw: bytes) -> bytes:
    return rng.choice([b"", b"null", b"[]", b"{}", b"\0" * 8, b"\xff" * 64])


CHANGES: list[Change] = [
    *(truncated, lengthened, flipped, flipped, length_changed),
    *(number_changed, number_changed, number_changed, text_changed, text_changed, nested, emptied),
]


def mutate(source: Path, target: Path, seed: int, number: int) -> str:
    """Make `target` the `number`-th mutation of `source`; says which file was changed and how."""
    rng = random.Random(f"{seed}/{number}")
    target.mkdir(parents=True)
    files = sorted(file for file in source.iterdir())
    for file in files:
        (target / file.name).symlink_to(file.resolve())
    file, change = target / rng.choice(files).name, rng.choice(CHANGES)
    raw = file.read_bytes()
    file.unlink()
    if rng.random() > 0.05:  # else it is missing
        file.write_bytes(change(rng, raw))
    return f"{change.__name__} {file.name}"


def main(source: Path, scratch: Path, seed: int, n: int) -> None:
    """Print {"outcomes": {...}, "slowest_s": ..., "left": [...]} as JSON."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:  # where memory can be told, 1 GiB more than the interpreter has
        limit = pages * resource.getpagesize() + GIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    outcomes, slowest, left = Counter[str](), 0.0, []
    for number in range(n):
        folder, out = scratch / "work" / "source", scratch / "work" / "out" / "model.gguf"
        what, start = mutate(source, folder, seed, number), time.perf_counter()
        try:
            tensors.tensor_table(convert.convert(folder, out, registry.DTYPES[number % 4]))
            outcomes["converted"] += 1
            out.unlink()
        except StudyError:
            outcomes["refused"] += 1
        except Exception as error:
            outcomes[f"{number} {what}: {type(error).__name__} {error}"[:300]] += 1
        slowest = max(slowest, time.perf_counter() - start)
        left += [str(path) for path in out.parent.glob("*")]
        left += [str(path) for path in scratch.iterdir() if path.name != "work"]
        shutil.rmtree(scratch / "work")
    print(json.dumps({"outcomes": outcomes, "slowest_s": slowest, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
