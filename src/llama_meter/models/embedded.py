"""The embedded models: small, trained, committed as F16 files; their other types are written from those.

A model whose mini is `trained` in data/models.toml has its F16 file in the repository (model card:
data/models/README.md). It does not train, and knows nothing of random weights.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from llama_meter.disk import growing
from llama_meter.errors import StudyError, unwritable
from llama_meter.models import gguf_file, recipes, registry, tensors, values
from llama_meter.models.gguf_file import Progress
from llama_meter.models.registry import ModelSpec
from llama_meter.models.tensors import TensorInfo

SOURCE = "F16"  # the type that is committed
COMMITTED = Path(__file__).resolve().parents[3] / "data" / "models"  # where, when PLAMO_STUDY_ROOT names another tree
WORDS_SPACE = 1 << 20  # bytes on disk for header and vocabulary, with room to spare
KEPT = ("general.name", "general.description", "general.license")


def make(spec: ModelSpec, dtype: str, progress: Progress | None = None) -> Path:
    """The path of a trained model's file: the committed one, or one written from it if missing.

    Raises StudyError for an unknown type, when a file differs from its pin, and when the committed one is not here.
    """
    path = recipes.model_path(spec.name, spec.scale, dtype)
    registry.check_dtype(dtype)
    if not path.exists():
        if dtype != SOURCE:
            return convert(spec, make(spec, SOURCE), path, dtype, progress)
        _copy(spec, path)
    if tensors.sha256(path) != spec.sha256.get(dtype):
        mend = f"git checkout -- {path}" if dtype == SOURCE else tensors.REMAKE
        raise StudyError(str(path), "differs from the hash in data/models.toml", mend)
    return path


def convert(spec: ModelSpec, source: Path, path: Path, dtype: str, progress: Progress | None = None) -> Path:
    """Write `source`, an F16 file of `spec`, with matrices of type `dtype`, and return `path`.

    F32 holds the same numbers; BF16 and Q8_0 round them as llama.cpp does. The same bytes on every machine.
    Raises StudyError for an unknown type or a folder that cannot be written.
    """
    registry.check_dtype(dtype)
    reader = gguf.GGUFReader(source)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    table = tensors.planned_table(spec, dtype)
    gguf_file.check_space(path, sum(tensor.n_bytes for tensor in table) + WORDS_SPACE)
    with gguf_file.writing(path, spec.arch) as writer:
        for key in KEPT:
            if field := reader.get_field(key):
                writer.add_string(key, field.contents())
        gguf_file.add_shape(writer, spec, dtype)
        for key, field in reader.fields.items():
            if key.startswith("tokenizer."):
                writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        gguf_file.stream(writer, [(tensor, _items(stored[tensor.name], tensor)) for tensor in table], progress)
    return path


def _items(stored: Any, tensor: TensorInfo) -> Iterator[NDArray[Any]]:
    """A tensor's numbers in its new type."""
    yield values.narrow(np.ascontiguousarray(stored.data, np.float32).ravel(), tensor.dtype)


def _copy(spec: ModelSpec, path: Path) -> None:
    committed = COMMITTED / path.name
    if not committed.exists():
        why = f"the trained model of {spec.name} is committed, and it is not here"
        raise StudyError(str(path), why, f"git checkout -- data/models/{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with growing(path) as partial:
            shutil.copyfile(committed, partial)
    except OSError as error:
        raise unwritable(path, error) from error
