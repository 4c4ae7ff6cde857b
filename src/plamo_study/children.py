"""Start other processes so that they load no code from the current directory, and end with this one.

Python looks for modules in the current directory first, and llama.cpp's tools load every `libggml-*.so` that lies
there. Measuring a downloaded file in its own folder would otherwise run code from it.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

NOWHERE = "/"  # working directory of other people's tools: only the system's owner can put files there
GUARD = 'read -r child && { read -r end; kill -s KILL -- "$child"; }'  # the second line never comes: the pipe closes


def python(*arguments: str) -> list[str]:
    """A command in this Python that imports modules only from where they are installed."""
    return [sys.executable, "-P", *arguments]


def keep_python_safe() -> None:
    """Do the same for Pythons that libraries start: multiprocessing and Jupyter accept no flags."""
    os.environ["PYTHONSAFEPATH"] = "1"


@contextmanager
def guard() -> Iterator[Callable[[int], None]]:
    """Yield a function that registers a child (pid) or a process group (negative): killed if this process dies.

    A lifeline is not enough: a stopped process does not notice that it closed, and a server has none. SIGKILL also ends
    stopped processes on Linux and macOS. The guard leads its own session, where a stop meant for others does not reach.
    """
    keeper = subprocess.Popen(["/bin/sh", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True, cwd=NOWHERE)
    assert keeper.stdin

    def name(child: int) -> None:
        assert keeper.stdin
        with suppress(BrokenPipeError):  # the guard was killed: the lifeline remains
            keeper.stdin.write(f"{child}\n".encode())
            keeper.stdin.flush()

    try:
        yield name
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdin.close()
