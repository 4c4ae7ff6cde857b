"""The house: two packages, and the rules that keep one route from a row to a number."""

import ast
import json
import re
import subprocess
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import msgspec
import pytest
import typer

from llama_meter import children, journal, paths
from llama_meter.rows import row_key
from plamo_study.cli import main

SOURCES = paths.ROOT / "src"
METER, STUDY = "llama_meter", "plamo_study"
SYSTEM = "llama_meter.measure.machine"  # what differs between Linux and macOS, the C library too
FILES = (path for path in SOURCES.rglob("*.py") if path.name != "__init__.py")
MODULES = {".".join(path.relative_to(SOURCES).with_suffix("").parts): path for path in FILES}


def imports(path: Path, known: Iterable[str]) -> set[str]:
    """What a module imports, inside functions too: modules of ours by their names, others by their first word."""
    known, found = set(known), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name if alias.name in known else alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = node.module.split(".")[0] in (METER, STUDY)
            found |= {name if name in known else node.module for name in names} if ours else {node.module.split(".")[0]}
    return found


def test_the_meter_knows_no_study():
    naming = {name for name, path in MODULES.items() if name.startswith(METER) and STUDY in str(imports(path, MODULES))}
    assert not naming


def test_no_modules_import_one_another_in_a_circle():
    """Imports inside functions count: a circle that hides behind them is one."""
    graph = {name: imports(path, MODULES) & MODULES.keys() - {name} for name, path in MODULES.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"{' -> '.join(error.args[1])} is a circle: split the module that both ends need")


def test_only_the_engine_s_room_touches_llama_cpp_and_ctypes():
    touching = {name for name, path in MODULES.items() if imports(path, MODULES) & {"llama_cpp", "ctypes"}}
    assert {name.split(".")[1] for name in touching - {SYSTEM}} == {"engine"}


def test_the_meter_loads_no_pandas():
    """A worker would start half a second later for every row."""
    frames = {"pandas", "altair", "IPython", "nbformat", "papermill"}
    assert not {name for name, path in MODULES.items() if name.startswith(METER) and imports(path, MODULES) & frames}


def test_every_recorded_row_keeps_its_key():
    """A cell that would be encoded otherwise than when it was measured would be measured again, by everybody."""
    n_rows = 0
    for path in journal.journals(paths.MEASURED / "reference"):
        for row in journal.latest_rows(journal.read(path)):
            study = f"{row.study}/anchor" if row.anchor else row.study
            found = row_key(study, row.cell, row.model, row.engine, row.machine, row.replicate, *row.others)
            assert found == row.key, f"{path.name}: {msgspec.json.encode(row.cell)!r}"
            n_rows += 1
    assert n_rows > 2000


HEAVY = {"altair", "IPython", "nbformat", "pandas", "papermill", "scipy"}


@pytest.mark.parametrize(
    ("entry", "absent"),
    [
        ("plamo_study.cli.main", HEAVY),
        ("llama_meter.measure.worker", HEAVY | {"gguf"}),
        ("llama_meter.measure.phases", HEAVY | {"gguf"}),
    ],
)
def test_a_process_loads_no_charts_no_frames_and_no_jupyter_before_it_knows_what_it_is_asked(entry, absent):
    """They take two to three seconds of a slow core, and every command and every row would wait for them.

    The package for GGUF files, which a gate's oracle imports later, is a quarter of a worker's start.
    """
    loaded = children.python("-c", f"import sys, {entry}; print(*sys.modules)")
    found = subprocess.run(loaded, capture_output=True, text=True, check=True).stdout.split()
    assert not absent & set(found)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list what a process maps")
@pytest.mark.parametrize(
    "code",
    [
        "import plamo_study.cli.main",
        "import llama_meter.measure.phases",
        "from plamo_study.measurements import measurements; measurements('01-phase-asymmetry')",
    ],
)
def test_importing_and_reading_rows_map_no_engine(code):
    """A process that measures nothing starts sooner without it, and works where no engine can be loaded."""
    ran = children.python("-c", f"{code}; print(open('/proc/self/maps').read())")
    maps = subprocess.run(ran, capture_output=True, text=True, check=True).stdout
    assert "python" in maps
    assert not {line.split()[-1] for line in maps.splitlines() if "libllama" in line or "libggml" in line}


def test_recorded_rows_are_read_without_engine_oracle_worker_and_files():
    """What reads rows is the small study: of the instrument it needs what a row is."""
    code = "import sys; from plamo_study.measurements import measurements; measurements('01-phase-asymmetry')"
    ran = children.python("-c", f"{code}; print(*sys.modules)")
    loaded = subprocess.run(ran, capture_output=True, text=True, check=True).stdout.split()
    upper = ("engine.", "oracle.", "measure.worker", "measure.runner", "models.check")
    assert "plamo_study.read.frame" in loaded
    assert not [name for name in loaded if name.startswith(tuple(f"llama_meter.{each}" for each in upper))]


def test_nothing_is_larger_than_its_ceiling():
    table = (paths.ROOT / "docs/CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-zA-Z ]+) \| ([\d,]+) \|", table, re.MULTILINE)
    ceilings = {what: int(most.replace(",", "")) for what, most in rows}
    lines = {
        room: [
            path.read_text(encoding="utf-8").count("\n")
            for path in (paths.ROOT / room).rglob("*.*")
            if path.suffix in (".py", ".cmake")
        ]
        for room in ("src", "tests", "tools")
    }
    notebooks = [json.loads(path.read_text(encoding="utf-8"))["cells"] for path in paths.NOTEBOOKS.glob("[!9]*.ipynb")]
    code = [cell["source"] for cells in notebooks for cell in cells if cell["cell_type"] == "code"]
    leaves = [*commands(typer.main.get_command(main.app))]
    options = [each for command in leaves for each in command.params if type(each).__name__.endswith("Option")]
    kept = [path for place in ("reference", "others") for path in (paths.MEASURED / place).iterdir()]
    size = {f"lines of {room}": sum(counts) for room, counts in lines.items()} | {
        "files of src": len(lines["src"]),
        "lines of notebook code": sum(map(len, code)),
        "notebooks": len(notebooks),
        "commands": len(leaves),
        "options": len(options),
        "words of README": len((paths.ROOT / "README.md").read_text(encoding="utf-8").split()),
        "kilobytes of rows": sum(path.stat().st_size for path in kept) // 1000,
    }
    assert size.keys() == ceilings.keys()
    assert {what: n for what, n in size.items() if n > ceilings[what]} == {}


def commands(command):
    """The commands without commands of their own."""
    inner = getattr(command, "commands", {}).values()
    for each in inner:
        yield from commands(each)
    if not inner:
        yield command
