"""Models composed in memory from two files of one model: each tensor comes from one file or the other.

The engine builds such a model from a header and a function that supplies tensor data. Types and kernels are those of a
file written with that mixture; nothing is requantized or written. Memory: one composed model; both files are mapped.
Two things differ from loading a file. A tied output head is a second copy of the embeddings. The CPU's repacked layouts
are not used (llama.cpp forbids them here), so logits equal those of a file loaded without them bit for bit, and those
of a file loaded as usual up to the order of additions.

It does not know which tensors are worth swapping.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llama_meter.engine.bindings import llama
from llama_meter.engine.ggml import GgufParams, InitParams, ggml
from llama_meter.engine.session import EngineError, Session, SessionConfig, load, model_params

HEAD, EMBEDDINGS = "output.weight", "token_embd.weight"
NEUTRAL = (".scale", ".input_scale")  # scales of types in neither file: the engine asks for them, 1 has no effect
SCRATCH = 1 << 16  # bytes of a ggml context that holds one tensor's description


@dataclass(frozen=True)
class Place:
    """Where a file holds a tensor: ggml type, position and size in bytes, shape in NumPy order."""

    dtype: int
    offset: int
    n_bytes: int
    shape: tuple[int, ...]


class Composer:
    """Two mapped files of one model. `differing`: names of the tensors whose types differ.

    Raises EngineError for a file that cannot be read, and for two files that do not hold the same tensors.
    """

    def __init__(self, reference: Path, candidate: Path):
        llama.llama_backend_init()
        self._base = ggml("ggml-base")
        self.path, self.other = reference, candidate
        self.reference, self._reference_data = self._open(reference)
        self.candidate, self._candidate_data = self._open(candidate)
        if {n: p.shape for n, p in self.reference.items()} != {n: p.shape for n, p in self.candidate.items()}:
            raise EngineError(f"{candidate} is not the same model as {reference}")
        self.differing = tuple(n for n, place in self.reference.items() if place.dtype != self.candidate[n].dtype)

    def compose(
        self, config: SessionConfig, swapped: Collection[str] = (), replaced: Mapping[str, np.ndarray] | None = None
    ) -> Session:
        """A session on the reference with the tensors named in `swapped` taken from the candidate.

        `replaced`: bytes (uint8) that replace tensors of the reference, in the reference's types.
        """
        header = self._header(self.path)
        data, types = self._pieces(swapped, replaced or {})
        try:
            for name in swapped:
                self._base.gguf_set_tensor_type(header, name.encode(), types[name])
            if HEAD not in types:
                data[HEAD] = data[EMBEDDINGS]
                self._declare(header, HEAD, types[EMBEDDINGS])
            return Session(self._build(header, data, config), config)
        finally:
            self._base.gguf_free(header)

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor in the reference, uint8, read-only."""
        place = self.reference[name]
        return self._reference_data[place.offset : place.offset + place.n_bytes]

    def _pieces(
        self, swapped: Collection[str], replaced: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Bytes and type of every tensor of the mixture."""
        data = {name: self.raw(name) for name in self.reference} | dict(replaced)
        types = {name: place.dtype for name, place in self.reference.items()}
        for name in swapped:
            place = self.candidate[name]
            data[name], types[name] = self._candidate_data[place.offset : place.offset + place.n_bytes], place.dtype
        return data, types

    def _build(self, header: int, data: Mapping[str, np.ndarray], config: SessionConfig) -> Any:
        unknown: list[str] = []

        @llama.llama_model_set_tensor_data_t
        def hand_out(tensor: int, _: int) -> None:
            name, n_bytes = self._base.ggml_get_name(tensor).decode(), self._base.ggml_nbytes(tensor)
            piece = np.ones(n_bytes // 4, np.float32).view(np.uint8) if name.endswith(NEUTRAL) else data.get(name)
            if piece is None or piece.nbytes != n_bytes:
                unknown.append(name)
            else:
                self._base.ggml_backend_tensor_set(tensor, piece.ctypes.data, 0, n_bytes)

        model = llama.llama_model_init_from_user(header, hand_out, None, model_params(config))
        if model and unknown:
            llama.llama_model_free(model)
        if not model or unknown:
            why = f"asks for {unknown[0]}, which the files do not hold" if unknown else "refuses the mixture"
            raise EngineError(f"the engine {why} ({self.path.name}, {self.other.name})")
        return model

    def _declare(self, header: int, name: str, dtype: int) -> None:
        """Add a tensor's name and type to a header; the engine takes its shape from the architecture."""
        context = self._base.ggml_init(InitParams(SCRATCH, None, True))
        tensor = self._base.ggml_new_tensor_1d(context, dtype, self._base.ggml_blck_size(dtype))
        self._base.ggml_set_name(tensor, name.encode())
        self._base.gguf_add_tensor(header, tensor)
        self._base.ggml_free(context)

    def _open(self, path: Path) -> tuple[dict[str, Place], np.ndarray]:
        header = self._header(path)
        base, start = self._base, self._base.gguf_get_data_offset(header)
        places = {}
        for i in range(base.gguf_get_n_tensors(header)):
            shape = tuple(base.gguf_get_tensor_ne(header, i)[:4][::-1])
            while len(shape) > 1 and shape[0] == 1:  # a quantizer writes a matrix of one row as a vector
                shape = shape[1:]
            offset, n_bytes = start + base.gguf_get_tensor_offset(header, i), base.gguf_get_tensor_size(header, i)
            name = base.gguf_get_tensor_name(header, i).decode()
            places[name] = Place(base.gguf_get_tensor_type(header, i), offset, n_bytes, shape)
        base.gguf_free(header)
        return places, np.memmap(path, mode="r")

    def _header(self, path: Path) -> int:
        header: int | None = self._base.gguf_init_from_file(str(path).encode(), GgufParams(True, None))
        if not header:
            raise EngineError(f"llama.cpp cannot read {path}")
        return header


def as_plain_file(path: Path, config: SessionConfig) -> Session:
    """A session on one file without the CPU's repacked layouts: a composed model equals it bit for bit."""
    params = model_params(config)
    params.use_extra_bufts = False
    return Session(load(path, params), config)
