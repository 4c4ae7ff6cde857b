"""A completion server as a process: started on a free loopback port, awaited, watched, and always ended.

Two kinds. "llama-server" is llama.cpp's own: it answers several requests at once, in slots. "llama_cpp.server" comes
with the Python bindings: it answers one request at a time, first come, first served.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from llama_meter import children
from llama_meter.engine import builds, server_build
from llama_meter.errors import StudyError
from llama_meter.measure import machine
from llama_meter.measure.process import ASSERT, BUILD_FOLDER

Kind = Literal["llama-server", "llama_cpp.server"]
PORTS = 3  # that are tried
START_S, LOOK_S, END_S = 300.0, 0.05, 10.0  # seconds until it listens (the first time, a Mac compiles Metal's shaders
# for it); between two checks; from terminate to kill
READY = {"llama-server": "/health", "llama_cpp.server": "/v1/models"}  # the path that answers 200 when it is ready
NAMED = "LLAMA_SERVER"  # environment: the llama-server to use
NO_GPUS = {"GGML_METAL_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "", "GGML_VK_VISIBLE_DEVICES": ""}  # without -dev
TAIL = 4000  # characters of the log that are read
PYTHON_NEEDS = ("fastapi", "uvicorn", "pydantic_settings", "sse_starlette", "starlette_context")


@dataclass(frozen=True)
class Setup:
    """Settings of a server; `n_ctx`: tokens of one slot; `libraries`: the folder from which it loads libllama."""

    kind: Kind
    model: Path
    n_slots: int = 1
    n_ctx: int = 2048
    n_threads: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: str = "auto"
    n_gpu_layers: int = 0
    libraries: Path | None = None
    binary: Path | None = None  # the llama-server; by default the one that `find` finds
    options: tuple[str, ...] = ()


class TakenError(StudyError):
    """Another program listens on the port that a server was given."""


class Server:
    """A running server. `ended` reports how it ended by itself, and its last message."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: IO[bytes]):
        self.url, self.process, self._log = url, process, log

    def ended(self, within_s: float = 0.0) -> str:
        """Why the server ended, waiting up to `within_s` seconds for it; empty while it runs."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return ""
        return f"the server ended: {machine.how_ended(code)}" + (f", {said}" if (said := self.assertion()) else "")

    def assertion(self) -> str:
        """The failed assertion in its log; empty for none."""
        match = ASSERT.search(self.log())
        return match.group(0) if match else ""

    def log(self) -> str:
        """The end of its log, without the folders of its build."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - TAIL, 0))
        return BUILD_FOLDER.sub("", self._log.read().decode(errors="replace"))


def find() -> Path | None:
    """The llama-server named by LLAMA_SERVER, else the one built here; others on the PATH are ignored.

    Raises StudyError where LLAMA_SERVER names no program.
    """
    if named := os.environ.get(NAMED):
        if not (program := shutil.which(named)):
            raise StudyError(f"{NAMED}={named}", "is no program", "name the llama-server binary, or unset it")
        return Path(program)
    return server_build.built()


def _settled(setup: Setup) -> Setup:
    """The setup with its binary. A binary that was not built here keeps the libraries of its own release.

    Raises StudyError where there is no binary, or where one that was not built here is to run on a build of ours.
    """
    if setup.binary or setup.kind != "llama-server":
        return setup
    if not (binary := find()):
        raise StudyError("llama-server", "not found", f"plamo-study engine build llama-server, or set {NAMED} to one")
    if binary.resolve() == (server_build.home() / server_build.BINARY).resolve():
        return replace(setup, binary=binary)
    if setup.libraries not in (None, builds.installed_libraries()):
        why = f"was not built here, so it cannot run on the engine in {setup.libraries}"
        raise StudyError(str(binary), why, f"plamo-study engine build llama-server, and unset {NAMED}")
    return replace(setup, binary=binary, libraries=None)


def threads() -> int:
    """Threads for a server whose client has a core of its own: a thread that shares its core slows all."""
    return max(machine.performance_cores() - 1, 1)


def has_python_server() -> bool:
    """Whether what `llama_cpp.server` needs beside the bindings is installed."""
    return all(find_spec(name) for name in PYTHON_NEEDS)


@contextmanager
def started(setup: Setup, start_s: float = START_S) -> Iterator[Server]:
    """Context with a running server; its process is gone when the context is left, in whatever way.

    Raises StudyError where it cannot be started, ends before it listens, or does not listen in time.
    """
    setup, until = _settled(setup), time.monotonic() + start_s
    with tempfile.TemporaryFile() as log, ExitStack() as running:
        yield _listening(setup, log, running, until)


