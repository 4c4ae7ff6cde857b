"""Messages between two processes over TCP: a JSON header of limited length, and bytes once the receiver accepts them.

A peer is not trusted: no message is unpickled, every length is checked against a limit, every wait has a limit, and
bytes that differ from those announced are refused. The module knows neither engine nor model.
One process makes the connection and hands one end to the other, so no other process on the machine can join.
"""

import hashlib
import socket
import struct
import time
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from llama_meter.errors import StudyError

LOOPBACK = "127.0.0.1"
MAGIC, VERSION = b"PLST", 1
PREFIX = struct.Struct(">4sHI")  # magic, version, bytes of the header
MOST_HEADER = 1 << 16
PIECE = 1 << 16  # bytes that a rate-limited sender sends at once
PATIENCE_S = 60.0  # without a byte
OWN_S = 3600.0  # between two processes of one cell: a prompt may take minutes, and the runner ends a hang
AGAIN = "send it again"

clock = time.perf_counter_ns  # one clock for all processes of a machine
Message = TypeVar("Message", bound=msgspec.Struct)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A header: fields of known names and types only."""


class Origin(Strict, frozen=True, kw_only=True):
    """Properties that two contexts must share for one to continue from the other's state."""

    model: str  # SHA-256 of the file
    engine: str  # SHA-256 of the libraries
    type_k: str
    type_v: str
    flash_attn: str
    n_seq_max: int
    kv_unified: bool
    swa_full: bool


class Spent(Strict, frozen=True, kw_only=True):
    """Nanoseconds spent on a state before it was announced."""

    prefill: Annotated[int, msgspec.Meta(ge=0)]
    save: Annotated[int, msgspec.Meta(ge=0)]
    check: Annotated[int, msgspec.Meta(ge=0)]


class State(Strict, frozen=True, kw_only=True):
    """Header of a sequence's state: its origin and contents."""

    origin: Origin
    request: int = 0
    n_tokens: int  # evaluated, and in the state
    token: int  # first of the answer: not in the state, and a recurrent state cannot go back to compute it
    n_bytes: int
    sha256: str  # of these bytes
    spent: Spent  # on the sender's side


class Reply(Strict, frozen=True, kw_only=True):
    """The receiver's reply to an announced or sent state: accepted, or the reason for a refusal."""

    refused: str = ""


class Hello(Strict, frozen=True, kw_only=True):
    """The sender is ready."""

    pid: int


class Start(Strict, frozen=True, kw_only=True):
    """The receiver is ready; with the `clock` time of the start (ns)."""

    at_ns: int = 0


class Proof(Strict, frozen=True, kw_only=True):
    """Header of the logits that the sender computed from the state it shipped."""

    n_steps: int
    n_vocab: int


def pair(patience_s: float = PATIENCE_S) -> tuple[socket.socket, socket.socket]:
    """Both ends of a loopback connection. No port stays open, and connections from any other caller are closed."""
    with socket.create_server((LOOPBACK, 0)) as door:
        near = socket.create_connection(door.getsockname(), PATIENCE_S)
        while True:
            far, caller = door.accept()
            if caller == near.getsockname():
                return ready(near, patience_s), ready(far, patience_s)
            far.close()


def ready(peer: socket.socket, patience_s: float = PATIENCE_S) -> socket.socket:
    """A connection that waits for no byte longer than `patience_s` seconds and holds no small message back."""
    peer.settimeout(patience_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def send(peer: socket.socket, header: msgspec.Struct) -> None:
    """Send a header. Raises StudyError if the peer is gone or no longer accepts data."""
    told = msgspec.json.encode(header)
    _give(peer, PREFIX.pack(MAGIC, VERSION, len(told)) + told)


def push(peer: socket.socket, data: np.ndarray, bps: int = 0) -> None:
    """Send the bytes that a header announced, at most `bps` bits per second (0: unlimited).

    A piece is sent when a link of this speed would have delivered its last bit. Raises StudyError as `send` does.
    """
    start, left = clock(), data.data.cast("B")
    for at in range(0, len(left), PIECE):
        piece = left[at : at + PIECE]
        due = start + (at + len(piece)) * 8e9 / bps if bps else start
        if (wait := due - clock()) > 0:
            time.sleep(wait / 1e9)
        _give(peer, piece)


def _give(peer: socket.socket, data: bytes | memoryview) -> None:
    try:
        peer.sendall(data)
    except OSError as error:
        raise StudyError("the peer", f"no longer accepts data ({error})", "start it again") from error


def offer(peer: socket.socket, told: State, data: np.ndarray, bps: int = 0) -> None:
    """Announce a state, send it once the peer accepts, and wait for its confirmation.

    Raises
    ------
    StudyError
        The peer refuses the state, before or after the transfer, or is gone.

    """
    send(peer, told)
    _accepted(peer)
    push(peer, data, bps)
    _accepted(peer)


def _accepted(peer: socket.socket) -> None:
    if why := receive(peer, Reply).refused:
        raise StudyError("the receiver", f"refused: {ascii(why)[1:-1]}", "send what it can take")


def receive(peer: socket.socket, kind: type[Message]) -> Message:
    """Receive the next header, of the given kind.

    Raises
    ------
    StudyError
        The header is of another protocol, too long, or not of this kind; or the peer is
        gone or silent.

    """
    magic, version, size = PREFIX.unpack(take(peer, PREFIX.size).tobytes())
    if (magic, version) != (MAGIC, VERSION):
        raise StudyError("the message", f"does not begin as version {VERSION} of this protocol", "update both sides")
    if size > MOST_HEADER:
        raise StudyError("the message", f"announces a header of {size} bytes, {MOST_HEADER} at most", AGAIN)
    try:
        return msgspec.json.decode(take(peer, size).tobytes(), type=kind)
    except (ValueError, RecursionError) as error:  # a DecodeError is a ValueError
        raise StudyError("the header", f"is no {kind.__name__} ({str(error)!a})", "update both sides") from error


def take(peer: socket.socket, n_bytes: int) -> np.ndarray:
    """Receive exactly `n_bytes` bytes, (n_bytes,) uint8; StudyError if the peer ends or falls silent before."""
    data = np.empty(n_bytes, np.uint8)
    left = data.data
    while left:
        try:
            n = peer.recv_into(left)
        except OSError as error:
            n, why = 0, f"is silent ({error})"
        else:
            why = "is gone"
        if not n:
            raise StudyError("the peer", f"{why} after {n_bytes - len(left):,} of {n_bytes:,} bytes", AGAIN)
        left = left[n:]
    return data


def digest(data: np.ndarray) -> str:
    """SHA-256 of an array's bytes, 64 hex digits."""
    return hashlib.sha256(data.data).hexdigest()
