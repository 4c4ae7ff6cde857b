"""Recipes of quantization by name, and a dry run: the type and size of every tensor, without running the quantizer.

It does not know the quantizer, nor why it prefers a type (models/mixture.py does).
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from llama_meter import paths
from llama_meter.errors import StudyError, offer, offer_check
from llama_meter.models import registry, tensors
from llama_meter.models.file_types import FILE_TYPES, NOT_WRITTEN
from llama_meter.models.finding import printable
from llama_meter.models.imatrix import Imatrix
from llama_meter.models.mixture import FLOATS, HEADS, Mixture, fitting, quantizable
from llama_meter.models.tensors import TensorInfo

KEPT = (*dict.fromkeys(default for _, default in FILE_TYPES.values()), "MXFP4")  # types of single tensors
NAMES = f"{', '.join(FILE_TYPES)}, and each with exceptions after it, as Q4_0-ssm_out-F16"
CHOOSE = "choose one of these"
IMATRIX = "add --imatrix FILE, or --imatrix-text FILE to compute one from a text"


@dataclass(frozen=True)
class Recipe:
    """A file type of llama.cpp and the tensor kinds that get a type of their own: `keep` holds (kind, type)."""

    file_type: str
    keep: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """E.g. "Q4_0-ssm_out-F16"."""
        return "-".join([self.file_type, *(word for pair in self.keep for word in pair)])


@dataclass(frozen=True)
class Step:
    """One tensor before and after. `wanted`: the type it would get if its rows were divisible by that type's block."""

    before: TensorInfo
    after: TensorInfo
    wanted: str


@dataclass(frozen=True)
class KindSize:
    """All tensors of one kind: types by descending bytes, sizes in bytes; `fallbacks` counts tensors."""

    kind: str
    n_tensors: int
    types_before: str
    bytes_before: int
    types_after: str
    bytes_after: int
    fallbacks: int


def _named() -> dict[str, Recipe]:
    plain = [Recipe(name) for name in FILE_TYPES]
    exempt = [Recipe(name, (("ssm_out", "BF16"),)) for name in FILE_TYPES if name not in FLOATS]
    public = Recipe("Q4_0", (("ssm_out", "F16"),))  # of the public PLaMo 2 translation benchmark of 2026-10
    return {recipe.name: recipe for recipe in (*plain, *exempt, public)}


RECIPES = _named()


def recipe(name: str, keep: Sequence[str] = ()) -> Recipe:
    """A recipe by name, any case, with further exceptions KIND=TYPE; a kind named again replaces the recipe's own.

    Raises StudyError for an unknown name, an unknown type, or a word that is no KIND=TYPE.
    """
    base = {key.lower(): recipe for key, recipe in RECIPES.items()}.get(name.lower())
    if base is None and name.upper() in NOT_WRITTEN:
        raise StudyError(f"type {name.upper()}", *NOT_WRITTEN[name.upper()])
    if base is None:
        raise StudyError(f"recipe {name!r}", f"unknown; known: {NAMES}", CHOOSE)
    return replace(base, keep=tuple((dict(base.keep) | dict(_exception(word) for word in keep)).items()))


def by_name(name: str) -> Recipe:
    """The recipe a file's name states: a file type, then kinds and types in turn, as `Recipe.name` joins them.

    Raises StudyError for a name that no recipe has.
    """
    file_type, *words = name.split("-")
    pairs = tuple(zip(words[::2], words[1::2], strict=False))
    result = Recipe(file_type, pairs)
    if file_type not in FILE_TYPES or len(words) % 2 or any(dtype not in KEPT for _, dtype in pairs):
        raise StudyError(f"type {name!r}", f"unknown; known: {NAMES}", CHOOSE)
    return result


def model_path(name: str, scale: str, dtype: str) -> Path:
    """Path of a registered model's file, data/models/<name>.<scale>.<dtype>.gguf; the file need not exist.

    `dtype` is a tensor type or the name of a recipe; StudyError for any other, except at scale weights, where a
    publisher chose the name. At scale "file" it is the path that was given.
    """
    if scale == registry.GIVEN:
        return registry.given_path(name, dtype)
    model = registry.spec(name, scale)
    if scale != "weights":
        by_name(dtype)
    return paths.MODELS / f"{model.name}.{model.scale}.{dtype}.gguf"


