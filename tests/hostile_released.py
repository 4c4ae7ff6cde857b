"""Released folders as a stranger might publish them: one mutation of a valid one, the same from the same seed."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile import SEED

ABSURD = (0, -1, 1, 3, 2**31, 2**32, 2**63, 2**64, 10**30, 1e308, 0.5, "text", None, True, [], {}, [[1]])
Random = random.Random


def mutate_safetensors(folder: Path, number: int, seed: int = SEED) -> str:
    """Damage a copy of a released folder in place; returns number and kind of the mutation."""
    kind = KINDS[number % len(KINDS)]
    kind(Random(f"{seed}/{number}"), folder)
    return f"{number} {kind.__name__}"


def cut_shard(rng: Random, folder: Path) -> None:
    path, whole = _shard(rng, folder)
    path.write_bytes(whole[: rng.randrange(len(whole))])


def cut_shard_header(rng: Random, folder: Path) -> None:
    path, whole = _shard(rng, folder)
    path.write_bytes(whole[: rng.randrange(8 + _length(whole))])


def longer_shard(rng: Random, folder: Path) -> None:
    path, whole = _shard(rng, folder)
    path.write_bytes(whole + bytes(rng.choice((1, 8, 1 << 20))))


def absurd_header_length(rng: Random, folder: Path) -> None:
    path, whole = _shard(rng, folder)
    n = _length(whole)
    absurd = rng.choice((0, 1, n - 1, n + 1, n + 8, len(whole), 2**20, 2**31, 2**63 - 1, 2**63, 2**64 - 1))
    path.write_bytes(struct.pack("<Q", absurd) + whole[8:])


def flip_header(rng: Random, folder: Path) -> None:
    path, whole = _shard(rng, folder)
    out = bytearray(whole)
    for _ in range(rng.randint(1, 8)):
        out[rng.randrange(8 + _length(whole))] = rng.randrange(256)
    path.write_bytes(bytes(out))


def flip_data(rng: Random, folder: Path) -> None:
    path, whole = _shard(rng, folder)
    out = bytearray(whole)
    for _ in range(rng.randint(1, 64)):
        out[rng.randrange(8 + _length(whole), len(out))] = rng.choice((0, 127, 255, rng.randrange(256)))
    path.write_bytes(bytes(out))


def other_dtype(rng: Random, folder: Path) -> None:
    types = ("F99", "", "I64", "BOOL", "F8_E4M3", "F16", "BF16", "F64", 7, None, ["F32"], "F32" * 100_000)
    _change_entry(rng, folder, "dtype", lambda value: rng.choice(types))


def other_shape(rng: Random, folder: Path) -> None:
    def change(shape: list[int]) -> Any:
        other = list(shape)
        other[rng.randrange(len(other))] = rng.choice(ABSURD)
        whole = (other, shape[::-1], [*shape, 1], [*shape, 0], [1] * 1000, [2**32, 2**32], [], rng.choice(ABSURD))
        return rng.choice((other, rng.choice(whole)))

    _change_entry(rng, folder, "shape", change)


def other_offsets(rng: Random, folder: Path) -> None:
    """Reversed, far away, overlapping, one off, of the wrong kind."""

    def change(at: list[int]) -> Any:
        start, end = at
        moved = ([end, start], [start + 4, end + 4], [start - 4, end - 4], [0, end - start], [start, end + 1])
        return rng.choice((*moved, [start, 2**63], [2**63, 2**63 + end - start], [-8, -4], [start], rng.choice(ABSURD)))

    _change_entry(rng, folder, "data_offsets", change)


def swapped_offsets(rng: Random, folder: Path) -> None:
    path, whole = _shard(rng, folder)
    entries = _entries(whole)
    one, other = rng.sample([name for name in entries if name != "__metadata__"], 2)
    entries[one]["data_offsets"], entries[other]["data_offsets"] = (
        entries[other]["data_offsets"],
        entries[one]["data_offsets"],
    )
    _write(path, entries, whole)


def odd_entry(rng: Random, folder: Path) -> None:
    path, whole = _shard(rng, folder)
    entries = _entries(whole)
    name = rng.choice([name for name in entries if name != "__metadata__"])
    change = rng.randrange(5)
    if change == 0:
        del entries[name]
    elif change == 1:
        entries[name] = rng.choice(ABSURD)
    elif change == 2:
        entries["x" * rng.choice((1, 1 << 20))] = entries.pop(name)
    elif change == 3:
        entries["__metadata__"] = rng.choice(({"a": 1}, [], "x", {"a": "b" * (1 << 22)}))
    else:
        entries[rng.choice(("../../x", "\x1b[2J", "", "extra"))] = dict(entries[name])
    _write(path, entries, whole)


def nested_header(rng: Random, folder: Path) -> None:
    path, whole = _shard(rng, folder)
    depth = rng.choice((10, 1_000, 100_000, 2_000_000))
    text = rng.choice((b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth))
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + _length(whole) :])


def duplicate_names(rng: Random, folder: Path) -> None:
    path, whole = _shard(rng, folder)
    header = whole[8 : 8 + _length(whole)].rstrip()
    text = header[:-1] + b"," + header[1:]
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + _length(whole) :])


def other_index(rng: Random, folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text()) if path.exists() else {"weight_map": {"a": "b.safetensors"}}
    names = index["weight_map"]
    name = rng.choice(list(names))
    outside = ("../model.safetensors", "/etc/passwd", "/dev/zero", "", ".", "no.safetensors", "a/../b.safetensors")
    change = rng.randrange(5)
    if change == 0:
        names[name] = rng.choice((*outside, *ABSURD))
    elif change == 1:
        del names[name]
    elif change == 2:
        names["extra"] = names[name]
    elif change == 3:
        index["weight_map"] = rng.choice(ABSURD)
    path.write_text(json.dumps(index) if change < 4 else rng.choice(("", "{", "[" * 100_000, "null")))


def missing_file(rng: Random, folder: Path) -> None:
    rng.choice(sorted(folder.iterdir())).unlink()


def folder_instead(rng: Random, folder: Path) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    path.unlink()
    path.mkdir()


def link_elsewhere(rng: Random, folder: Path) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    path.unlink()
    path.symlink_to(rng.choice(("/dev/zero", "/nowhere", str(path), "/dev/stdin")))


def other_setting(rng: Random, folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    key = rng.choice(list(config))
    if rng.random() < 0.2:
        del config[key]
    else:
        near = [config[key] + 1, config[key] * 2] if type(config[key]) is int else []
        config[key] = rng.choice([*ABSURD, *near, float("nan"), float("inf")])
    path.write_text(json.dumps(config))


def spoilt_text(rng: Random, folder: Path) -> None:
    """config.json, tokenizer_config.json or tokenizer.jsonl cut, flipped, nested, or replaced by noise."""
    path = folder / rng.choice(("config.json", "tokenizer_config.json", "tokenizer.jsonl"))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[rng.randrange(len(whole))] = rng.randrange(256)
    nested = rng.choice((b"[" * 100_000, b'{"a":' * 100_000))
    path.write_bytes(
        rng.choice((whole[: rng.randrange(len(whole))], bytes(flipped), nested, rng.randbytes(1000), b"", b"null"))
    )


def other_token(rng: Random, folder: Path) -> None:
    path = folder / "tokenizer.jsonl"
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    row = json.loads(lines[at])
    texts = ("", "a" * (1 << 20), "\ud800", "\0", json.loads(lines[0])[0], "<0x00>", 5, None)
    change = rng.randrange(5)
    if change == 0:
        del lines[at]
    elif change == 1:
        row[0] = rng.choice(texts)
    elif change == 2:
        row[1] = rng.choice((*ABSURD, -1000, float("nan"), -1e300))
    elif change == 3:
        row = rng.choice(([], [1], {}, "x", row[:1], [row], None))
    else:
        lines += lines * rng.choice((1, 1000))
    if change in (1, 2, 3):
        lines[at] = json.dumps(row)
    path.write_text("\n".join(lines))


def other_special(rng: Random, folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config[rng.choice(list(config))] = rng.choice((*ABSURD, "no such token", {"content": 5}))
    config["chat_template"] = rng.choice((*ABSURD, "{{ 'x' }}" * (1 << 17), "\ud800"))
    path.write_text(json.dumps(config))


KINDS: tuple[Callable[[Random, Path], None], ...] = (
    cut_shard, cut_shard_header, longer_shard, absurd_header_length, flip_header, flip_data, other_dtype, other_shape,
    other_offsets, swapped_offsets, odd_entry, nested_header, duplicate_names, other_index, missing_file,
    folder_instead, link_elsewhere, other_setting, spoilt_text, other_token, other_special,
)  # fmt: skip


def _shard(rng: Random, folder: Path) -> tuple[Path, bytes]:
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    return path, path.read_bytes()


def _length(whole: bytes) -> int:
    return int(struct.unpack("<Q", whole[:8])[0])


def _entries(whole: bytes) -> dict[str, Any]:
    return dict(json.loads(whole[8 : 8 + _length(whole)]))


def _write(path: Path, entries: dict[str, Any], whole: bytes) -> None:
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + _length(whole) :])


def _change_entry(rng: Random, folder: Path, key: str, change: Callable[[Any], Any]) -> None:
    path, whole = _shard(rng, folder)
    entries = _entries(whole)
    name = rng.choice([name for name in entries if name != "__metadata__"])
    entries[name][key] = change(entries[name][key])
    _write(path, entries, whole)
