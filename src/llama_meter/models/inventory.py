"""The known models and their files here."""

from pathlib import Path

from llama_meter import paths
from llama_meter.models.registry import ModelSpec


def files_of(spec: ModelSpec) -> list[Path]:
    """The files of a model at its scale in data/models, by name."""
    return sorted(paths.MODELS.glob(f"{spec.name}.{spec.scale}.*.gguf"))
