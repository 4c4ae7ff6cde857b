"""The instrument by itself: its command measures, judges and reads without frames, charts or Jupyter."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import mini_file

from llama_meter import journal, paths
from llama_meter.cells import Decode, Prefill
from llama_meter.measure import of_files
from llama_meter.measure.asked import sweep
from llama_meter.measure.plan import MODELS
from llama_meter.models import registry, synthetic

ABSENT = ("pandas", "altair", "IPython", "nbformat", "nbconvert", "papermill", "plamo_study", "typer", "rich")
SMALL = ("-p", "16", "-n", "4", "-d", "8")
ALONE = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # whoever imports it gets an ImportError, as where it is not installed
from llama_meter.__main__ import main
raise SystemExit(main(sys.argv[1:]))
"""


def run(*arguments, folder, env=None):
    words = [sys.executable, "-c", ALONE, *map(str, arguments)]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def file(tmp_path):
    """A reader's own file, in a folder with a blank."""
    (tmp_path / "my files").mkdir()
    return shutil.copy(mini_file(MODELS[0]), tmp_path / "my files" / "モデル.gguf")


@pytest.mark.long
def test_a_file_is_measured_with_verdicts_and_never_twice(file, tmp_path):
    asked = ("measure", file, *SMALL, "-s", "1,2", "--json", "--journal", tmp_path / "rows.jsonl")
    first = run(*asked, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert [(line["workload"], line["n_seq"]) for line in lines] == [("prefill", 1), ("decode", 1), ("decode", 2)]
    assert all(line["verdicts"] == ["valid"] and line["processes"] == 3 for line in lines)
    assert all(line["low"] <= line["tokens_per_second"] <= line["high"] for line in lines)
    kept = (tmp_path / "rows.jsonl").read_bytes()
    again = run(*asked, folder=tmp_path)
    assert (again.stdout, (tmp_path / "rows.jsonl").read_bytes()) == (first.stdout, kept)
    read = run("read", tmp_path / "rows.jsonl", "--json", folder=tmp_path)
    assert read.stdout == first.stdout
    shown = run("read", tmp_path / "rows.jsonl", folder=tmp_path).stdout
    assert len(shown.splitlines()) == 3
    assert shown.count("valid") == 3


@pytest.mark.long
def test_a_row_that_was_computed_wrong_is_called_so(file, tmp_path):
    asked = ("measure", file, *SMALL, "--journal", tmp_path / "rows.jsonl")
    assert run(*asked, folder=tmp_path).returncode == 0
    wrong = (tmp_path / "rows.jsonl").read_text().replace('"valid":true', '"valid":false', 1)
    (tmp_path / "rows.jsonl").write_text(wrong)  # the first row is the file's gate
    assert "invalid" in run("read", tmp_path / "rows.jsonl", folder=tmp_path).stdout


def test_a_sound_file_and_a_torn_one_are_told_apart(file, tmp_path):
    assert run("judge", file, folder=tmp_path).returncode == 0
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(mini_file(MODELS[0]).read_bytes()[:-4096])
    judged = run("judge", torn, folder=tmp_path)
    assert judged.returncode == 1
    assert "blocking" in judged.stdout


@pytest.mark.parametrize(
    "arguments",
    [("measure", "absent.gguf"), ("judge", "absent.gguf"), ("read", "absent.jsonl"), ("probe", "http://127.0.0.1:9")],
)
def test_what_is_not_there_is_one_message_with_its_mend(arguments, tmp_path):
    ended = run(*arguments, folder=tmp_path)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    assert "mend" in ended.stdout + ended.stderr


def strings(path):
    """Every text of a module but docstrings, which no user sees."""
    tree = ast.parse(path.read_text())
    told = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    return [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)
            and id(each) not in told]  # fmt: skip


def test_the_study_s_commands_are_offered_only_to_those_who_have_them():
    """`offer` says which of the two programs whoever sees the error has."""
    package = paths.ROOT / "src/llama_meter"
    naming = {path.name for path in package.rglob("*.py") if any("plamo-study " in text for text in strings(path))}
    assert naming == {"errors.py", "finding.py", "mistaken.py"}, "say errors.offer(...)"
    for name in ("finding", "mistaken"):
        code = (package / f"models/{name}.py").read_text()
        assert code.count("has_study()") == sum(
            "plamo-study " in text for text in strings(package / f"models/{name}.py")
        )


def test_a_mend_of_the_instrument_alone_is_a_command_that_it_has(tmp_path):
    as_converted = {"dtype": "F16", "path": tmp_path / "a.gguf", "head_count_array": True}
    broken, out = synthetic.write(registry.spec(MODELS[0], "mini"), **as_converted), tmp_path / "b.gguf"
    judged = run("judge", broken, folder=tmp_path)
    assert judged.returncode == 1
    mend = judged.stdout.partition("mend: python -m llama_meter ")[2].splitlines()[0]
    words = [{"FILE": broken, "OUT": out}.get(word, word) for word in mend.split()]
    repaired = run(*words, folder=tmp_path)
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    assert "blocking" not in repaired.stdout


@pytest.mark.long
def test_rates_are_tokens_over_the_median_time_of_each_process(file, tmp_path):
    planned = of_files.plan(sweep(files=str(file), n_prompt="16", n_gen="4", n_seq="1,2", n_depth="8"))
    assert [type(cell) for cell in planned.cells] == [Prefill, Decode, Decode]
    asked = ("measure", file, *SMALL, "-s", "1,2", "--journal", tmp_path / "rows.jsonl")
    run(*asked, folder=tmp_path)
    rows = journal.latest_rows(journal.read(tmp_path / "rows.jsonl"))
    by = {(found.cell.workload, found.cell.n_seq): found for found in of_files.rates(rows)}
    steps = [sorted(row.samples_ns[0]) for row in rows if row.cell == by["decode", 2].cell]
    middle = sorted((own[1] + own[2]) / 2 for own in steps)[1]
    assert by["decode", 2].rate.value == pytest.approx(2e9 / middle)


@pytest.mark.long
def test_installed_without_the_repository_it_keeps_what_it_remembers_in_the_cache_folder(file, tmp_path):
    shutil.copytree(paths.ROOT / "src/llama_meter", tmp_path / "installed/llama_meter")
    shutil.copy(paths.DATA / "models.toml", tmp_path / "installed/llama_meter")  # as a wheel does
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("PLAMO_STUDY_ROOT", None)
    ended = run("measure", file, *SMALL, folder=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("valid") == 2
    assert [path.name for path in (tmp_path / "cache/llama-meter/data/models").iterdir()] == ["given.json"]
    assert {path.name for path in (tmp_path / "installed").iterdir()} == {"llama_meter"}
