"""A model file's tokenizer: text to token ids and back, without loading weights."""

import ctypes
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llama_meter.engine.bindings import llama
from llama_meter.engine.session import EngineError, tokenize

LONGEST = 1024  # bytes of a piece


class Tokenizer:
    """The vocabulary of a GGUF as llama.cpp uses it; `bos` and `eos` are token ids.

    Raises
    ------
    EngineError
        The file does not load, or a text is refused.

    """

    def __init__(self, path: Path | str):
        params = llama.llama_model_default_params()
        params.vocab_only = True
        self._model = llama.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise EngineError(f"llama.cpp cannot load the vocabulary of {path}")
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.bos: int = llama.llama_vocab_bos(self._vocab)
        self.eos: int = llama.llama_vocab_eos(self._vocab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        llama.llama_model_free(self._model)

    def encode(self, text: str, add_special: bool = False) -> NDArray[np.int32]:
        """Token ids (n_tokens,) int32 of a text; `add_special` adds the tokens that the model puts around it.

        The name of a special token in the text becomes that token: this tokenizer type does not distinguish them.
        """
        return tokenize(self._vocab, text.encode(), add_special=add_special)

    def decode(self, ids: NDArray[np.int32]) -> bytes:
        """The text of token ids as bytes; special tokens add nothing."""
        buffer, spelt = ctypes.create_string_buffer(LONGEST), []
        for token in ids.tolist():
            n = llama.llama_token_to_piece(self._vocab, token, buffer, LONGEST, 0, False)
            spelt.append(buffer.raw[: max(n, 0)])
        return b"".join(spelt)
