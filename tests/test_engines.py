"""Corrected builds by name: patches, sources by hash, what can be missing, and what is said of a build.

A whole build takes two to four minutes of two cores, so it is not made here. What can rot without one is tested: the
sources come by the locked hash, every patch applies to them, and the patched file still compiles.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace

import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file
from test_runner import small_plan
from typer.testing import CliRunner

from llama_meter import journal, paths
from llama_meter.engine import builds as engines
from llama_meter.engine.bindings import NOTE, described
from llama_meter.errors import StudyError
from llama_meter.limits import DEFECTS
from llama_meter.measure import runner
from plamo_study.cli import main as cli
from plamo_study.read import frame


@pytest.fixture
def nothing_here(tmp_path, monkeypatch):
    """No build and no sources here yet, and no way to fetch them."""
    monkeypatch.setattr(paths, "DATA", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """llama.cpp as the locked sdist has it."""
    try:
        return engines.sources(tmp_path_factory.mktemp("sdist"))
    except StudyError as error:
        pytest.skip(f"pip cannot fetch the sdist here: {error.why}")


@pytest.mark.whole
@pytest.mark.parametrize("name", engines.definitions())
def test_every_build_s_patches_apply_to_the_locked_sources_and_compile(name, sources, tmp_path):
    said = engines.definition(name)
    assert all(code in DEFECTS or code == name for code in said["corrects"])
    assert "program" in said or frame.build_name(said) == name
    if not said.get("patches"):
        return  # the locked sources themselves
    patches = [engines.PATCHES / f"{patch}.patch" for patch in said["patches"]]
    changed = {name for patch in patches for name in re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)}
    tree = shutil.copytree(sources, tmp_path / "tree", copy_function=os.link)  # thousands of files, of which few change
    for name in changed:
        (tree / name).unlink(missing_ok=True)
        if (sources / name).exists():
            shutil.copy2(sources / name, tree / name)
    for patch in patches:
        engines.apply(patch, tree)
    if "packages" in said:
        return  # what it includes is not on every machine
    parts = ("src", "include", "ggml/include", "common", "ggml/src", "ggml/src/ggml-cpu", "vendor")
    includes = [f"-I{tree / part}" for part in parts]
    for file in sorted(tree / name for name in changed if name.endswith(".cpp")):
        subprocess.run([engines.compiler(), "-std=c++17", "-fsyntax-only", *includes, str(file)], check=True)


def test_what_a_build_misses_is_named_and_leaves_nothing_behind(nothing_here, tmp_path, monkeypatch):
    with pytest.raises(StudyError, match="unknown; there are corrected, corrected-projections"):
        engines.build("nonsense")
    with pytest.raises(StudyError, match=r"(?s)pip download.*[Nn]o matching distribution"):
        engines.build("corrected")
    release, _ = engines.locked()
    with tarfile.open(tmp_path / f"llama_cpp_python-{release}.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(f"llama_cpp_python-{release}/PKG-INFO"), io.BytesIO())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(StudyError, match="DO NOT MATCH THE HASHES"):
        engines.build("corrected")
    assert not list((nothing_here / "engines").glob("corrected*"))


def test_a_name_stands_for_a_build_that_is_here_and_made_from_these_patches(nothing_here, monkeypatch):
    with pytest.raises(StudyError, match="plamo-study engine build window"):
        engines.resolve("window")
    monkeypatch.setattr(engines, "sources", lambda into, on_step: into)
    monkeypatch.setattr(engines, "apply", lambda patch, source: None)

    def compiled(target, source, into, on_step, options):
        (into / "bin").mkdir(parents=True)
        (into / "bin" / f"lib{target}.so").touch()

    monkeypatch.setattr(engines, "compile_target", compiled)
    for name in ("window", "corrected", "untiled"):
        assert engines.build(name) == (engines.folder(name), True)
    assert engines.resolve("window") == engines.folder("window").resolve()
    assert described(engines.folder("window"))["window"] == 2048
    assert engines.build("corrected") == (engines.folder("corrected"), False), "it is not made again"
    here = {name for name in engines.definitions() if engines.state(name) == "yes"}
    assert here == {"window", "corrected", "untiled"}
    assert "misplaced" in CliRunner().invoke(cli.app, ["engine", "list"]).stdout
    own = engines.folder("corrected") / NOTE
    own.write_text(own.read_text().replace('misplaced-states = "', 'misplaced-states = "0'))
    assert engines.state("corrected") == "outdated"
    with pytest.raises(StudyError, match="from other patches"):
        engines.resolve("corrected")


def test_a_release_is_loaded_with_its_own_bindings(nothing_here, monkeypatch):
    """Of a package that pip would have compiled: here the installed one."""

    def installed(release, sha256, command, at, on_step):
        shutil.copytree(engines.installed_libraries().parent, at / "package" / "llama_cpp")

    monkeypatch.setattr(engines, "_pip", installed)
    made, _ = engines.build("0.3.20")
    said = "from llama_meter.engine import library; from llama_meter.engine.bindings import llama\n"
    said += "print(library.describe()['binding'], llama.__file__, llama._base_path)"
    done = subprocess.run(
        [sys.executable, "-c", said],
        env=os.environ | {"LLAMA_CPP_LIB_PATH": str(made)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"llama-cpp-python 0.3.20 {made / 'llama_cpp' / 'llama_cpp.py'} {made}"


# ---------------------------------------------------------------- builds beside one another


@pytest.mark.long
def test_builds_share_blocks_and_each_has_its_own_gate(tmp_path):
    other = tmp_path / "other"  # the same libraries under another name: what `--beside DIR` expects of a build
    shutil.copytree(engines.installed_libraries(), other, symlinks=True)
    (other / NOTE).write_text('description = "a copy"\ncorrects = ["D2", "D3"]\n')
    cells = (mini("prefill", n_prompt=16), mini("prefill", n_prompt=24))
    planned = replace(small_plan(cells, blocks=2), compared=cells[:1])
    summary = runner.sweep(planned, tmp_path / "j.jsonl", beside=[other])
    table = frame.frame(summary.rows, frame.facts(journal.read(tmp_path / "j.jsonl")))
    counts = table[~table["anchor"]].groupby(["build", "workload", "verdict"]).size().to_dict()
    assert counts == {
        ("corrected", "gate", "valid"): 1,
        ("corrected", "prefill", "valid"): 2,
        ("stock", "gate", "valid"): 1,
        ("stock", "prefill", "valid"): 4,
    }
    assert set(table[table["build"] == "corrected"]["block"]) == {-1, 0, 1}
    assert runner.sweep(planned, tmp_path / "j.jsonl", beside=[other]).measured == 0
    (tmp_path / "none").mkdir()
    with pytest.raises(StudyError, match="does not load"):
        runner.sweep(small_plan(), tmp_path / "none.jsonl", beside=[tmp_path / "none"])
    assert not [record for record in journal.read(tmp_path / "none.jsonl") if getattr(record, "status", "")]


@pytest.mark.long
@pytest.mark.parametrize(("model", "wrong"), [(HYBRID, True), (ATTENTION, False)])
def test_the_report_s_script_shows_the_defects_on_the_hybrid_alone(model, wrong):
    script = paths.DATA / "upstream" / "reproduce.py"
    done = subprocess.run([sys.executable, script, mini_file(model)], capture_output=True, text=True, check=True)
    errors = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(errors) == 5
    assert all(error > 0.05 for error in errors) if wrong else all(error < 0.02 for error in errors)