def _exception(word: str) -> tuple[str, str]:
    kind, _, dtype = word.partition("=")
    if not kind or not dtype:
        raise StudyError(f"--keep {word}", "is not KIND=TYPE", "--keep ssm_out=BF16")
    if dtype.upper() not in KEPT:
        raise StudyError(f"--keep {word}", f"type {dtype!r} is unknown; known: {', '.join(KEPT)}", CHOOSE)
    return kind.lower(), dtype.upper()


def chosen(name: str | None, file_type: str | None, keep: Sequence[str] = ()) -> Recipe:
    """The recipe that --recipe or --type selects. StudyError when both or neither are given."""
    words = [word for word in (name, file_type) if word]
    if len(words) != 1:
        why = "names a recipe and a type" if words else f"names no recipe; known: {NAMES}"
        raise StudyError("the command line", why, "give --recipe NAME or --type TYPE")
    return recipe(words[0], keep)


def default_out(source: Path, recipe: Recipe) -> Path:
    """The default path of a quantized file: beside its source, with the recipe in place of the type."""
    stem, _, last = source.stem.rpartition(".")
    base = stem if stem and last.upper() in KEPT else source.stem
    return source.with_name(f"{base}.{recipe.name}.gguf")


def plan_sizes(source: Path, recipe: Recipe, imatrix: Imatrix | bool = False, requantize: bool = False) -> list[Step]:
    """Every tensor before and after quantization, in the quantizer's order. Reads the header only.

    An importance matrix changes some types (True: there will be one) and, when given, must be this model's.
    Raises StudyError for a source that cannot be read, is one part of several, or is quantized already (unless
    `requantize`); for an exception whose kind the file lacks; for a type that needs an importance matrix, and for a
    matrix of another model.
    """
    facts, table = tensors.metadata(source), sorted(tensors.tensor_table(source), key=lambda t: _order(source, t.name))
    _check_source(source, table, facts, requantize)
    _check_kinds(source, recipe, table)
    mixture = Mixture(recipe.file_type, table, facts, imatrix is not False)
    steps = [_step(tensor, mixture, dict(recipe.keep)) for tensor in table]
    blind = [step for step in steps if mixture.needs_imatrix(step.after, step.after.dtype)]
    if blind and imatrix is False:
        why = f"needs an importance matrix: {blind[0].after.name} would be {blind[0].after.dtype}"
        raise StudyError(f"recipe {recipe.name}", why, IMATRIX)
    if isinstance(imatrix, Imatrix):
        _check_imatrix(imatrix, source, steps)
    return steps


def by_kind(steps: Sequence[Step]) -> list[KindSize]:
    """Steps summed by tensor kind, the largest source first."""
    groups: dict[str, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.before.kind, []).append(step)
    sizes = [_kind_size(kind, group) for kind, group in groups.items()]
    return sorted(sizes, key=lambda size: -size.bytes_before)


def quantizer_arguments(recipe: Recipe) -> tuple[int, list[tuple[str, int]], dict[str, int]]:
    """The recipe as `llama_model_quantize` takes it: llama_ftype, (pattern, ggml type) pairs, metadata to override.

    The quantizer reads patterns only when the file type is a quantized one. So a float type with exceptions is passed
    as Q8_0 with a last pattern that matches everything, and the metadata corrects the file type.
    """
    file_type, default = FILE_TYPES[recipe.file_type]
    patterns = [(rf"^(blk\.[0-9]+\.)?{re.escape(kind)}\.weight$", _ggml(dtype)) for kind, dtype in recipe.keep]
    if default not in FLOATS or not patterns:
        return file_type, patterns, {}
    return FILE_TYPES["Q8_0"][0], [*patterns, (".*", _ggml(default))], {"general.file_type": file_type}


