"""Processes of one cell that talk to one another: one starts others and hands each an end of a connection.

Messages are Python objects, bytes follow the message that announces them. Both ends are ours, so nothing is checked but
what a computation needs. Whoever dies closes its connection; `started` then says how it ended.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

import msgspec
import numpy as np

from llama_meter import children
from llama_meter.errors import StudyError
from llama_meter.measure import machine, worker

PIECE = 1 << 16  # bytes that are sent at once
DYING_S, LOOK_S = 1.0, 0.01  # in which a process ends after its connection; between two looks whether it has

clock = time.perf_counter_ns  # one clock for all processes of a machine


class Go(msgspec.Struct, frozen=True, kw_only=True):
    """Go on; with the `clock` time at which to start (ns), where there is one."""

    at_ns: int = 0


def push(line: Connection, data: np.ndarray) -> None:
    """Send the bytes that a message announced."""
    left = data.data.cast("B")
    for at in range(0, len(left), PIECE):
        line.send_bytes(left[at : at + PIECE])


def take(line: Connection, n_bytes: int) -> np.ndarray:
    """Receive exactly `n_bytes` bytes, (n_bytes,) uint8."""
    data, at = np.empty(n_bytes, np.uint8), 0
    while at < n_bytes:
        at += line.recv_bytes_into(data.data, at)
    return data


class Peer(NamedTuple):
    """A process that was started, called `name`, and the connection to it."""

    name: str
    process: subprocess.Popen[bytes]
    line: Connection


@contextmanager
def started(module: str, tasks: Mapping[str, msgspec.Struct]) -> Iterator[dict[str, Peer]]:
    """Start a process for each task, by its name, which does `serve(task, connection)` of a module of ours.

    They belong to this worker's group, so none outlives it, however it ends (`process.work`).
    StudyError names the process that ended, where one did.
    """
    peers: dict[str, Peer] = {}
    try:
        for name, task in tasks.items():
            near, far = Pipe()
            command = children.python("-m", __name__, str(far.fileno()), module)
            with far:  # only the process keeps this end, and its death closes the connection
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[far.fileno()])
            peers[name] = Peer(name, process, near)
            near.send(task)
        yield peers
    except (EOFError, OSError) as error:
        raise _missed(list(peers.values()), error) from error
    finally:
        for peer in peers.values():
            peer.process.kill()
            peer.process.wait()
            peer.line.close()


def _missed(peers: Sequence[Peer], error: Exception) -> StudyError:
    """The error for the first process that ended within DYING_S."""
    until = time.monotonic() + DYING_S
    while time.monotonic() < until:
        for peer in peers:
            if (code := peer.process.poll()) is not None:
                return StudyError(peer.name, f"ended by itself: {machine.how_ended(code)}", "measure it again")
        time.sleep(LOOK_S)
    return StudyError("a process of this cell", f"no longer answers ({error!r})", "measure it again")


if __name__ == "__main__":  # in a process that `started` made: an error is written to the worker's log
    worker.begin()
    with worker.failing(), Connection(int(sys.argv[1])) as line:
        import_module(sys.argv[2]).serve(line.recv(), line)
