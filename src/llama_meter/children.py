"""Start other processes so that they load no code from the current directory, and end with this one.

Python looks for modules in the current directory first, and llama.cpp's tools load every `libggml-*.so` that lies
there. Measuring a downloaded file in its own folder would otherwise run code from it.

What a measured process inherits is chosen. llama.cpp's tools take any option from the environment (LLAMA_ARG_*), the
server of the bindings even from API_KEY or N_CTX, and OpenMP its threads: with these another program would be measured
than the one that its row names.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

NOWHERE = "/"  # working directory of other people's tools: only the system's owner can put files there
GUARD = 'read -r child && { read -r end; kill -s KILL -- "$child"; }'  # the second line never comes: the pipe closes
PLACES = (  # inherited: where programs, libraries and files lie, and in which words a program speaks
    *("PATH", "HOME", "USER", "LANG", "LC_", "TZ", "TMPDIR", "XDG_", "LD_", "DYLD_", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("PYTHON", "PLAMO_STUDY_", "LLAMA_CPP_LIB_PATH", "LLAMA_SERVER"),
)
SETTINGS = (  # inherited and recorded: which devices the engine uses, and how it computes
    *("GGML_", "CUDA_", "CUBLAS_", "NVIDIA_TF32_OVERRIDE", "HIP_", "ROCR_", "HSA_", "VK_", "METAL_", "MTL_"),
    *("GLIBC_TUNABLES", "MALLOC_", "LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "OPENBLAS_CORETYPE"),
    *("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"),
)
UNRECORDED = ("CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "CUDA_VERSION", "GGML_NO_BACKTRACE")
OURS = {"GGML_NO_BACKTRACE": "1"}  # an assertion's text is enough; the backtrace costs seconds
FOLDERS = re.compile(r"[^\s:,;=]*/")  # in front of a file's name
MOST_SETTING = 200  # characters that are recorded of one setting


def environment() -> dict[str, str]:
    """The environment of a process that is measured: what was chosen of ours, and what this project sets."""
    return {name: value for name, value in os.environ.items() if name.startswith(PLACES + SETTINGS)} | OURS


def settings(variables: Mapping[str, str]) -> list[str]:
    """What in an environment may change a measurement, as NAME=VALUE in order of the names; of paths the last part."""
    names = sorted(name for name in variables if name.startswith(SETTINGS) and name not in UNRECORDED)
    return [f"{name}={FOLDERS.sub('', variables[name])}"[:MOST_SETTING] for name in names]


def python(*arguments: str) -> list[str]:
    """A command in this Python that imports modules only from where they are installed."""
    return [sys.executable, "-P", *arguments]


def keep_python_safe() -> None:
    """Do the same for Pythons that libraries start: multiprocessing and Jupyter accept no flags."""
    os.environ["PYTHONSAFEPATH"] = "1"


@contextmanager
def guard() -> Iterator[Callable[[int], None]]:
    """Yield a function that registers a child (pid) or a process group (negative): killed if this process dies.

    SIGKILL also ends stopped processes on Linux and macOS. The guard leads its own session, where a stop meant for
    others does not reach.
    """
    keeper = subprocess.Popen(["/bin/sh", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True, cwd=NOWHERE)
    assert keeper.stdin

    def name(child: int) -> None:
        assert keeper.stdin
        with suppress(BrokenPipeError):  # somebody killed the guard
            keeper.stdin.write(f"{child}\n".encode())
            keeper.stdin.flush()

    try:
        yield name
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdin.close()