def _step(tensor: TensorInfo, mixture: Mixture, keep: dict[str, str]) -> Step:
    flat = replace(tensor, shape=_without_ones(tensor.shape))
    if not quantizable(tensor):
        return Step(tensor, flat, tensor.dtype)
    wanted = keep.get(tensor.kind) or mixture.choose(tensor)
    return Step(tensor, replace(flat, dtype=fitting(wanted, tensor.shape[-1])), wanted)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """llama.cpp writes a matrix of one row, such as the key norm of a single key/value head, as a vector."""
    return _without_ones(shape[1:]) if len(shape) > 1 and shape[0] == 1 else shape


def _ggml(dtype: str) -> int:
    return int(GGMLQuantizationType[dtype])


def _kind_size(kind: str, steps: list[Step]) -> KindSize:
    before, after = ([getattr(step, side) for step in steps] for side in ("before", "after"))
    fallbacks = sum(step.wanted != step.after.dtype for step in steps)
    sizes = [(_types(side), sum(tensor.n_bytes for tensor in side)) for side in (before, after)]
    return KindSize(kind, len(steps), *sizes[0], *sizes[1], fallbacks)


def _types(side: list[TensorInfo]) -> str:
    total: Counter[str] = Counter()
    for tensor in side:
        total[tensor.dtype] += tensor.n_bytes
    return ", ".join(name for name, _ in total.most_common())


def _order(source: Path, name: str) -> tuple[int, bytes]:
    """llama.cpp's order of tensors: by block, then by name; tensors outside blocks come first."""
    if not name.startswith("blk."):
        return -1, name.encode()
    block = re.match(r"blk\.([0-9]+)\..", name)
    if block is None:
        raise StudyError(str(source), f"tensor {name!r} belongs to no block", offer_check(source))
    return int(block[1]), name.encode()


def _check_source(source: Path, table: list[TensorInfo], facts: dict[str, Any], requantize: bool) -> None:
    arch, mend = facts["general.architecture"], offer_check(source)
    if f"{arch}.block_count" not in facts:
        raise StudyError(str(source), "does not say how many blocks it has", mend)
    for key in (f"{arch}.block_count", "split.count", *(f"{arch}.{key}" for key in HEADS)):
        value = facts.get(key, 1)
        layers = value if isinstance(value, list) and key.endswith(HEADS) else [value]
        if not layers or any(type(number) is not int for number in layers):
            raise StudyError(str(source), f"{key} is {printable(value)}, and no whole number", mend)
    if int(facts.get("split.count", 1)) > 1:
        raise StudyError(str(source), "is one part of several", "merge the parts with llama-gguf-split --merge")
    types = {tensor.dtype for tensor in table} - set(FLOATS)
    if types and not requantize:
        why = f"is quantized already ({', '.join(sorted(types))}): every further rounding adds to the first"
        raise StudyError(str(source), why, "name an F32, F16 or BF16 file, or add --requantize")


def _check_kinds(source: Path, recipe: Recipe, table: list[TensorInfo]) -> None:
    kinds = sorted({tensor.kind for tensor in table if quantizable(tensor)})
    for kind, dtype in recipe.keep:
        if kind not in kinds:
            why = f"{source.name} has no {kind!r} that could change its type; it has {', '.join(kinds)}"
            raise StudyError(f"--keep {kind}={dtype}", why, CHOOSE)


def _check_imatrix(imatrix: Imatrix, source: Path, steps: list[Step]) -> None:
    """Require an entry of the right width for every quantized matrix in a block: the quantizer only warns."""
    for step in steps:
        if step.before.layer is None or step.after.dtype in FLOATS or step.before.dtype == step.after.dtype:
            continue
        sums = imatrix.sums.get(step.before.name)
        if sums is None or len(sums) != step.before.shape[-1]:
            entry = "no entry" if sums is None else f"{len(sums)} columns"
            why = f"has {entry} for {step.before.name} of {source.name}: it was computed on another model"
            raise StudyError("importance matrix", why, offer(f"models quantize {source} --imatrix-text FILE"))
