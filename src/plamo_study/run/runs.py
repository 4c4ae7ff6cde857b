"""Execute notebooks with papermill, so that a final file name means that every cell ran.

The output is written to `NAME.partial.ipynb` and is renamed to `NAME.ipynb` when it is complete. What papermill reports
is not enough: after a dead kernel it marks every cell completed, and `sys.exit(0)` skips the rest and counts
as success. `unfinished` looks at execution counts, replies and error outputs too. A failure is a result, and the
next one runs.

Nothing here depends on what the notebooks measure.
"""

import asyncio
import hashlib
import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal

import msgspec
import nbformat
import papermill
import zmq
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError
from traitlets import default

from llama_meter import paths
from llama_meter.disk import growing, parsed
from llama_meter.errors import FAILED_GATE, NOT_MEASURED, StudyError, of_system
from plamo_study.run import parameters

MADE_FROM = "made_from"  # in the metadata of an executed notebook
MARKED = "papermill-error-cell-tag"  # of the cells by which papermill marks an error
ADDED = {"injected-parameters", MARKED}  # tags of papermill's own cells
ANSWERS_S, ENDS_S = 2.0, 5.0  # in which an idle kernel answers, and ends when asked to
SAVED_EVERY_S = 5.0  # shortest interval between saves of a running notebook
Status = Literal["ok", "unchanged", "gate failed", "not measured", "failed", "dead_kernel", "incomplete"]
GOES_ON: dict[str, Status] = {FAILED_GATE: "gate failed", NOT_MEASURED: "not measured"}  # by an error's name


@dataclass(frozen=True)
class RunResult:
    """The outcome of one notebook.

    `unchanged`: executed before from the same inputs. `gate failed`: complete, but the gate of a file failed, and what
    that file lacks is said on the page; `not measured`: so is a file that there was no time for. `output` is the
    complete notebook. `cell` is the cell that did not finish, counted from 0 in `notebook`; `error` and `message` are
    the exception's name and text.
    """

    notebook: Path
    status: Status
    seconds: float
    output: Path | None = None
    cell: int | None = None
    error: str = ""
    message: str = ""

    @property
    def is_new(self) -> bool:
        """Whether a complete notebook was written just now."""
        return self.output is not None and self.status != "unchanged"


class ThisPython(AsyncKernelManager):
    """Starts kernels with the running interpreter, never with another environment's kernelspec."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The kernelspec that ipykernel would install for this environment."""
        return KernelSpec(**get_kernel_dict())

    @default("transport_encryption")
    def _encrypted_where_possible(self) -> str:
        return "auto" if zmq.has("curve") else "disabled"

    async def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
        """Ask an idle kernel to end, and leave it time; end others as jupyter_client does.

        That interrupts first. A kernel that is not quite done with its last answer logs the interrupt as an error.
        """
        if not now and await self.is_alive() and await self._is_idle():
            await self.request_shutdown(restart=restart)
            until = time.monotonic() + ENDS_S
            while await self.is_alive() and time.monotonic() < until:
                await asyncio.sleep(ENDS_S / 60)
        await super().shutdown_kernel(now=now, restart=restart)

    async def _is_idle(self) -> bool:
        """Whether the kernel answers soon."""
        client = self.client()
        client.start_channels(iopub=False, stdin=False, hb=False, control=False)
        try:
            client.kernel_info()
            await client.get_shell_msg(timeout=ANSWERS_S)
        except queue.Empty:
            return False
        finally:
            client.stop_channels()
        return True


class SavesSeldom(NBClientEngine):
    """Papermill's engine with fewer saves: saving before and after every cell takes as long as many a notebook.
    The notebook is saved at the end; if this process is killed, the last save remains.

    Papermill's own options do not serve: `autosave_cell_every` adds saves within a cell to those around it, and without
    `request_save_on_cell_execute` a dead kernel leaves no notebook that says how far it came.
    """

    @classmethod
    def execute_managed_notebook(cls, nb_man: NotebookExecutionManager, kernel_name: str, **how: Any) -> None:
        """Execute a notebook; the start or end of a cell saves it if the last save was SAVED_EVERY_S ago."""
        save, saved = nb_man.save, time.monotonic()

        def seldom(**given: Any) -> None:
            nonlocal saved
            if time.monotonic() - saved >= SAVED_EVERY_S:
                save(**given)
                saved = time.monotonic()

        nb_man.save = seldom
        try:
            super().execute_managed_notebook(nb_man, kernel_name, **how)
        finally:
            nb_man.save = save


papermill_engines.register("seldom", SavesSeldom)


