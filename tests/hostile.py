"""GGUF files as a stranger might send them: mutations of two tiny valid ones, the same ones from the same seed.

`hostile_worker.py` feeds them to check and convert in a process of limited memory; `hostile_released.py` does to
released folders what this does to GGUF files.
"""

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plamo_study.models import header, synthetic
from plamo_study.models.header_parts import ARRAY, NUMBERS, STRING, Header, Record, TensorRecord
from plamo_study.models.registry import ModelSpec

SEED, N = 20261120, 500
LIMIT_S, LIMIT_BYTES = 5.0, 1 << 30
ENGINE_S = 3.5  # of these, for the engine's own process; the rest is for what lies around it

HYBRID = ModelSpec(
    name="tiny-hybrid", scale="tiny", arch="plamo2", hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn=64,
    vocab=288, context_length=256, rms_eps=1e-6, rope_theta=1e4, tied=True,
    mamba_heads=2, mamba_head_dim=32, d_state=16, d_conv=4,
)  # fmt: skip
ATTENTION = ModelSpec(
    name="tiny-attention", scale="tiny", arch="plamo3", hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn=64,
    vocab=288, context_length=256, rms_eps=1e-6, rope_theta=1e6, tied=True,
    rope_theta_swa=1e4, window=16, window_pattern=2,
)  # fmt: skip

