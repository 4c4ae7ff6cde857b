"""One model and one context: prefill, decode, logits and per-sequence state through llama.cpp's batch API."""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from llama_meter.cells import OnModel
from llama_meter.engine import library
from llama_meter.engine.bindings import TYPES, llama
from llama_meter.limits import FIRST_TOKEN

Policy = Literal["per_sequence", "packed"]
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}  # llama.h, enum llama_flash_attn_type
Part = Literal["everything", "fixed"]
STATE_PARTS = {"everything": 0, "fixed": 1}  # llama.h, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
DECODE_ERRORS = {1: "no room left in the context", 2: "aborted", -1: "invalid batch"}  # llama.h, llama_decode
CONTEXT = ("n_batch", "n_ubatch", "n_seq_max", "n_threads", "swa_full", "kv_unified", "n_rs_seq")
OF_CELL = ("n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "flash_attn", "n_gpu_layers", "use_mmap")
LAST = slice(-1, None)  # of the tokens of a sequence in a call
WITHOUT = {"n_rs_seq": 0, "kv_unified": False, "swa_full": True}  # what a release does that has no such setting
LONGEST = 1024  # bytes of a token's text
NO_DEVICES = (ctypes.c_void_p * 1)()  # an empty list of GPUs


class EngineError(RuntimeError):
    """llama.cpp refused a file, a context or a batch."""


@dataclass(frozen=True)
class SessionConfig:
    """Parameters of model and context, in llama.cpp's own terms.

    `n_ctx_seq` is the context of one sequence in tokens; llama.cpp's n_ctx is that times `n_seq_max`.
    `n_gpu_layers` < 0 means all; by default nothing is computed on a GPU. `swa_full`: sliding layers keep every token
    (llama.cpp's tools: their window only).
    `n_rs_seq`: past tokens whose recurrent states are kept for rollback; engines without rollback use 0.
    """

    n_ctx_seq: int
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    n_gpu_layers: int = 0
    swa_full: bool = True
    use_mmap: bool = True
    kv_unified: bool = False
    n_rs_seq: int = 0

    @classmethod
    def of(cls, cell: OnModel, n_ctx_seq: int, **changes: Any) -> Self:
        """The context of a cell with room for `n_ctx_seq` tokens per sequence; `changes` are fields that differ."""
        return cls(n_ctx_seq, **{name: getattr(cell, name) for name in OF_CELL} | changes)


class Session:
    """A loaded model with its memory. Sequences are numbered 0..n_seq_max-1; positions are counted here.

    `source`: a file, or another session, which must end after this one: they share its model. A model that is not
    shared is freed when the session ends.

    Raises
    ------
    EngineError
        The file does not load, the context cannot be made, or a batch is refused.

    """

    def __init__(self, source: "Path | str | Session", config: SessionConfig):
        self._owns_model = not isinstance(source, Session)
        self.model: int = source.model if isinstance(source, Session) else load(source, model_params(config))
        self.config = config
        self.context = llama.llama_init_from_model(self.model, self._context_params())
        if not self.context:
            if self._owns_model:
                llama.llama_model_free(self.model)
            raise EngineError(f"llama.cpp cannot make a context of {config.n_seq_max} x {config.n_ctx_seq} tokens")
        if config.n_gpu_layers and (why := library.lacks_room()):
            self.__exit__(None, None, None)
            raise EngineError(f"a context of {config.n_seq_max} x {config.n_ctx_seq} tokens does not fit: {why}")
        self.memory = llama.llama_get_memory(self.context)
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.n_vocab: int = llama.llama_vocab_n_tokens(self.vocab)
        self.n_past = [0] * config.n_seq_max
        self.n_evaluated = 0
        self.n_batch: int = llama.llama_n_batch(self.context)  # at most the context: a longer batch would abort
        self._batch = self._make_batch(self.n_batch)

    def _context_params(self) -> "llama.llama_context_params":
        """llama.cpp's context parameters; a subclass may add a callback."""
        config, params = self.config, llama.llama_context_default_params()
        params.n_ctx = config.n_ctx_seq * config.n_seq_max
        for name in CONTEXT:
            set_field(params, name, getattr(config, name))
        params.n_threads_batch = config.n_threads
        params.type_k, params.type_v = TYPES[config.type_k.upper()], TYPES[config.type_v.upper()]
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = FLASH_ATTENTION[config.flash_attn]
        else:  # releases before 0.3.17: on or off, and off is what they do unasked
            set_field(params, "flash_attn", config.flash_attn == "on")
        return params

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        llama.llama_free(self.context)
        if self._owns_model:
            llama.llama_model_free(self.model)

    def clear(self) -> None:
        """Forget every sequence and zero the evaluated-token count."""
        llama.llama_memory_clear(self.memory, True)
        self.n_past = [0] * self.config.n_seq_max
        self.n_evaluated = 0

    @property
    def bos(self) -> int | None:
        """The beginning-of-text token, None if the model's vocabulary does not use one."""
        return int(llama.llama_vocab_bos(self.vocab)) if llama.llama_vocab_get_add_bos(self.vocab) else None

    def tokenize(self, text: bytes) -> np.ndarray:
        """Token ids (n_tokens,) int32 of a UTF-8 text, with what the engine adds around it: for PLaMo nothing.

        Later engines begin PLaMo's texts with `bos` (llama.cpp #29734).
        """
        return tokenize(self.vocab, text)

    def prefill(
        self, prompts: Mapping[int, Sequence[int] | np.ndarray], policy: Policy = "per_sequence", every: bool = False
    ) -> dict[int, np.ndarray]:
        """Evaluate prompts (sequence -> tokens); returns each sequence's logits, float32.

        `per_sequence` gives every prompt its own `llama_decode` calls; `packed` feeds all prompts as one stream cut
        every `n_batch` tokens, as llama-batched-bench does (wrong on PLaMo 2 with the stock engine).
        Shapes: (1, n_vocab), the last position, or with `every` (n_tokens, n_vocab).
        """
        groups = [[seq] for seq in prompts] if policy == "per_sequence" else [list(prompts)]
        logits: dict[int, list[np.ndarray]] = {seq: [] for seq in prompts}
        for group in groups:
            seq_ids = np.repeat(group, [len(prompts[seq]) for seq in group])
            tokens = np.concatenate([prompts[seq] for seq in group])
            for start in range(0, len(tokens), self.n_batch):
                part = slice(start, start + self.n_batch)
                cut = {seq: tokens[part][seq_ids[part] == seq] for seq in dict.fromkeys(seq_ids[part].tolist())}
                for seq, rows in self.evaluate(cut.items(), slice(None) if every else LAST).items():
                    logits[seq].append(rows.copy())
        return {seq: np.concatenate(rows if every else rows[-1:]) for seq, rows in logits.items()}

    def evaluate(
        self, parts: Iterable[tuple[int, np.ndarray]], outputs: slice | list[int] = LAST
    ) -> dict[int, np.ndarray]:
        """Evaluate the next tokens of sequences in one `llama_decode`; logits (n_outputs, n_vocab) by sequence.

        `outputs`: which tokens of each part get logits. They are views of the engine's buffer, which the next call
        overwrites.
        """
        n, ends = 0, {}
        for seq, tokens in parts:
            at = slice(n, n := n + len(tokens))
            self._token[at], self._seq[at], self._output[at] = tokens, seq, 0
            self._output[at][outputs] = 1
            self._pos[at] = self.n_past[seq] + np.arange(len(tokens))
            self.n_past[seq] += len(tokens)
            ends[seq] = int(self._output[:n].sum())
        self._run(n)
        logits = np.split(self.outputs(int(self._output[:n].sum())), list(ends.values()))
        return dict(zip(ends, logits, strict=False))

    def decode(self, tokens: Mapping[int, int]) -> None:
        """One step: one token for each of the given sequences, all in one `llama_decode`. Returns when it is done."""
        for i, (seq, token) in enumerate(tokens.items()):
            self._token[i], self._pos[i], self._seq[i], self._output[i] = token, self.n_past[seq], seq, 1
            self.n_past[seq] += 1
        self._run(len(tokens))

    def score(self, tokens: np.ndarray, first: int) -> np.ndarray:
        """Evaluate a text (n,) alone, in one `llama_decode`; logits (n - 1 - first, n_vocab) at first ... n - 2.

        A view of the engine's buffer, which the next call overwrites: row i predicts token first + 1 + i.
        """
        self.clear()
        return self.evaluate([(0, tokens)], slice(first, len(tokens) - 1))[0]

    def outputs(self, n: int) -> np.ndarray:
        """The `n` output rows of the last `llama_decode`, (n, n_vocab) float32: a view that the next one overwrites."""
        return np.ctypeslib.as_array(llama.llama_get_logits(self.context), shape=(n, self.n_vocab))

    def logits(self, row: int = 0) -> np.ndarray:
        """Copy of one output row of the last `llama_decode`, shape (n_vocab,), float32. `row` counts batch tokens."""
        pointer = llama.llama_get_logits_ith(self.context, row)
        if not pointer:
            raise EngineError(f"batch token {row} has no logits")
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,)).copy()

    def get_state(self, seq: int) -> bytes:
        """Everything llama.cpp keeps for one sequence: its KV cells and recurrent state."""
        return self.read_state(seq).tobytes()

    def read_state(self, seq: int, part: Part = "everything") -> np.ndarray:
        """A sequence's state as an array (n_bytes,) uint8 that the engine fills, without a second copy.

        `part`: "fixed" omits keys and values that can be removed token by token.
        """
        buffer = np.empty(_of_states("get_size", part)(self.context, seq), np.uint8)
        written = _of_states("get_data", part)(self.context, _bytes_of(buffer), buffer.size, seq)
        return buffer[:written]

    def set_state(self, seq: int, state: bytes | np.ndarray, n_past: int, part: Part = "everything") -> None:
        """Restore a saved state into a sequence. `n_past`: the number of tokens that the state covers.

        A "fixed" part leaves keys and values in place, except that those from `n_past` on are removed.
        """
        buffer = np.frombuffer(state, np.uint8)
        if _of_states("set_data", part)(self.context, _bytes_of(buffer), buffer.size, seq) == 0:
            raise EngineError(f"llama.cpp refused the state for sequence {seq}")
        self.n_past[seq] = n_past
        if part == "fixed" and not self.remove_tail(seq, n_past):
            raise EngineError(f"llama.cpp did not remove sequence {seq}'s tokens from {n_past} on")

    @property
    def n_rollback(self) -> int:
        """Tokens that the engine can roll back in a sequence's recurrent state, as it reports; 0 for none."""
        return int(llama.llama_n_rs_seq(self.context))

    @property
    def is_recurrent(self) -> bool:
        """Whether the model has a recurrent state, which cannot be undone token by token, also beside a KV cache."""
        return bool(llama.llama_model_is_recurrent(self.model) or llama.llama_model_is_hybrid(self.model))

    def move(self, source: int, target: int) -> None:
        """Move the sequence in slot `source` to slot `target`, replacing its sequence; `source` is free afterwards."""
        self.set_state(target, self.read_state(source), self.n_past[source])
        self.remove_tail(source, 0)

    def copy(self, source: int, target: int) -> None:
        """Let slot `target` begin where slot `source` stands; both go on by themselves."""
        llama.llama_memory_seq_cp(self.memory, source, target, -1, -1)
        self.n_past[target] = self.n_past[source]

    def remove_tail(self, seq: int, position: int) -> bool:
        """Drop a sequence's tokens from `position` on; False where the architecture cannot (PLaMo 2's state)."""
        removed = bool(llama.llama_memory_seq_rm(self.memory, seq, position, -1))
        if removed:
            self.n_past[seq] = min(self.n_past[seq], position)
        return removed

    def _run(self, n_tokens: int) -> None:
        self._batch.n_tokens = n_tokens
        code = llama.llama_decode(self.context, self._batch)
        llama.llama_synchronize(self.context)
        if code:
            raise EngineError(f"llama_decode returned {code}: {DECODE_ERRORS.get(code, 'fatal error')}")
        if library.gpu_failures:
            raise EngineError(f"the GPU did not complete a call ({'; '.join(library.gpu_failures)})")
        self.n_evaluated += n_tokens

    def _make_batch(self, n: int) -> "llama.llama_batch":
        """A llama_batch of `n` tokens over NumPy arrays, so that filling it costs no conversions."""
        self._token, self._pos, self._seq = (np.zeros(n, dtype=np.int32) for _ in range(3))
        self._n_seq, self._output = np.ones(n, dtype=np.int32), np.zeros(n, dtype=np.int8)
        self._seq_rows = (self._seq.ctypes.data + 4 * np.arange(n)).astype(np.uintp)
        batch = llama.llama_batch()
        int32, int8 = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        for field, array, pointer in (
            ("token", self._token, int32),
            ("pos", self._pos, int32),
            ("n_seq_id", self._n_seq, int32),
            ("seq_id", self._seq_rows, ctypes.POINTER(int32)),
            ("logits", self._output, int8),
        ):
            setattr(batch, field, array.ctypes.data_as(pointer))
        return batch


