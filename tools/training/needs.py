"""The packages that training needs beyond the usual ones."""

from importlib.util import find_spec

from llama_meter.errors import StudyError

NEEDS = ("torch", "tokenizers")


def require() -> None:
    """StudyError unless the packages of the extra `train` are installed."""
    if lacking := [name for name in NEEDS if find_spec(name) is None]:
        raise StudyError("training", f"needs {' and '.join(lacking)}", "pip install -e '.[train]'")
