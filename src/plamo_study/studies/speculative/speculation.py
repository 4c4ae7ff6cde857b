"""Rounds of speculation: draft, save, verify in one call, accept, take back; each token is checked.

Greedy: the target first continues each prompt alone, one token per call: the reference. The generated text follows it,
so that cost can be measured at any acceptance; the check is on the token that verification would have chosen at each
position.

At a temperature there is no reference: the text is drawn by exact rejection sampling, after Leviathan et al. 2023,
"Fast inference from transformers via speculative decoding", algorithm 1. A token drawn from the draft's distribution q
is kept with probability min(1, p / q); otherwise one is drawn from max(p - q, 0), normalized. The last logits of the
text are checked against one prefill of it.

A rejected end of a draft is removed in one of four ways. `tail` removes it if the engine can: keys and values always,
a recurrent state only in builds that keep the states of the last positions. Otherwise it falls back to `part`, the
cheapest way in an engine as released. `full` saves the whole sequence before each draft, restores it, and evaluates the
accepted tokens again. `part` does the same with the part that cannot be removed token by token. `joined` also restores
the part, but evaluates the accepted tokens in the next verification: no separate call, and no new save.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from llama_meter.cells import TERMS, Speculate
from llama_meter.engine import library
from llama_meter.engine.session import EngineError, Part, Session
from llama_meter.measure import proof
from llama_meter.oracle.compare import relative_error
from plamo_study.studies.speculative.drafters import Draft

clock = time.perf_counter_ns
Times = dict[str, int]  # nanoseconds by term


class Reference:
    """A prompt with the target's continuation: `tokens` including the prompt, and `logits`.

    Greedy: `n` tokens, one per call; row i of `logits` (n, n_vocab) chose token n_prompt + i. At a
    temperature only the first token is drawn here; the rounds append theirs.
    """

    def __init__(self, session: Session, seq: int, prompt: np.ndarray, n: int, temperature: float, seed: int):
        session.clear()
        rows, tokens = [session.prefill({seq: prompt})[seq][-1]], prompt.tolist()
        self.state, self.n_prompt = session.read_state(seq), len(prompt)
        self.rng = np.random.default_rng([seed, seq])
        if temperature:
            p = probabilities(rows[0], temperature)
            tokens.append(int(self.rng.choice(len(p), p=p)))
        else:
            while len(rows) < n:
                tokens.append(int(rows[-1].argmax()))
                session.decode({seq: tokens[-1]})
                rows.append(session.logits())
            tokens.append(int(rows[-1].argmax()))
        self.logits, self.tokens = np.stack(rows), np.array(tokens, dtype=np.int32)

    def forget(self) -> None:
        """Remove the tokens that rounds have appended."""
        self.tokens = self.tokens[: self.n_prompt + len(self.logits)]

    def expected(self, at: int) -> np.ndarray:
        """Logits (n_vocab,) that chose token `at`."""
        return np.asarray(self.logits[at - self.n_prompt])


class Loop:
    """Rounds of speculation on sequences of one session, and their records."""

    def __init__(self, cell: Speculate, session: Session, references: dict[int, Reference], drafts: dict[int, Draft]):
        self.cell, self.session, self.references, self.drafts = cell, session, references, drafts
        self.way = Way(session, cell.back, cell.n_draft)
        several = len(references) > 1 and cell.n_draft > 0  # tokens of several sequences
        self.apart = several and session.is_recurrent and "D2" not in library.corrects()
        self.at = {seq: reference.n_prompt for seq, reference in references.items()}  # certain tokens, without the last
        self.rounds: list[Times] = []
        self.counts: dict[str, list[int]] = {"drafted": [], "accepted": [], "sequence": []}
        self.others: list[tuple[int, int, int]] = []  # sequence, token's position, token chosen instead
        self.error = 0.0
        self.longest = min(1, cell.n_draft) if cell.drafter == "adapts" else cell.n_draft
        self.last = dict[int, np.ndarray]()  # logits at the end of each drawn text
        session.clear()
        for seq, reference in references.items():
            session.set_state(seq, reference.state, reference.n_prompt)
            reference.forget()

    def run(self, n_gen: int) -> None:
        """Run rounds until one sequence has `n_gen` new tokens."""
        while max(self.at[seq] - reference.n_prompt for seq, reference in self.references.items()) < n_gen:
            self.round()

    def round(self) -> None:
        """Draft, save, verify, accept and take back, once for every sequence."""
        times: Times = dict.fromkeys(TERMS, 0)
        start = clock()
        drafted = {seq: self._draft(seq) for seq in self.references}
        times["draft"] = clock() - start
        self.way.before([seq for seq, draft in drafted.items() if len(draft)], times)
        owed = {seq: self.way.owed(seq) for seq in drafted}
        columns = {
            seq: [*owed[seq], int(self.references[seq].tokens[self.at[seq]]), *draft.tolist()]
            for seq, draft in drafted.items()
        }
        silent = max(map(len, owed.values()))  # only single-sequence runs owe tokens
        start = clock()
        logits = self.verify({seq: np.array(tokens, dtype=np.int32) for seq, tokens in columns.items()}, silent)
        chosen = {seq: rows.argmax(axis=1) for seq, rows in logits.items()}
        times["verify"] = clock() - start
        for seq, draft in drafted.items():
            n = self._judge(seq, draft, logits[seq], chosen[seq])
            self._adapt(len(draft), n)
            self.way.after(seq, columns[seq], len(owed[seq]) + 1 + n, times)
        self.rounds.append(times)

    def _draft(self, seq: int) -> np.ndarray:
        if not self.cell.n_draft:
            return np.empty(0, np.int32)
        return self.drafts[seq](self.references[seq].tokens[: self.at[seq] + 1], self.longest)

    def verify(self, columns: dict[int, np.ndarray], silent: int = 0) -> dict[int, np.ndarray]:
        """Logits by sequence at the last certain token and at each token of the draft: in one call, or in a call per
        sequence if the engine mixes up sequences with several tokens in one call."""
        if not self.apart:
            return self.session.verify(columns, silent)
        return {seq: self.session.verify({seq: tokens})[seq].copy() for seq, tokens in columns.items()}

    def _judge(self, seq: int, draft: np.ndarray, logits: np.ndarray, chosen: np.ndarray) -> int:
        """Number of draft tokens that are kept: those equal to the reference or, at a temperature, those drawn."""
        n = self._drawn(seq, draft, logits) if self.cell.temperature else self._agreed(seq, draft, logits, chosen)
        self.at[seq] += n + 1
        for name, value in (("drafted", len(draft)), ("accepted", n), ("sequence", seq)):
            self.counts[name].append(value)
        return n

    def _agreed(self, seq: int, draft: np.ndarray, logits: np.ndarray, chosen: np.ndarray) -> int:
        """Number of draft tokens equal to the reference; records verification's other choices up to the next token."""
        reference, at = self.references[seq], self.at[seq]
        agree = draft == reference.tokens[at + 1 : at + 1 + len(draft)]
        n = len(draft) if agree.all() else int(agree.argmin())
        for i, token in enumerate(chosen[: n + 1].tolist(), at + 1):
            if token != reference.tokens[i]:
                self.others.append((seq, i, token))
        self.error = max(self.error, relative_error(logits[n], reference.expected(at + 1 + n)))
        return n

    def _drawn(self, seq: int, draft: np.ndarray, logits: np.ndarray) -> int:
        reference = self.references[seq]
        p = probabilities(logits, self.cell.temperature)
        n, after = verified(draft, one_hot(draft, p.shape[1]), p, reference.rng)
        reference.tokens = np.append(reference.tokens, np.array([*draft[:n], after], dtype=np.int32))
        self.last[seq] = logits[n].copy()
        return n

    def _adapt(self, drafted: int, accepted: int) -> None:
        """Lengthen the next draft by two after a fully accepted one, else shorten it by one; at least one token."""
        if self.cell.drafter == "adapts":
            longer = self.longest + 2 if accepted == drafted else self.longest - 1
            self.longest = min(max(longer, 1), self.cell.n_draft)

    def prove(self) -> None:
        """Check the last logits of each drawn text against one prefill of it."""
        for seq, logits in self.last.items():
            alone = proof.alone(self.session, seq, self.references[seq].tokens[:-1])
            self.error = max(self.error, relative_error(logits, alone))


