"""Execute notebooks with papermill, so that a final file name means that every cell ran.

The output is written to `NAME.partial.ipynb` and is renamed to `NAME.ipynb` when it is complete. What papermill reports
is not enough: after a dead kernel it marks every cell completed, and `sys.exit(0)` skips the rest and counts
as success. `unfinished` looks at execution counts, replies and error outputs too. A failure is a result, and the
next one runs.
"""

import ast
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
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
from papermill import inspection, iorw
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError
from traitlets import default

from llama_meter import paths
from llama_meter.disk import growing
from llama_meter.errors import FAILED_GATE, NOT_MEASURED, StudyError, of_system
from llama_meter.journal import LOCAL, OTHERS, REFERENCE
from llama_meter.measure import machine
from plamo_study.live import MORE, UNMEASURED
from plamo_study.studies.registry import OF_ALL

MADE_FROM = "made_from"  # in the metadata of an executed notebook
MARKED = "papermill-error-cell-tag"  # of the cells by which papermill marks an error
NOTEBOOK_BYTES = 1 << 30  # of a kernel and what runs it: a third of that on recorded rows
ADDED = {"injected-parameters", MARKED}  # tags of papermill's own cells
KINDS = ("*.py", "*.toml", "*.json", "*.jsonl", "*.jsonl.gz", "*.csv", "*.lock")  # of files that decide a page
TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}  # of parameters
Status = Literal["ok", "unchanged", "gate failed", "not measured", "in part", "failed", "dead_kernel", "incomplete"]
GOES_ON: dict[str, Status] = {FAILED_GATE: "gate failed", NOT_MEASURED: "not measured"}  # by an error's name
OnLine = Callable[[str, str, bool], None]  # a notebook's line, the row measured just now, and whether something failed


@dataclass(frozen=True)
class RunResult:
    """The outcome of one notebook.

    `unchanged`: executed before from the same inputs. `gate failed`: complete, but the gate of a file failed, and what
    that file lacks is said on the page; `not measured`: so is a file that there was no time for; `in part`: so is a
    finding that lacks rows. `output` is the complete notebook. `cell` is the cell that did not finish, counted from 0
    in `notebook`; `error` and `message` are the exception's name and text.
    """

    notebook: Path
    status: Status
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


class Client(PapermillNotebookClient):
    """Passes on each line that a notebook replaces by the next, and each error that it goes on after."""

    def __init__(self, nb_man: NotebookExecutionManager, on_line: OnLine, **how: Any):
        super().__init__(nb_man, **how)
        self.on_line = on_line

    def process_message(self, msg: dict[str, Any], *where: Any) -> Any:
        """Process a message of the kernel."""
        content = msg["content"]
        if content.get("transient", {}).get("display_id") and "text/markdown" in content["data"]:
            self.on_line(content["data"]["text/markdown"], content["metadata"].get("row", ""), False)
        elif content.get("ename") in GOES_ON:
            self.on_line(content["evalue"], "", True)
        return super().process_message(msg, *where)


