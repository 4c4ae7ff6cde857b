"""Whether a file of PLaMo states a model that the engine computes rightly: what its header shows, without an engine.

The engine itself says what else it cannot load, in a process with limits (measure/checking.py). A pinned SHA-256 says
whether weights are the released ones. The files of a request are checked and named here; none is copied, moved or
written to.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from llama_meter.disk import expanded, growing, plain, plain_name, printable
from llama_meter.errors import StudyError, offer_check
from llama_meter.models import registry, tensors
from llama_meter.models.header import (
    AGAIN,
    PART,
    Header,
    check_path,
    core,
    named_parts,
    read,
    require_model,
    shape,
    split_of,
    type_name,
)
from llama_meter.models.recipes import KINDS
from llama_meter.models.registry import ARCHS, FILE_SCALE, FLOATS, ModelFile, ModelSpec
from llama_meter.models.synthetic import check_space

SCALES = (".scale", ".input_scale")  # of a whole tensor: llama.cpp loads them beside any matrix, the oracle knows none
REPAIR = "plamo-study models check FILE --repair OUT"
HANG = "lost rotation (D1): llama.cpp takes the rotary dimensions from layer 0, and the CPU backend never returns"
KEEP = "quantize again: plamo-study models quantize SOURCE --type Q4_0-ssm_out-BF16"
SELF = "nothing to mend: the gate holds the engine against itself"
TOKENS = "tokenizer.ggml.tokens"
MERGE = "llama-gguf-split --merge FIRST-PART OUT.gguf, then use OUT.gguf"
SHOWN = 4  # names listed before the rest is only counted
TYPE = re.compile(r"[.\-_ ](?:i?q\d|f16|f32|bf16|tq\d|mxfp4)\w*$", re.IGNORECASE)  # at the end of a file's stem
NO_NAME = ("", "n/a", "none", "null", "unknown", "unnamed", "model")  # what converters write where there is none
LONGEST = 40  # characters of a name
SLACK = 1 << 20  # bytes that a repair may add


@dataclass(frozen=True)
class Finding:
    """`blocking`: numbers from this file are meaningless; `warning`: they may be; `note`: for information.

    `code` is stable, for scripts; `evidence` and `mend` are sentences for people.
    """

    severity: Literal["blocking", "warning", "note"]
    code: str
    evidence: str
    mend: str


def block(code: str, why: str, mend: str = AGAIN) -> Finding:
    """A finding that forbids using the file."""
    return Finding("blocking", code, why, mend)


def blocking(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that forbid using the file."""
    return [finding for finding in findings if finding.severity == "blocking"]


def listed(names: Iterable[object]) -> str:
    """The first few of many names, and how many more there are."""
    shown = [printable(name) for name in names]
    rest = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + rest


@dataclass(frozen=True)
class FileSpec(ModelSpec):
    """What a header states; 0 where it does not, and no limit of the context. Of PLaMo everything.

    `weights`: as many as the file holds. `recurrent`: which layers of a PLaMo are Mamba.
    """

    weights: int = 0
    recurrent: tuple[bool, ...] = ()

    @property
    def n_params(self) -> int:
        """Number of weights in the file."""
        return self.weights

    def is_mamba(self, layer: int) -> bool:
        """As the file says: a layer without key/value heads."""
        return self.recurrent[layer]


