"""Tracked documents with numbers written from the recorded rows, so that they stay current."""

import re
from collections.abc import Callable

import nbformat
from IPython.display import Markdown

from documents import headlines, house, schema, upstream
from documents.headlines import recorded
from llama_meter import paths
from llama_meter.disk import growing
from llama_meter.journal import REFERENCE
from llama_meter.serve import concurrency
from plamo_study.laws import serving
from plamo_study.measurements import answers
from plamo_study.plans import registry, speculative as speculation
from plamo_study.read import results
from plamo_study.read.recording import Recording
from plamo_study.show import collected
from plamo_study.show.evidence import escaped
from plamo_study.show.findings import ANSWERS, FINDINGS as FINDINGS_OF, stated
from plamo_study.show.tables import Table
from plamo_study.show.theme import ROWS_KEY

CLAIMS = 3  # claims of each notebook that FINDINGS repeats
README, README_JA = "README.md", "README.ja.md"
USING, FINDINGS, CONTRIBUTING, ROWS = "docs/USING.md", "docs/FINDINGS.md", "docs/CONTRIBUTING.md", "data/ROWS.md"
PICTURE = paths.DATA / "published" / "readme.png"
BATCHING, PROJECTIONS, PACKING, TILES, ROLLBACK, WAKEUPS, HALVES, SCAN, ROPE, TILED = (
    f"data/upstream/{name}.md"
    for name in (
        "plamo2-batching", "plamo2-projections", "k-quant-packing", "flash-attention-tiles", "plamo2-rollback",
        "server-wakeups", "x86-half-conversion", "cuda-scan", "plamo2-rope", "tiled-eight-columns",
    )
)  # fmt: skip


def findings() -> str:
    """The findings of each notebook, as committed."""
    return "\n\n".join(_found(name) for name in registry.NOTEBOOKS)


def _found(name: str) -> str:
    """A notebook's title, its first sentence, its evidence, and its first claims with the cells that state them."""
    notebook = nbformat.read(paths.NOTEBOOKS / f"{name}.ipynb", as_version=4)
    title, link = notebook.cells[0].source.splitlines()[0].removeprefix("# "), f"../notebooks/{name}.ipynb"
    said = _said(notebook)
    rows = [
        f"| {line['claim']} | {escaped(line['of'])} | {line['figure']} | "
        f"{ANSWERS.get(line['verdict'], line['verdict'])} | {_where(notebook, line['claim'], link)} |"
        for line in stated(notebook)[:CLAIMS]
    ]
    table = "\n".join(["| question | of | measured | answer | where |", "|---|---|---|---|---|", *rows]) if rows else ""
    parts = (f"### [{title}]({link})", said, _evidence(notebook), table)
    return "\n\n".join(part for part in parts if part)


