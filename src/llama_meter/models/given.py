"""Model files that a user gives by path: what each is, the name of its rows, and whether it may be measured.

A file is never copied, moved or written to.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from gguf import LlamaFileType

from llama_meter.disk import expanded, plain, plain_name
from llama_meter.errors import StudyError
from llama_meter.models import check, header, registry, tensors
from llama_meter.models.check import Finding, blocking
from llama_meter.models.header import PART, Header, check_path, type_name
from llama_meter.models.registry import ARCHS, FLOATS, GIVEN, ModelSpec

TYPE = re.compile(r"[.\-_ ](?:i?q\d|f16|f32|bf16|tq\d|mxfp4)\w*$", re.IGNORECASE)  # at the end of a file's stem
NO_NAME = ("", "n/a", "none", "null", "unknown", "unnamed", "model")  # what converters write where there is none
BEYOND_ORACLE = ("tensor-scale", "rope-scaling")  # findings about what the oracle does not compute
LONGEST = 40  # characters of a name


@dataclass(frozen=True)
class Given:
    """A file: where it lies, all its parts, what it states, and the findings of its check."""

    path: Path
    parts: tuple[Path, ...]
    spec: ModelSpec
    dtype: str
    sha256: str
    findings: tuple[Finding, ...]

    @property
    def file(self) -> tuple[str, str, str]:
        """As cells name it: model, scale and type."""
        return self.spec.name, GIVEN, self.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.stat().st_size for part in self.parts)


FILES: dict[tuple[str, str, str], Given] = {}  # of this process, by the names that cells give them


def give(named: str | Iterable[Any]) -> list[Given]:
    """The files that a parameter names: a path, several with commas between them, or a list; each once.

    Raises StudyError for a path that is no file, a file that is no model, a part that is missing, and a blocking
    finding of the check.
    """
    models = []
    for path in split(named):
        model = _one(path)
        FILES[model.file] = model
        registry.give(model.spec, model.dtype, model.path)
        models.append(model)
    return list(dict.fromkeys(models))


def has_oracle(file: tuple[str, str, str]) -> bool:
    """Whether the oracle can judge a given file: PLaMo in one part, with nothing that the oracle does not compute."""
    own = FILES[file]
    beyond = any(finding.code in BEYOND_ORACLE for finding in own.findings)
    return own.spec.arch in ARCHS and len(own.parts) == 1 and not beyond


def matrix_bytes(file: tuple[str, str, str]) -> dict[str, int]:
    """Bytes of a given file's matrices by tensor type; an embedding that is only looked up is none."""
    sizes: dict[str, int] = {}
    records = [tensor for part in FILES[file].parts for tensor in header.read(part).tensors]
    looked_up = {"token_embd.weight"} if any(tensor.name == "output.weight" for tensor in records) else set()
    for tensor in records:
        if len(header.core(header.shape(tensor))) > 1 and tensor.name not in looked_up and "conv1d" not in tensor.name:
            sizes[type_name(tensor)] = sizes.get(type_name(tensor), 0) + tensor.n_bytes
    return sizes


def split(named: str | Iterable[Any]) -> list[Path]:
    """The paths of a parameter: a list, also as JSON; one path, whatever commas it has; or several between commas."""
    if isinstance(named, str) and named.startswith('["'):
        named = msgspec.json.decode(named)
    texts = [named.strip()] if isinstance(named, str) else [str(path) for path in named]
    if len(texts) == 1 and not os.path.exists(expanded(texts[0])):
        texts = [part.strip() for part in texts[0].split(",")]
    return [expanded(text) for text in texts if text]


def _one(path: Path) -> Given:
    check_path(path)
    whole = path.resolve()
    opened = header.read(whole if path.suffix.lower() == ".gguf" or PART.fullmatch(whole.name) else path)
    header.require_model(opened)
    parts = _parts(path, whole, opened)
    heads = [opened, *(header.read(part) for part in parts[1:])]
    findings = tuple(_checked(heads))
    if worst := blocking(findings):
        raise StudyError(str(path), f"must not be measured: {worst[0].evidence}", worst[0].mend)
    digest, spec, dtype = tensors.sha256_of_parts(parts), check.spec_of(heads, _name(path, opened)), _dtype(heads)
    clash = FILES.get((spec.name, GIVEN, dtype))
    if clash and clash.sha256 != digest:
        spec = replace(spec, name=f"{spec.name} {digest[:6]}")
    return Given(path.absolute(), parts, spec, dtype, digest, findings)


def _parts(path: Path, whole: Path, opened: Header) -> tuple[Path, ...]:
    """All parts of a split file, the given one first. StudyError for another part, and where one is missing."""
    number, count = header.split_of(opened)
    if count < 2:
        return (whole,)
    named = header.named_parts(path, count)
    if number > 1 or not named:
        first = named[0] if named else f"NAME-00001-of-{count:05d}.gguf"
        raise StudyError(str(path), f"is part {number} of {count}", f"give the first part, named as {first}")
    if missing := [part for part in named if not part.is_file()]:
        why = f"is the first of {count} parts, and {len(missing)} are missing (first: {missing[0].name})"
        raise StudyError(str(path), why, f"fetch all parts into {path.parent}")
    return tuple(named)


def _checked(heads: Sequence[Header]) -> list[Finding]:
    """Findings of a whole file of PLaMo; of other files the engine is the judge."""
    if heads[0].arch not in ARCHS:
        return []
    if len(heads) > 1:
        why = "is split, and only whole files of PLaMo are checked tensor by tensor"
        return [Finding("note", "split", why, check.MERGE)]
    return check.of_header(heads[0])


def _name(path: Path, opened: Header) -> str:
    """`general.name`, else the stem without type under which it was first given: printable, short, and no path."""
    stated = " ".join((opened.text("general.name") or "").split())
    if stated.lower() not in NO_NAME:
        return _short(stated)
    part = PART.fullmatch(path.name)
    stem = part[1] if part else path.name.removesuffix(".gguf")
    return tensors.first_name(path, _short(TYPE.sub("", stem) or stem))


def _short(name: str) -> str:
    return plain_name(plain(name, kept="")[:LONGEST].strip()) or "unnamed"


def _dtype(heads: Sequence[Header]) -> str:
    """The file's type: llama.cpp's file type where most bytes of its layers are of that family, else their own type.

    Exceptions for `ssm_out` are named. A label is believed by its family, because mixtures such as Q4_K_M hold several
    types; embeddings do not count where there are layers, because a small model's are most of it.
    """
    n_bytes: dict[str, int] = {}
    every = [tensor for head in heads for tensor in head.tensors]
    for tensor in [tensor for tensor in every if tensor.name.startswith("blk.")] or every:
        n_bytes[type_name(tensor)] = n_bytes.get(type_name(tensor), 0) + tensor.n_bytes
    most = max(n_bytes, key=lambda name: n_bytes[name], default="")
    said = heads[0].number("general.file_type")
    names = {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    dtype = names.get(said, most) if said is not None else most  # type: ignore[call-overload] # a float equals its int
    if dtype.partition("_")[0] != most.partition("_")[0]:
        dtype = most
    apart = {type_name(t) for head in heads for t in head.tensors if t.name.endswith("ssm_out.weight")}
    kept = apart & set(FLOATS)
    return f"{dtype}-ssm_out-{kept.pop()}" if len(apart) == 1 and kept and dtype not in FLOATS else dtype
