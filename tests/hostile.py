"""GGUF files as a stranger might send them: mutations of two tiny valid ones, the same ones from the same seed.

    python tests/hostile.py FOLDER N GATED

checks N of them in a process that may use 512 MiB and prints one JSON line for each; GATED of those that pass go
through the gate too. FOLDER is empty at first and holds nothing afterwards but the two originals.
"""

import json
import random
import resource
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_meter.measure import checking, machine
from llama_meter.models import header, synthetic
from llama_meter.models.finding import blocking
from llama_meter.models.header import ARRAY, FLOAT32, INT32, STRING, UINT32, Header, TensorRecord
from llama_meter.models.registry import ModelSpec

SEED = 20261120
LIMIT_S, LIMIT_BYTES = 5.0, 1 << 29
SIZES = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 64, "vocab": 288}
SIZES |= {"context_length": 256, "rms_eps": 1e-6, "tied": True, "scale": "tiny"}
MAMBA = {"mamba_heads": 2, "mamba_head_dim": 32, "d_state": 16, "d_conv": 4}
WINDOW = {"rope_theta_swa": 1e4, "window": 16, "window_pattern": 2}
SPECS = (
    ModelSpec(name="tiny-hybrid", arch="plamo2", rope_theta=1e4, **SIZES, **MAMBA),
    ModelSpec(name="tiny-attention", arch="plamo3", rope_theta=1e6, **SIZES, **WINDOW),
)
ABSURD = (0, 1, 7, 255, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
NOISE = (b"", b"\xff\xfe", b"\x1b[2J", b"../../x", b"a" * 70_000, "文字".encode(), b"[PAD]", b"<0x00>")
ENGINE = (  # keys that a PLaMo file does not have and the engine reads all the same
    *("rope.dimension_count", "rope.dimension_count_swa", "expert_count", "expert_used_count", "nextn_predict_layers"),
    *("attention.key_length_swa", "embedding_length_out", "pooling_type", "rope.scaling.type", "rope.scaling.factor"),
)


@dataclass
class Parts:
    """A GGUF taken apart; `header` is the original's."""

    records: dict[str, bytes]
    tensors: list[TensorRecord]
    data: bytes
    header: Header

    def put(self, key: str, kind: int, value: Any) -> None:
        """Set a key; a list becomes an array of this kind."""
        self.records[key] = record(key, kind, value)

    def build(self, alignment: int = 32) -> bytes:
        head = opening(n_tensors=len(self.tensors), n_keys=len(self.records)) + b"".join(self.records.values())
        head += b"".join(tensor(t.name, t.dims, t.type_id, t.offset) for t in self.tensors)
        return head + bytes(-len(head) % alignment) + self.data


def take_apart(path: Path) -> Parts:
    head = header.read(path)
    records = {key: head.data[r.start : r.end] for key, r in head.records.items()}
    return Parts(records, list(head.tensors), path.read_bytes()[head.data_start :], head)


def opening(version: int = 3, n_tensors: int = 0, n_keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def record(key: bytes | str, kind: int, value: Any) -> bytes:
    if not isinstance(value, list):
        return _packed(STRING, key) + struct.pack("<I", kind) + _packed(kind, value)
    return (
        _packed(STRING, key) + struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_packed(kind, v) for v in value)
    )


def _packed(kind: int, value: Any) -> bytes:
    if kind != STRING:
        return struct.pack("<" + "BbHhIifBxxQqd"[kind], value)
    text = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(text)) + text


def tensor(name: bytes | str, dims: tuple[int, ...], type_id: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *(n % 2**64 for n in dims))
    return _packed(STRING, name) + shape + struct.pack("<IQ", type_id % 2**32, offset % 2**64)


# ---------------------------------------------------------------- mutations


def cut(rng: random.Random, parts: Parts) -> bytes:
    whole = parts.build()
    return whole[
        : rng.choice((rng.randrange(len(whole)), rng.randrange(parts.header.tensors_end), -rng.randint(1, 200)))
    ]


def flipped(rng: random.Random, parts: Parts) -> bytes:
    whole, head = bytearray(parts.build()), parts.header
    start, end = rng.choice(
        ((0, 24), (0, head.keys_end), (head.keys_end, head.tensors_end), (head.data_start, len(whole)))
    )
    for _ in range(rng.randint(1, 8)):
        whole[rng.randrange(start, end)] = rng.randrange(256)
    return bytes(whole)


