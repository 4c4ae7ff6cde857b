"""What goes into the matrix products of a model: sums of squares per input column, through llama.cpp's callback.

The graph is stopped at every product of a block's weights, as llama-imatrix does. It does not know files, texts'
encodings or the quantizer, and it leaves out products with experts, which PLaMo has not.

Every call evaluates ONE sequence. llama-imatrix packs n_batch / n_ctx pieces of text as parallel sequences, which
PLaMo 2 mixes up in llama.cpp 0c1e57098 (defect D2): its sums are those of another computation.
"""

import ctypes
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import llama_cpp.llama_cpp as llama
import numpy as np

from plamo_study.engine.library import ggml
from plamo_study.engine.session import EngineError, SessionConfig, context_params, model_params

F32 = 0  # ggml.h, enum ggml_type
LARGEST = float(np.finfo(np.float32).max)  # files hold the sums as float32
OBJECT_SIZE = 32  # bytes of ggml.c's struct ggml_object on a 64-bit machine


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


class InputSquares:
    """A model that sums the squares of what it multiplies its blocks' matrices with, while it evaluates texts.

    `sums`: by tensor name, (n_columns,) float64; `counts`: the tokens summed over. `config` sets room and threads.

    Raises
    ------
    EngineError
        The file does not load, a text is refused, an input is not finite, or the build lays tensors out otherwise.

    """

    def __init__(self, path: Path | str, config: SessionConfig):
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, int] = {}
        self._base, self._error = _base(), ""
        self._callback = llama.ggml_backend_sched_eval_callback(self._on_node)
        self.model = llama.llama_model_load_from_file(str(path).encode(), model_params(config))
        if not self.model:
            raise EngineError(f"llama.cpp cannot load {path}")
        self._vocab = llama.llama_model_get_vocab(self.model)
        params = context_params(config)
        params.n_batch, params.cb_eval = config.n_ctx_seq, self._callback
        self.context = llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise EngineError(f"llama.cpp cannot make a context of {config.n_ctx_seq} tokens")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        llama.llama_free(self.context)
        llama.llama_model_free(self.model)

    def tokenize(self, text: bytes) -> np.ndarray:
        """Token ids (n_tokens,) int32 of a UTF-8 text, with what the model's tokenizer puts around one."""
        needed = -llama.llama_tokenize(self._vocab, text, len(text), None, 0, True, False)
        ids = (llama.llama_token * max(needed, 1))()
        n = llama.llama_tokenize(self._vocab, text, len(text), ids, len(ids), True, False) if needed > 0 else 0
        if n < 0 or needed < 0:
            raise EngineError("the model's tokenizer refuses the text")
        return np.ctypeslib.as_array(ids)[:n].copy()

    def add(self, tokens: np.ndarray) -> None:
        """Evaluate one piece of text by itself, every position an output, and add what its products saw.

        As in llama-imatrix the first token gives way to the beginning-of-text token where the model wants one.
        """
        n = len(tokens)
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        batch = llama.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        if n and llama.llama_vocab_get_add_bos(self._vocab):
            batch.token[0] = llama.llama_vocab_bos(self._vocab)
        code = llama.llama_decode(self.context, batch)
        llama.llama_synchronize(self.context)
        llama.llama_batch_free(batch)
        if code or self._error:
            raise EngineError(self._error or f"llama_decode returned {code}")

    def _on_node(self, address: int, ask: bool, _: int) -> bool:
        """Asked: is this node wanted? Then told that it is computed; False would end the evaluation."""
        try:
            node = Tensor.from_address(address)
            if ask:
                return self._is_wanted(node)
            self._add_inputs(_name(node.src[0]), node.src[0].contents, node.src[1])
        except Exception as error:  # ctypes would print it and go on
            self._error = str(error)
        return not self._error

    def _is_wanted(self, node: Tensor) -> bool:
        if self._base.ggml_op_name(node.op) != b"MUL_MAT":
            return False
        return _name(node.src[0]).startswith("blk.") and node.src[1].contents.type == F32

    def _add_inputs(self, name: str, weights: Tensor, inputs: Any) -> None:
        if weights.ne[2] * weights.ne[3] != 1:
            raise EngineError(f"{name} is more than one matrix")
        rows = self._values(inputs).reshape(-1, inputs.contents.ne[0])
        total = self.sums.get(name, 0.0) + np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
        if not (total <= LARGEST).all():  # NaN is not smaller either
            raise EngineError(f"what is multiplied with {name} is not finite, or its squares exceed float32")
        self.sums[name] = total
        self.counts[name] = self.counts.get(name, 0) + len(rows)

    def _values(self, tensor: Any) -> np.ndarray:
        """A copy of an F32 tensor from wherever its backend keeps it, in NumPy order, strides as they are."""
        described, n_bytes = tensor.contents, self._base.ggml_nbytes(tensor)
        data = np.empty(n_bytes, dtype=np.uint8)
        self._base.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, n_bytes)
        shape, strides = tuple(described.ne)[::-1], tuple(described.nb)[::-1]
        return np.lib.stride_tricks.as_strided(data.view(np.float32), shape, strides)


def _name(tensor: Any) -> str:
    """A weight's name; a backend's copy is called like `CUDA0#blk.0.ffn_up.weight#0`."""
    parts = tensor.contents.name.decode(errors="replace").split("#")
    return str(parts[1] if len(parts) > 1 else parts[0])


def _base() -> ctypes.CDLL:
    base = ggml("ggml-base")
    base.ggml_tensor_overhead.restype = base.ggml_nbytes.restype = ctypes.c_size_t
    base.ggml_op_name.restype, base.ggml_op_name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    base.ggml_nbytes.argtypes = [ctypes.c_void_p]
    base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    base.ggml_backend_tensor_get.restype = None
    if base.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + OBJECT_SIZE:
        raise EngineError("this build lays tensors out otherwise than ggml 0c1e57098")
    return base
