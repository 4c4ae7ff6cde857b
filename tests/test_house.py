"""The house: two packages on floors, and the rules that keep one route from a row to a number."""

import ast
import inspect
import re
import subprocess
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import msgspec
import nbformat
import pytest
from documents import house
from documents.house import FLOORS, METER, STUDY, floor, imports, modules, room

from llama_meter import children, journal, paths
from llama_meter.rows import row_key

MODULES = modules()
PEERS = "llama_meter.measure.peers"  # processes of ours that talk to one another
SYSTEM = "llama_meter.measure.machine"  # what differs between Linux and macOS, the C library too
ONE_READER = {  # laws that one page asks, and that tests hold on made-up input
    "predictions": "holds every way to predict a load against what was measured of it, none on its own fit",
    "speed_ups": "computes drafting at any acceptance from one process; tests know the answer in closed form",
    "turning": "bisects where a pass waits for compute; tests know where",
}
A_ROW = re.compile(r"\[.*\bRow\b")  # rows in a list, an iterable, or whatever holds several
CLI = "plamo_study.cli"
RAW = {f"plamo_study.read.{name}" for name in ("frame", "recording", "disturbances")}  # here rows become frames
MEASURES = ("plans", "live", "run", "cli", "measurements")  # rooms of the study that drive the meter


def reached(name: str, found: set[str] | None = None) -> set[str]:
    """The modules that importing this one reads, inside functions too."""
    found = set() if found is None else found
    for other in imports(MODULES[name], MODULES) & MODULES.keys() - found:
        found.add(other)
        reached(other, found)
    return found


def test_every_module_stands_on_a_floor():
    homeless = sorted(name for name in MODULES if name.split(".")[1] not in FLOORS[name.split(".")[0]])
    assert not homeless, f"{homeless} stand on no floor: move them into a room of documents/house.py"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_only_floors_below_it_and_its_own(name):
    for other in sorted(imports(MODULES[name], MODULES) & MODULES.keys()):
        assert floor(other) <= floor(name), (
            f"{name} imports {other}, which stands above it: move what it needs down, or let the caller hand it over"
        )


def test_the_meter_knows_no_study():
    named = {name for name, path in MODULES.items() if name.startswith(METER) and STUDY in path.read_text()}
    allowed = {name for name in named if not re.search(rf"{STUDY}\.|import {STUDY}", MODULES[name].read_text())}
    assert named == allowed, "an import or a module's name of the study in the meter"


def test_no_modules_import_one_another_in_a_circle():
    """Imports inside functions count: a circle that hides behind them is one."""
    graph = {name: imports(path, MODULES) & MODULES.keys() - {name} for name, path in MODULES.items()}
    rooms = {room(name): {room(other) for other in found} - {room(name)} for name, found in graph.items()}
    for name, found in graph.items():
        rooms[room(name)] |= {room(other) for other in found} - {room(name)}
    for drawn in (graph, rooms):
        try:
            tuple(TopologicalSorter(drawn).static_order())
        except CycleError as error:
            pytest.fail(f"{' -> '.join(error.args[1])} is a circle: split the module that both ends need")


def test_the_picture_of_the_house_is_that_of_its_imports():
    text = (paths.ROOT / "docs/CONTRIBUTING.md").read_text(encoding="utf-8")
    assert house.drawn() in text, "python tools/readme.py draws it"


def test_one_module_asks_which_system_this_is():
    """`builds` does so too: below `machine`, it knows what a library's file is called."""
    asking = {name for name, path in MODULES.items() if re.search(r"sys\.platform|platform\.system", path.read_text())}
    assert asking == {SYSTEM, "llama_meter.engine.builds"}, "let `machine` tell what differs"


def test_one_module_speaks_http():
    """With one set of limits, and one answer to proxies, redirects and keys."""
    tools = {f"tools/{path.name}": path for path in (paths.ROOT / "tools").rglob("*.py")}
    by = {name: imports(path, MODULES) for name, path in (MODULES | tools).items()}
    others = {"httpx2", "httpx", "requests", "urllib3", "aiohttp", "http"}
    assert {name for name, found in by.items() if found & others} == {"llama_meter.http"}
    assert {room(name) for name, found in by.items() if "huggingface_hub" in found} == {"llama_meter.models"}
    asking = r"urllib\.request|create_connection"
    assert {name for name, path in MODULES.items() if re.search(asking, path.read_text())} == {PEERS}


