"""A plan with little time: what is left out is the last of the plan, and no notebook needs it."""

import ast
from functools import cache

import altair as alt
import msgspec
import nbformat
import pytest

from llama_meter import paths
from llama_meter.cells import Read
from plamo_study import measurements
from plamo_study.live import collect, conduct
from plamo_study.read import recording
from plamo_study.show import theme
from plamo_study.show.tables import Table
from plamo_study.studies import registry
from plamo_study.studies.latency import law

pytestmark = pytest.mark.whole

NOTEBOOKS = [name for name in registry.NOTEBOOKS if registry.of_notebook(name, "mini")]  # those that measure
SHORT = 2  # blocks
whole = recording.of_rows
build = cache(conduct.build)  # the engine is asked once


def shape(cell):
    """A cell without what follows from the machine."""
    alike = {"n_threads": 1} | ({"array_bytes": 0} if isinstance(cell, Read) else {})
    return msgspec.structs.replace(cell, **alike)


def shortened(rows, records, study, source, scale):
    known = registry.STUDIES.get(study)
    planned = build(study, scale) if known and known.where != registry.HISTORY else None
    if planned:
        needed = {shape(cell) for cell in planned.cells[: planned.needed]}
        asked = {shape(cell) for cell in planned.cells}
        rows = [
            row
            for row in rows
            if row.block < SHORT and (row.anchor or shape(row.cell) in needed or shape(row.cell) not in asked)
        ]
    return whole(rows, records, study, source, scale)


@pytest.fixture(autouse=True)
def fresh():
    """A notebook reads a recording once: what another test shortened is not kept for the next one."""
    measurements.recording.cache_clear()
    yield
    measurements.recording.cache_clear()


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_is_written_from_the_cells_it_needs(notebook, monkeypatch):
    for module in (recording, collect):
        monkeypatch.setattr(module, "of_rows", shortened)
    monkeypatch.setattr(theme, "enable", lambda: None)
    monkeypatch.setattr(law, "ASKED", 100)  # requests of a simulation: what is written of them is the same
    room: dict[str, object] = {}
    for number, cell in enumerate(nbformat.read(paths.NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells):
        if cell.cell_type == "code":
            shown(cell.source, f"{notebook}, cell {number}", room)


def shown(source, name, room):
    """Run a cell as Jupyter does: what its last expression gives is composed or written."""
    if not (body := ast.parse(source).body):
        return
    *before, last = body
    if not isinstance(last, ast.Expr):
        before, last = [*before, last], None
    exec(compile(ast.Module(before, []), name, "exec"), room)
    if last:
        found = eval(compile(ast.Expression(last.value), name, "eval"), room)
        if isinstance(found, alt.TopLevelMixin):
            assert found.to_dict()["description"]
        elif isinstance(found, Table):
            found._repr_html_()
