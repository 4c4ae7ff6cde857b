"""Small random files of any architecture that llama.cpp knows, written by its own generator.

The generator draws every tensor by its name with the C++ library's hash, so another platform writes other numbers.
"""

import subprocess
from pathlib import Path

from plamo_study import children
from plamo_study.engine import builds
from plamo_study.errors import StudyError

NAME = "architectures"  # of the build
SHAPES = {"whole": {}, "three layers": {"ARCHS_LAYERS": "3"}, "four heads": {"ARCHS_HEADS": "4"}}
LIMIT_S = 60.0


def write(name: str, into: Path, shape: str = "whole", seed: int = 1) -> Path:
    """Write one file, e.g. "mamba2-dense" or "lfm2moe-moe", in F32, into a folder; returns its path.

    StudyError where the generator is not built, or cannot write this architecture in this shape.
    """
    arch = name.rpartition("-")[0]
    asked = [str(builds.program(NAME)), "-a", arch, "-s", str(seed), "-o", str(into)]
    surroundings = children.environment() | SHAPES[shape] | {"ARCHS_RWKV": "1"}
    done = subprocess.run(asked, env=surroundings, capture_output=True, text=True, timeout=LIMIT_S)
    path = into / f"{name}.gguf"
    if done.returncode or not path.exists():
        said = [line for line in done.stderr.splitlines() if "GGML_ASSERT" in line or "error" in line.lower()]
        why = said[-1].rpartition("/")[2] if said else "not supported"
        raise StudyError(f"no file of {arch} in this shape", why, "ask another architecture, or its usual shape")
    return path