def test_only_the_engine_s_room_touches_llama_cpp_and_ctypes():
    touching = {name for name, path in MODULES.items() if imports(path, MODULES) & {"llama_cpp", "ctypes"}}
    assert {room(name) for name in touching - {SYSTEM}} == {"llama_meter.engine"}


def test_only_the_rooms_that_measure_drive_the_meter():
    """What reads rows, estimates and draws needs what a row is, and no worker, no server and no engine."""
    driving = {
        (name, other)
        for name, path in MODULES.items()
        for other in imports(path, MODULES) & MODULES.keys()
        if name.startswith(STUDY) and name.split(".")[1] not in MEASURES
        if room(other) in {"llama_meter.engine", "llama_meter.oracle", "llama_meter.measure", "llama_meter.serve"}
    }
    assert {other for _, other in driving} <= READ_OF_METER, sorted(driving)


READ_OF_METER = {  # modules of the meter's upper rooms that say what rows mean; none loads an engine
    "llama_meter.oracle.layers",
    "llama_meter.measure.asked",
    "llama_meter.measure.defects",
    "llama_meter.measure.facts",
    "llama_meter.measure.identity",
    "llama_meter.measure.plan",
    "llama_meter.measure.result_file",
    "llama_meter.measure.tolerance",
    "llama_meter.measure.verdicts",
    "llama_meter.measure.watch",
    "llama_meter.serve.objectives",
}


def test_the_meter_loads_no_pandas():
    """A worker would start half a second later for every row, and an instrument should do without frames."""
    needing = {
        name
        for name, path in MODULES.items()
        if name.startswith(METER) and imports(path, MODULES) & {"pandas", "altair", "IPython", "nbformat", "papermill"}
    }
    assert not needing


def names(code: str) -> set[str]:
    """Every name that a module or a page uses."""
    found = [(getattr(n, "id", ""), getattr(n, "attr", ""), getattr(n, "name", "")) for n in ast.walk(ast.parse(code))
             if isinstance(n, ast.Name | ast.Attribute | ast.alias)]  # fmt: skip
    written = {
        n.value.rpartition(".")[2]
        for n in ast.walk(ast.parse(code))
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and re.fullmatch(r"[a-z_.]+\.[a-z_]+", n.value)
    }  # a plan, by its name
    return {name for each in found for name in each if name} | written  # fmt: skip


def only_one_page_reads(package: dict[str, str], tools: list[str], pages: list[str]) -> set[str]:
    """The public functions and classes that nothing of the package and no tool uses, and at most one page."""
    used = set().union(*(names(code) for code in (*package.values(), *tools)))
    by_page = [names(code) for code in pages]
    bodies = [ast.parse(code).body for name, code in package.items() if name.startswith(STUDY) and room(name) != CLI]
    defined = [each.name for body in bodies for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    public = [name for name in defined if not name.startswith("_") and name not in used]
    return {name for name in public if sum(name in page for page in by_page) < 2}


@pytest.mark.long
def test_what_one_page_alone_computes_stands_in_its_cells():
    package = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    tools = [path.read_text(encoding="utf-8") for path in (paths.ROOT / "tools").rglob("*.py")]
    notebooks = [nbformat.read(path, as_version=4) for path in sorted(paths.NOTEBOOKS.glob("*.ipynb"))]
    pages = ["\n".join(cell.source for cell in each.cells if cell.cell_type == "code") for each in notebooks]
    found = only_one_page_reads(package, tools, pages)
    assert not found - ONE_READER.keys(), "make it cells of its page, or delete what no page reads"
    assert not ONE_READER.keys() - found, "it has a second reader now: name it here no more"
    planted = "".join(f"def planted_{each}(): ...\n" for each in ("once", "twice", "never", "tool"))
    more = only_one_page_reads(
        package | {"plamo_study.laws.planted": planted}, [*tools, "planted_tool()"],
        [*pages, "planted_once(planted_twice())", "analysis.planted_twice"],
    )  # fmt: skip
    assert more - found == {"planted_once", "planted_never"}


def takes_rows(code: str) -> list[str]:
    """The public functions whose annotations ask for several rows of a journal, as `llama_meter.rows` defines them."""
    tree = ast.parse(code)
    imported = [each.names for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)
                if each.module in ("llama_meter.rows", "llama_meter")]  # fmt: skip
    if not {"Row", "rows"} & {alias.name for names_of in imported for alias in names_of}:
        return []  # a Row of another kind
    return [
        each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
        for arg in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)
        if arg.annotation and A_ROW.search(ast.unparse(arg.annotation).replace("rows.Row", "Row"))
    ]  # fmt: skip


