"""A trained model as a GGUF file. It takes float32 arrays by tensor name; it knows neither PyTorch nor training."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llama_meter.errors import StudyError
from llama_meter.models import gguf_file, tensors, values as numbers
from llama_meter.models.registry import ModelSpec
from llama_meter.models.vocabulary import Vocabulary

LICENCE = "MIT"


def write(
    spec: ModelSpec, weights: Mapping[str, NDArray[np.float32]], vocabulary: Vocabulary, path: Path, dtype: str = "F16"
) -> Path:
    """Write the planned tensors of `spec` and return `path`; matrices become `dtype`, small tensors stay F32.

    StudyError for a number that `dtype` cannot hold, and for a folder that cannot be written.
    """
    parts = []
    for tensor in tensors.planned_table(spec, dtype):
        values = np.ascontiguousarray(weights[tensor.name], np.float32).reshape(tensor.shape)
        items = numbers.narrow(values.ravel(), tensor.dtype)
        if not numbers.is_finite(items, tensor.dtype):
            raise StudyError(f"{path}, {tensor.name}", f"{tensor.dtype} cannot hold a weight", "write F32 or BF16")
        parts.append((tensor, iter([items])))
    path.parent.mkdir(parents=True, exist_ok=True)
    with gguf_file.writing(path, spec.arch) as writer:
        writer.add_name(f"{spec.name} {spec.scale}, trained on Python sources")
        writer.add_description(
            "Small model in the architecture of the named one, trained on the Python standard library; "
            "not the released weights. See data/models/README.md."
        )
        writer.add_license(LICENCE)
        gguf_file.add_shape(writer, spec, dtype)
        vocabulary.add_to(writer)
        gguf_file.stream(writer, parts, None)
    return path
