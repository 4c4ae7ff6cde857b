"""A model's fact with shape and tensors, for any registered model and type, without its file."""

from dataclasses import asdict
from typing import Any

from plamo_study.measure.files import by_kind
from plamo_study.models import registry, tensors


def fact(name: str, scale: str, dtype: str) -> dict[str, Any]:
    """`name`, `dtype`, `shape` and `tensors` (kind -> type, count, n_elements, n_bytes) of a file of one type.

    `dtype` is a GGML type (F16, Q8_0, Q4_0 ...); norms and the scalars of the scan stay F32, as in every file. Raises
    StudyError for a model or scale that is not registered.
    """
    spec = registry.spec(name, scale)
    shape = {key: value for key, value in asdict(spec).items() if isinstance(value, int | float | str)}
    return {"name": name, "dtype": dtype, "shape": shape, "tensors": by_kind(tensors.planned_table(spec, dtype))}