def spec_of(heads: Sequence[Header], name: str) -> FileSpec:
    """The shape that a file with all its parts states."""
    head, every = heads[0], [tensor for each in heads for tensor in each.tensors]
    number, hidden, n_heads = head.size_of, head.size_of("embedding_length"), head.size_of("attention.head_count")
    mamba_heads, window = number("ssm.time_step_rank"), number("attention.sliding_window")
    numbers: dict[str, Any] = {
        "hidden": hidden,
        "layers": number("block_count"),
        "heads": n_heads,
        "kv_heads": number("attention.head_count_kv") or n_heads,
        "head_dim": number("attention.key_length") or hidden // max(n_heads, 1),
        "ffn": number("feed_forward_length"),
        "vocab": head.count(TOKENS) or number("vocab_size"),
        "context_length": number("context_length") or 1 << 30,
        "d_state": number("ssm.state_size"),
        "d_conv": number("ssm.conv_kernel"),
        "tied": all(tensor.name != "output.weight" for tensor in every),
        "weights": sum(tensor.n_elements for tensor in every),
    }
    if head.arch not in ARCHS:
        return FileSpec(name=name, scale=FILE_SCALE, arch=head.arch, rms_eps=0.0, rope_theta=0.0, **numbers)
    if numbers["layers"] > len(every):
        why = f"states {numbers['layers']:,} layers and holds {len(every)} tensors"
        raise StudyError(str(head.path), why, AGAIN)
    kv_heads = head.value(f"{head.arch}.attention.head_count_kv")
    by_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * numbers["layers"]
    if len(by_layer) < numbers["layers"]:
        why = f"states {numbers['layers']} layers, and key/value heads of {len(by_layer)}"
        raise StudyError(str(head.path), why, AGAIN)
    if head.arch == "plamo2":
        numbers |= {"mamba_heads": mamba_heads, "mamba_head_dim": number("ssm.inner_size") // max(mamba_heads, 1)}
    else:
        pattern = head.number("plamo3.attention.sliding_window_pattern")
        theta = _real(head, "rope.freq_base_swa", 1e4) if window else 0.0
        numbers |= {"window": window, "window_pattern": int(pattern or 8), "rope_theta_swa": theta}
    return FileSpec(
        name=name,
        scale=FILE_SCALE,
        arch=head.arch,
        recurrent=tuple(n == 0 for n in by_layer),
        rms_eps=_real(head, "attention.layer_norm_rms_epsilon", 0.0),
        rope_theta=_real(head, "rope.freq_base", 1e4),
        **numbers,
    )


def _real(head: Header, name: str, default: float) -> float:
    """A number with the seven digits that an f32 has."""
    value = head.number(f"{head.arch}.{name}")
    return default if value is None else float(f"{value:.7g}")


def inspect(path: Path) -> tuple[list[Finding], Header | None]:
    """Findings about a file, without an engine, and its header if it can be read.

    Raises StudyError when there is no file.
    """
    check_path(path)
    try:
        header = read(path)
        require_model(header)
        if split_of(header) != (1, 1):
            return [block("split", "is a part of a model: only whole files are checked", MERGE)], None
        return of_header(header), header
    except StudyError as error:
        return [block("unusable", error.why, error.mend)], None


def of_header(header: Header) -> list[Finding]:
    """Findings about a whole file of PLaMo; of any other file one: what it is."""
    if header.arch not in ARCHS:
        why = f"general.architecture is {header.arch!r:.60}, not one of {', '.join(ARCHS)}"
        return [block("architecture", why, "name a PLaMo 2 or PLaMo 3 file")]
    spec = spec_of([header], header.path.name)
    return [*_rotation(header, spec), *_tensors(header.tensors, spec)]


def _rotation(header: Header, spec: FileSpec) -> Iterator[Finding]:
    """The head counts that lose it, and bases unlike those of the registry's model of this shape."""
    heads = header.value(f"{spec.arch}.attention.head_count")
    if isinstance(heads, list) and heads[0] == 0:
        yield block("head-count-array", f"the head count is an array with 0 for layer 0. {HANG}", REPAIR)
    if (n_rot := header.size_of("rope.dimension_count", spec.head_dim)) != spec.head_dim:
        yield block("rope-dimensions", f"rope.dimension_count is {n_rot}, not the head size {spec.head_dim}")
    kind = header.text(f"{spec.arch}.rope.scaling.type")
    if kind not in (None, "none"):
        why = f"rope.scaling.type is {printable(kind)}, which the oracle does not compute"
        yield Finding("note", "rope-scaling", why, SELF)
    models = [model for model in registry.load().values() if model.arch == spec.arch]
    same = [model for model in models if _sizes(model) == _sizes(spec)] or models
    for field in ("rope_theta", "rope_theta_swa"):
        here, there = getattr(spec, field), sorted({getattr(model, field) for model in same})
        if here not in there:
            of = listed(dict.fromkeys(model.name for model in same))
            why = f"{field} is {here:g}, and {listed(f'{base:g}' for base in there)} in {of}"
            key = "rope.freq_base" + field.removeprefix("rope_theta")
            mend = f"gguf-set-metadata FILE {spec.arch}.{key} {there[-1]:g}"
            yield Finding("warning", field.replace("_", "-"), why, mend)


def _sizes(spec: ModelSpec) -> tuple[int, ...]:
    return (spec.hidden, spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn, spec.mamba_heads, spec.vocab)


def _tensors(here: Sequence[ReaderTensor], spec: FileSpec) -> Iterator[Finding]:
    """Tensors that are missing, that no such model has, and that are of another shape."""
    wanted, names = spec.tensor_shapes(), {tensor.name for tensor in here}
    scales = {name for name in names if name.endswith(SCALES) and f"{name.rpartition('.')[0]}.weight" in wanted}
    if missing := wanted.keys() - names:
        yield block("tensor-missing", f"{len(missing)} tensors are missing: {listed(sorted(missing))}")
    if extra := names - wanted.keys() - scales:
        yield block("tensor-extra", f"{len(extra)} tensors belong to no such model: {listed(sorted(extra))}")
    if wrong := [t for t in here if t.name in wanted and core(shape(t)) != core(wanted[t.name])]:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        why = f"{wrong[0].name} is {shape(wrong[0])}, the metadata asks for {wanted[wrong[0].name]}{more}"
        yield block("tensor-shape", why)
    if scales:
        why = f"{len(scales)} tensors scale others as a whole: {listed(sorted(scales))}; the oracle does not"
        yield Finding("note", "tensor-scale", why, SELF)


def ssm_out_findings(header: Header, gpu: bool) -> list[Finding]:
    """Half-precision overflow (D5): the input of `ssm_out` is unnormalised, and Metal's kernels may cast it to F16.

    Read in llama.cpp 0c1e57098, ggml-metal/kernels/mul_mm.metal: from nine columns on, in every type but BF16. `gpu`:
    the engine has one.
    """
    types = sorted({type_name(t) for t in header.tensors if t.name.endswith("ssm_out.weight")} - {"BF16"})
    if not types:
        return []
    why = f"ssm_out is {listed(types)}: Metal casts a prompt's input of it to F16, which ends at 65,504 (D5)"
    return [Finding("warning" if gpu else "note", "ssm-out-type", why, KEEP)]


def repair(path: Path, out: Path) -> str:
    """Write `path` to `out` with one head count in place of an array that starts with 0 (lost rotation, D1).

    The tensors are the same. Returns what was changed; nothing is left behind on failure. Raises StudyError when there
    is nothing to correct, when `out` is the file itself, and when the disk is too full.
    """
    header = read(path)
    if out.exists() and out.samefile(path):
        raise StudyError(str(out), "is the file to be repaired", "name another file: a repair is never in place")
    key = f"{header.arch}.attention.head_count"
    heads = header.value(key)
    if not isinstance(heads, list) or heads[0] != 0 or len(set(heads)) != 2:
        raise StudyError(str(path), "has nothing that can be repaired", offer_check(path))
    check_space(out, header.size + SLACK)
    with growing(out) as partial:
        reader, writer = GGUFReader(path), GGUFWriter(partial, header.arch)
        writer.data_alignment = reader.alignment
        copy_with_new_metadata(reader, writer, {key: MetadataDetails(GGUFValueType.UINT32, max(heads))}, [])
    return f"{key} is {max(heads)} instead of an array that starts with 0"


# ---------------------------------------------------------------- the files of a request


def requested(named: str | Iterable[Any]) -> list[ModelFile]:
    """The files that a parameter names: a path, several with commas between them, or a list; each once.

    Raises StudyError for a path that is no file, a file that is no model, a part that is missing, and a blocking
    finding of the check.
    """
    return list({model.file: model for model in map(_one, paths_of(named))}.values())


def paths_of(named: str | Iterable[Any]) -> list[Path]:
    """The paths of a parameter: a list, also as JSON; one path, whatever commas it has; or several between commas."""
    if isinstance(named, str) and named.startswith('["'):
        named = msgspec.json.decode(named)
    texts = [named.strip()] if isinstance(named, str) else [str(path) for path in named]
    if len(texts) == 1 and not os.path.exists(expanded(texts[0])):
        texts = [part.strip() for part in texts[0].split(",")]
    return [expanded(text) for text in texts if text]


def _one(path: Path) -> ModelFile:
    whole = path.resolve()
    header = read(path)
    require_model(header)
    parts = _parts(path, whole, header)
    heads = [header, *(read(part) for part in parts[1:])]
    findings = _checked(heads)
    if worst := blocking(findings):
        raise StudyError(str(path), f"must not be measured: {worst[0].evidence}", worst[0].mend)
    return file_of(path, parts, heads, findings)


def file_of(path: Path, parts: tuple[Path, ...], heads: Sequence[Header], findings: Iterable[Finding]) -> ModelFile:
    """Name a file, of which all parts were read and checked, and make it known to this process."""
    digest, spec, dtype = tensors.sha256_of_parts(parts), spec_of(heads, _name(path, heads[0])), _dtype(heads)
    clash = registry.FILES.get((spec.name, FILE_SCALE, dtype))
    if clash and clash.sha256 != digest:
        spec = replace(spec, name=f"{spec.name} {digest[:6]}")
    model = ModelFile(path.absolute(), parts, spec, dtype, digest, tuple(finding.code for finding in findings))
    registry.FILES[model.file] = model
    return model


def _parts(path: Path, whole: Path, header: Header) -> tuple[Path, ...]:
    """All parts of a split file, the named one first. StudyError for another part, and where one is missing."""
    number, count = split_of(header)
    if count < 2:
        return (whole,)
    beside = named_parts(path, count)
    if number > 1 or not beside:
        first = beside[0] if beside else f"NAME-00001-of-{count:05d}.gguf"
        raise StudyError(str(path), f"is part {number} of {count}", f"give the first part, named as {first}")
    if missing := [part for part in beside if not part.is_file()]:
        why = f"is the first of {count} parts, and {len(missing)} are missing (first: {missing[0].name})"
        raise StudyError(str(path), why, f"fetch all parts into {path.parent}")
    return tuple(beside)


def _checked(heads: Sequence[Header]) -> list[Finding]:
    """Findings of a whole file of PLaMo; of other files the engine is the judge."""
    if heads[0].arch not in ARCHS:
        return []
    if len(heads) > 1:
        why = "is split, and only whole files of PLaMo are checked tensor by tensor"
        return [Finding("note", "split", why, MERGE)]
    return of_header(heads[0])


def _name(path: Path, header: Header) -> str:
    """`general.name`, else the stem without type that it was first measured under: printable, short, and no path."""
    stated = " ".join((header.text("general.name") or "").split())
    if stated.lower() not in NO_NAME:
        return _short(stated)
    part = PART.fullmatch(path.name)
    stem = part[1] if part else path.name.removesuffix(".gguf")
    return tensors.first_name(path, _short(TYPE.sub("", stem) or stem))


def _short(name: str) -> str:
    return plain_name(plain(name, allowed="")[:LONGEST].strip()) or "unnamed"


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
    number = heads[0].number("general.file_type")
    dtype = next((name for name, kind in KINDS.items() if kind == number), most)
    if dtype.partition("_")[0] != most.partition("_")[0]:
        dtype = most
    apart = {type_name(t) for head in heads for t in head.tensors if t.name.endswith("ssm_out.weight")}
    floats = apart & set(FLOATS)
    return f"{dtype}-ssm_out-{floats.pop()}" if len(apart) == 1 and floats and dtype not in FLOATS else dtype
