"""What `make` does before anything is there, with what a Mac has: an old Python, Rosetta, old tools.

macOS comes with GNU make 3.81 and the original awk. The system's make is always tried; 3.81 too where the PATH has it
as `make-3.81`, which builds from the sources that Apple publishes (apple-oss-distributions/gnumake).
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from llama_meter import paths
from llama_meter.engine import builds

OLD = """\
#!/bin/sh
exec '{python}' -c '
import platform, sys
sys.version_info, platform.machine, platform.system = {version}, lambda: "{machine}", lambda: "{system}"
exec(open(sys.argv[1]).read())' "$@"
"""
NAME = r"^([a-z][\w.-]*)=="  # of a locked package
MAKES = [found for found in ("make-3.81", "make") if shutil.which(found)]
AWKS = [awk for awk in ("original-awk", "mawk", "gawk", "awk") if shutil.which(awk)]  # the first is macOS's
TOOL = """\
#!/bin/sh
echo "$(basename "$0") $* with $CMAKE_ARGS" >> log
if [ "$1" = tools/fits.py ]; then exec '{python}' "$@"; fi
if [ "$2" = venv ]; then mkdir -p .venv/bin; for name in pip uv python plamo-study; do cp "$0" .venv/bin/$name; done; fi
"""


@pytest.fixture
def house(tmp_path):
    """What `make` reads, in a folder where nothing is set up."""
    folder = tmp_path / "house"
    folder.mkdir()
    (folder / "tools").mkdir()
    for name in ("Makefile", "requirements.lock", "pyproject.toml", "tools/fits.py", "tools/engine.cmake"):
        shutil.copy(paths.ROOT / name, folder / name)
    return folder


def python(folder, version=sys.version_info[:2], machine="x86_64", system="Linux"):
    """A Python that says of itself what is asked, for the code that it is given."""
    path = folder / "python"
    path.write_text(OLD.format(python=sys.executable, version=version, machine=machine, system=system))
    path.chmod(0o755)
    return path


def make(folder, *arguments, by="make", **variables):
    told = os.environ | variables
    return subprocess.run([by, *arguments], cwd=folder, env=told, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("by", MAKES)
@pytest.mark.parametrize(
    ("said", "where", "why"),
    [
        ({"version": (3, 9)}, "house", "Python 3.9: the locked packages are for 3.11 to 3.14"),
        ({"machine": "x86_64", "system": "Darwin"}, "house", "Python for x86_64 (an Intel Mac's, or under Rosetta)"),
        ({"machine": "arm64", "system": "Darwin"}, "a blank", "a blank: a blank, a quote, a colon"),
    ],
    ids=["an old Python", "Rosetta", "a blank"],
)
def test_what_cannot_be_set_up_is_said_in_one_sentence_before_anything_is_made(house, tmp_path, said, where, why, by):
    folder = house.rename(tmp_path / where)
    done = make(folder, f"PYTHON='{python(house.parent, **said)}'", by=by)
    assert done.returncode == 2
    assert why in done.stderr
    assert done.stderr.count("mend:") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / ".venv").exists()


@pytest.mark.parametrize("awk", AWKS)
@pytest.mark.parametrize("by", MAKES)
def test_every_make_with_every_awk_sets_up_once_and_alike(house, tmp_path, by, awk):
    """With tools that only write down how they were called."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "awk").symlink_to(shutil.which(awk))
    tool = tmp_path / "bin" / "python3"
    tool.write_text(TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    asked = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "CMAKE_ARGS": "-DGGML_METAL=OFF"}
    done = make(house, "study", "SCALE=mini", "MINUTES=3", by=by, **asked)
    assert (done.returncode, done.stderr) == (0, "")
    log = (house / "log").read_text()
    assert log.endswith("plamo-study study --scale mini --minutes 3 with -DGGML_METAL=OFF\n")
    assert (log.count("python3 -m venv .venv"), log.count("uv pip install")) == (1, 1)
    (engine,) = re.findall(r"^pip install .*--no-build-isolation.* -r requirements.lock .*$", log, re.MULTILINE)
    flags = engine.partition(" with ")[2]
    assert flags.startswith("-DCMAKE_C_FLAGS=-U__AMX_INT8__ ")
    assert flags.endswith(f" -DCMAKE_PROJECT_INCLUDE={house}/tools/engine.cmake -DGGML_METAL=OFF")
    tools, uv = ((house / ".venv" / f"{name}.lock").read_text() for name in ("tools", "uv"))
    locked = re.findall(NAME, (house / "requirements.lock").read_text(), re.MULTILINE)
    assert re.findall(NAME, tools, re.MULTILINE) == [name for name in locked if name != builds.PACKAGE]
    assert re.findall(NAME, uv, re.MULTILINE) == ["uv"]
    make(house, "study", by=by, **asked)
    assert (house / "log").read_text().removeprefix(log) == "plamo-study study with -DGGML_METAL=OFF\n", "once"