class Engine(NBClientEngine):
    """Papermill's engine, saving once, at the end: before and after every cell it takes as long as many a notebook."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: NotebookExecutionManager, kernel_name: str, folder: str, on_line: OnLine, **_: Any
    ) -> None:
        """Execute a notebook in this folder. A kernel ends at once: asked to, it logs an interrupt as an error."""
        save, nb_man.save = nb_man.save, lambda **_: None
        how: dict[str, Any] = {"kernel_manager_class": ThisPython, "shutdown_kernel": "immediate"}
        how["log"] = logging.getLogger("papermill")
        try:
            resources = {"metadata": {"path": folder}}
            Client(nb_man, on_line, kernel_name=kernel_name, timeout=None, resources=resources, **how).execute()
        finally:
            nb_man.save = save


papermill_engines.register("whole", Engine)


def find_notebooks(names: Sequence[str]) -> list[Path]:
    """Return the notebooks named by number (`01`), name (`01-phase-asymmetry`) or path; all of them for no names.

    Raises StudyError for a name that matches none or several.
    """
    notebooks = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
    return list(dict.fromkeys(_find(name, notebooks) for name in names)) if names else notebooks


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


@cache
def _inferred(notebook: Path, *_seen: int) -> dict[str, str]:
    try:
        cells = iorw.load_notebook_node(str(notebook))  # inspect_notebook wants the name of a kernel, which is not used
        inferred = inspection._infer_parameters(cells, "python3", "python")
        return {
            each.name: type(ast.literal_eval(each.default)).__name__
            if each.inferred_type_name == "None"
            else each.inferred_type_name
            for each in inferred
        }
    except Exception as problem:  # nbformat, papermill and JSON each raise their own kind here
        raise StudyError(str(notebook), f"not a readable notebook ({problem})", "jupyter lab notebooks") from problem


def declared(notebook: Path) -> dict[str, str]:
    """Return {parameter: type name} as the notebook's `parameters` cell declares them, or as their defaults are.

    Raises StudyError when the file is not a readable notebook.
    """
    return _inferred(notebook, notebook.stat().st_mtime_ns if notebook.exists() else 0)


def assign(notebooks: Sequence[Path], values: Mapping[str, Any]) -> dict[Path, dict[str, Any]]:
    """Return, for each notebook, the `values` it declares, text as the declared type.

    Raises StudyError when no chosen notebook declares a name, or a value is not of the type.
    """
    types = {notebook: declared(notebook) for notebook in notebooks}
    names = sorted({name for declares in types.values() for name in declares})
    if unknown := [name for name in values if name not in names]:
        chosen = ", ".join(path.stem for path in notebooks)
        mend = f"use one of: {', '.join(names) or 'none'}"
        raise StudyError(f"-p {unknown[0]}", f"no such parameter in {chosen}", mend)
    return {
        notebook: {name: _typed(name, value, declares[name]) for name, value in values.items() if name in declares}
        for notebook, declares in types.items()
    }


def _typed(name: str, value: Any, kind: str) -> Any:
    try:
        return msgspec.convert(value, TYPES.get(kind, Any), strict=False)
    except msgspec.ValidationError as problem:
        mend = f"give {name} a value of type {kind}"
        raise StudyError(f"-p {name} {value}", f"not of type {kind}", mend) from problem


def run(
    notebook: Path, values: Mapping[str, Any], out_dir: Path, force: bool = False, on_line: OnLine = lambda *_: None
) -> RunResult:
    """Execute a notebook into `out_dir`. Whatever happens inside it is a result.

    A notebook that was executed from the same inputs is not executed again, unless by `force`. `values` are parameters
    as text or typed. `on_line` gets what the notebook says while it measures.

    Raises StudyError, before anything runs, for an unknown parameter or a value of the wrong type (`assign`), and for a
    notebook that lies in `out_dir`.
    """
    assigned, out_dir = assign([notebook], values)[notebook], out_dir.resolve()
    if notebook.parent == out_dir:
        raise StudyError(str(notebook), "would be overwritten by its own output", "choose another output folder")
    out_dir.mkdir(parents=True, exist_ok=True)
    partial, output = (out_dir / f"{notebook.stem}{suffix}" for suffix in (".partial.ipynb", ".ipynb"))
    if not force and is_current(notebook, assigned, out_dir):
        return RunResult(notebook, "unchanged", output)
    partial.unlink(missing_ok=True)
    problem = _execute(notebook, partial, assigned, on_line)
    if isinstance(problem, OSError) and problem.filename is None:
        problem.filename = str(output)
    executed = _read_back(partial)
    outcome = GOES_ON.get(problem.ename) if isinstance(problem, PapermillExecutionError) else None
    if (
        problem is None
        and executed
        and re.search(f"{re.escape(MORE)}|{UNMEASURED}", str([cell.get("outputs") for cell in executed.cells]))
    ):
        outcome = "in part"
    if executed and (problem is None or outcome) and not unfinished(executed):
        executed.metadata[MADE_FROM] = "" if outcome else _made_from(notebook, assigned)  # with the rows of this run
        executed.cells = [cell for cell in executed.cells if MARKED not in cell.metadata.get("tags", [])]
        executed.metadata.papermill.update(input_path=output.name, output_path=output.name)  # no folder of this machine
        try:
            with growing(output) as whole:
                nbformat.write(executed, whole)
            partial.unlink()
            return RunResult(notebook, outcome or "ok", output)
        except OSError as full:
            problem = full
    status, error, message = _reason(problem)
    return RunResult(notebook, status, None, _last_started(executed) if executed else None, error, message)


def _read_back(path: Path) -> nbformat.NotebookNode | None:
    """An executed notebook; None where none can be read."""
    try:
        return nbformat.read(path, as_version=4)
    except Exception:  # nbformat and JSON each raise their own kind here
        return None


def side_by_side(
    jobs: Sequence[tuple[Path, Mapping[str, Any]]], out_dir: Path, force: bool = False
) -> Iterator[RunResult]:
    """Execute notebooks that measure nothing as `run` does, as many at once as cores and memory allow, in this order.

    After an interrupt no further ones start.
    """
    with ThreadPoolExecutor(machine.at_once(1, NOTEBOOK_BYTES)) as pool:
        try:
            yield from pool.map(lambda job: run(job[0], job[1], out_dir, force), jobs)
        finally:
            pool.shutdown(cancel_futures=True)


def is_current(notebook: Path, values: Mapping[str, Any], out_dir: Path) -> bool:
    """Whether a notebook was executed there before, with these parameters and from the inputs of now."""
    made_from = _metadata(out_dir / f"{notebook.stem}.ipynb").get(MADE_FROM)
    return bool(made_from) and made_from == _made_from(notebook, assign([notebook], values)[notebook])


def made(output: Path) -> tuple[str, str] | None:
    """The files that an executed notebook measured and when it began, in UTC; None where it cannot be read."""
    ran = _metadata(output).get("papermill")
    return (str(ran["parameters"].get("files", "")), str(ran["start_time"])) if ran else None


def _metadata(output: Path) -> dict[str, Any]:
    """The metadata of an executed notebook; empty where it cannot be read and must be executed again."""
    try:
        return dict(json.loads(output.read_bytes())["metadata"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _made_from(notebook: Path, values: dict[str, Any]) -> str:
    """SHA-256 of what an executed notebook depends on: itself, its parameters, code, rows, registry and engine."""
    engine = os.environ.get("LLAMA_CPP_LIB_PATH", "")
    hasher = hashlib.sha256(f"{sys.version} {engine} {json.dumps(values, sort_keys=True)}".encode())
    folders = (Path(__file__).parents[1], paths.MEASURED / REFERENCE, paths.MEASURED / OTHERS, paths.PUBLISHED)
    inputs = [notebook, *(path for folder in folders for kind in KINDS for path in sorted(folder.rglob(kind)))]
    chapter = "" if notebook.stem in OF_ALL else notebook.stem[:2]
    inputs += sorted((paths.MEASURED / LOCAL).glob(f"{chapter}*"))
    inputs += [path for path in (paths.DATA / "models.toml", paths.ROOT / "requirements.lock") if path.exists()]
    for path in inputs:
        stat = path.stat()
        hasher.update(path.name.encode() + b"\0" + _content(path, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return hasher.hexdigest()


@cache  # notebooks share most of their inputs
def _content(path: Path, *_looks: int) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _execute(notebook: Path, partial: Path, values: dict[str, Any], on_line: OnLine) -> Exception | None:
    """Let papermill write `partial`; return its exception. The kernel runs in the notebook's folder, as in Lab."""
    for name in ("papermill", "asyncio"):  # the result reports a dead kernel
        logging.getLogger(name).setLevel(logging.CRITICAL)
    how: dict[str, Any] = {"engine_name": "whole", "folder": str(notebook.parent), "on_line": on_line}
    try:
        papermill.execute_notebook(
            notebook, partial, values, kernel_name="python3", language="python", progress_bar=False, **how
        )
    except Exception as problem:  # a notebook may fail in any way; the others still run
        return problem
    return None


def _last_started(executed: nbformat.NotebookNode) -> int | None:
    """The last cell that papermill started, by its place in the notebook before papermill added cells of its own."""
    cells = [cell for cell in executed.cells if not ADDED & set(cell.metadata.get("tags", []))]
    started = [index for index, cell in enumerate(cells) if cell.metadata.get("papermill", {}).get("start_time")]
    return started[-1] if started else None


def _reason(problem: Exception | None) -> tuple[Status, str, str]:
    match problem:
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
