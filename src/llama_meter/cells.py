"""Types of cells, one for each workload. To add one, write a class here and add its name to `Cell`.

Rows and frames use the names of the fields. Keys hash no defaults, so a field added later changes no existing key.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import msgspec

File = tuple[str, str, str]  # model, scale, and type or recipe
Calls = tuple[tuple[tuple[int, int], ...], ...]  # (sequence, tokens) of each call; 0 tokens: the sequence leaves


class AnyCell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="workload", tag=str.lower):
    """What every cell says, and what others ask of it; a simulation needs no more."""

    timed: ClassVar[bool] = False  # whether its results are times, which concurrent work would spoil
    crowds: ClassVar[bool] = False  # whether its own processes wait for one another's threads, even on an idle machine
    computes: ClassVar[bool] = False  # whether all its threads compute, or spin, throughout what is timed on a CPU
    n_threads: int = 1
    repetitions: int = 1
    seed: int = 0

    @property
    def is_timed(self) -> bool:
        """Whether the result of this very cell is a time."""
        return self.timed

    @property
    def keeps_busy(self) -> bool:
        """Whether all threads of this very cell compute, or spin, throughout."""
        return self.computes

    @property
    def may_fail(self) -> bool:
        """Whether it asks if something is correct: then a wrong result or an abort is its answer, not a failure.

        By default true where prompts of several sequences share a call.
        """
        return getattr(self, "policy", "") == "packed"

    @property
    def workload(self) -> str:
        """The name of its type in lower case."""
        return str(self.__struct_config__.tag)

    @property
    def files(self) -> tuple[File, ...]:
        """The model files it runs on, in the order in which its workload gets their paths."""
        return ()


class OnEngine(AnyCell, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine computes."""

    timed = True
    dtype: str = ""
    n_gpu_layers: int = 0


class Read(OnEngine, frozen=True, kw_only=True):
    """The read ceiling."""

    array_bytes: int = 0


class MatMul(OnEngine, frozen=True, kw_only=True):
    """The ceiling of matrix products, or one of the engine's kernels."""

    n_rows: int = 0  # and columns, of the weights
    n_columns: int = 0  # of what they are multiplied with; 0: as many as a micro-batch
    layout: Literal["", "packed", "plain"] = ""  # "": as loaded


class OnModel(OnEngine, frozen=True, kw_only=True):
    """What runs a model, and the context it runs in."""

    model: str = ""
    scale: str = ""
    n_batch: int = 2048
    n_ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: Literal["auto", "on", "off"] = "auto"
    use_mmap: bool = True  # weights stay in the file's pages; else they are read into memory of the process

    @property
    def files(self) -> tuple[File, ...]:
        """The one model's file; a type with a second model names it here too."""
        return ((self.model, self.scale, self.dtype),)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sequences evaluated together, tokens each begins with, and tokens generated after these."""
        before = ("n_prompt", "depth", "n_ctx", "n_tokens")
        n_prompt = next((getattr(self, name) for name in before if hasattr(self, name)), 0)
        return getattr(self, "n_seq", 1), n_prompt, getattr(self, "n_gen", 0)


class Prefill(OnModel, frozen=True, kw_only=True):
    """Prompts timed."""

    computes = True
    n_prompt: int = 0  # tokens of each
    n_seq: int = 1
    policy: Literal["per_sequence", "packed"] = "per_sequence"
    proof: Literal["", "first"] = ""  # first: only the first process of a cell proves its result


class Decode(OnModel, frozen=True, kw_only=True):
    """Decode steps timed."""

    computes = True
    depth: int = 0  # tokens each sequence starts from
    n_gen: int = 0  # steps
    n_seq: int = 1
    policy: Literal["per_sequence", "packed", "shared"] = "per_sequence"  # shared: one prompt, its state copied to all
    proof: Literal["", "first"] = ""  # first: only the first process of a cell proves its result


class Gate(OnModel, frozen=True, kw_only=True):
    """A file held against the oracle."""

    timed = False
    n_prompt: int = 0  # tokens that both see
    n_gen: int = 0  # steps after them, at depth; in older rows also tokens continued greedily
    # parts: each part, given what entered it; no more. depth: these at some positions of a long prompt and in the steps
    # after it. consistent: the engine against itself, where there is no oracle
    judges: Literal["", "parts", "depth", "consistent"] = ""


class Replay(OnModel, frozen=True, kw_only=True):
    """Any calls, each sequence held against itself alone."""

    timed = False
    n_tokens: int = 0  # of the sequence that gets most
    n_seq: int = 1
    calls: Calls = ()
    question: str = ""  # map, identity, isolation, bystander; none: drawn at random

    @property
    def may_fail(self) -> bool:
        """Always."""
        return True


class Isolation(Replay, frozen=True, kw_only=True):
    """The same calls twice, a sequence's neighbours with other tokens."""