@contextmanager
def spent(times: Times, term: str) -> Iterator[None]:
    """Context manager that adds the time spent inside to a term (ns)."""
    start = clock()
    yield
    times[term] += clock() - start


class Way:
    """One way of taking drafts back, for all sequences of a session."""

    def __init__(self, session: Session, way: str, k: int):
        self.session, self.k = session, k
        self.removes = way == "tail" and k > 0 and (not session.is_recurrent or session.n_kept >= k)
        self.part: Part = "everything" if way == "full" else "fixed"
        self.joins = way == "joined"
        self.saves = k > 0 and not self.removes
        self.saved: dict[int, tuple[np.ndarray, int]] = {}  # state, and the number of tokens in it
        self._owed: dict[int, list[int]] = {}  # accepted tokens missing from the restored state

    def clear(self) -> None:
        """Forget what was saved: the sequences are new."""
        self.saved.clear()
        self._owed.clear()

    def before(self, seqs: list[int], times: Times) -> None:
        """Save the state to which a draft may be taken back."""
        if not self.saves:
            return
        for seq in seqs:
            if len(self._owed.get(seq, ())) > self.k:
                self._replay(seq, self._owed.pop(seq), times)
            if seq not in self._owed:
                with spent(times, "save"):
                    self.saved[seq] = self.session.read_state(seq, self.part), self.session.n_past[seq]

    def owed(self, seq: int) -> list[int]:
        """Tokens to evaluate before the draft, in the same call."""
        return self._owed.get(seq, [])

    def after(self, seq: int, columns: list[int], n_kept: int, times: Times) -> None:
        """Keep the first `n_kept` of the columns just evaluated; `columns` begins with the owed tokens."""
        if n_kept == len(columns):
            self._owed.pop(seq, None)
        elif self.removes:
            with spent(times, "restore"):
                if not self.session.remove_tail(seq, self.session.n_past[seq] - len(columns) + n_kept):
                    raise EngineError(f"llama.cpp did not take back {len(columns) - n_kept} tokens of sequence {seq}")
        else:
            with spent(times, "restore"):
                state, n_past = self.saved[seq]
                self.session.set_state(seq, state, n_past, self.part)
            if self.joins:
                self._owed[seq] = columns[:n_kept]
            else:
                self._replay(seq, columns[:n_kept], times)

    def _replay(self, seq: int, tokens: list[int], times: Times) -> None:
        with spent(times, "replay"):
            self.session.evaluate([(seq, np.array(tokens, dtype=np.int32))])


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Softmax of logits (..., n_vocab) at a temperature above 0, float64."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    weights = np.exp(scaled)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def one_hot(tokens: np.ndarray, n_vocab: int) -> np.ndarray:
    """Distributions (k, n_vocab) of a deterministic drafter's tokens (k,): n-grams, or a greedy model."""
    return np.eye(n_vocab)[tokens]


def verified(draft: np.ndarray, drafted: np.ndarray, target: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """Number of tokens of a draft (k,) that are kept, and the token after them.

    `drafted`: the distributions (k, n_vocab) they were drawn from; `target`: the target's, (k + 1, n_vocab), the last
    one after the whole draft.
    """
    for i, token in enumerate(draft.tolist()):
        p, q = target[i], drafted[i]
        if rng.random() * q[token] >= p[token]:
            left = np.maximum(p - q, 0)
            return i, int(rng.choice(len(p), p=left / left.sum()))
    return len(draft), int(rng.choice(target.shape[1], p=target[-1]))