def test_outside_of_measuring_rows_come_as_a_frame():
    reading = {name: path for name, path in MODULES.items() if name.startswith(STUDY) and name not in RAW}
    asking = {name: takes_rows(path.read_text(encoding="utf-8")) for name, path in reading.items()}
    assert not {name: found for name, found in asking.items() if found}, "take a frame (read/frame.py), or one row"
    planted = "from llama_meter.rows import Row\ndef law(rows: Iterable[Row], n: int): ...\ndef one(row: Row): ..."
    assert takes_rows(planted) == ["law"]


def test_a_room_s_front_door_holds_its_description_and_nothing_else():
    for package in FLOORS:
        for path in (house.SOURCES / package).rglob("__init__.py"):
            body = ast.parse(path.read_text(encoding="utf-8")).body
            assert [type(node) for node in body] == [ast.Expr], f"{path}: move the code into a module"


def test_public_functions_of_the_meter_say_what_they_do():
    for name in sorted(name for name in MODULES if name.startswith(METER) and not name.endswith("__main__")):
        for node in ast.parse(MODULES[name].read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node) or node.decorator_list, f"{name}.{node.name} has no docstring"


def test_every_recorded_row_keeps_its_key():
    """A cell that would be encoded otherwise than when it was measured would be measured again, by everybody."""
    n_rows = 0
    for path in sorted(paths.MEASURED.glob("reference/*.jsonl")):
        for row in journal.latest_rows(journal.read(path)):
            study = f"{row.study}/anchor" if row.anchor else row.study
            found = row_key(study, row.cell, row.model, row.engine, row.machine, row.replicate, *row.others)
            assert found == row.key, f"{path.name}: {msgspec.json.encode(row.cell)!r}"
            n_rows += 1
    assert n_rows > 2000


def test_every_recorded_journal_has_a_plan_that_measures_it_again():
    registry = import_module("plamo_study.plans.registry")
    rows = (journal.latest_rows(journal.read(path))[0] for path in paths.MEASURED.glob("reference/*.jsonl"))
    recorded = {row.study for row in rows}
    assert recorded <= set(registry.STUDIES), recorded - set(registry.STUDIES)


HEAVY = {"altair", "IPython", "nbformat", "pandas", "papermill", "scipy"}


@pytest.mark.parametrize(
    ("entry", "absent"),
    [
        ("plamo_study.cli.main", HEAVY),
        ("llama_meter.__main__", HEAVY | {"gguf", "numpy"}),
        ("llama_meter.measure.worker", HEAVY | {"gguf"}),
        ("llama_meter.workloads.phases", HEAVY | {"gguf"}),
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
        "import llama_meter.workloads.phases",
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
    upper = ("engine.", "oracle.", "measure.worker", "measure.runner", "models.check", "models.given")
    assert "plamo_study.read.frame" in loaded
    assert not [name for name in loaded if name.startswith(tuple(f"llama_meter.{each}" for each in upper))]


def test_a_rule_of_the_house_is_broken_by_what_is_planted_against_it(tmp_path, monkeypatch):
    """The meter importing the study, an import upwards, and a circle are each seen in a copy of two files."""
    planted = tmp_path / "planted.py"
    planted.write_text("def f():\n    from plamo_study.show import charts\n    return charts\n")
    found = imports(planted, MODULES)
    assert found == {"plamo_study.show.charts"}
    assert floor("plamo_study.show.charts") > floor("llama_meter.measure.runner")
    assert inspect.getdoc(house.floor)