def random_tokens(seed: int | list[int], n_vocab: int, *shape: int) -> np.ndarray:
    """Random tokens of a shape, int32: but for a mixture of experts, speed does not depend on them."""
    return np.random.default_rng(seed).integers(FIRST_TOKEN, n_vocab, shape, dtype=np.int32)


def _bytes_of(buffer: np.ndarray) -> Any:
    """A pointer to an array's bytes, of the type that llama.cpp expects."""
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def tokenize(vocab: Any, text: bytes, add_special: bool = True) -> np.ndarray:
    """Token ids (n_tokens,) int32 of a UTF-8 text by a vocabulary of llama.cpp; EngineError when it refuses."""
    needed = -llama.llama_tokenize(vocab, text, len(text), None, 0, add_special, False)
    ids = (llama.llama_token * max(needed, 1))()
    n = llama.llama_tokenize(vocab, text, len(text), ids, len(ids), add_special, False) if needed > 0 else 0
    if n < 0 or needed < 0:
        raise EngineError("the model's tokenizer refuses the text")
    return np.ctypeslib.as_array(ids)[:n].copy()


class Tokenizer:
    """The vocabulary of a model file, loaded without its weights. EngineError where the file does not load."""

    def __init__(self, path: Path | str):
        params = llama.llama_model_default_params()
        params.vocab_only = True
        self._model = load(path, params)
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama.llama_vocab_n_tokens(self._vocab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        llama.llama_model_free(self._model)

    def encode(self, text: str) -> np.ndarray:
        """Token ids (n_tokens,) int32 of a text, without what a model adds around it."""
        return tokenize(self._vocab, text.encode(), add_special=False)

    def decode(self, ids: np.ndarray) -> bytes:
        """The text of token ids as bytes; special tokens add nothing."""
        buffer, pieces = ctypes.create_string_buffer(LONGEST), []
        for token in ids.tolist():
            n = llama.llama_token_to_piece(self._vocab, token, buffer, LONGEST, 0, False)
            pieces.append(buffer.raw[: max(n, 0)])
        return b"".join(pieces)


def _of_states(what: str, part: Part) -> Callable[..., int]:
    """llama.h's llama_state_seq_... for a part; EngineError for a part that a release's bindings know nothing of."""
    name, flags = f"llama_state_seq_{what}", STATE_PARTS[part]
    if extended := getattr(llama, f"{name}_ext", None):
        return lambda *arguments: int(extended(*arguments, flags))
    if flags:
        raise EngineError(f"this release keeps no part of a state apart: {name}_ext is missing")
    return getattr(llama, name)  # type: ignore[no-any-return] # bindings are not typed


def load(path: Path | str, params: "llama.llama_model_params") -> int:
    """Load a model file; EngineError where llama.cpp cannot."""
    if params.n_gpu_layers < 0 and (why := library.lacks_room(Path(path).stat().st_size)):
        raise EngineError(f"{path} does not fit on the GPU: {why}")
    model: int | None = llama.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        why = library.refusal()
        raise EngineError(f"llama.cpp cannot load {path}{': ' * bool(why)}{why}")
    return model


def set_field(params: ctypes.Structure, name: str, value: object) -> None:
    """Set a field of one of llama.cpp's structures; EngineError where this release has none and would do otherwise.

    Python would take the value as an attribute of its own, and the engine would never see it.
    """
    if hasattr(params, name):
        setattr(params, name, value)
    elif name not in WITHOUT or value != WITHOUT[name]:
        raise EngineError(f"this release of llama.cpp has no setting {name}, which should be {value}")


def model_params(config: SessionConfig) -> "llama.llama_model_params":
    """llama.cpp's model parameters. Without layers on a GPU, the GPU is not used at all.

    If it stayed listed, calls of 32 tokens or more would run there, copying the weights each time (`op_offload`).
    """
    params = llama.llama_model_default_params()
    params.n_gpu_layers = config.n_gpu_layers
    if not config.use_mmap and hasattr(params, "load_mode"):
        params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    elif not config.use_mmap:
        set_field(params, "use_mmap", False)
    if config.n_gpu_layers == 0:
        params.devices = ctypes.addressof(NO_DEVICES)
    return params