class OnText(OnModel, frozen=True, kw_only=True):
    """What evaluates a text; random tokens where it names none."""

    timed = False
    text: str = ""  # UTF-8, a name in data/corpus or a path
    text_sha256: str = ""

    @property
    def is_timed(self) -> bool:
        """Only on random tokens: with a text, the result is not a time."""
        return self.timed and not self.text


class Comparison(OnText, frozen=True, kw_only=True):
    """Files held against one another on a text."""

    n_ctx: int = 0  # tokens of a chunk of the text
    n_chunks: int = 0
    candidates: tuple[str, ...] = ()  # types or recipes held against `dtype`


class Quality(Comparison, frozen=True, kw_only=True):
    """Divergence of whole files, and their greedy continuations."""

    n_gen: int = 0  # tokens of each continuation
    n_seq: int = 1  # continuations


class Handover(Comparison, frozen=True, kw_only=True):
    """A text read by one file and written by another, for pairs of `dtype` and the candidates."""

    n_ctx: int = 0  # tokens read
    n_gen: int = 0  # tokens written, which the text gives
    stranger: str = ""  # another model of the same type, whose state must be refused
    compares: Literal["", "parts", "free"] = ""  # parts of states, or free greedy answers
    # whole: every pair; few: those that read or write in the reference, and each file alone
    paired: Literal["whole", "few"] = "whole"

    @property
    def files(self) -> tuple[File, ...]:
        """The reference, and the file of the other model; of files that were given also the candidates."""
        compared = [(self.model, self.scale, name) for name in self.candidates if self.scale == "file"]
        return (*super().files, *compared, *([(self.stranger, self.scale, self.dtype)] if self.stranger else []))


class Relay(OnModel, frozen=True, kw_only=True):
    """Requests read by one file and written by another; by one file alone where no writer is named."""

    timed = computes = True
    n_prompt: int = 0
    n_gen: int = 0
    n_seq: int = 1  # requests that are read one after the other and written together
    writer: str = ""  # the model that writes, and its type
    writer_dtype: str = ""
    n_processes: int = 1  # 2: the reader has a process of its own, and ships its states

    @property
    def overlaps(self) -> bool:
        """Whether the reader reads on while requests are written: it has a process, and there are several requests."""
        return self.n_processes > 1 and self.n_seq > 1

    @property
    def keeps_busy(self) -> bool:
        """Not where one of the two files may have nothing to do."""
        return not self.overlaps

    @property
    def files(self) -> tuple[File, ...]:
        """The reader, and the writer where it is another file."""
        return (*super().files, *([(self.writer, self.scale, self.writer_dtype)] if self.writer else []))


class Trace(OnModel, frozen=True, kw_only=True):
    """One request, operator by operator."""

    n_prompt: int = 0
    n_gen: int = 0


class Naive(OnModel, frozen=True, kw_only=True):
    """A loop without a cache beside one with it."""

    n_prompt: int = 0
    n_gen: int = 0  # output tokens


LADDER, WALK, FEW, WHOLE_WINDOW = "", "walk", "few", "swa_full"  # ladders of a `Depth`, by their names in rows