def _said(notebook: nbformat.NotebookNode) -> str:
    """A notebook's first finding, as its output says it or, without one, the first bold sentence of its text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    found = next((output for output in outputs if FINDINGS_OF in output.get("metadata", {}).get("text/markdown", {})
                  or FINDINGS_OF in output.get("metadata", {})), None)  # fmt: skip
    if found:
        return str(found["data"]["text/markdown"])
    bold = re.match(r"\*\*.+?\*\*", notebook.cells[1].source, re.DOTALL)
    return bold[0] if bold else ""


def _evidence(notebook: nbformat.NotebookNode) -> str:
    """The output of its evidence cell: rows, verdicts, machine and scale."""
    lines = ("evidence.verified(", "evidence.of_rows(")
    outputs = [
        each
        for cell in notebook.cells
        if any(line in cell.source for line in lines)
        for each in cell.get("outputs", [])
    ]
    if outputs:
        return str(outputs[0]["data"]["text/markdown"])
    every = [each for cell in notebook.cells for each in cell.get("outputs", [])]
    about = next(
        (rows for each in every if (rows := each.get("metadata", {}).get("text/markdown", {}).get(ROWS_KEY))), None
    )
    return f"*{about['machine']}; {about['engine']}; {about['days'][-1]}.*" if about else ""


def _where(notebook: nbformat.NotebookNode, claim: str, link: str) -> str:
    """The number, from 1, of the cell that states a claim, as a link to its notebook; the notebook, where none says it
    in one piece."""
    number = next((number for number, cell in enumerate(notebook.cells, 1) if claim in cell.source), 0)
    return f"[cell {number}]({link})" if number else f"[notebook]({link})"


def notebooks() -> str:
    """The table of notebooks and their questions."""
    lines = [f"| [`{name}`](../notebooks/{name}.ipynb) | {question} |" for name, question in registry.NOTEBOOKS.items()]
    return "\n".join(["| notebook | question |", "|---|---|", *lines])


def forks() -> str:
    """Where notebook 00 opens without installing anything, by the address in CITATION.cff; without one, how to set it.

    Binder takes OWNER/NAME of a GitHub repository in its path, and so does Colab.
    """
    cited = (paths.ROOT / "CITATION.cff").read_text(encoding="utf-8")
    address = r"^repository-code: [\"']?https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?[\"']?$"
    found = re.search(address, cited, re.MULTILINE)
    if not found:
        return (
            "This repository has no public address yet. A fork puts its own into CITATION.cff, as\n"
            "`repository-code: https://github.com/OWNER/NAME`, and runs `python tools/readme.py`. Links to Binder\n"
            "and Colab then stand here."
        )
    path = "notebooks/00-start-here.ipynb"
    binder = f"https://mybinder.org/v2/gh/{found[1]}/HEAD?urlpath=lab/tree/{path}"
    colab = f"https://colab.research.google.com/github/{found[1]}/blob/main/{path}"
    return f"[Binder]({binder}) and [Colab]({colab}) open notebook 00 on recorded rows."


def _law() -> Recording:
    return recorded("03-batching-law", "mini")


def _shown(table: Callable[[Recording], Table | Markdown], recording: Callable[[], Recording]) -> Callable[[], str]:
    return lambda: table(recording())._repr_markdown_()


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    README: {"headlines": headlines.all_of_them, "forks": forks},
    README_JA: {"headlines": lambda: headlines.all_of_them("ja")},
    USING: {"notebooks": notebooks},
    FINDINGS: {"findings": findings},
    CONTRIBUTING: {"house": house.drawn},
    ROWS: {"rows": schema.of_rows, "cells": schema.of_cells},
    BATCHING: {
        "server": lambda: upstream.server_finding(concurrency.recorded()),
        "load": lambda: upstream.under_load(answers("11-serving", "recorded", "mini")),
        "prompts": lambda: upstream.shared_calls(headlines.known()),
        "tests": _shown(upstream.three_tests, _law),
        "law": lambda: upstream.law(_law()),
        "aborts": lambda: upstream.first_aborts(_law()),
    },
    PROJECTIONS: {"speed": _shown(upstream.projections, lambda: recorded("03-batch-scaling"))},
    PACKING: {
        "kernels": _shown(upstream.packing, lambda: recorded("04-quantization")),
        "machine": lambda: upstream.machine(recorded("04-quantization")),
    },
    TILES: {
        "speed": _shown(upstream.chunks, lambda: recorded("06-tiles", "mini")),
        "full-width": upstream.full_width,
        "machine": lambda: upstream.machine(recorded("06-tiles", "mini")),
    },
    ROLLBACK: {
        "exact": lambda: upstream.rolled_back(recorded("08-speculative", "mini")),
        "speed": _shown(upstream.kept_rates, lambda: recorded("08-speculative")),
        "memory": lambda: upstream.kept_states(speculation.HYBRID, (4, 8)),
    },
    SCAN: {"speed": lambda: upstream.scan_on_gpu()._repr_markdown_(), "machine": upstream.gpu},
    ROPE: {"rotation": lambda: upstream.lost_rotation()._repr_markdown_()},
    HALVES: {"speed": lambda: upstream.scales()._repr_markdown_()},
    TILED: {
        "speed": lambda: upstream.tiled()._repr_markdown_(),
        "machine": lambda: upstream.machine(recorded("17-changes")),
    },
    WAKEUPS: {
        "crowds": lambda: upstream.crowds(results.crowds(REFERENCE))._repr_markdown_(),
        "held": lambda: upstream.side_by_side(serving.alike(serving.held(REFERENCE, "mini")))._repr_markdown_(),
    },
}


def write() -> None:
    """Write what the notebooks found into one file, and the generated parts into their documents."""
    collected.write(collected.collect(paths.NOTEBOOKS))
    for name in PARTS:
        path = paths.ROOT / name
        with growing(path) as partial:
            partial.write_text(_filled(name, path.read_text(encoding="utf-8")), encoding="utf-8")
    with growing(PICTURE) as partial:
        partial.write_bytes(headlines.picture())


def is_current() -> bool:
    """Whether the documents agree with the rows."""
    if collected.FILE.read_text(encoding="utf-8") != collected.written(collected.collect(paths.NOTEBOOKS)):
        return False
    texts = {name: (paths.ROOT / name).read_text(encoding="utf-8") for name in PARTS}
    return all(_filled(name, text) == text for name, text in texts.items())


def _filled(name: str, text: str) -> str:
    for part, written in PARTS[name].items():
        begin, end = f"<!-- {part}: written by `tools/readme.py` -->", f"<!-- end of {part} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{written()}\n\n{end}{after}"
    return text