def _listening(setup: Setup, log: IO[bytes], running: ExitStack, until: float, tries: int = PORTS) -> Server:
    """A server that has begun to listen, on another port where the first was taken while it loaded its model."""
    port = free_port()
    try:
        with ExitStack() as own:
            guarded = own.enter_context(children.guard())
            process = _spawn(_command(setup, port), environment(setup.kind, setup.libraries, setup.n_gpu_layers), log)
            own.callback(_end, process)
            guarded(process.pid)
            server = Server(f"http://127.0.0.1:{port}", process, log)
            _await(server, port, READY[setup.kind], until)
            running.push(own.pop_all())
            return server
    except TakenError:
        if tries == 1:
            raise
    return _listening(setup, log, running, until, tries - 1)


def environment(kind: Kind, libraries: Path | None, n_gpu_layers: int = -1) -> dict[str, str]:
    """The environment in which a server loads the libraries of a folder, or its own ones where `libraries` is None."""
    variables = children.environment()
    if kind == "llama_cpp.server" and n_gpu_layers == 0:
        variables |= NO_GPUS
    if libraries and kind == "llama-server":
        variables |= dict.fromkeys(("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"), str(libraries.absolute()))
    elif libraries:
        variables |= {"LLAMA_CPP_LIB_PATH": str(libraries.absolute())}
    return variables


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(setup: Setup, port: int) -> list[str]:
    at = ["--host", "127.0.0.1", "--port", str(port)]
    threads, size = str(setup.n_threads), [str(setup.n_batch), str(setup.n_ubatch)]
    model = str(setup.model.absolute())
    if setup.kind == "llama_cpp.server":
        if not has_python_server():
            raise StudyError("llama_cpp.server", "its web framework is not installed", "pip install '.[server]'")
        command = children.python("-m", "llama_cpp.server", "--model", model, *at)
        command += ["--n_ctx", str(setup.n_ctx), "--n_threads", threads, "--n_threads_batch", threads]
        command += ["--n_batch", size[0], "--n_ubatch", size[1], "--n_gpu_layers", str(setup.n_gpu_layers)]
        # Answers must be whole: by default an arriving request cuts off the one that is being answered.
        command += ["--interrupt_requests", "False", "--logits_all", "False", "--verbose", "False"]
        return [*command, "--flash_attn", str(setup.flash_attn == "on"), *setup.options]
    assert setup.binary
    command = [str(setup.binary.absolute()), "-m", model, *at, "-np", str(setup.n_slots), "-t", threads, "-tb", threads]
    command += ["-c", str(setup.n_ctx * setup.n_slots), "-b", size[0], "-ub", size[1], "-fa", setup.flash_attn]
    return [*command, *offload(setup.n_gpu_layers), "--cache-ram", "0", *setup.options]


def offload(n_gpu_layers: int) -> list[str]:
    """Options of llama.cpp's tools for a number of layers on a GPU. For 0, the GPU must be disabled explicitly.

    Otherwise a build with GPU support computes calls of 32 tokens or more there, copying the weights each time.
    """
    return ["-ngl", str(n_gpu_layers), *(["-dev", "none"] if n_gpu_layers == 0 else [])]


def _spawn(command: list[str], variables: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    try:
        return subprocess.Popen(command, env=variables, cwd=children.NOWHERE, **ends)
    except OSError as error:
        raise StudyError(command[0], f"cannot be run ({error})", "name a llama-server binary") from None


def _await(server: Server, port: int, path: str, until: float) -> None:
    from llama_meter import http  # its import takes 0.1 s, so only starting a server pays for it

    while time.monotonic() < until:
        why, answers = server.ended(), http.answers(server.url + path)
        if why and answers:
            raise TakenError("the server", f"{why}: another program listens on its port, {port}", "try again")
        if why:
            tail = " ".join(server.log().strip().splitlines()[-2:])
            raise StudyError("the server", f"{why} before it listened: {tail}", "read its last words above")
        if answers and _listens(server.process.pid, port):
            return
        time.sleep(LOOK_S)
    raise StudyError("the server", "does not listen in time", "give it longer, or look whether memory is short")


def _listens(pid: int, port: int) -> bool:
    """Whether a process, or one that it started, is what listens on a port; also where the system does not say."""
    try:
        own = psutil.Process(pid)
        connections = [
            connection for one in (own, *own.children(recursive=True)) for connection in one.net_connections("tcp")
        ]
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
    return any(connection.status == psutil.CONN_LISTEN and connection.laddr.port == port for connection in connections)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
