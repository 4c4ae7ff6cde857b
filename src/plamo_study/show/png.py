"""Compress the PNG of a chart to a third of its size without loss, because executed notebooks are tracked.

vl-convert stores four channels, rows as differences, compressed for speed. Charts are flat and opaque: three
channels, rows as they are, compressed for size. Pillow cannot be told to leave rows as they are: it makes the pictures
of notebooks 03 and 12 a third larger, and a palette would lose colours of most.
"""

import struct
import zlib
from collections.abc import Iterator

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
RGB, RGBA = 2, 6
ROW_AS_IS, ROW_OF_DIFFERENCES = 0, 1


def size(png: bytes) -> tuple[int, int]:
    """Return width and height in pixels, from the header."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def compact(png: bytes) -> bytes:
    """Return the same picture in fewer bytes; a PNG that differs in kind from vl-convert's is returned unchanged.

    Deterministic for the same zlib. Source of the format: W3C PNG specification, third edition, sections 5, 9 and 11.
    """
    chunks = list(_chunks(png))
    pixels = _pixels(dict(chunks)[b"IHDR"], b"".join(data for kind, data in chunks if kind == b"IDAT"))
    if pixels is None:
        return png
    height, width, _ = pixels.shape
    rows = np.concatenate([np.full((height, 1), ROW_AS_IS, np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, RGB, 0, 0, 0)
    density = [(kind, data) for kind, data in chunks if kind == b"pHYs"]
    parts = [(b"IHDR", header), *density, (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b"")]
    return SIGNATURE + b"".join(_pack(kind, data) for kind, data in parts)


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(SIGNATURE)
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        yield kind, png[at + 8 : at + 8 + length]
        at += 12 + length


def _pixels(header: bytes, data: bytes) -> "np.ndarray[tuple[int, int, int], np.dtype[np.uint8]] | None":
    """Return red, green and blue as (height, width, 3), or None when the picture is not opaque, flat 8-bit RGBA."""
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", header)
    if (depth, colour) != (8, RGBA):
        return None
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + 4 * width)
    pixels = np.cumsum(rows[:, 1:].reshape(height, width, 4), axis=1, dtype=np.uint8)
    if (rows[:, 0] != ROW_OF_DIFFERENCES).any() or (pixels[:, :, 3] != 255).any():
        return None
    return pixels[:, :, :3]


def _pack(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