class Depth(OnText, frozen=True, kw_only=True):
    """Prefill and decode at growing depth or, of a text, what kinds of cache do to its predictions."""

    timed = True  # without a text
    computes = True
    n_ctx: int = 0  # tokens of the longest sequence, or of a chunk of the text
    n_chunks: int = 0
    n_gen: int = 0  # steps timed at each depth
    ladder: Literal["", "walk", "few", "swa_full"] = ""
    rungs: tuple[int, ...] = ()  # depths of the ladder between 0 and n_ctx, which ends it; none: doublings
    caches: tuple[str, ...] = ()  # FLASH/K/V, held against one another on the text


class Arrival(OnModel, frozen=True, kw_only=True):
    """A prompt arrives while sequences are decoding, or nobody is."""

    timed = computes = True
    depth: int = 0  # tokens each decoding sequence starts from
    n_gen: int = 0  # decode steps before the prompt arrives, and as many after its first token
    n_seq: int = 1  # sequences decoding
    n_arriving: int = 0  # tokens of the prompt
    n_chunk: int = 0  # of them evaluated in a call
    way: Literal["whole", "apart", "together"] = "whole"  # chunks between the decode steps, or in one call with them
    kv_unified: bool = False  # one buffer of keys and values for all sequences

    @property
    def shape(self) -> tuple[int, int, int]:
        """The prompt is one more sequence; it may be longer than the model's training context."""
        return self.n_seq + 1, self.depth, self.n_gen


