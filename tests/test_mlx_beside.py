"""mlx-lm beside llama.cpp, with an mlx-lm whose answers our oracle gives, and whose interface is the wheel's."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace

import fake_mlx
import mlx_beside
import numpy as np
import pytest
import released
import safetensors.numpy
import typer
from conftest import mini, mini_file
from mlx_model import MlxJob

from llama_meter import journal, paths
from llama_meter.cells import Decode, Gate, Prefill
from llama_meter.errors import StudyError
from llama_meter.measure import plan, watch
from llama_meter.measure.tasks import REPEAT
from llama_meter.models import hf, recipes, registry, synthetic
from plamo_study.cli import main
from plamo_study.read import frame

RELEASE = "mlx-lm==0.32.2"
COMMAND = re.compile(r"`plamo-study (models \w+) ([^`]*)`")  # in a docstring
CELLS = (mini("prefill", n_prompt=12, repetitions=2), mini("decode", n_prompt=4, n_gen=3))
GATE = mini("gate", n_prompt=12, n_gen=4)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The invented mlx-lm, for this process and its workers."""
    packages = str(fake_mlx.install(tmp_path / "packages"))
    monkeypatch.setattr(mlx_beside, "find_spec", lambda name: packages)
    known = [packages, os.environ.get("PYTHONPATH", ""), str(paths.ROOT / "src")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, known)))


@pytest.fixture
def weights(installed, tmp_path):
    """`weights(clipped)`: a folder with the embedded model's weights."""
    return lambda clipped=False: fake_mlx.weights(tmp_path / f"clipped-{clipped}", mini_file(), clipped)


def measured(cell, folder, **how):
    outcome = mlx_beside._in_mlx(MlxJob(cell=cell, folder=str(folder), gguf=str(mini_file()), **how), 100.0)
    assert outcome.status == "ok", outcome.failure
    return outcome.measured


def test_prompts_and_steps_are_timed_and_proved_by_a_second_path(weights):
    folder = weights()
    prompt, steps = (measured(cell, folder) for cell in CELLS)
    assert (prompt.valid, steps.valid) == (True, True)
    assert [len(sample) for sample in prompt.samples_ns] == [1, 1]
    assert [len(sample) for sample in steps.samples_ns] == [3]
    assert (prompt.n_evaluated, steps.n_evaluated) == (2 * 12, 3)
    assert len(steps.series["stream_ns"]) == 3
    assert all(ns > 0 for ns in (*prompt.warmup_ns, *steps.warmup_ns, *steps.prefill_ns, *steps.samples_ns[0]))
    assert prompt.evidence.wall_ns > 0, "what the machine did meanwhile is counted as for every row"


def test_greedy_tokens_that_the_oracle_disputes_fail_the_gate_and_an_unclipped_dt_mends_it(weights):
    plain, clipped = weights(), weights(clipped=True)
    right, wrong, mended = measured(GATE, plain), measured(GATE, clipped), measured(GATE, clipped, unclipped=True)
    assert (right.valid, wrong.valid, mended.valid) == (True, False, True)
    assert right.checks["prefill_error"] < 1e-6 < 0.1 < wrong.checks["prefill_error"]
    assert (right.checks["greedy_disputed"], wrong.checks["greedy_disputed"] > 0) == (0, True)


def planned(*cells, blocks):
    """A plan of these cells without anchors: no block of it is long enough to drift."""
    usual = replace(plan.with_gates("01-mlx", "mini", cells), compared=cells, blocks=blocks, gates=(GATE,))
    return replace(usual, anchor=None)


@pytest.mark.whole
@pytest.mark.timeout(400)
def test_both_engines_measure_the_same_cells_in_the_same_blocks_and_a_second_call_nothing(
    weights, tmp_path, monkeypatch
):
    """The last row is told to be disturbed, so it is measured once more."""
    monkeypatch.setattr(watch, "disturbed", lambda rows: {list(rows)[-1].key})
    monkeypatch.setattr(mlx_beside, "CALM_S", 0.0)
    path, folder, asked = tmp_path / "01-mlx.mini.jsonl", weights(), planned(*CELLS, blocks=2)
    rows = mlx_beside.measure(asked, path, folder)
    records = journal.read(path)
    assert {row.key for row in mlx_beside.measure(asked, path, folder)} == {row.key for row in rows}
    assert len(journal.read(path)) == len(records)
    known = frame.facts(records)
    names = {row.engine: known[row.engine]["binding"] for row in rows}
    assert sum(name.startswith("mlx-lm ") for name in names.values()) == 1 == len(names) - 1
    assert [row.replicate >= REPEAT for row in rows] == [False] * 10 + [True]
    for block in (0, 1):
        own = [(row.cell, names[row.engine]) for row in rows if row.block == block and row.replicate < REPEAT]
        assert {cell for cell, _ in own} == set(CELLS)
        assert len(set(own)) == 4
    assert all(row.valid for row in rows)
    monkeypatch.undo()
    found = mlx_beside.compared(frame.frame(rows, known)).set_index("what")
    assert list(found.index) == ["step after 4", "prompt of 12"]
    assert (found[["llama is", "mlx is"]] == "valid").all(axis=None)
    for line in found.itertuples():
        assert line.ratio.n == 2
        assert line.ratio.value > 0 < line.mlx


