"""A context's side of a shipment: what it must share with another one, and how it takes a state or stays as it was."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from plamo_study.engine import filling, library
from plamo_study.engine.session import EngineError, Session, SessionConfig
from plamo_study.errors import StudyError
from plamo_study.models import tensors
from plamo_study.studies.disaggregation import wire
from plamo_study.studies.disaggregation.wire import Origin, State

A_CELL = 16  # bytes at most of a token's position and sequence
FRAME = 1 << 17  # bytes at most of what describes caches and layers, and of the rounding in the engine's log


def origin(path: Path, config: SessionConfig) -> Origin:
    """What a context of this file and configuration shares with those that can take its states."""
    same = {name: getattr(config, name) for name in Origin.__struct_fields__ if hasattr(config, name)}
    return Origin(model=tensors.sha256(path), engine=library.describe()["sha256"], **same)


@dataclass(frozen=True)
class Receiver:
    """A context that takes states of its own kind. `log`: what the engine said when it was made."""

    session: Session
    own: Origin
    log: list[str]
    n_requests: int = 1

    @cached_property
    def most_bytes(self) -> int:
        """More than any state of one sequence can have: what the engine reserved for all of them."""
        memory = filling.memory(self.log)
        return int(memory.kv + memory.state) + A_CELL * sum(memory.cells) + FRAME

    def check(self, told: State) -> None:
        """StudyError for an announced state that this context must not take; nothing is read of it yet."""
        session = self.session
        wire.check(told, self.own, session.config.n_ctx_seq, self.most_bytes, session.n_vocab, self.n_requests)

    def load(self, seq: int, told: State, data: np.ndarray) -> None:
        """Put a state that was checked and verified into a sequence.

        Raises
        ------
        StudyError
            The engine refuses it, or finds other tokens in it than announced. The sequence is empty then.

        """
        try:
            self.session.set_state(seq, data, told.n_tokens)
            why = "" if self.session.held(seq) == told.n_tokens else f"holds {self.session.held(seq)} tokens"
        except EngineError as error:
            why = str(error)
        if why:
            self.session.remove_tail(seq, 0)
            raise StudyError("the state", f"of {told.n_tokens} tokens cannot be taken: {why}", wire.AGAIN)