def number(rng: random.Random, parts: Parts) -> bytes:
    """A version, count, length, type, value, dimension or offset: an absurd one, or one near the right one."""
    whole = bytearray(parts.build())
    kinds = _numbers(parts.header)
    for at, width in rng.sample(kinds[rng.choice(list(kinds))], rng.choice((1, 1, 1, 2))):
        now = int.from_bytes(whole[at : at + width], "little")
        new = rng.choice((*ABSURD, now - 1, now + 1, now * 2, now // 2, now + 32, now - 32, rng.randrange(45)))
        whole[at : at + width] = (new % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(whole)


def _numbers(head: Header) -> dict[str, list[tuple[int, int]]]:
    """Position and width in bytes of every number that the format defines, by its meaning."""
    found: dict[str, list[tuple[int, int]]] = {"count": [(4, 4), (8, 8), (16, 8)]}

    def at(what: str, *place: int) -> None:
        found.setdefault(what, []).append(place)  # type: ignore[arg-type]

    for r in head.records.values():
        at("length", r.start, 8)
        at("type", r.start + 8 + len(r.key.encode()), 4)
        if r.kind == ARRAY:
            at("type", r.payload - 12, 4)
            at("length", r.payload - 8, 8)
        at(*(("length", r.payload, 8) if r.item == STRING else ("value", r.payload, 4)))
    place = head.keys_end
    for t in head.tensors:
        at("length", place, 8)
        place += 8 + len(t.name.encode())
        at("dimensions", place, 4)
        for i in range(len(t.dims)):
            at("dimensions", place + 4 + 8 * i, 8)
        place += 16 + 8 * len(t.dims)
        at("tensor type", place - 12, 4)
        at("offset", place - 8, 8)
    return found


def other_records(rng: random.Random, parts: Parts) -> bytes:
    """Keys or tensors missing, there twice, exchanged, or under another name."""
    if rng.random() < 0.5:
        key = rng.choice(list(parts.records))
        noise = rng.choice(NOISE)
        parts.records |= rng.choice(({"again": parts.records[key]}, {key: b""}, {key: record(noise, UINT32, 1)}))
        parts.records = {k: r for k, r in parts.records.items() if r}
    else:
        one, other = rng.sample(range(len(parts.tensors)), 2)
        a, b = parts.tensors[one], parts.tensors[other]
        named = replace(a, name=rng.choice(NOISE))
        parts.tensors[one : one + 1] = rng.choice(([], [a, a], [named], [replace(a, offset=b.offset)]))
        if len(parts.tensors) > other and rng.random() < 0.5:
            parts.tensors[other] = replace(b, offset=a.offset)
    return parts.build()


def other_value(rng: random.Random, parts: Parts) -> bytes:
    """A well-formed value: of another type, absurd, or of a key that only the engine knows."""
    arch = parts.header.text("general.architecture")
    key = rng.choice((*parts.records, *(f"{arch}.{name}" for name in ENGINE), "split.count", "general.alignment"))
    kind, value = rng.choice(
        (
            (STRING, rng.choice(NOISE)),
            (FLOAT32, rng.choice(FLOATS)),
            (UINT32, rng.choice([n for n in ABSURD if n < 2**32])),
            (rng.choice((0, 1, 2, 3, 5, 7, 10, 11, 12)), 1),
            (INT32, rng.choice(([0, 2], [2, 0], [0, 0], [0], [0, 2, 0], [2**31 - 1, 2], [0, -1]))),  # head counts: D1
        )
    )
    if isinstance(value, list):
        key = f"{arch}.attention.{rng.choice(('head_count', 'head_count_kv'))}"
    elif rng.random() < 0.3:
        value = [value] * rng.randrange(4)
    parts.put(key, kind, value)
    return parts.build(rng.choice((32, 32, 64, 4096)))


def grown(rng: random.Random, parts: Parts) -> bytes:
    """A hundred thousand keys, millions of strings, one long string, arrays in arrays."""
    key, many = rng.choice(list(parts.records)), rng.choice((1_000, 100_000))
    change = rng.randrange(4)
    if change == 0:
        parts.records |= {f"x.{i}": record(f"x.{i}", 0, 1) for i in range(many)}
    elif change == 1:
        parts.records[key] = record(key, STRING, [])[:-8] + struct.pack("<Q", 20 * many) + bytes(160 * many)
    elif change == 2:
        parts.put(key, STRING, rng.choice((b"a", b"\xff")) * (300 * many))
    else:
        parts.records[key] = record(key, ARRAY, [])[:-12] + struct.pack("<IQ", ARRAY, 1) * many + bytes(16)
    return parts.build()


KINDS = (cut, flipped, flipped, number, number, number, number, other_records, other_value, other_value, grown)


def mutants(folder: Path, n: int, seed: int = SEED) -> Iterator[tuple[str, bytes]]:
    """n mutated files, named by number, kind and original."""
    originals = [synthetic.write(spec, "F16", folder / f"{spec.name}.gguf") for spec in SPECS]
    for i in range(n):
        kind, original = KINDS[i % len(KINDS)], originals[i // len(KINDS) % len(originals)]
        yield f"{i} {kind.__name__} {original.stem}", kind(random.Random(f"{seed}/{i}"), take_apart(original))


# ---------------------------------------------------------------- what becomes of them


def main(folder: Path, n: int, gated: int) -> None:
    """Check n mutants, the first `gated` that pass with the engine; one JSON line each, the peak of memory at last."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    path = folder / "mutant.gguf"
    for name, made in mutants(folder, n):
        path.write_bytes(made)
        row = _outcome(path, gate=False)
        if gated and row["kind"] == "passed":
            row, gated = _outcome(path, gate=True), gated - 1
        path.unlink()
        left = sorted(str(p) for p in folder.rglob("*") if p.stem not in [spec.name for spec in SPECS])
        print(json.dumps({"name": name, **row, "left": left}), flush=True)
    print(json.dumps({"peak_rss": machine.peak_rss()}), flush=True)


def _outcome(path: Path, gate: bool) -> dict[str, Any]:
    """`kind`: found, passed, or the accident. `seconds`: of this process's CPU, which others do not stretch."""
    start, found = time.process_time(), []
    try:
        found = checking.check(path, gate=gate, time_limit_s=LIMIT_S, memory_limit=LIMIT_BYTES)
        kind = "found" if blocking(found) else "passed"
    except BaseException as raised:
        kind = f"{type(raised).__name__}: {raised}"[:500]
    told = {
        "kind": kind,
        "codes": sorted({f.code for f in found}),
        "seconds": time.process_time() - start,
        "gate": gate,
    }
    return told | {"printable": all(f.evidence.isprintable() for f in found)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
