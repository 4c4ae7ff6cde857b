"""How other processes are started, so that they take no code from the folder somebody stands in, and end with this one.

Python looks for modules in the current directory first, and llama.cpp's tools load every `libggml-*.so` that lies
there. Whoever measures a downloaded file in the folder it came in would run what came with it.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

NOWHERE = "/"  # where other people's tools stand: only the system's owner puts files there
GUARD = 'read -r child && { read -r end; kill -s KILL -- "$child"; }'  # the second line never comes: the pipe closes


def python(*arguments: str) -> list[str]:
    """A command in this Python, which looks for modules where they are installed."""
    return [sys.executable, "-P", *arguments]


def keep_python_safe() -> None:
    """The same for Pythons that libraries start: multiprocessing and Jupyter take their flags from nobody."""
    os.environ["PYTHONSAFEPATH"] = "1"


@contextmanager
def guard() -> Iterator[Callable[[int], None]]:
    """Name it a child (its number) or a group of processes (negative): killed if this process dies meanwhile.

    A lifeline is not enough: a stopped process does not notice that it closed, and a server has none. SIGKILL ends what
    is stopped, too, on Linux and macOS; the guard leads a session of its own, where no stop for others reaches it.
    """
    keeper = subprocess.Popen(["/bin/sh", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True, cwd=NOWHERE)
    assert keeper.stdin

    def name(child: int) -> None:
        assert keeper.stdin
        with suppress(BrokenPipeError):  # somebody killed it: the lifeline is left
            keeper.stdin.write(f"{child}\n".encode())
            keeper.stdin.flush()

    try:
        yield name
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdin.close()
