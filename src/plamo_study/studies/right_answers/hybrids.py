"""Questions to a model that keeps a state: is a sequence's answer its own, whatever else the engine is doing?

Each question evaluates sequences as a server would. Every sequence is then held against itself alone: its own context,
its prompt in one call, one token a step. All tokens are drawn in advance, so that rounding cannot change what follows.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from llama_meter import children
from llama_meter.cells import Hybrid
from llama_meter.engine import builds, library
from llama_meter.engine.session import EngineError, Session, SessionConfig
from llama_meter.models import tensors
from llama_meter.models.synthetic import writing
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured
from plamo_study.studies.right_answers import plan

STEPS = 8  # tokens that a sequence goes on for behind its prompt
SHORT = 6  # tokens of a prompt where many sequences are asked
FEW = 4  # tokens of a prompt that a planted fault replaces
LIMIT_S = 60.0  # for the generator

FORMS = {plan.LAYERED: {"ARCHS_LAYERS": "3"}, plan.STATE_FIRST: {"ARCHS_STATE_FIRST": "1"}}
OLDER = {  # in files for older builds
    "plamo2": {"ARCHS_SSM_HEADS": "4"},  # Mamba heads as wide as attention's, as in the released file
    "plamo3": {"ARCHS_LAYERS": "8"},  # layers of every kind: some builds abort where all have a window
}
# Tensors that released files lack, and builds before they came refuse: factors of others, as NVFP4 has, and optional
NEWS = re.compile(r".*\.(scale|input_scale)|rope_freqs\.weight|blk\.\d+\.attn_[qkv]\.bias")
TIED = "output.weight"  # and this one in files of LFM2

Logits = dict[tuple[int, int], np.ndarray]  # (n_vocab,) by sequence and the number of its tokens that were evaluated


def write(name: str, into: Path, form: str = "whole") -> Path:
    """Write one file, e.g. "mamba2-dense" or "lfm2moe-moe", in F32, into a folder; returns its path.

    UnmeasuredError where the generator is not built, EngineError where it does not write this architecture so.
    """
    arch, path, plain = name.rpartition("-")[0], into / f"{name}.gguf", form in (plan.PLAIN, plan.STATE_FIRST)
    command = [str(builds.program(plan.GENERATOR)), "-a", arch, "-s", "1", "-o", str(into)]
    surroundings = children.environment() | {"ARCHS_RWKV": "1"} | FORMS.get(form, {})
    surroundings |= OLDER.get(arch, {}) if plain else {}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode or not path.exists():
        raise EngineError(f"the generator writes no file of {arch} in this form: {done.stderr[-200:]}")
    if plain:
        changes = {"tokenizer.ggml.model": MetadataDetails(GGUFValueType.STRING, "none")}
        if arch.startswith("qwen"):  # older builds count which layers are attention: here every second one
            changes[f"{arch}.full_attention_interval"] = MetadataDetails(GGUFValueType.UINT32, 2)
        reader = GGUFReader(path)
        tied = TIED if arch.startswith("lfm2") else ""
        reader.tensors = [each for each in reader.tensors if not NEWS.fullmatch(each.name) and each.name != tied]
        _copy(reader, path, arch, changes)
    return path


def by_layer(path: Path) -> Path:
    """Write a file again, with a number of heads for each layer: 0 for those without attention. Returns its path."""
    reader, into = GGUFReader(path), path.with_suffix(".by-layer.gguf")
    fields = {field.name.partition(".")[2]: field.contents() for field in reader.fields.values()}
    n_heads, arch = fields["attention.head_count"], fields["architecture"]
    heads = [0 if recurrent else n_heads for recurrent in fields["attention.recurrent_layers"]]
    by_layer = MetadataDetails(GGUFValueType.ARRAY, heads, sub_type=GGUFValueType.UINT32)
    _copy(reader, into, arch, {f"{arch}.attention.head_count": by_layer})
    return into


def _copy(reader: GGUFReader, into: Path, arch: str, changes: dict[str, MetadataDetails]) -> None:
    """Write what a reader holds, with other values in some fields; an empty list, which gguf cannot write, goes."""
    empty = [field.name for field in reader.fields.values() if field.contents() == []]
    with writing(into, arch) as writer:
        copy_with_new_metadata(reader, writer, changes, empty)


@dataclass
class Serving:
    """Contexts on one file, the tokens of sequences, how many of each were evaluated, and the logits behind them.

    `lengths`: tokens of each prompt. `contexts`: end with it. A planted fault: after a step the last sequence gets the
    first one's state; where there is only one, the last tokens of its prompt are others.
    """

    cell: Hybrid
    path: Path
    config: SessionConfig
    tokens: list[np.ndarray]
    lengths: list[int]
    contexts: ExitStack

    def __post_init__(self) -> None:
        self.logits: Logits = {}
        self.done = [0] * len(self.tokens)
        self.slots = list(range(len(self.tokens)))

    def context(self, **changed: object) -> Session:
        """A further context, with a model of its own; it ends with the question."""
        return self.contexts.enter_context(Session(self.path, replace(self.config, **changed)))  # type: ignore[arg-type]

    def call(self, session: Session, parts: Mapping[int, int]) -> None:
        """Evaluate so many next tokens of these sequences in one call."""
        call = []
        for seq, n in parts.items():
            tokens = self.tokens[seq][self.done[seq] : self.done[seq] + n]
            if self.cell.planted and len(self.tokens) == 1 and not self.done[seq]:
                tokens = np.concatenate([tokens[:-FEW], (tokens[-FEW:] + 1) % session.n_vocab])
            call.append((self.slots[seq], tokens))
            self.done[seq] += n
        logits = session.evaluate(call)
        self.logits |= {(seq, self.done[seq]): logits[self.slots[seq]][-1].copy() for seq in parts}

    def read(self, session: Session, *seqs: int) -> None:
        """Evaluate the prompts of these sequences in one call."""
        self.call(session, {seq: self.lengths[seq] for seq in seqs})

    def drafted(self, seq: int, n: int) -> np.ndarray:
        """A sequence's next token, and a draft of `n` wrong ones behind it: as if they were taken back already."""
        at = self.done[seq]
        self.done[seq] += 1
        return np.concatenate([self.tokens[seq][at : at + 1], self.tokens[seq][:n]])

    def go_on(self, session: Session, *seqs: int, steps: int = STEPS) -> None:
        """Let these sequences, by default all, take steps together."""
        chosen = seqs or range(len(self.tokens))
        for step in range(steps):
            if self.cell.planted and step == 1 and len(chosen) > 1:
                first, last = self.slots[chosen[0]], self.slots[chosen[-1]]
                session.set_state(last, session.read_state(first), session.n_past[first])
            self.call(session, dict.fromkeys(chosen, 1))

    def take_back(self, session: Session, seqs: Iterable[int]) -> None:
        """Leave these sequences as many tokens as they are to have."""
        for seq in seqs:
            if not session.remove_tail(seq, self.done[seq]):
                raise EngineError("the engine does not take tokens back")

    def go_on_in_copies(self, session: Session) -> None:
        """Copy the first sequence's state to all others, and let all step together."""
        for seq in range(1, len(self.tokens)):
            session.copy(0, seq)
            self.done[seq] = self.done[0]
        self.go_on(session)


