"""What a path or a file is that was taken for a GGUF: a folder, a pointer, a page, an archive, another format.

It knows the first bytes of a file only; of a GGUF that is no model, roles.py says what it is.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from llama_meter.errors import StudyError
from llama_meter.models.finding import listed, printable

LOOKED_AT = 4096  # first bytes of a file
REST = "fetch the rest with `curl -L -C - -o FILE URL`, which goes on where the file ends, or fetch it again"
ANOTHER = "name a .gguf file; plamo-study models list shows those here"
FETCH = "fetch it again"
CONVERT = "make a GGUF of its folder with llama.cpp's convert_hf_to_gguf.py"
POINTER = re.compile(rb"version https://git-lfs\.\S+\n(?:[^\n]*\n)*?oid sha256:([0-9a-f]{64})\nsize ([0-9]{1,18})\n")
PACKED = {  # first bytes -> what packed it, and what unpacks it
    b"PK\x03\x04": ("a zip archive", "unzip"),
    b"\x1f\x8b": ("compressed with gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unzstd"),
    b"\xfd7zXZ\x00": ("compressed with xz", "unxz"),
    b"BZh": ("compressed with bzip2", "bunzip2"),
    b"7z\xbc\xaf\x27\x1c": ("a 7-Zip archive", "7z x"),
}
BEFORE_GGUF = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # ggml, ggmf, ggjt and their adapters, little-endian


@dataclass(frozen=True)
class Mistaken:
    """What a file is instead of a GGUF, as the end of a sentence, and the command or the address that mends it."""

    what: str
    mend: str


def check_path(path: Path, mend: str = ANOTHER) -> None:
    """Raise StudyError unless a path is a regular file or a link to one; of a folder it lists the GGUF files."""
    try:
        if path.is_file():
            return
        if path.is_dir():
            raise _folder(path)
        why = "is a link to nothing" if path.is_symlink() else "is no regular file" if path.exists() else "no such file"
    except (OSError, ValueError) as error:  # a name too long, or with a NUL byte
        raise StudyError(str(path), f"no such file ({error})", mend) from error
    raise StudyError(str(path), why, mend)


def _folder(path: Path) -> StudyError:
    try:
        names = sorted(entry.name for entry in os.scandir(path))
    except OSError as error:
        return StudyError(str(path), f"is a folder that cannot be read ({error.strerror})", "name a file in it")
    inside = [name for name in names if name.lower().endswith(".gguf")]
    if inside:
        return StudyError(
            str(path), f"is a folder; GGUF files in it: {listed(inside)}", f"name one: {path / inside[0]}"
        )
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return StudyError(str(path), "is a folder with weights in safetensors format, and no GGUF file", CONVERT)
    return StudyError(str(path), "is a folder without a GGUF file", "name a .gguf file")


def foreign(data: bytes, size: int, name: str = "") -> Mistaken | None:
    """What a file is, by its first bytes, size and name; None for one that begins as a GGUF or like nothing known."""
    if data[:4] == b"GGUF":
        return None
    start = data[:LOOKED_AT].lstrip(b"\xef\xbb\xbf \t\r\n")
    if not size:
        return Mistaken("is empty: a download that never began, or a disk that was full", FETCH)
    if pointer := POINTER.match(data[:LOOKED_AT]):
        what = f"is a Git LFS pointer to a file of {int(pointer[2]):,} bytes, not that file"
        return Mistaken(what, f"`git lfs pull` in its repository, or {FETCH}")
    if b"/annex/objects/" in data[:LOOKED_AT]:
        return Mistaken("is a git-annex pointer, not the file", "`git annex get FILE` in its repository")
    if is_safetensors(data, size):
        return Mistaken("is weights in safetensors format", CONVERT)
    return _text(start, name) or _packed(data) or _other(data, name)


def is_safetensors(data: bytes, size: int) -> bool:
    """Whether a file begins as the format does: with the length of a JSON object, and that object."""
    return 0 < int.from_bytes(data[:8], "little") < size and bool(re.match(rb"\s*\{", data[8:64]))


def _text(start: bytes, name: str) -> Mistaken | None:
    lower = start[:1024].lower()
    if lower.startswith((b"<!doctype html", b"<html", b"<head")) or b"<html" in lower:
        title = re.search(rb"<title[^>]*>([^<]{1,200})", start, re.IGNORECASE)
        named = f" ({printable(title[1].strip(), 60)})" if title else ""
        return Mistaken(f"is a web page{named}, saved in place of a file", f"{FETCH}; a gated one needs a login")
    if lower.startswith((b"<?xml", b"<error")):
        return Mistaken("is a message of a server in XML, saved in place of a file", f"{FETCH}: links expire")
    if lower.startswith((b"{", b"[")):
        return Mistaken("is JSON, such as an error of a server or a configuration", FETCH)
    if lower.startswith((b"invalid ", b"access to ", b"entry not found", b"not found")):
        return Mistaken(f"is a message of a server ({printable(start[:60])!r})", FETCH)
    return None


def _packed(data: bytes) -> Mistaken | None:
    if data.startswith(b"PK\x03\x04") and re.search(rb"/(?:data\.pkl|\.format_version|version)", data[:LOOKED_AT]):
        return Mistaken("is a PyTorch checkpoint", f"take the weights in safetensors format, then {CONVERT}")
    if re.match(rb"\x80[\x02-\x05]", data):
        return Mistaken("is a Python pickle, such as an old PyTorch checkpoint", f"take safetensors, then {CONVERT}")
    for magic, (what, command) in PACKED.items():
        if data.startswith(magic):
            return Mistaken(f"is {what}", f"unpack it with `{command}`, and name the file inside")
    if data[257:262] == b"ustar":
        return Mistaken("is a tar archive", "unpack it with `tar xf`, and name the file inside")
    return None


def _other(data: bytes, name: str) -> Mistaken | None:
    if data.startswith(BEFORE_GGUF):
        return Mistaken("is a model in the format before GGUF, which llama.cpp no longer reads", FETCH)
    if re.match(rb".{2}\0\0.\0\0\0(?:blk|output|token)[.\w]{1,56}", data, re.DOTALL):
        mend = "llama-imatrix --in-file FILE -o OUT.gguf"
        return Mistaken("is an importance matrix in llama.cpp's older format, which has no header", mend)
    if not data[:LOOKED_AT].strip(b"\0"):
        return Mistaken("begins with zeros: room that a download reserved and did not fill", f"{REST}, or {FETCH}")
    return None


def damage_of(what: str, start: int, length: int, size: int) -> str:
    """What reaches beyond the end of a file, in numbers that mean something: a length read from noise does not."""
    if start + length < 2 * size:
        return f"needs {start + length:,} bytes for {what}, the file has {size:,}"
    return f"{what} would reach far beyond its {size:,} bytes"
