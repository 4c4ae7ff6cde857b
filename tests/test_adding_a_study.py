"""CONTRIBUTING's walk-through, walked: a study added in a copy with a plan, an entry and a notebook, and run."""

import os
import shutil
import subprocess
import sys
import textwrap

import nbformat
import pytest

from llama_meter import paths

pytestmark = pytest.mark.whole

NAME = "99-half-a-prompt"
FILES = {
    "plamo_study/plans/half_a_prompt.py": '''
        """Which cells the study measures at which scale."""

        from dataclasses import replace

        from llama_meter.cells import Counted, Prefill
        from llama_meter.measure.plan import DTYPE, MODELS, Plan, change, check_scale, with_gates


        def halves(scale: str, gpu: bool = False) -> Plan:
            """Prefill of 64 tokens and of 32, and one count."""
            check_scale(scale)
            whole = Prefill(model=MODELS[0], scale=scale, dtype=DTYPE[scale], n_prompt=64)
            cells = (whole, change(whole, n_prompt=32), Counted(n_counted=3))
            planned = with_gates("99-half-a-prompt", scale, cells, exact_cache=False)
            return replace(planned, blocks=2, extra_blocks=0, anchors=1, workload="llama_meter.workloads.counted")
        ''',
    "llama_meter/workloads/counted.py": '''
        """What a cell of a type of its own does."""

        from llama_meter.cells import Counted
        from llama_meter.rows import Measured


        def run(cell, path, stage):
            """Count."""
            return Measured(checks={"counted": float(cell.n_counted)}, valid=True)


        RUNS = {Counted: run}
        ''',
}
TYPE = '''class Counted(AnyCell, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulation."""

    n_counted: int = 0


'''
TYPES = {  # in cells.py, each before the line it names
    "Cell = (\n": TYPE,
    ")\nKINDS": "    | Counted\n",
}
ENTRIES = {  # in plans/registry.py, each before the line it names
    "}\nSTUDIES": f'    "{NAME}": "what does half a prompt cost",\n',
    '    "A-gates"': f'    "{NAME}": Study("half_a_prompt.halves"),\n',
}
MOST_FILES = 5


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository without its rows; the engine is that of this environment."""
    shutil.copytree(paths.ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        paths.DATA / "models", tmp_path / "data/models", ignore=shutil.ignore_patterns("*.shape.*", "*.weights.*")
    )
    for name in ("data/models.toml", "data/published"):
        (tmp_path / name).symlink_to(paths.ROOT / name)
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def add(copy):
    """The files written or changed."""
    source, written = copy / "src", []
    for name, text in FILES.items():
        (source / name).write_text(textwrap.dedent(text).lstrip())
        written.append(source / name)
    for name, added in (("plamo_study/plans/registry.py", ENTRIES), ("llama_meter/cells.py", TYPES)):
        text = (source / name).read_text()
        for before, line in added.items():
            assert text.count(before) == 1, before
            text = text.replace(before, line + before)
        (source / name).write_text(text)
        written.append(source / name)
    cells = [
        nbformat.v4.new_markdown_cell("# What does half a prompt cost?"),
        nbformat.v4.new_code_cell('source = "recorded"\nscale = "mini"', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(
            "from IPython.display import Markdown\n"
            "from plamo_study.measurements import measurements\n"
            "from plamo_study.stats.estimates import compare\n\n"
            f'm = measurements("{NAME}", source, scale).query("metric == \'prefill\'")\n'
            'half = compare(m, of="n_prompt == 32", to="n_prompt == 64").estimate.item()\n'
            'Markdown(f"Half a prompt takes {half:.2f} times as long.")'
        ),
    ]
    notebook = copy / "notebooks" / f"{NAME}.ipynb"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), notebook)
    return [*written, notebook]


@pytest.mark.timeout(600)
def test_a_study_is_a_plan_an_entry_and_a_notebook(copy):
    assert len(add(copy)) <= MOST_FILES
    everything = {"PYTHONPATH": str(copy / "src"), "PLAMO_STUDY_ROOT": str(copy), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "plamo_study.cli.main", "run", "99"],
        env=os.environ | everything,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    executed = nbformat.read(copy / "reports" / f"{NAME}.ipynb", as_version=4)
    assert "Half a prompt takes" in executed.cells[-1].outputs[0]["data"]["text/markdown"]
    rows = (copy / "data" / "measured" / "local" / f"{NAME}.mini.jsonl").read_text()
    assert rows.count('"checks":{"counted":3.0}') == 2, "once a block"