def equal(serving: Serving) -> None:
    """All prompts are read in one call, in micro-batches of so many tokens as the cell says, if it does."""
    session = serving.context(n_ubatch=serving.cell.number or serving.config.n_ubatch)
    serving.read(session, *range(len(serving.tokens)))
    serving.go_on(session)


def listed(serving: Serving) -> None:
    """The same file with a number of heads for each layer: 0 where a layer has no attention."""
    serving.path = by_layer(serving.path)
    equal(serving)


def steps(serving: Serving) -> None:
    """Prompts are read one by one, and all sequences step together."""
    session = serving.context(n_seq_max=max(serving.slots) + 1)
    for seq in range(len(serving.tokens)):
        serving.read(session, seq)
    serving.go_on(session)


def gaps(serving: Serving) -> None:
    """The slots in use do not lie side by side."""
    serving.slots = [0, 2, 7]
    steps(serving)


def late(serving: Serving) -> None:
    """A prompt is read in a call with the steps of others."""
    session = serving.context()
    *others, last = range(len(serving.tokens))
    for seq in others:
        serving.read(session, seq)
    for _ in range(2):
        serving.call(session, dict.fromkeys(others, 1))
    serving.call(session, dict.fromkeys(others, 1) | {last: serving.lengths[last]})
    serving.go_on(session, steps=STEPS - 3)


def left(serving: Serving) -> None:
    """One sequence leaves; another takes its slot while the others go on."""
    session = serving.context(n_seq_max=len(serving.tokens) - 1)
    first, *others, new = range(len(serving.tokens))
    for seq in (first, *others):
        serving.read(session, seq)
    serving.go_on(session, first, *others, steps=3)
    serving.done[first] = 0
    serving.take_back(session, [first])
    serving.call(session, dict.fromkeys(others, 1))
    serving.slots[new] = serving.slots[first]
    serving.read(session, new)
    serving.go_on(session, *others, new, steps=STEPS - 4)


def moved(serving: Serving) -> None:
    """A saved state goes on in another slot."""
    session = serving.context(n_seq_max=3)
    serving.read(session, 0)
    session.move(0, 2)
    serving.slots[0] = 2
    serving.go_on(session)


def resized(serving: Serving) -> None:
    """A saved state of a context with three slots goes on in another one, with five."""
    here, there = serving.context(n_seq_max=3), serving.context(n_seq_max=5)
    serving.read(here, 0)
    there.set_state(1, here.read_state(0), here.n_past[0])
    serving.slots[0] = 1
    serving.go_on(there)


