"""Write environment.yml: what pyproject.toml depends on, in the versions of requirements.lock.

python tools/conda.py           # `make lock` does it last
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "environment.yml"
TEMPLATE = """\
# The conda route: conda env create -f environment.yml
# Written by tools/conda.py from pyproject.toml and requirements.lock. Not tried on any machine of ours yet.
# Conda brings Python and the compiler; pip brings the locked versions, llama-cpp-python among them, built here from its
# sdist. On Apple silicon the bindings turn Metal on whatever CMAKE_ARGS says (the Makefile's engine.cmake keeps them
# from it); GGML_METAL_DEVICES=0 in the environment keeps the engine off the GPU. On an Intel CPU with AMX set
# CMAKE_ARGS="-DCMAKE_C_FLAGS=-U__AMX_INT8__ -DCMAKE_CXX_FLAGS=-U__AMX_INT8__" (the Makefile does).
name: {name}
channels: [conda-forge]
dependencies:
  - python=3.12
  - pip
  - make
  - cxx-compiler # the Xcode command-line tools serve as well on macOS
  - pip:
{pinned}
      - --editable .
"""


def written(project: str, lock: str) -> str:
    """The file, from the texts of pyproject.toml and requirements.lock. KeyError for what is not locked."""
    about = tomllib.loads(project)["project"]
    locked = dict(re.findall(r"^([a-z][\w.-]*)==([\w.]+)", lock, re.MULTILINE))
    names = [name.partition("==")[0] for name in about["dependencies"]]
    pinned = "\n".join(f"      - {name}=={locked[name]}" for name in names)
    return TEMPLATE.format(name=about["name"], pinned=pinned)


def of_repository() -> str:
    """The file that belongs to the lock as it is."""
    return written((ROOT / "pyproject.toml").read_text(encoding="utf-8"), (ROOT / "requirements.lock").read_text())


if __name__ == "__main__":
    FILE.write_text(of_repository(), encoding="utf-8")
