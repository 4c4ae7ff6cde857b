"""What `make` does before anything is there, with what a Mac has: an old Python, Rosetta, its own awk, forced Metal."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from plamo_study import paths
from plamo_study.engine import builds
from plamo_study.errors import StudyError

OLD = """\
#!/bin/sh
exec '{python}' -c '
import platform, sys
sys.version_info, platform.machine, platform.system = {version}, lambda: "{machine}", lambda: "{system}"
code, sys.argv = sys.argv[2], sys.argv[2:]
exec(code)' "$@"
"""
VENDOR = """\
cmake_minimum_required(VERSION 3.14...3.28)
project("llama.cpp" NONE)
option(GGML_METAL "ggml: use Metal" ON)
file(WRITE "${CMAKE_BINARY_DIR}/metal" "${GGML_METAL}")
"""
AWKS = [awk for awk in ("original-awk", "mawk", "gawk", "awk") if shutil.which(awk)]  # the first is macOS's


@pytest.fixture
def house(tmp_path):
    """What `make` reads, in a folder where nothing is set up."""
    folder = tmp_path / "house"
    folder.mkdir()
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(paths.ROOT / name, folder / name)
    return folder


def python(folder, version=sys.version_info[:2], machine="x86_64", system="Linux"):
    """A Python that says of itself what is asked, for the code that it is given."""
    path = folder / "python"
    path.write_text(OLD.format(python=sys.executable, version=version, machine=machine, system=system))
    path.chmod(0o755)
    return path


def make(folder, *arguments):
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def dry(folder):
    """The commands of setting up, one a line."""
    return make(folder, "-n", "SETTING_UP=yes", ".venv/.ready").stdout.replace("\\\n", "").splitlines()


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ({"version": (3, 9)}, "house"),
        ({"version": (3, 15)}, "house"),
        ({"machine": "x86_64", "system": "Darwin"}, "house"),
        ({"machine": "arm64", "system": "Darwin"}, "a blank"),
        ({}, "somebody's"),
    ],
    ids=["an old Python", "a new Python", "Rosetta", "a blank", "a quote"],
)
def test_what_cannot_be_set_up_is_said_in_one_sentence_before_anything_is_made(house, tmp_path, said, where):
    folder = house.rename(tmp_path / where)
    done = make(folder, f"PYTHON='{python(house.parent, **said)}'")
    assert done.returncode == 2
    assert done.stderr.count("mend:") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / ".venv").exists()


def test_what_is_asked_of_a_python_is_asked_in_words_that_an_old_one_reads(house):
    code = re.search(r"^define FITS\n(.*?)^endef$", (house / "Makefile").read_text(), re.DOTALL | re.MULTILINE)[1]
    ast.parse(code, feature_version=(3, 4))
    for fits in ({"version": (3, 11)}, {"version": (3, 14)}, {"machine": "arm64", "system": "Darwin"}):
        command = [python(house.parent, **fits), "-c", code]
        assert subprocess.run(command, cwd=house, check=False).returncode == 0


@pytest.mark.parametrize("awk", AWKS)
def test_the_lock_is_divided_alike_by_every_awk(house, awk):
    (house / ".venv").mkdir()
    for command in dry(house):
        if command.startswith("awk "):
            subprocess.run(command.replace("awk", awk, 1), shell=True, cwd=house, check=True)
    tools, uv = ((house / ".venv" / f"{name}.lock").read_text() for name in ("tools", "uv"))
    locked = re.findall(r"^([a-z][\w.-]*)==", (house / "requirements.lock").read_text(), re.MULTILINE)
    assert re.findall(r"^([a-z][\w.-]*)==", tools, re.MULTILINE) == [name for name in locked if name != builds.PACKAGE]
    assert re.findall(r"^([a-z][\w.-]*)==", uv, re.MULTILINE) == ["uv"]
    assert uv.count("--hash=") > 0


@pytest.mark.parametrize(("asked", "built"), [([], "ON"), (["-DGGML_METAL=OFF"], "OFF"), (["-DGGML_METAL=ON"], "ON")])
def test_metal_is_built_as_asked_though_the_bindings_turn_it_on(house, asked, built):
    """With their own CMakeLists, told that this is a Mac, on a llama.cpp of three lines."""
    (house / ".venv").mkdir()
    written = next(command for command in dry(house) if "> .venv/engine.cmake" in command)
    subprocess.run(written, shell=True, cwd=house, check=True)
    (house / "CMakeLists.txt").write_text(re.sub(r"if ?\(APPLE\)", "if(NOT APPLE)", bindings()))
    (house / "vendor" / "llama.cpp").mkdir(parents=True)
    (house / "vendor" / "llama.cpp" / "CMakeLists.txt").write_text(VENDOR)
    tools = builds.tools_found()
    told = [f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}", f"-DCMAKE_PROJECT_INCLUDE={house}/.venv/engine.cmake"]
    command = [tools["cmake"], "-G", "Ninja", "-DLLAVA_BUILD=OFF", *told, *asked, "-S", house, "-B", house / "build"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (house / "build" / "metal").read_text() == built


def bindings():
    """The CMakeLists of the locked llama-cpp-python itself."""
    try:
        sdist = builds.fetch()
    except StudyError as error:
        pytest.skip(f"pip cannot fetch the sdist here: {error.why}")
    with tarfile.open(sdist) as archive:
        found = next(member for member in archive if re.fullmatch(r"[^/]+/CMakeLists\.txt", member.name))
        return archive.extractfile(found).read().decode()