class Replicas(OnModel, frozen=True, kw_only=True):
    """Processes side by side, each with the model and with sequences of its own; `n_threads` are those of all."""

    timed = crowds = True
    n_processes: int = 1
    n_seq: int = 1  # of each process
    n_prompt: int = 0  # tokens each sequence begins with
    n_gen: int = 0  # decode steps
    policy: Literal["per_sequence", "packed"] = "per_sequence"
    killed: int = -1  # the process that is killed halfway through its steps; -1: none

    @property
    def is_timed(self) -> bool:
        """Not where a process is killed: its CPU time is not counted, and so looks like another program's work."""
        return self.killed < 0

    @property
    def threads_each(self) -> int:
        """Threads of one process: its share, and at least one."""
        return max(self.n_threads // self.n_processes, 1)


PHASES = ("prefill", "save", "check", "send", "load", "step")  # of a shipment, as its samples have them


class Shipment(OnModel, frozen=True, kw_only=True):
    """A prompt evaluated in one process and answered in another, which gets the sequence's state over TCP."""

    timed = crowds = True
    n_prompt: int = 0
    n_gen: int = 0  # decode steps after it, in both processes
    link_bps: int = 0  # bits per second that the sender keeps to; 0: as fast as it goes


class Service(OnModel, frozen=True, kw_only=True):
    """Requests that arrive over time, answered by one engine, or by one that reads prompts and one that writes."""

    timed = crowds = True
    n_prompt: int = 0  # tokens of each request
    n_gen: int = 0  # of each answer
    n_seq: int = 1  # answered at once
    n_requests: int = 1
    per_second: float = 1.0  # arrivals, in the mean
    mode: Literal["", "shared", "split"] = ""  # split: threads are shared out


TERMS = ("draft", "save", "verify", "restore", "replay")  # parts of a round that are timed


class Speculate(OnText, frozen=True, kw_only=True):
    """Tokens generated by drafting some, verifying them in one call, and taking back those that are rejected.

    A repetition is a prompt: random tokens, or a piece of a text.
    """

    timed = computes = True
    depth: int = 0  # tokens each sequence starts from
    n_gen: int = 0  # tokens generated
    n_seq: int = 1
    n_draft: int = 0  # tokens of a draft at the most; 0: plain decode
    back: Literal["tail", "full", "part", "joined"] = "tail"  # of wrong tokens
    drafter: Literal["", "even", "adapts", "lookup", "model"] = ""  # "": `accepts` says
    accepts: float = 0.0  # how likely a drafted token is right, given that those before it are
    temperature: float = 0.0  # 0: greedy
    draft: str = ""  # the model that drafts, and its type
    draft_dtype: str = ""

    @property
    def files(self) -> tuple[File, ...]:
        """The target, and the model that drafts where there is one."""
        return (*super().files, *([(self.draft, self.scale, self.draft_dtype)] if self.draft else []))


class Serving(OnModel, frozen=True, kw_only=True):
    """Requests to a server over HTTP: so many at a time, or as they arrive."""

    timed = crowds = True
    server: Literal["llama-server", "llama_cpp.server"] = "llama-server"
    n_prompt: int = 0  # tokens of each request
    n_gen: int = 0  # of each answer
    n_seq: int = 1  # slots of the server
    n_requests: int = 1
    n_clients: int = 1  # requests at a time; 0: they come as they arrive
    per_second: float = 1.0  # arrivals, in the mean, where they come as they arrive
    pattern: Literal["", "poisson", "gamma", "knee"] = ""  # of these arrivals; knee: the rate is sought

    @property
    def may_fail(self) -> bool:
        """Whether requests that share a server's batches get the answers they get alone."""
        return self.n_clients != 1


class Turns(OnModel, frozen=True, kw_only=True):
    """Five moves in conversations: each answered from what is kept of the conversation, and again from nothing.

    A model without a scale is a small random file of llama.cpp's generator.
    """

    timed = crowds = True
    n_prompt: int = 0  # tokens of each conversation
    n_gen: int = 0  # of each answer
    n_seq: int = 1  # slots of the server
    n_clients: int = 1  # requests at a time: neighbours that decode beside the move
    reuse: Literal["slot", "saved", "bindings", "states"] = "slot"  # of llama-server, its saved slot; the high-level
    # interface; states that we keep of the engine
    away: bool = False  # another chat is answered in between
    marked: bool = True  # the server knows where questions begin, as it does of a chat
    n_checkpoints: int = 32  # --ctx-checkpoints
    cache_mib: int = 8192  # --cache-ram
    planted: bool = False  # states are restored one token off

    @property
    def files(self) -> tuple[File, ...]:
        """None of a generated model, which has no scale."""
        return super().files if self.scale else ()

    @property
    def may_fail(self) -> bool:
        """Always."""
        return True


class Answers(OnModel, frozen=True, kw_only=True):
    """Greedy answers to distinct prompts in the engine itself: each alone, and then several in one call."""

    timed = False
    n_prompt: int = 0  # tokens of each, or of the longest
    n_gen: int = 0  # of each answer
    n_seq: int = 1  # slots of the context
    n_requests: int = 1  # prompts
    n_clients: int = 1  # of them that share a call
    lengths: Literal["", "drawn"] = ""  # drawn: between half of n_prompt and all

    @property
    def may_fail(self) -> bool:
        """Always."""
        return True


# rules of `Traffic` that are no policy
PARTS = "parts"  # instead of a policy: the calls that traffic is made of, each alone
SPLIT = "split"  # a process with half of the threads reads, and ships to one that answers, as chapter 7 does


class Traffic(OnModel, frozen=True, kw_only=True):
    """Requests of different lengths that arrive over time, served by a policy; or the calls of such, each alone."""

    timed = crowds = True
    n_prompt: int = 0  # tokens of the longest request
    n_gen: int = 0  # of the longest answer
    n_seq: int = 1  # answered at once
    n_requests: int = 1
    per_second: float = 1.0  # arrivals, in the mean
    rule: str = ""  # a policy's name; "parts": calls alone


class Fleet(AnyCell, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Days of requests shared out among simulated machines: how many of these must there be to serve them well?"""

    model: str = ""
    scale: str = ""
    rows_sha256: str = ""  # of the journal with the calls that were measured
    rule: str = ""  # the policy that each machine follows
    balance: Literal["", "round robin", "least work"] = ""  # how requests are shared out
    pattern: Literal["", "steady", "diurnal", "bursty"] = ""  # of arrivals over a day
    n_machines: int = 1
    n_seq: int = 1  # answered at once by each
    n_requests: int = 1  # of each in a day, in the mean


class Hybrid(OnEngine, frozen=True, kw_only=True):
    """A question to a small random file of an architecture: is a sequence's answer its own?"""

    timed = False
    model: str = ""  # as llama.cpp's generator names its file, e.g. "mamba2-dense"
    question: str = ""
    number: int = 0  # what the question counts
    form: Literal["whole", "three layers", "four heads", "plain", "state first"] = "whole"
    planted: bool = False  # a fault is planted, which the answer must show
    longer: int = 0  # tokens more than usual in each prompt

    @property
    def may_fail(self) -> bool:
        """Always."""
        return True


Cell = (
    Prefill
    | Decode
    | Gate
    | Replay
    | Isolation
    | Read
    | MatMul
    | Quality
    | Trace
    | Depth
    | Replicas
    | Shipment
    | Service
    | Speculate
    | Serving
    | Traffic
    | Fleet
    | Naive
    | Arrival
    | Hybrid
    | Answers
    | Turns
    | Handover
    | Relay
)
KINDS: dict[str, Any] = {kind.__name__.lower(): kind for kind in get_args(Cell)}
_DEFAULTS = {f.name: f.default for kind in KINDS.values() for f in msgspec.structs.fields(kind)}
ORDER = ("workload", *_DEFAULTS)  # of frame columns


def columns(cell: AnyCell) -> dict[str, Any]:
    """A cell's fields by the names of `ORDER`, with the usual default where its type has no such field."""
    return {"workload": cell.workload} | _DEFAULTS | msgspec.structs.asdict(cell)


def canonical(cell: AnyCell) -> dict[str, Any]:
    """What keys hash of a cell: its fields without those that equal their default."""
    fields = ((name, getattr(cell, name), _DEFAULTS[name]) for name in cell.__struct_fields__)
    return {"workload": cell.workload} | {name: type(usual)(value) for name, value, usual in fields if value != usual}


# ------------------------------------------------------------------ loads of servers

SHORT = {"mini": (128, 64), "shape": (128, 16), "file": (128, 16)}  # of the loads
SLOTS = 4  # llama-server's own default
DISTINCT = 8  # prompts asked alone; a load of more requests asks them again
ENOUGH = 0.9  # of the requests of a rate that a server sustains meet its objectives


class Objectives(NamedTuple):
    """Latency objectives in seconds: time to the first token, and mean time per further token."""

    ttft_s: float = inf
    tpot_s: float = inf

    def met(self, ttft_s: Any, tpot_s: Any) -> Any:
        """Whether requests met both: of a number each, or of an array (n,) each. NaN, for never, meets none."""
        return (ttft_s <= self.ttft_s) & (tpot_s <= self.tpot_s)

    def met_by(self, due_ns: int, token_ns: Sequence[int], failure: str) -> bool:
        """Whether one request met both; a failed request never does."""
        if failure or not token_ns:
            return False
        rest = (token_ns[-1] - token_ns[0]) / max(len(token_ns) - 1, 1)
        return bool(self.met((token_ns[0] - due_ns) / 1e9, rest / 1e9))


OBJECTIVES: Mapping[str, Objectives] = {  # of `Serving`, by scale
    "mini": Objectives(0.25, 0.01),
    "shape": Objectives(10.0, 0.4),
    "file": Objectives(5.0, 0.2),  # five tokens a second: about as fast as people read
}
WITHIN: Mapping[str, Objectives] = {  # of `Traffic`, by scale
    "mini": Objectives(0.05, 0.01),
    "shape": Objectives(10.0, 0.5),
    "file": Objectives(10.0, 0.5),
}


def named(cell: AnyCell) -> str:
    """A cell in words."""
    what = cell.workload
    if isinstance(cell, OnModel):
        together = f" × {cell.shape[0]}" if cell.shape[0] > 1 else ""
        what = f"{cell.model} {cell.dtype} {what} {cell.shape[1]}+{cell.shape[2]}{together}"
    return f"{what} ({cell.n_threads} threads)"