def find_notebooks(names: Sequence[str]) -> list[Path]:
    """Return the notebooks named by number (`01`), name (`01-phase-asymmetry`) or path; all of them for no names.

    Raises StudyError for a name that matches none or several, and for two notebooks of the same name.
    """
    notebooks = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
    chosen = list(dict.fromkeys(_find(name, notebooks) for name in names)) if names else notebooks
    stems = [path.stem for path in chosen]
    for stem in stems:
        if stems.count(stem) > 1:
            raise StudyError(stem, "two notebooks of this name would share one output", "run them one after the other")
    if not chosen:
        raise StudyError(str(paths.NOTEBOOKS), "holds no notebooks", "git checkout -- notebooks")
    return chosen


def _find(name: str, notebooks: Sequence[Path]) -> Path:
    path = Path(name)
    if path.suffix == ".ipynb" and path.is_file():
        return path.resolve()
    stem = path.name.removesuffix(".ipynb")
    fitting = [path for path in notebooks if path.stem == stem] or [
        path for path in notebooks if path.stem.startswith(stem + "-")
    ]
    if len(fitting) == 1:
        return fitting[0]
    why = "fits several notebooks" if fitting else "no such notebook"
    raise StudyError(name, why, f"use one of: {', '.join(path.stem for path in fitting or notebooks) or 'none'}")


def run(notebook: Path, values: Mapping[str, Any], out_dir: Path, inputs: str = "") -> RunResult:
    """Execute a notebook into `out_dir`. Whatever happens inside it is a result.

    `inputs` is a digest of its inputs besides itself and its parameters; a notebook that was executed from the same
    inputs is not executed again. Without a digest, it is. `values` are parameters as text or typed.

    Raises StudyError, before anything runs, for an unknown parameter or a value of the wrong type
    (see `parameters.assign`), and for a notebook that lies in `out_dir`.
    """
    assigned, out_dir = parameters.assign([notebook], values)[notebook], out_dir.resolve()
    if notebook.parent == out_dir:
        raise StudyError(str(notebook), "would be overwritten by its own output", "choose another output folder")
    out_dir.mkdir(parents=True, exist_ok=True)
    partial, output = (out_dir / f"{notebook.stem}{suffix}" for suffix in (".partial.ipynb", ".ipynb"))
    made_from, started = _made_from(notebook, assigned, inputs), time.monotonic()
    if inputs and _was_made_from(output) == made_from:
        return RunResult(notebook, "unchanged", 0.0, output)
    partial.unlink(missing_ok=True)
    problem = _execute(notebook, partial, assigned)
    if isinstance(problem, OSError) and problem.filename is None:
        problem.filename = str(output)
    seconds, executed = time.monotonic() - started, _read_back(partial)
    outcome = GOES_ON.get(problem.ename) if isinstance(problem, PapermillExecutionError) else None
    if executed and (problem is None or outcome) and not unfinished(executed):
        executed.metadata[MADE_FROM] = "" if outcome else made_from
        executed.cells = [cell for cell in executed.cells if MARKED not in cell.metadata.get("tags", [])]
        executed.metadata.papermill.update(input_path=output.name, output_path=output.name)  # no folder of this machine
        try:
            with growing(output) as whole:
                nbformat.write(executed, whole)
            partial.unlink()
            return RunResult(notebook, outcome or "ok", seconds, output)
        except OSError as full:
            problem = full
    status, error, message = _reason(problem, torn=executed is None)
    return RunResult(notebook, status, seconds, None, _last_started(executed) if executed else None, error, message)


def _read_back(path: Path) -> nbformat.NotebookNode | None:
    """An executed notebook; None where there is none, or it is torn, as a full disk leaves it."""
    try:
        return nbformat.read(path, as_version=4)
    except Exception:  # nbformat and JSON each raise their own kind here
        return None


def side_by_side(
    jobs: Sequence[tuple[Path, Mapping[str, Any], str]], out_dir: Path, at_once: int
) -> Iterator[RunResult]:
    """Execute notebooks as `run` does, several at once: (notebook, values, inputs) each; results in their order.

    Notebooks that are up to date are not given to another process, which would take longer than the check.
    """
    todo = [not is_current(notebook, values, out_dir, inputs) for notebook, values, inputs in jobs]
    n, spawn = max(min(at_once, sum(todo)), 1), get_context("spawn")
    try:
        made = ProcessPoolExecutor(n, mp_context=spawn, initializer=_end_with_parent)
    except OSError:  # no semaphores here, as without a /dev/shm that can be written to: one after the other
        yield from (run(notebook, values, out_dir, inputs) for notebook, values, inputs in jobs)
        return
    with made as pool:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: a start that is cut off is loud
        try:
            given = [
                pool.submit(_in_pool, notebook, values, out_dir, inputs) if new else None
                for (notebook, values, inputs), new in zip(jobs, todo, strict=True)
            ]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        for (notebook, values, inputs), running in zip(jobs, given, strict=True):
            yield running.result() if running else run(notebook, values, out_dir, inputs)


