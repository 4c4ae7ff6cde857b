"""Notebooks as readers use them: cells that can be run again, and commands that exist, there and in the documents."""

import ast
import json
import re
import subprocess
import sys
from functools import cache

import altair as alt
import nbformat
import pytest
import typer

from llama_meter import paths
from plamo_study.cli import main
from plamo_study.show.tables import Table

NAMES = sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))
DOCUMENTS = ("README.md", "docs/USING.md", "docs/CONTRIBUTING.md")
ROOT = typer.main.get_command(main.app)
TARGETS = set(re.findall(r"^([a-z]+):", (paths.ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
CODE = re.compile(r"^ *```.*?^ *```|`[^`]+`", re.DOTALL | re.MULTILINE)
TOOL = re.compile(r"\btools/[\w/]+\.py")
COMMAND = re.compile(r"(?<![{\w/-])plamo-study((?: +[\w./~<>=+-]+)*)")
TARGET = re.compile(r"(?:^|`) *make ([a-z]+)", re.MULTILINE)


@cache
def cells(name):
    """(type, source) of each cell."""
    found = json.loads((paths.NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in found]


def shown(source, room):
    """What a cell shows, as text, without the numbers that count what was drawn before it."""
    if not (body := ast.parse(source).body):
        return ""
    *before, last = body
    if not isinstance(last, ast.Expr):
        before, last = [*before, last], None
    exec(compile(ast.Module(before, []), "cell", "exec"), room)
    found = eval(compile(ast.Expression(last.value), "cell", "eval"), room) if last else ""
    if isinstance(found, alt.TopLevelMixin):
        return re.sub(r"(param|view)_\d+", r"\1", str(found.to_dict()))
    return found._repr_html_() if isinstance(found, Table) else str(getattr(found, "data", found))


def texts():
    """(where, text that may name commands) of documents and cells."""
    for name in DOCUMENTS:
        yield name, "\n".join(CODE.findall((paths.ROOT / name).read_text(encoding="utf-8")))
    for name in NAMES:
        for number, (kind, source) in enumerate(cells(name)):
            yield f"{name}, cell {number}", "\n".join(CODE.findall(source)) if kind == "markdown" else source


def gone(text):
    """What a text names that is not there: commands of ours with their options, targets of make, tools."""
    for words in COMMAND.findall(text):
        command, options = ROOT, set()
        for word in words.split():
            options |= {each for parameter in command.params for each in (*parameter.opts, *parameter.secondary_opts)}
            if word == "--help":
                break
            if hasattr(command, "commands"):
                if word not in command.commands:
                    yield f"plamo-study{words}: {word}"
                    break
                command = command.commands[word]
            elif word.startswith("-") and word.split("=")[0] not in options:
                yield f"plamo-study{words}: {word}"
    yield from (f"make {target}" for target in TARGET.findall(text) if target not in TARGETS)
    yield from (tool for tool in TOOL.findall(text) if not (paths.ROOT / tool).exists())


def test_every_command_that_a_document_or_a_cell_names_exists():
    found = {where: missing for where, text in texts() if (missing := [*gone(text)])}
    assert found == {}


CHART = """
from IPython.display import display
data = {{"text/plain": "a line that rises"}}
spec = {{"datasets": {{"data-0": [{{"x": 1, "y": {y}}}]}}}}
display(data, metadata={{"plamo_study_vegalite": spec}}, raw=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(("y", "passes"), [(2.5000001, True), (2.51, False)])
def test_a_chart_whose_data_drifts_is_seen_though_its_words_stay(y, passes, tmp_path):
    """nbval looks at no metadata, where a chart's data stand."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CHART.format(y=y))])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.cells[0].execution_count = 1
    notebook.cells[0].outputs = [
        nbformat.v4.new_output(
            "display_data",
            {"text/plain": "a line that rises"},
            metadata={"plamo_study_vegalite": {"datasets": {"data-0": [{"x": 1, "y": 2.5}]}}},
        )
    ]
    nbformat.write(notebook, tmp_path / "drawn.ipynb")
    asked = ["-c", paths.ROOT / "pyproject.toml", "-o", "addopts=-p early --nbval", tmp_path / "drawn.ipynb"]
    done = subprocess.run([sys.executable, "-m", "pytest", *asked], cwd=paths.ROOT, capture_output=True, text=True)
    assert (done.returncode, "data of the chart" in done.stdout) == (0 if passes else 1, not passes), done.stdout
