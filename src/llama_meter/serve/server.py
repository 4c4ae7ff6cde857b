"""llama-server as a process: built, started on a free port, awaited, watched, and always ended.

llama.cpp's own server answers several requests at once, in slots. It is built once, from the locked sources against the
installed ggml: no engine patch touches its own sources, and the libllama compiled along the way is discarded. A
server's libllama and ggml are chosen when it starts, by the folder it finds its libraries in: the installed engine's,
or that of a build of `engine.builds`.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from llama_meter import children, disk
from llama_meter.cells import Serving, Turns
from llama_meter.engine import builds
from llama_meter.engine.bindings import NOTE
from llama_meter.engine.builds import OnStep
from llama_meter.errors import StudyError, UnmeasuredError
from llama_meter.measure import machine
from llama_meter.measure.process import ASSERT, BUILD_FOLDER

BINARY = "llama-server"
OF_CELL = ("n_threads", "n_batch", "n_ubatch", "flash_attn", "n_gpu_layers")
TURNED_ON = ("BUILD_COMMON", "BUILD_TOOLS", "BUILD_SERVER")
LIBRARIES = ("llama-common", "llama-server-impl", "mtmd")  # libraries beside it; an engine brings libllama and ggml
START_S, LOOK_S, END_S = 300.0, 0.05, 10.0  # seconds until it listens (the first time, a Mac compiles Metal's shaders
# for it); between two checks; from terminate to kill
READY = "/health"  # the path that answers 200 when it is ready
NAMED = "LLAMA_SERVER"  # environment: the llama-server to use
TAIL = 4000  # characters of the log that are read


# ------------------------------------------------------------------ the program


def _home() -> Path:
    """The folder of the program that is built here; it need not exist."""
    return builds.folder("server")


def _built() -> Path | None:
    """The program that `build` made from the current sources, None without one."""
    made = _home() / NOTE
    return _home() / BINARY if made.exists() and disk.toml(made) == tomllib.loads(_note_text()) else None


def build(on_step: OnStep = lambda *step: None) -> Path:
    """Make the program if it is missing. Raises StudyError as `engine.builds.build` does."""
    if binary := _built():
        return binary
    with builds.replacing(_home()) as (partial, made):
        tree = partial / "build"
        builds.compile_target(BINARY, builds.sources(partial, on_step), tree, on_step, TURNED_ON)
        made.mkdir()
        shutil.copy2(tree / "bin" / BINARY, made / BINARY)
        for name in LIBRARIES:
            for file in (tree / "bin").glob(f"lib{name}*{builds.SUFFIX}*"):
                shutil.copy2(file, made / file.name, follow_symlinks=False)
        (made / NOTE).write_text(_note_text(), encoding="utf-8")
    return _home() / BINARY


def _note_text() -> str:
    release, sha256 = builds.locked()
    return f"source = {json.dumps(f'{builds.PACKAGE} {release}, sha256 {sha256}')}\n"


def find() -> Path | None:
    """The llama-server named by LLAMA_SERVER, else the one built here; others on the PATH are ignored.

    Raises StudyError where LLAMA_SERVER names no program.
    """
    if named := os.environ.get(NAMED):
        if not (program := shutil.which(named)):
            raise StudyError(f"{NAMED}={named}", "is no program", "name the llama-server binary, or unset it")
        return Path(program)
    return _built()


def program() -> Path:
    """The program that `find` finds; UnmeasuredError without one."""
    if not (binary := find()):
        raise UnmeasuredError(BINARY, "not found", f"plamo-study engine build {BINARY}, or set {NAMED} to one")
    return binary


# ------------------------------------------------------------------ a process


@dataclass(frozen=True)
class Setup:
    """Settings of a server; `n_ctx`: tokens of one slot; `libraries`: the folder from which it loads libllama.

    `reuse`: options of what is kept of a prompt; by default nothing beside its slot.
    """

    model: Path
    n_slots: int = 1
    n_ctx: int = 2048
    n_threads: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: str = "auto"
    n_gpu_layers: int = 0
    libraries: Path | None = None
    reuse: tuple[str, ...] = ("--cache-ram", "0")

    @classmethod
    def of(cls, cell: Serving | Turns, model: Path, n_ctx: int, **changes: Any) -> Self:
        """The server of a cell on this worker's engine, with slots of `n_ctx` tokens; `changes`: fields that differ."""
        folder = os.environ.get("LLAMA_CPP_LIB_PATH")
        libraries = Path(folder) if folder else builds.installed_libraries()
        shared = {name: getattr(cell, name) for name in OF_CELL}
        return cls(model, cell.n_seq, n_ctx, libraries=libraries, **shared | changes)


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
        failed = ASSERT.search(self.log())
        return f"the server ended: {machine.how_ended(code)}" + (f", {failed.group(0)}" if failed else "")

    def log(self) -> str:
        """The end of its log, without the folders of its build."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - TAIL, 0))
        return BUILD_FOLDER.sub("", self._log.read().decode(errors="replace"))


def threads() -> int:
    """Threads for a server whose client has a core of its own: a thread that shares its core slows all."""
    return max(machine.performance_cores() - 1, 1)


@contextmanager
def started(setup: Setup, start_s: float = START_S) -> Iterator[Server]:
    """Context with a running server; its process is gone when the context is left, in whatever way.

    Raises StudyError where there is no program or it cannot be started, ends before it listens, or does not listen in
    time; and where a program that was not built here is to run on a build of ours: it has the libraries of its release.
    """
    binary = program()
    libraries = setup.libraries
    if binary.resolve() != (_home() / BINARY).resolve():
        if libraries not in (None, builds.installed_libraries()):
            why = f"was not built here, so it cannot run on the engine in {libraries}"
            raise StudyError(str(binary), why, f"plamo-study engine build llama-server, and unset {NAMED}")
        libraries = None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryFile() as log, ExitStack() as running:
        guarded = running.enter_context(children.guard())
        try:
            process = subprocess.Popen(
                command(setup, binary, port),
                env=environment(libraries),
                cwd=children.NOWHERE,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise StudyError(str(binary), f"cannot be run ({error})", "name a llama-server binary") from None
        running.callback(_end, process)
        guarded(process.pid)
        server = Server(f"http://127.0.0.1:{port}", process, log)
        _await(server, start_s)
        yield server


def environment(libraries: Path | None) -> dict[str, str]:
    """The environment in which a server loads the libraries of a folder, or its own ones where `libraries` is None."""
    names = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if libraries else ()
    return children.environment() | {name: str(libraries.absolute()) for name in names if libraries}


def command(setup: Setup, binary: Path, port: str) -> list[str]:
    """The command that starts a server."""
    words = [binary.absolute(), "-m", setup.model.absolute(), "--host", "127.0.0.1", "--port", port]
    words += ["-np", setup.n_slots, "-t", setup.n_threads, "-tb", setup.n_threads, "-c", setup.n_ctx * setup.n_slots]
    words += ["-b", setup.n_batch, "-ub", setup.n_ubatch, "-fa", setup.flash_attn, *offload(setup.n_gpu_layers)]
    return [*map(str, words), *setup.reuse]


def offload(n_gpu_layers: int) -> list[str]:
    """Options of llama.cpp's tools for a number of layers on a GPU. For 0, the GPU must be disabled explicitly.

    Otherwise a build with GPU support computes calls of 32 tokens or more there, copying the weights each time.
    """
    return ["-ngl", str(n_gpu_layers), *(["-dev", "none"] if n_gpu_layers == 0 else [])]


def _await(server: Server, start_s: float) -> None:
    import httpx2  # its import takes 0.1 s, so only starting a server pays for it

    until = time.monotonic() + start_s
    with httpx2.Client(trust_env=False, verify=False) as web:
        while time.monotonic() < until:
            if why := server.ended(LOOK_S):
                tail = " ".join(server.log().strip().splitlines()[-2:])
                raise StudyError("the server", f"{why} before it listened: {tail}", "read its last words above")
            try:
                if web.get(server.url + READY).status_code == httpx2.codes.OK:
                    return
            except httpx2.TransportError:
                continue
    raise StudyError("the server", "does not listen in time", "give it longer, or look whether memory is short")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
