"""Whether bindings describe the structures of the library that they call.

llama-cpp-python repeats llama.h's structures by hand. A field that is missing or too wide there shifts all that follow,
and the engine reads other settings than the ones that were set, without an error. So the headers are asked: a program
of `sizeof` and `offsetof`, compiled against them, prints where each field of the bindings should lie.
"""

import ctypes
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llama_meter import children
from llama_meter.errors import StudyError

STRUCTURES = ("llama_batch", "llama_model_params", "llama_context_params", "llama_model_quantize_params")
Layout = dict[str, list[tuple[str, int, int]]]  # of each structure (field, offset, size) in bytes, then ("", 0, size)
SHOW = """
import json, sys
from llama_meter.engine import structures
from llama_meter.engine.bindings import llama
print(json.dumps(structures.of_bindings(llama)))
"""


def of_bindings(bindings: object) -> Layout:
    """The layout that bindings give to those of `STRUCTURES` which they know."""
    layout: Layout = {}
    for name in STRUCTURES:
        kind = getattr(bindings, name, None)
        if kind is not None:
            fields = [(field, getattr(kind, field).offset, getattr(kind, field).size) for field, *_ in kind._fields_]
            layout[name] = [*fields, ("", 0, ctypes.sizeof(kind))]
    return layout


def of_headers(asked: Layout, headers: Sequence[Path], compiler: str) -> Layout:
    """The layout that llama.h gives to the same fields. StudyError for a field that it does not have."""
    lines = ["#include <cstddef>", "#include <cstdio>", '#include "llama.h"', "int main() {"]
    for name, fields in asked.items():
        for field, _, _ in fields[:-1]:
            lines.append(f'std::printf("%zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *) 0)->{field}));')
        lines.append(f'std::printf("0 %zu\\n", sizeof({name}));')
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "structures.cpp", Path(folder) / "structures"
        source.write_text("\n".join([*lines, "}", ""]), encoding="utf-8")
        command = [compiler, *(f"-I{path}" for path in headers), str(source), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), "no word")
            raise StudyError("the bindings", f"name a field that llama.h has not: {said.split('error: ')[-1]}", MEND)
        printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    numbers = iter([tuple(map(int, line.split())) for line in printed])
    return {name: [(field, *next(numbers)) for field, _, _ in fields] for name, fields in asked.items()}  # type: ignore[misc]


MEND = "this release cannot be measured through its own bindings: choose another of plamo-study engine list"


def check(folder: Path, headers: Sequence[Path], compiler: str) -> None:
    """StudyError where the bindings beside a build's libraries differ from its headers in any field's place or size."""
    environment = children.environment() | {"LLAMA_CPP_LIB_PATH": str(folder.resolve())}
    done = subprocess.run(children.python("-c", SHOW), env=environment, capture_output=True, text=True)
    if done.returncode:
        raise StudyError("the bindings", f"do not load: {done.stderr.strip().splitlines()[-1]}", MEND)
    said = {name: [tuple(field) for field in fields] for name, fields in json.loads(done.stdout).items()}
    for name, fields in of_headers(said, headers, compiler).items():  # type: ignore[arg-type]
        for (field, *here), (_, *there) in zip(said[name], fields, strict=True):
            if here != there:
                what = f"{name}.{field}" if field else name
                why = f"{what} at {here[0]} of {here[1]} bytes, where llama.h has it at {there[0]} of {there[1]} bytes"
                raise StudyError("the bindings", why, MEND)
