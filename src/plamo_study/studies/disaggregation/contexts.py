"""A context's side of a shipment: what two contexts must have in common, and how one loads a state or refuses it."""

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
FRAME = 1 << 17  # bytes at most of the descriptions of caches and layers, and of rounding in the engine's log


def origin(path: Path, config: SessionConfig) -> Origin:
    """Properties that a context of this file and configuration shares with those that can load its states."""
    same = {name: getattr(config, name) for name in Origin.__struct_fields__ if hasattr(config, name)}
    return Origin(model=tensors.sha256(path), engine=library.describe()["sha256"], **same)


@dataclass(frozen=True)
class Receiver:
    """A context that loads states of its own kind. `log`: the engine's log from its creation."""

    session: Session
    own: Origin
    log: list[str]
    n_requests: int = 1

    @cached_property
    def most_bytes(self) -> int:
        """Upper limit of one sequence's state in bytes: the memory that the engine reserved for all sequences."""
        memory = filling.memory(self.log)
        return int(memory.kv + memory.state) + A_CELL * sum(memory.cells) + FRAME

    def check(self, told: State) -> None:
        """StudyError for an announced state that this context must not load; none of it has been read yet."""
        session = self.session
        wire.check(told, self.own, session.config.n_ctx_seq, self.most_bytes, session.n_vocab, self.n_requests)

    def load(self, seq: int, told: State, data: np.ndarray) -> None:
        """Load a checked and verified state into a sequence.

        Raises
        ------
        StudyError
            The engine refuses it, or it does not hold the announced number of tokens. The sequence is then empty.

        """
        try:
            self.session.set_state(seq, data, told.n_tokens)
            why = "" if self.session.held(seq) == told.n_tokens else f"holds {self.session.held(seq)} tokens"
        except EngineError as error:
            why = str(error)
        if why:
            self.session.remove_tail(seq, 0)
            raise StudyError("the state", f"of {told.n_tokens} tokens cannot be taken: {why}", wire.AGAIN)
