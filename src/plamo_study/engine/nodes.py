"""A model whose graph nodes are inspected during evaluation, through llama.cpp's evaluation callback.

Shared plumbing: ggml's tensor struct, reading a tensor from its backend's memory, and one model with one sequence. It
does not know which nodes matter: a subclass decides which are wanted and what to do with them.
"""

import ctypes
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from plamo_study.engine.bindings import llama
from plamo_study.engine.library import ggml
from plamo_study.engine.session import EngineError, SessionConfig, context_params, model_params, tokenize

OBJECT_SIZE = 32  # bytes of ggml.c's struct ggml_object on a 64-bit machine
F32 = 0  # ggml.h, enum ggml_type
NUMBERS = {F32: "<f4", 1: "<f2"}  # by ggml type, what `values` can read


class Tensor(ctypes.Structure):
    """ggml.h, struct ggml_tensor."""


Tensor._fields_ = (
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
)


class WatchedModel:
    """A model with a context of one sequence (`config.n_ctx_seq` tokens) whose nodes a subclass inspects.

    `watch` False makes the same context without a callback, to measure the cost of watching. `model`: a loaded model to
    use instead of loading the file; whoever loaded it frees it.

    Raises
    ------
    EngineError
        The file does not load, a batch is refused, or the build's tensor layout differs; also any exception of `see`,
        with its text.

    """

    def __init__(self, path: Path | str, config: SessionConfig, watch: bool = True, model: Any = None):
        self._base, self._error, self.n_past = ggml_base(), "", 0
        self._ops: dict[int, str] = {}
        self._callback = llama.ggml_backend_sched_eval_callback(self._on_node)
        self._owns_model = model is None
        self.model = model or llama.llama_model_load_from_file(str(path).encode(), model_params(config))
        if not self.model:
            raise EngineError(f"llama.cpp cannot load {path}")
        self._vocab = llama.llama_model_get_vocab(self.model)
        self.n_vocab: int = llama.llama_vocab_n_tokens(self._vocab)
        params = context_params(config)
        params.n_batch = config.n_ctx_seq
        if watch:
            params.cb_eval = self._callback
        self.context = llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise EngineError(f"llama.cpp cannot make a context of {config.n_ctx_seq} tokens")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        llama.llama_free(self.context)
        if self._owns_model:
            llama.llama_model_free(self.model)

    def wanted(self, node: Tensor) -> bool:
        """Whether to call `see` for this node."""
        raise NotImplementedError

    def see(self, node: Tensor) -> None:
        """Look at a wanted node that has just been computed; `ctypes.pointer(node)` is what `values` takes."""
        raise NotImplementedError

    def tokenize(self, text: bytes) -> np.ndarray:
        """Token ids (n_tokens,) int32 of a UTF-8 text, including the tokens that the model adds around it."""
        return tokenize(self._vocab, text)

    def clear(self) -> None:
        """Forget the sequence."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        self.n_past = 0

    def evaluate(self, tokens: np.ndarray, every: bool = True) -> None:
        """Evaluate the sequence's next tokens in one `llama_decode`; outputs at every position or only the last."""
        n = len(tokens)
        batch = llama.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = (
                token,
                self.n_past + i,
                1,
                every or i == n - 1,
            )
            batch.seq_id[i][0] = 0
        code = llama.llama_decode(self.context, batch)
        llama.llama_synchronize(self.context)
        llama.llama_batch_free(batch)
        if code or self._error:
            raise EngineError(self._error or f"llama_decode returned {code}")
        self.n_past += n

    def logits(self, n: int = 1) -> np.ndarray:
        """Copy of the `n` output rows of the last `evaluate`, (n, n_vocab) float32."""
        return np.ctypeslib.as_array(llama.llama_get_logits(self.context), shape=(n, self.n_vocab)).copy()

    def op(self, node: Tensor) -> str:
        """Name of the operation that makes a node, e.g. "MUL_MAT"."""
        number = node.op
        if number not in self._ops:
            self._ops[number] = str(self._base.ggml_op_name(number).decode())
        return self._ops[number]

    def values(self, tensor: Any) -> np.ndarray:
        """A copy of an F32 or F16 tensor from its backend's memory, in NumPy order and with the tensor's strides.

        `tensor`: pointer to a `Tensor`.
        """
        described, n_bytes = tensor.contents, self._base.ggml_nbytes(tensor)
        data = np.empty(n_bytes, dtype=np.uint8)
        self._base.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, n_bytes)
        shape, strides = tuple(described.ne)[::-1], tuple(described.nb)[::-1]
        return np.lib.stride_tricks.as_strided(data.view(np.dtype(NUMBERS[described.type])), shape, strides)

    def _on_node(self, address: int, ask: bool, _: int) -> bool:
        """With `ask`: whether the node is wanted. Without: it is computed; returning False ends the evaluation."""
        try:
            node = Tensor.from_address(address)
            if ask:
                return self.wanted(node)
            self.see(node)
        except Exception as error:  # ctypes would only print it
            self._error = str(error)
        return not self._error


def name_of(tensor: Any) -> str:
    """A tensor's name from a pointer to it; a backend's copy is named like `CUDA0#blk.0.ffn_up.weight#0`."""
    parts = tensor.contents.name.decode(errors="replace").split("#")
    return str(parts[1] if len(parts) > 1 else parts[0])


def ggml_base() -> ctypes.CDLL:
    """libggml-base with the signatures used here. EngineError when its tensor layout differs."""
    base = ggml("ggml-base")
    base.ggml_tensor_overhead.restype = base.ggml_nbytes.restype = ctypes.c_size_t
    base.ggml_op_name.restype, base.ggml_op_name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    base.ggml_nbytes.argtypes = [ctypes.c_void_p]
    base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    base.ggml_backend_tensor_get.restype = None
    if base.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + OBJECT_SIZE:
        raise EngineError("this build's tensor layout is not that of ggml 0c1e57098")
    return base
