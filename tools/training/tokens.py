"""Modules to token streams with the engine's own tokenizer, through a file that holds the vocabulary."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from llama_meter.engine.tokenizer import Tokenizer
from llama_meter.models import gguf_file
from llama_meter.models.registry import ModelSpec
from llama_meter.models.vocabulary import Vocabulary
from training.corpus import Module


def streams(found: Iterable[Module], spec: ModelSpec, vocabulary: Vocabulary) -> list[NDArray[np.int32]]:
    """Token ids of every module, bos first."""
    bos = np.array([vocabulary.special["bos"]], np.int32)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        with gguf_file.writing(path, spec.arch) as writer:
            gguf_file.add_shape(writer, spec, "F32")
            vocabulary.add_to(writer)
            gguf_file.stream(writer, [], None)
        with Tokenizer(path) as tokenizer:
            return [np.concatenate([bos, tokenizer.encode(module.text)]) for module in found]