@pytest.mark.whole
@pytest.mark.timeout(400)
def test_the_command_says_when_mlx_lm_computes_something_else(weights, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mlx_beside, "planned", lambda: planned(CELLS[1], blocks=1))
    monkeypatch.setattr(watch, "disturbed", lambda rows: set())
    monkeypatch.setattr(mlx_beside, "interruptible", lambda: None)
    monkeypatch.setattr(mlx_beside, "journal_path", lambda *_: tmp_path / "rows.jsonl")
    mlx_beside.beside(weights())
    said = capsys.readouterr().err
    assert "step after 4" in said
    assert "another computation" not in said
    with pytest.raises(typer.Exit):
        mlx_beside.beside(weights(clipped=True))
    assert "another computation" in capsys.readouterr().err


def test_without_mlx_lm_one_sentence_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(mlx_beside, "find_spec", lambda name: None)
    with pytest.raises(
        StudyError, match=r"(?s)mlx-lm.*is not installed.*Apple silicon and `pip install -e '\.\[mlx\]'`"
    ):
        mlx_beside.measure(mlx_beside.planned(), tmp_path / "rows.jsonl", tmp_path)


def test_a_folder_that_mlx_lm_does_not_load_is_named(installed, tmp_path):
    with pytest.raises(StudyError, match=r"(?s)empty.*does not load it.*as released"):
        mlx_beside.measure(planned(*CELLS, blocks=1), tmp_path / "rows.jsonl", tmp_path / "empty")


def test_the_plan_is_notebook_01_s_prompts_and_steps_of_released_weights_in_bf16():
    found = mlx_beside.planned()
    assert {cell.files for cell in found.cells} == {((plan.MODELS[0], "weights", "BF16"),)}
    assert [cell.n_prompt for cell in found.cells if isinstance(cell, Prefill)] == [128, 512, 2048]
    (step,) = (cell for cell in found.cells if isinstance(cell, Decode))
    assert (step.depth, step.n_gen, step.n_gpu_layers) == (128, 512, -1)
    assert found.compared == found.cells
    assert all(isinstance(gate, Gate) and gate.n_gen for gate in found.gates)


# ---------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """mlx-lm's wheel, which is the same for every system."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", RELEASE]
    if subprocess.run([*command, "-d", str(folder)], check=False, capture_output=True).returncode:
        pytest.skip("pip cannot fetch mlx-lm here")
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}


def signature(text, name):
    """Names of a function's parameters: positional ones, and those by name alone."""
    (found,) = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)
    return [each.arg for each in found.args.args], [each.arg for each in found.args.kwonlyargs]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("utils.py", "load_model"),
        ("generate.py", "generate_step"),
        ("models/cache.py", "make_prompt_cache"),
        ("models/ssm.py", "ssm_update"),
    ],
)
def test_the_invented_mlx_lm_takes_what_the_wheel_s_takes_in_the_same_order(wheel, file, name):
    ours, theirs = (signature(files[f"mlx_lm/{file}"], name) for files in (fake_mlx.FILES, wheel))
    positional = ours[0]
    assert theirs[0][: len(positional)] == positional
    assert set(ours[1]) <= set(theirs[1])


def test_the_wheel_s_plamo_2_bounds_dt_and_looks_its_scan_up_where_unclipped_replaces_it(wheel):
    text = wheel["mlx_lm/models/plamo2.py"]
    assert "from .ssm import ssm_update" in text
    (call,) = (
        n for n in ast.walk(ast.parse(text))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "ssm_update"
    )  # fmt: skip
    assert "time_step_limit" not in {keyword.arg for keyword in call.keywords}
    assert len(call.args) <= 8, "the bound is no positional argument either"
    (scan,) = (
        n for n in ast.walk(ast.parse(wheel["mlx_lm/models/ssm.py"]))
        if isinstance(n, ast.FunctionDef) and n.name == "ssm_update"
    )  # fmt: skip
    defaults = dict(zip([a.arg for a in scan.args.args[::-1]], scan.args.defaults[::-1], strict=False))
    assert ast.literal_eval(defaults["time_step_limit"]) == (0.001, 100.0)
    assert f"mlx-lm=={RELEASE.partition('==')[2]};" in (paths.ROOT / "pyproject.toml").read_text()


def test_the_real_mlx_lm_agrees_with_the_oracle_once_dt_is_not_clipped(tmp_path):
    """Where it is installed: on a Mac with the extra `mlx`, or elsewhere with mlx's build for CPUs."""
    pytest.importorskip("mlx_lm")
    spec = replace(registry.spec("plamo-2-1b", "mini"), head_dim=128)  # mlx-lm has one size for all heads, as releases
    gguf = synthetic.write(spec, "F16", tmp_path / "random.gguf")
    folder = released.write_released(gguf, tmp_path / "weights", dtype="F16")
    held = safetensors.numpy.load_file(folder / hf.SINGLE)
    safetensors.numpy.save_file(
        {name: value.astype(np.float32) if value.dtype == np.float64 else value for name, value in held.items()},
        folder / hf.SINGLE,
    )
    cell = mini("gate", n_prompt=64, n_gen=8)
    asked = {"cell": cell, "folder": str(folder), "gguf": str(gguf)}
    clipped, free = (
        mlx_beside._in_mlx(MlxJob(**asked, unclipped=unclipped), 100.0).measured for unclipped in (False, True)
    )
    assert free.valid
    assert free.checks["prefill_error"] < 5e-3 < clipped.checks["prefill_error"]


def test_the_command_that_it_asks_for_first_has_these_options_and_writes_the_file_that_it_measures():
    ((name, arguments),) = COMMAND.findall(mlx_beside.__doc__)
    told = typer.main.get_command(main.app).commands
    for each in name.split():
        command, told = told[each], getattr(told[each], "commands", {})
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in arguments.split() if word.startswith("-")} <= options
    written = recipes.model_path(plan.MODELS[0], "weights", mlx_beside.DTYPE)
    assert str(written.relative_to(paths.ROOT)) in arguments.split()
