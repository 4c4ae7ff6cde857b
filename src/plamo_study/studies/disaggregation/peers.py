"""The other process: started, waited for, and ended with this one, whichever of both dies first and how."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plamo_study.errors import StudyError
from plamo_study.measure import process
from plamo_study.measure.cells import Shipment
from plamo_study.studies.disaggregation import sender, wire
from plamo_study.studies.disaggregation.requests import Asking
from plamo_study.studies.disaggregation.sender import Hello, Order

LOOK_S = 0.1  # between two looks at whether the sender still lives


class Sender(threading.Thread):
    """Runs the sending process until it ends; then `outcome` says how."""

    def __init__(self, cell: Shipment | Asking, path: Path, port: int, lengths: list[int]):
        super().__init__(daemon=True)
        self.order = Order(cell=cell, path=str(path), port=port, lengths=lengths)
        self.outcome: process.Outcome | None = None

    def run(self) -> None:
        """Wait for the process."""
        self.outcome = process.work(self.order, wire.OWN_S, worker=sender.__name__)


@contextmanager
def started(cell: Shipment | Asking, path: Path, lengths: Sequence[int] = ()) -> Iterator[tuple[Sender, socket.socket]]:
    """A sender of this cell on its way, and the socket at which it will call; it is gone when this ends well.

    `lengths`: tokens of each request's prompt.
    """
    with wire.listen() as door:
        thread = Sender(cell, path, door.getsockname()[1], list(lengths))
        thread.start()
        try:
            yield thread, door
        except StudyError as error:
            thread.join(LOOK_S * 10)
            raise told(thread, error) from error
        thread.join()


def accepted(thread: Sender, door: socket.socket) -> tuple[socket.socket, int]:
    """The sender's connection and its pid. StudyError where it ended before it called."""
    door.settimeout(LOOK_S)
    while True:
        try:
            peer, _ = door.accept()
        except TimeoutError:
            if thread.is_alive():
                continue
            raise StudyError("the sender", "ended before it called", "start it again") from None
        wire.ready(peer, wire.OWN_S)
        return peer, wire.receive(peer, Hello).pid


def told(thread: Sender, error: StudyError) -> StudyError:
    """The error, and how the sender ended where that is known."""
    failure = thread.outcome.failure if thread.outcome else None
    if failure is None:
        return error
    return StudyError(error.what, f"{error.why}; the sender ended in {failure.stage}: {failure.why}", error.mend)
