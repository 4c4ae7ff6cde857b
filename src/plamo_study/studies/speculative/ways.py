"""Four ways to remove the rejected end of a draft from a sequence, with one interface.

`tail` removes it if the engine can: keys and values always, a recurrent state only in builds that keep the states of
the last positions. Otherwise it falls back to `part`, the cheapest way in an engine as released.
`full` saves the whole sequence before each draft, restores it, and evaluates the accepted tokens again. `part`
does the same with the part that cannot be removed token by token. `joined` also restores the part, but evaluates the
accepted tokens in the next verification: no separate call, and no new save.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from plamo_study.engine.session import EngineError, Part, Session

clock = time.perf_counter_ns
Times = dict[str, int]  # nanoseconds by term


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