def _in_pool(*job: Any) -> RunResult:
    """`run`; an interrupt, which every process of a terminal gets, ends its kernel and then this process, silently."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run(*job)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with_parent() -> None:
    """End this pool process with its parent, for which it would wait forever, and by an interrupt while it waits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = parent_process()
    assert parent

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def is_current(notebook: Path, values: Mapping[str, Any], out_dir: Path, inputs: str) -> bool:
    """Whether a notebook was executed there before, with these parameters and from these inputs (none: unknown)."""
    assigned = parameters.assign([notebook], values)[notebook]
    output = out_dir / f"{notebook.stem}.ipynb"
    return bool(inputs) and _was_made_from(output) == _made_from(notebook, assigned, inputs)


class Whole(msgspec.Struct):
    """Of an executed notebook what says where it comes from. Nothing else of it is kept, and all of it must be JSON."""

    metadata: dict[str, Any]


def made(output: Path) -> tuple[str, str] | None:
    """The files that an executed notebook was given and the day it began, in UTC; None where it cannot be read."""
    try:
        papermill = parsed(output.read_bytes(), Whole).metadata["papermill"]
        return str(papermill["parameters"].get("files", "")), str(papermill["start_time"])[:10]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _was_made_from(output: Path) -> str:
    """What an executed notebook says that it was made from; "" where it cannot be read and must be executed again."""
    try:
        return str(parsed(output.read_bytes(), Whole).metadata.get(MADE_FROM, ""))
    except (OSError, ValueError):
        return ""


def _made_from(notebook: Path, values: dict[str, Any], inputs: str) -> str:
    parts = (notebook.read_bytes(), json.dumps(values, sort_keys=True).encode(), inputs.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _execute(notebook: Path, partial: Path, values: dict[str, Any]) -> Exception | None:
    """Let papermill write `partial`; return its exception. The kernel runs in the notebook's folder, as in Lab."""
    for name in ("papermill", "asyncio"):  # the result reports a dead kernel
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        papermill.execute_notebook(
            notebook,
            partial,
            values,
            engine_name="seldom",
            kernel_name="python3",
            language="python",
            progress_bar=False,
            cwd=notebook.parent,
            kernel_manager_class=ThisPython,
        )
    except Exception as problem:  # a notebook may fail in any way; the others still run
        return problem
    return None


def _last_started(executed: nbformat.NotebookNode) -> int | None:
    """The last cell that papermill started, by its place in the notebook before papermill added cells of its own."""
    own = [cell for cell in executed.cells if not ADDED & set(cell.metadata.get("tags", []))]
    started = [index for index, cell in enumerate(own) if cell.metadata.get("papermill", {}).get("start_time")]
    return started[-1] if started else None


def _reason(problem: Exception | None, torn: bool = False) -> tuple[Status, str, str]:
    match problem:
        case None if torn:
            return "incomplete", "OSError", "what was executed cannot be read back: look at the disk with `df -h`"
        case None:
            return "incomplete", "SystemExit", "the notebook ended before its last cell"
        case DeadKernelError():
            return "dead_kernel", "DeadKernelError", "the kernel process died"
        case OSError(errno=int()) if error := of_system(problem):
            return "failed", "OSError", f"{error.what}: {error.why}; {error.mend}"
        case PapermillExecutionError():
            return "failed", str(problem.ename), str(problem.evalue)
        case _:
            return "failed", type(problem).__name__, str(problem)


def unfinished(notebook: nbformat.NotebookNode) -> list[int]:
    """Return the indices of code cells with code that did not finish: not executed, without a reply, or with an error.

    A kernel that dies may have numbered its last cell, but it has not replied.
    """
    return [
        index
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "code"
        and cell.source.strip()
        and (cell.execution_count is None or _has_no_reply(cell) or _has_error(cell))
    ]


def _has_no_reply(cell: nbformat.NotebookNode) -> bool:
    """Whether Jupyter wrote down when a cell began, and not that the kernel replied."""
    times = cell.metadata.get("execution", {})
    return bool(times) and not any(name.startswith("shell.execute_reply") for name in times)


def _has_error(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell ended with an error; those of GOES_ON do not end it."""
    return any(output.output_type == "error" and output.ename not in GOES_ON for output in cell.outputs)
