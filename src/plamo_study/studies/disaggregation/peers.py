"""The sending process: started, waited for, and ended with this one, whichever dies first."""

import select
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

LOOK_S = 0.1  # between two checks that the sender is alive


class Sender(threading.Thread):
    """Thread that runs the sending process until it ends; `outcome` then holds the result."""

    def __init__(self, cell: Shipment | Asking, path: Path, end: socket.socket, lengths: list[int]):
        super().__init__(daemon=True)
        self.order = Order(cell=cell, path=str(path), connection=end.fileno(), lengths=lengths)
        self.end = end
        self.outcome: process.Outcome | None = None

    def run(self) -> None:
        """Wait for the process."""
        with self.end:
            self.outcome = process.work(self.order, wire.OWN_S, worker=sender.__name__, files=[self.end.fileno()])


@contextmanager
def started(cell: Shipment | Asking, path: Path, lengths: Sequence[int] = ()) -> Iterator[tuple[Sender, socket.socket]]:
    """Start a cell's sender and yield it with the connection to it; wait for its end on exit.

    `lengths`: tokens of each request's prompt.
    """
    peer, end = wire.pair(wire.OWN_S)
    thread = Sender(cell, path, end, list(lengths))
    thread.start()
    try:
        with peer:
            yield thread, peer
    except StudyError as error:
        thread.join(LOOK_S * 10)
        raise told(thread, error) from error
    thread.join()


def called(thread: Sender, peer: socket.socket) -> int:
    """Wait until the sender is ready; its pid. StudyError if it ended before that."""
    while not select.select([peer], [], [], LOOK_S)[0]:
        if not thread.is_alive():
            raise StudyError("the sender", "ended before it called", "start it again")
    pid = wire.receive(peer, Hello).pid
    thread.end.close()  # the sender owns it now, and its end must close the connection
    return pid


def told(thread: Sender, error: StudyError) -> StudyError:
    """The error, with the reason of the sender's end if it is known."""
    failure = thread.outcome.failure if thread.outcome else None
    if failure is None:
        return error
    return StudyError(error.what, f"{error.why}; the sender ended in {failure.stage}: {failure.why}", error.mend)
