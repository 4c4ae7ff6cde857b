"""CONTRIBUTING's walk-through, walked: a study added in a copy with a folder, an entry and a notebook, and run."""

import os
import shutil
import subprocess
import sys
import textwrap

import nbformat
import pytest

from llama_meter import paths

pytestmark = pytest.mark.long

NAME = "99-half-a-prompt"
FILES = {
    "__init__.py": '"""What half a prompt costs."""\n',
    "plan.py": '''
        """Which cells the study measures at which scale."""

        from dataclasses import replace

        from llama_meter.cells import Counted, Prefill
        from llama_meter.measure.plan import (DTYPE, MODELS, Plan, change, check_scale, with_gates)


        def halves(scale: str, gpu: bool = False) -> Plan:
            """Prefill of 64 tokens and of 32, and one count."""
            check_scale(scale)
            whole = Prefill(model=MODELS[0], scale=scale, dtype=DTYPE[scale], n_prompt=64)
            cells = (whole, change(whole, n_prompt=32), Counted(n_counted=3))
            planned = with_gates("99-half-a-prompt", scale, cells, exact_cache=False)
            return replace(planned, blocks=2, extra_blocks=0, anchors=1, workload=f"{__package__}.workload")
        ''',
    "workload.py": '''
        """What a cell of this study's own type does."""

        from llama_meter.cells import Counted
        from llama_meter.rows import Measured


        def run(cell, path, stage):
            """Count."""
            return Measured(checks={"counted": float(cell.n_counted)}, valid=True)


        RUNS = {Counted: run}
        ''',
    "show.py": '''
        """The finding."""

        from IPython.display import Markdown

        from plamo_study.stats.estimates import median_sample, paired_ratio, seconds_by_block
        from plamo_study.read.recording import Recording
        from plamo_study.show import evidence


        def finding(recording: Recording) -> Markdown:
            """How much of a prompt's time half of it takes."""
            rows = recording.rows
            half, whole = (
                seconds_by_block(rows[(rows["workload"] == "prefill") & (rows["n_prompt"] == n)], median_sample)
                for n in (32, 64)
            )
            said = f"Half a prompt takes {paired_ratio(half, whole):.2f} times as long."
            return Markdown(evidence.disturbed(rows) + said)
        ''',
}
TYPE = '''class Counted(AnyCell, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulation."""

    n_counted: int = 0


'''
TYPES = {  # in cells.py, each before the line it names
    "Cell = (\n": TYPE,
    ")  # fmt: skip\nKINDS": "    | Counted\n",
}
NAMES = {")  # fmt: skip\n": '    "n_counted",\n'}  # in cells.py, at the end
ENTRIES = {  # in plans/registry.py, each before the line it names
    "from plamo_study.studies.numeric_range ": "from plamo_study.studies.half_a_prompt import plan as half_a_prompt\n",
    "}\nSTUDIES": f'    "{NAME}": "what does half a prompt cost",\n',
    '    "00-gates"': f'    "{NAME}": Study(half_a_prompt.halves),\n',
}
MOST_FILES = 8


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
    studies = copy / "src" / "plamo_study" / "studies"
    folder = studies / "half_a_prompt"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(textwrap.dedent(text).lstrip())
    registry, types, names = studies / "registry.py", studies.parent / "cells.py", studies.parent / "cells.py"
    for file, added in ((registry, ENTRIES), (types, TYPES), (names, NAMES)):
        text = file.read_text()
        for before, line in added.items():
            assert text.count(before) == 1, before
            text = text.replace(before, line + before)
        file.write_text(text)
    cells = [
        nbformat.v4.new_markdown_cell("# What does half a prompt cost?"),
        nbformat.v4.new_code_cell('source = "recorded"\nscale = "mini"', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(
            "from plamo_study.live.collect import collect\n"
            "from plamo_study.studies.half_a_prompt import show\n\n"
            f'show.finding(collect("{NAME}", source, scale))'
        ),
    ]
    notebook = copy / "notebooks" / f"{NAME}.ipynb"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), notebook)
    return [*folder.iterdir(), registry, types, notebook]


@pytest.mark.timeout(600)
def test_a_study_is_a_folder_an_entry_and_a_notebook(copy):
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