def roll_back(serving: Serving, together: bool = True) -> None:
    """Drafts of this many tokens are evaluated behind a right one, in one call or token by token, and taken back.

    Of several slots the second is read first, and the first one's draft has a token more.
    """
    session, every = serving.context(n_rs_seq=plan.ROLLBACK), range(len(serving.tokens))
    for seq in (*every[1::-1], *every[2:]):
        serving.read(session, seq)
    longer = len(every) > 1
    drafts = [(seq, serving.drafted(seq, serving.cell.number + (longer and seq == 0))) for seq in every]
    for call in [drafts] if together else [[(0, token)] for token in drafts[0][1][:, None]]:
        session.evaluate(call)
    serving.take_back(session, every)
    serving.go_on(session, steps=STEPS - 1)


def roll_back_and_copy(serving: Serving) -> None:
    """A draft of one call is taken back, and copies of the sequence go on with tokens of their own."""
    session = serving.context(n_rs_seq=plan.ROLLBACK)
    serving.done[0] = serving.lengths[0] - 1
    for call in (serving.tokens[0][: serving.done[0]], serving.drafted(0, serving.cell.number)):
        session.evaluate([(0, call)])
    serving.take_back(session, [0])
    serving.go_on_in_copies(session)


def copied(serving: Serving) -> None:
    """One prompt is read, its state copied, and the copies go on with tokens of their own."""
    session = serving.context()
    serving.read(session, 0)
    serving.go_on_in_copies(session)


RULES: dict[str, Callable[[Serving], None]] = {
    "equal": equal,
    "unequal": equal,
    "steps": steps,
    "late": late,
    "left": left,
    "gaps": gaps,
    "slots": steps,
    "cut": equal,
    "moved": moved,
    "resized": resized,
    "copied": copied,
    plan.LISTED: listed,
    "kept": roll_back,
    "kept apart": partial(roll_back, together=False),
    "kept beside": roll_back,
    "kept copied": roll_back_and_copy,
}


def by_itself(session: Session, seq: int, tokens: np.ndarray, n_prompt: int) -> Logits:
    """Logits of a sequence by itself: so many tokens in one call, then one a call."""
    session.clear()
    logits = {(seq, n_prompt): session.prefill({0: tokens[:n_prompt]})[0][0]}
    for at in range(n_prompt, len(tokens)):
        session.decode({0: int(tokens[at])})
        logits[seq, at + 1] = session.logits()
    return logits


def judged(cell: Hybrid, path: Path) -> Measured:
    """Ask a file the question of a cell. EngineError where the engine fails to load it; an abort ends the process.

    Checks: `error`, the largest relative error of any logits against the sequence alone, with its `tolerance` and
    `rounding`, that of the first sequence's prompt token by token; `wrong`, how many sequences are beyond the
    tolerance; `refused`, the engine said that it cannot. A refusal is no wrong answer. Where a fault is planted, the
    answer is valid if it shows.
    """
    question = (plan.QUESTIONS | plan.ABOUT_FILES)[cell.question]
    lengths = list(question.lengths or (SHORT,) * cell.number)
    config = SessionConfig(plan.N_CTX, n_threads=cell.n_threads, n_gpu_layers=cell.n_gpu_layers)
    with Session(path, config) as session:
        rng = np.random.default_rng(cell.seed)
        tokens = [rng.integers(0, session.n_vocab, n + STEPS, dtype=np.int32) for n in lengths]
        if question.shared:
            tokens = [np.concatenate([tokens[0][:n], each[n:]]) for n, each in zip(lengths, tokens, strict=True)]
        alone: Logits = {}
        for seq, each in enumerate(tokens):
            alone |= by_itself(session, seq, each, lengths[seq])
        stepped = by_itself(session, 0, tokens[0], 1)
        rounding = max(relative_error(stepped[at], row) for at, row in alone.items() if at[0] == 0)
    limit = plan.tolerance(rounding, gpu=cell.n_gpu_layers != 0)
    checks: dict[str, float | bool] = {"refused": False, "rounding": rounding, "tolerance": limit}
    digest = tensors.read_sha256(path)
    with ExitStack() as contexts:
        serving = Serving(cell, path, replace(config, n_seq_max=len(tokens)), tokens, lengths, contexts)
        try:
            RULES[cell.question](serving)
        except EngineError:
            return Measured(checks=checks | {"refused": True}, file_sha256=digest, valid=True)
    errors = {at: relative_error(row, alone[at]) for at, row in serving.logits.items()}
    wrong = {seq for (seq, _), error in errors.items() if error > limit}
    checks |= {"error": max(errors.values()), "wrong": float(len(wrong))}
    return Measured(checks=checks, file_sha256=digest, valid=bool(wrong) == cell.planted)


def run(cell: Hybrid, path: Path, stage: Callable[[str], None]) -> Measured:
    """Write the file of a cell, and ask it the question."""
    library.capture_log([])
    with tempfile.TemporaryDirectory() as folder:
        stage("writing the file")
        file = write(cell.model, Path(folder), cell.form)
        stage(cell.question)
        return judged(cell, file)


RUNS = {Hybrid: run}