ABSURD = (0, 1, 7, 255, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
Random = random.Random


@dataclass
class Parts:
    """A GGUF taken apart. The counts are written as they stand here, true or not."""

    records: list[bytes]
    tensors: list[bytes]
    data: bytes
    version: int = 3
    n_tensors: int | None = None
    n_keys: int | None = None
    header: Header = field(kw_only=True, repr=False)  # as it was before any mutation

    def build(self, alignment: int = 32) -> bytes:
        counts = [
            len(given) if count is None else count
            for count, given in ((self.n_tensors, self.tensors), (self.n_keys, self.records))
        ]
        head = b"GGUF" + struct.pack("<IQQ", self.version, *counts) + b"".join([*self.records, *self.tensors])
        return head + bytes(-len(head) % alignment) + self.data


def take_apart(path: Path) -> Parts:
    head = header.read(path)
    records = [head.data[r.start : r.end] for r in head.records.values()]
    tensors = [tensor(t.name, t.dims, t.type_id, t.offset) for t in head.tensors]
    return Parts(records, tensors, path.read_bytes()[head.data_start :], header=head)


def text(value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes | str, dims: tuple[int, ...], type_id: int, offset: int) -> bytes:
    shape = b"".join(struct.pack("<Q", n % 2**64) for n in dims)
    return text(name) + struct.pack("<I", len(dims)) + shape + struct.pack("<IQ", type_id % 2**32, offset % 2**64)


def scalar(key: bytes | str, kind: int, value: Any) -> bytes:
    body = text(value) if kind == STRING else struct.pack("<" + "BbHhIifBxxQqd"[kind], value)
    return text(key) + struct.pack("<I", kind) + body


def array(key: bytes | str, item: int, values: list[Any]) -> bytes:
    body = b"".join(text(v) if item == STRING else struct.pack("<" + "BbHhIifBxxQqd"[item], v) for v in values)
    return text(key) + struct.pack("<IIQ", ARRAY, item, len(values)) + body


# ---------------------------------------------------------------- mutations of GGUF files


def cut_anywhere(rng: Random, parts: Parts) -> bytes:
    whole = parts.build()
    return whole[: rng.randrange(len(whole))]


def cut_in_header(rng: Random, parts: Parts) -> bytes:
    return parts.build()[: rng.randrange(parts.header.tensors_end)]


def cut_at_the_end(rng: Random, parts: Parts) -> bytes:
    return parts.build()[: -rng.randint(1, 200)]


def flip_header(rng: Random, parts: Parts) -> bytes:
    return _flipped(rng, parts.build(), 0, parts.header.tensors_end)


def flip_opening(rng: Random, parts: Parts) -> bytes:
    return _flipped(rng, parts.build(), 0, 24)


def flip_tensor_records(rng: Random, parts: Parts) -> bytes:
    return _flipped(rng, parts.build(), parts.header.keys_end, parts.header.tensors_end)


def flip_data(rng: Random, parts: Parts) -> bytes:
    whole = parts.build()
    return _flipped(rng, whole, parts.header.data_start, len(whole))


def _flipped(rng: Random, whole: bytes, start: int, end: int) -> bytes:
    out = bytearray(whole)
    for _ in range(rng.randint(1, 8)):
        out[rng.randrange(start, end)] = rng.randrange(256)
    return bytes(out)


def absurd_count(rng: Random, parts: Parts) -> bytes:
    if rng.random() < 0.5:
        return replace(parts, n_tensors=rng.choice(ABSURD)).build()
    return replace(parts, n_keys=rng.choice(ABSURD)).build()


def absurd_name_length(rng: Random, parts: Parts) -> bytes:
    records = rng.choice((parts.records, parts.tensors))
    at = rng.randrange(len(records))
    records[at] = struct.pack("<Q", rng.choice(ABSURD)) + records[at][8:]
    return parts.build()


def absurd_value_length(rng: Random, parts: Parts) -> bytes:
    at, record = _pick(rng, parts, lambda r: STRING in (r.kind, r.item) or r.kind == ARRAY)
    where = record.payload - record.start - (8 if record.kind == ARRAY else 0)
    if record.item == STRING and rng.random() < 0.5:
        where = record.payload - record.start
    old = parts.records[at]
    parts.records[at] = old[:where] + struct.pack("<Q", rng.choice(ABSURD)) + old[where + 8 :]
    return parts.build()


def wrong_type(rng: Random, parts: Parts) -> bytes:
    at, record = _pick(rng, parts)
    where = 8 + len(record.key.encode()) + (4 if record.kind == ARRAY and rng.random() < 0.5 else 0)
    kind = struct.pack("<I", rng.choice((*range(14), 255, 2**31, 2**32 - 1)))
    parts.records[at] = parts.records[at][:where] + kind + parts.records[at][where + 4 :]
    return parts.build()


def other_type(rng: Random, parts: Parts) -> bytes:
    """A value of another type, well formed."""
    at, record = _pick(rng, parts)
    kind = rng.choice([*NUMBERS, STRING])
    value = rng.choice((b"", b"1", b"\xff\xfe", "文字".encode())) if kind == STRING else 1
    many = rng.random() < 0.5
    made = array(record.key, kind, [value] * rng.randrange(4)) if many else scalar(record.key, kind, value)
    parts.records[at] = made
    return parts.build()


def absurd_value(rng: Random, parts: Parts) -> bytes:
    at, record = _pick(rng, parts, lambda r: r.kind in (4, 6))
    value = rng.choice(FLOATS) if record.kind == 6 else rng.choice([n for n in ABSURD if n < 2**32])
    parts.records[at] = scalar(record.key, record.kind, value)
    return parts.build()


def slightly_other_value(rng: Random, parts: Parts) -> bytes:
    """A number one off, doubled or halved: shapes no longer fit, or nothing shows."""
    at, record = _pick(rng, parts, lambda r: r.kind == 4)
    value = parts.header.value(record.key)
    parts.records[at] = scalar(record.key, 4, max(0, rng.choice((value - 1, value + 1, value * 2, value // 2))))
    return parts.build()


def missing_key(rng: Random, parts: Parts) -> bytes:
    del parts.records[rng.randrange(len(parts.records))]
    return parts.build()


def duplicate_key(rng: Random, parts: Parts) -> bytes:
    parts.records.insert(rng.randrange(len(parts.records) + 1), rng.choice(parts.records))
    return parts.build()


def many_keys(rng: Random, parts: Parts) -> bytes:
    parts.records += [scalar(f"x.{i}", 0, 1) for i in range(rng.choice((1_000, 100_000)))]
    return parts.build()


def nested_arrays(rng: Random, parts: Parts) -> bytes:
    at, record = _pick(rng, parts)
    depth = rng.choice((1, 2, 10, 1_000, 100_000))
    nest = struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQB", 0, 1, 1)
    parts.records[at] = text(record.key) + struct.pack("<I", ARRAY) + nest
    return parts.build()


def huge_string(rng: Random, parts: Parts) -> bytes:
    n = rng.choice((1 << 16, 1 << 20, 1 << 23, 1 << 25))
    at, record = _pick(rng, parts, lambda r: STRING in (r.kind, r.item))
    if record.kind == STRING:
        parts.records[at] = scalar(record.key, STRING, b"a" * n)
    else:
        tokens = parts.header.value(record.key)
        tokens[rng.randrange(len(tokens))] = rng.choice((b"a", "あ".encode(), b"\xff")) * (n // 3)
        parts.records[at] = array(record.key, STRING, tokens)
    return parts.build()


def many_strings(rng: Random, parts: Parts) -> bytes:
    """Millions of empty strings: eight bytes each, and a loop."""
    at, record = _pick(rng, parts)
    n = rng.choice((1_000_000, 2_000_000))
    parts.records[at] = text(record.key) + struct.pack("<IIQ", ARRAY, STRING, n) + bytes(8 * n)
    return parts.build()


def other_version(rng: Random, parts: Parts) -> bytes:
    return replace(parts, version=rng.choice((0, 1, 2, 4, 99, 0x03000000, 0x10003, 2**31, 2**32 - 1))).build()


def odd_name(rng: Random, parts: Parts) -> bytes:
    name = rng.choice((b"", b"a" * 64, b"a" * 65_537, b"\xff\xfe", b"\x1b[2J", b"\0", b"../../x", b"output.weight"))
    if rng.random() < 0.5:
        at, record = _pick(rng, parts)
        parts.records[at] = text(name) + parts.records[at][8 + len(record.key.encode()) :]
    else:
        at, t = _pick_tensor(rng, parts)
        parts.tensors[at] = tensor(name, t.dims, t.type_id, t.offset)
    return parts.build()


def duplicate_tensor(rng: Random, parts: Parts) -> bytes:
    parts.tensors.insert(rng.randrange(len(parts.tensors)), rng.choice(parts.tensors))
    return parts.build()


def missing_tensor(rng: Random, parts: Parts) -> bytes:
    del parts.tensors[rng.choice((-1, rng.randrange(len(parts.tensors))))]
    return parts.build()


def other_dims(rng: Random, parts: Parts) -> bytes:
    at, t = _pick_tensor(rng, parts)
    dims = list(t.dims)
    dims[rng.randrange(len(dims))] = rng.choice((*ABSURD, 32, 48, 64, 96, 128))
    shapes = (tuple(dims), tuple(reversed(t.dims)), t.dims * 8, (), (*t.dims, 1, 1), (2**32, 2**32), (*t.dims, 0))
    parts.tensors[at] = tensor(t.name, rng.choice((tuple(dims), rng.choice(shapes))), t.type_id, t.offset)
    return parts.build()


def other_tensor_type(rng: Random, parts: Parts) -> bytes:
    at, t = _pick_tensor(rng, parts)
    kind = rng.choice((*range(45), 255, 2**31, 2**32 - 1))
    parts.tensors[at] = tensor(t.name, t.dims, kind, t.offset)
    return parts.build()


def other_offset(rng: Random, parts: Parts) -> bytes:
    """Overlapping, swapped (cyclic), misaligned, far away."""
    at, t = _pick_tensor(rng, parts)
    other = rng.choice(parts.header.tensors)
    offset = rng.choice((other.offset, t.offset + 1, t.offset + 32, t.offset - 32, *ABSURD))
    parts.tensors[at] = tensor(t.name, t.dims, t.type_id, offset)
    if offset == other.offset:
        back = parts.header.tensors.index(other)
        parts.tensors[back] = tensor(other.name, other.dims, other.type_id, t.offset)
    return parts.build()


def other_alignment(rng: Random, parts: Parts) -> bytes:
    alignment = rng.choice((0, 1, 2, 3, 16, 64, 4096, 2**20, 2**30, 2**31, 2**32 - 1))
    parts.records.append(rng.choice((scalar("general.alignment", 4, alignment), scalar("general.alignment", 10, 32))))
    return parts.build(rng.choice((32, min(max(alignment, 1), 4096))))


def planted_numbers(rng: Random, parts: Parts) -> bytes:
    """NaN, infinity or a huge number among the weights."""
    _, t = _pick_tensor(rng, parts)
    width = 4 if t.type_name == "F32" else 2
    at = t.offset + width * rng.randrange(t.n_bytes // width)
    form, values = ("<f", (*FLOATS, 3e38)) if width == 4 else ("<H", (0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0xFBFF))
    parts.data = parts.data[:at] + struct.pack(form, rng.choice(values)) + parts.data[at + width :]
    return parts.build()


def spoilt_tokenizer(rng: Random, parts: Parts) -> bytes:
    names = list(parts.header.records)
    key, item = rng.choice((("tokens", STRING), ("scores", 6), ("token_type", 5)))
    values = list(parts.header.value(f"tokenizer.ggml.{key}"))
    spoil: dict[str, tuple[Any, ...]] = {
        "tokens": (b"", b"<0x00>", b"\xff", b"[PAD]", values[7]),
        "scores": (*FLOATS, -1000.0, -1001.0, 3e5),
        "token_type": (0, 1, 5, 6, 7, -1, 2**31 - 1),
    }
    at = rng.randrange(len(values))
    change = rng.randrange(3)
    if change == 0:
        del values[at]
    elif change == 1:
        values[at] = rng.choice(spoil[key])
    else:
        values = [rng.choice(spoil[key])] * len(values)
    parts.records[names.index(f"tokenizer.ggml.{key}")] = array(f"tokenizer.ggml.{key}", item, values)
    return parts.build()


def odd_head_counts(rng: Random, parts: Parts) -> bytes:
    """D1 and its relatives."""
    arch = parts.header.value("general.architecture")
    key = f"{arch}.attention.{rng.choice(('head_count', 'head_count', 'head_count_kv'))}"
    layers = rng.choice(([0, 2], [0, 2], [2, 0], [0, 0], [2, 2], [0], [0, 2, 0], [2**31 - 1, 2], [0, -1]))
    parts.records[list(parts.header.records).index(key)] = array(key, 5, layers)
    return parts.build()


def engine_keys(rng: Random, parts: Parts) -> bytes:
    """Keys that a PLaMo file does not have and the engine reads all the same."""
    arch = parts.header.value("general.architecture")
    value = rng.choice((0, 1, 2, 33, 2**31, 2**32 - 1))
    made = rng.choice(
        (
            *(scalar(f"{arch}.{name}", 4, value) for name in ("rope.dimension_count", "rope.dimension_count_swa")),
            *(scalar(f"{arch}.{name}", 4, value) for name in ("expert_count", "expert_used_count")),
            *(scalar(f"{arch}.{name}", 4, value) for name in ("nextn_predict_layers", "attention.key_length_swa")),
            *(scalar(f"{arch}.{name}", 4, value) for name in ("embedding_length_out", "pooling_type")),
            scalar(f"{arch}.rope.scaling.type", STRING, rng.choice((b"yarn", b"linear", b"nonsense", b""))),
            scalar(f"{arch}.rope.scaling.factor", 6, rng.choice(FLOATS)),
            scalar("split.count", 2, value % 2**16),
            scalar("tokenizer.ggml.add_bos_token", 7, 2),
            array("tokenizer.ggml.suppress_tokens", 5, [-1, 2**31 - 1]),
            array(f"{arch}.classifier.output_labels", STRING, [b""] * 3),
        )
    )
    parts.records.append(made)
    return parts.build()


def garbage(rng: Random, parts: Parts) -> bytes:
    noise = rng.randbytes(rng.choice((0, 1, 3, 20, 10_000)))
    return rng.choice((noise, b"GGUF" + noise, b"GGUF\3\0\0\0" + noise, b"PK\3\4" + noise, b"FUGG" + noise))


KINDS: tuple[Callable[[Random, Parts], bytes], ...] = (
    cut_anywhere, cut_in_header, cut_at_the_end, flip_header, flip_opening, flip_tensor_records, flip_data,
    absurd_count, absurd_name_length, absurd_value_length, wrong_type, other_type, absurd_value, slightly_other_value,
    missing_key, duplicate_key, many_keys, nested_arrays, huge_string, many_strings, other_version, odd_name,
    duplicate_tensor, missing_tensor, other_dims, other_tensor_type, other_offset, other_alignment, planted_numbers,
    spoilt_tokenizer, odd_head_counts, engine_keys, garbage,
)  # fmt: skip


def _pick(rng: Random, parts: Parts, wanted: Callable[[Record], bool] = lambda r: True) -> tuple[int, Record]:
    return rng.choice([(i, r) for i, r in enumerate(parts.header.records.values()) if wanted(r)])


def _pick_tensor(rng: Random, parts: Parts) -> tuple[int, TensorRecord]:
    return rng.choice(list(enumerate(parts.header.tensors)))


def bases(folder: Path) -> list[Path]:
    """The two valid files everything is made from."""
    return [synthetic.write(spec, "F16", folder / f"{spec.name}.gguf") for spec in (HYBRID, ATTENTION)]


def mutants(originals: list[Path], n: int = N, seed: int = SEED) -> Iterator[tuple[str, bytes]]:
    """n mutated files, named by number, kind and original; any of them can be made again alone."""
    for number in range(n):
        yield mutant(originals, number, seed)


def mutant(originals: list[Path], number: int, seed: int = SEED) -> tuple[str, bytes]:
    kind = KINDS[number % len(KINDS)]
    original = originals[number // len(KINDS) % len(originals)]
    made = kind(Random(f"{seed}/{number}"), take_apart(original))
    return f"{number} {kind.__name__} {original.stem}", made
