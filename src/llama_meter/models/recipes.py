"""Recipes of quantization by name, and what a source needs for them. The quantizer chooses the types of tensors."""

import re
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType, LlamaFileType

from llama_meter import paths
from llama_meter.errors import StudyError
from llama_meter.models import registry, tensors
from llama_meter.models.header import read, require_model, split_of
from llama_meter.models.registry import FILE_TYPES, FLOATS
from llama_meter.models.tensors import TensorInfo

KINDS = {kind.name.removeprefix("MOSTLY_").removeprefix("ALL_"): int(kind) for kind in LlamaFileType}  # llama_ftype
TYPES = {*FILE_TYPES.values(), "MXFP4"}  # of single tensors
NAMES = f"{', '.join(FILE_TYPES)}, and each with exceptions after it, as Q4_0-ssm_out-F16"
CHOOSE = "choose one of these"


@dataclass(frozen=True)
class Recipe:
    """A file type of llama.cpp and the tensor kinds that get a type of their own: `keep` holds (kind, type)."""

    file_type: str
    keep: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """E.g. "Q4_0-ssm_out-F16"."""
        return "-".join([self.file_type, *(word for pair in self.keep for word in pair)])


def by_name(name: str) -> Recipe:
    """The recipe of a name: a file type, then kinds and types in turn, as `Recipe.name` joins them.

    Raises StudyError for a name that no recipe has.
    """
    file_type, *words = name.split("-")
    pairs = tuple(zip(words[::2], words[1::2], strict=False))
    result = Recipe(file_type, pairs)
    if file_type not in FILE_TYPES or len(words) % 2 or any(dtype not in TYPES for _, dtype in pairs):
        raise StudyError(f"type {name!r}", f"unknown; known: {NAMES}", CHOOSE)
    return result


def model_path(name: str, scale: str, dtype: str) -> Path:
    """Path of a registered model's file, data/models/<name>.<scale>.<dtype>.gguf; the file need not exist.

    `dtype` is a tensor type or the name of a recipe; StudyError for any other. At scale "file" it is the path that a
    request names.
    """
    if scale == registry.FILE_SCALE:
        return registry.path_of(name, dtype)
    model = registry.spec(name, scale)
    by_name(dtype)
    return paths.MODELS / f"{model.name}.{model.scale}.{dtype}.gguf"


def default_out(source: Path, recipe: Recipe) -> Path:
    """The default path of a quantized file: beside its source, with the recipe in place of the type."""
    stem, _, last = source.stem.rpartition(".")
    base = stem if stem and last.upper() in TYPES else source.stem
    return source.with_name(f"{base}.{recipe.name}.gguf")


def check_source(source: Path, recipe: Recipe) -> None:
    """Require a source that the quantizer can turn into `recipe`. Reads the header only.

    Raises StudyError for a source that cannot be read, is one part of several, or is quantized already,
    and for an exception whose kind the file lacks.
    """
    table = tensors.tensor_table(source)
    header = read(source)
    require_model(header)
    if split_of(header) != (1, 1):
        raise StudyError(str(source), "is a part of a model", "llama-gguf-split --merge FIRST-PART OUT.gguf")
    types = {tensor.dtype for tensor in table} - set(FLOATS)
    if types:
        why = f"is quantized already ({', '.join(sorted(types))}): every further rounding adds to the first"
        raise StudyError(str(source), why, "name an F32, F16 or BF16 file")
    kinds = sorted({tensor.kind for tensor in table if quantizable(tensor)})
    for kind, dtype in recipe.keep:
        if kind not in kinds:
            why = f"{source.name} has no {kind!r} that could be {dtype}; it has {', '.join(kinds)}"
            raise StudyError(f"type {recipe.name}", why, CHOOSE)


def quantizable(tensor: TensorInfo) -> bool:
    """Whether a tensor is a matrix of several rows, but no norm or convolution (llama.cpp's own rule)."""
    is_matrix = len(tensor.shape) > 1 and tensor.shape[0] > 1
    return is_matrix and tensor.name.endswith(".weight") and not tensors.stays_f32(tensor.name)


def quantizer_arguments(recipe: Recipe) -> tuple[int, list[tuple[str, int]], dict[str, int]]:
    """The recipe as `llama_model_quantize` takes it: llama_ftype, (pattern, ggml type) pairs, metadata to override.

    The quantizer reads patterns only when the file type is a quantized one. So a float type with exceptions is passed
    as Q8_0 with a last pattern that matches everything, and the metadata corrects the file type.
    """
    file_type, default = KINDS[recipe.file_type], FILE_TYPES[recipe.file_type]
    patterns = [(rf"^(blk\.[0-9]+\.)?{re.escape(kind)}\.weight$", _ggml(dtype)) for kind, dtype in recipe.keep]
    if default not in FLOATS or not patterns:
        return file_type, patterns, {}
    return KINDS["Q8_0"], [*patterns, (".*", _ggml(default))], {"general.file_type": file_type}


def _ggml(dtype: str) -> int:
    return int(GGMLQuantizationType[dtype])
