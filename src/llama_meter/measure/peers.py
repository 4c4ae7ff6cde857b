"""Processes that talk to one another: one starts others and hands each an end of a connection; messages over it.

A message is a JSON header of limited length, and bytes once the receiver accepts them. A peer is not trusted: no
message is unpickled, every length is checked against a limit, every wait has a limit. No port stays open, so no other
process on the machine can join. Whoever dies closes its connection; `started` then says how it ended.
"""

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import numpy as np

from llama_meter import children
from llama_meter.errors import StudyError
from llama_meter.measure import machine, worker

LOOPBACK = "127.0.0.1"
MAGIC, VERSION = b"PLST", 1
PREFIX = struct.Struct(">4sHI")  # magic, version, bytes of the header
MOST_HEADER = 1 << 16
PIECE = 1 << 16  # bytes that a rate-limited sender sends at once
PATIENCE_S = 60.0  # without a byte
OWN_S = 3600.0  # between two processes of one cell: a prompt may take minutes, and the runner ends a hang
DYING_S, LOOK_S = 1.0, 0.01  # in which a process ends after its connection; between two looks whether it has
AGAIN = "send it again"

clock = time.perf_counter_ns  # one clock for all processes of a machine
Message = TypeVar("Message", bound=msgspec.Struct)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A header: fields of known names and types only."""


class Go(Strict, frozen=True, kw_only=True):
    """Go on; with the `clock` time at which to start (ns), where there is one."""

    at_ns: int = 0


# ---------------------------------------------------------------- messages


def pair(patience_s: float = PATIENCE_S) -> tuple[socket.socket, socket.socket]:
    """Both ends of a loopback connection. Connections from any other caller are closed."""
    with socket.create_server((LOOPBACK, 0)) as door:
        near = socket.create_connection(door.getsockname(), PATIENCE_S)
        while True:
            far, caller = door.accept()
            if caller == near.getsockname():
                return ready(near, patience_s), ready(far, patience_s)
            far.close()


def ready(line: socket.socket, patience_s: float = PATIENCE_S) -> socket.socket:
    """A connection that waits for no byte longer than `patience_s` seconds and holds no small message back."""
    line.settimeout(patience_s)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def send(line: socket.socket, header: msgspec.Struct) -> None:
    """Send a header. Raises StudyError if the peer is gone or no longer accepts data."""
    body = msgspec.json.encode(header)
    _give(line, PREFIX.pack(MAGIC, VERSION, len(body)) + body)


def push(line: socket.socket, data: np.ndarray, bps: int = 0) -> None:
    """Send the bytes that a header announced, at most `bps` bits per second (0: unlimited).

    A piece is sent when a link of this speed would have delivered its last bit. Raises StudyError as `send` does.
    """
    start, left = clock(), data.data.cast("B")
    for at in range(0, len(left), PIECE):
        piece = left[at : at + PIECE]
        due = start + (at + len(piece)) * 8e9 / bps if bps else start
        if (wait := due - clock()) > 0:
            time.sleep(wait / 1e9)
        _give(line, piece)


def _give(line: socket.socket, data: bytes | memoryview) -> None:
    try:
        line.sendall(data)
    except OSError as error:
        raise StudyError("the peer", f"no longer accepts data ({error})", "start it again") from error


def receive(line: socket.socket, kind: type[Message]) -> Message:
    """Receive the next header, of the given kind.

    Raises
    ------
    StudyError
        The header is of another protocol, too long, or not of this kind; or the peer is
        gone or silent.

    """
    magic, version, size = PREFIX.unpack(take(line, PREFIX.size).tobytes())
    if (magic, version) != (MAGIC, VERSION):
        raise StudyError("the message", f"does not begin as version {VERSION} of this protocol", "update both sides")
    if size > MOST_HEADER:
        raise StudyError("the message", f"announces a header of {size} bytes, {MOST_HEADER} at most", AGAIN)
    try:
        return msgspec.json.decode(take(line, size).tobytes(), type=kind)
    except (ValueError, RecursionError) as error:  # a DecodeError is a ValueError
        raise StudyError("the header", f"is no {kind.__name__} ({str(error)!a})", "update both sides") from error


def take(line: socket.socket, n_bytes: int) -> np.ndarray:
    """Receive exactly `n_bytes` bytes, (n_bytes,) uint8; StudyError if the peer ends or falls silent before."""
    data = np.empty(n_bytes, np.uint8)
    left = data.data
    while left:
        try:
            n = line.recv_into(left)
        except OSError as error:
            n, why = 0, f"is silent ({error})"
        else:
            why = "is gone"
        if not n:
            raise StudyError("the peer", f"{why} after {n_bytes - len(left):,} of {n_bytes:,} bytes", AGAIN)
        left = left[n:]
    return data


# ---------------------------------------------------------------- processes


class Peer:
    """A process that was started, called `name`, and the connection to it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], line: socket.socket):
        self.name, self.process, self.line = name, process, line

    def kill(self) -> None:
        """End it as the system does when memory runs out; nothing happens where it has ended."""
        self.process.kill()
        self.process.wait()
        self.line.close()


@contextmanager
def started(module: str, tasks: Mapping[str, msgspec.Struct], files: Sequence[int] = ()) -> Iterator[dict[str, Peer]]:
    """Start a process for each task, by its name; a module of ours takes the task with `joined`. None is left behind.

    They belong to this process's group and hold a lifeline to it, so none outlives it, however it ends. `files`: file
    descriptors that they inherit. One that is taken out of the dictionary is missed by nobody.
    An error inside becomes one that names the process which ended, if one did.
    """
    lifeline, ours = os.pipe()
    peers: dict[str, Peer] = {}
    try:
        for name, task in tasks.items():
            near, far = pair(OWN_S)
            command = children.python("-m", module, str(lifeline), str(far.fileno()))
            fds = [lifeline, far.fileno(), *files]
            with far:  # only the process keeps this end, and its death closes the connection
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
            peers[name] = Peer(name, process, near)
            send(near, task)
        yield peers
    except StudyError as error:
        raise _missed(list(peers.values()), error) from error
    finally:
        for peer in peers.values():
            peer.kill()
        os.close(lifeline)
        os.close(ours)


def _missed(peers: Sequence[Peer], error: StudyError) -> StudyError:
    """The error for the first process that ended within DYING_S; the given one where none did."""
    until = time.monotonic() + DYING_S
    while time.monotonic() < until:
        for peer in peers:
            if (code := peer.process.poll()) is not None:
                why = f"ended by itself: {machine.how_ended(code)} ({error.what} {error.why})"
                return StudyError(peer.name, why, "measure it again")
        time.sleep(LOOK_S)
    return error


@contextmanager
def joined(kind: type[Message]) -> Iterator[tuple[Message, socket.socket]]:
    """In a process that `started` made: its task, and the connection to the process that started it.

    An error inside is written to the log of the worker, and ends this process.
    """
    worker.begin()
    with worker.failing(), ready(socket.socket(fileno=int(sys.argv[2])), OWN_S) as line:
        yield receive(line, kind), line
