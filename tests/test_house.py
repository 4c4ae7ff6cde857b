"""The house: floors that import only floors below them, studies that know one another only where it is named."""

import ast
import re
import subprocess
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import msgspec
import nbformat
import pytest

from plamo_study import children, paths
from plamo_study.measure import journal
from plamo_study.measure.rows import row_key

PACKAGE = Path(paths.__file__).parent
FLOORS = (  # the lowest first
    "errors", "foreign", "children", "paths", "growing", "locking", "limits", "fields", "progress", "engine", "oracle",
    "models", "analysis", "measure", "present", "studies", "measurements", "publish", "cli",
)  # fmt: skip
SYSTEM = "measure.machine"  # what differs between Linux and macOS, the C library too
REGISTRY = ("registry", "collect")  # of the studies: these know them all
SIMULATING = "studies.scheduling.fleets"  # its step model is fitted with pandas, before days of requests
GUIDES = ("machines",)  # it tells what the studies found, and measures nothing
NAMED = {  # a study that needs another one
    ("context", "quality"): "drift is the quality of one cache held against another's",
    ("fragility", "quality"): "a tensor is fragile in the quality of the text it leaves",
    ("scheduling", "serving"): "a server is asked over HTTP, whoever asks",
    ("batching_law", "serving"): "the engine itself is asked the kind of prompts that servers are asked",
    ("numeric_range", "batching_law"): "a backend is held against the law and the three tests that hold on the CPU",
    ("scheduling", "disaggregation"): "a split engine is driven by its two processes, whatever the policies beside it",
}


ONE_READER = {  # laws that one page asks, and that tests hold on made-up input
    "frontier": "protects one class of tensors after the other, and is counted byte by byte",
    "predictions": "holds every way to predict a load against what was measured of it, none on its own fit",
    "speed_ups": "computes drafting at any acceptance from one process; tests know the answer in closed form",
    "thresholds": "from which input on a type fails, by build and phase",
    "turning": "bisects where a pass waits for compute; tests know where",
}
A_ROW = re.compile(r"\[.*\bRow\b")  # rows in a list, an iterable, or whatever holds several


def module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module(path): path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}


def imports(path: Path) -> set[str]:
    """What a module imports of this package, by dotted name below it, and of others by their first name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            first, _, rest = node.module.partition(".")
            names = {f"{rest}.{alias.name}".strip(".") for alias in node.names}
            found |= {name if name in MODULES else rest for name in names} if first == "plamo_study" else {first}
    return found


def floor(name: str) -> int:
    return FLOORS.index(name.split(".")[0])


def test_one_module_asks_which_system_this_is():
    """`builds` does so too: below `machine`, it knows what a library's file is called."""
    asking = {name for name, path in MODULES.items() if re.search(r"sys\.platform|platform\.system", path.read_text())}
    assert asking == {"measure.machine", "engine.builds"}, "let `machine` tell what differs"


def study(name: str) -> str:
    room, _, rest = name.partition(".")
    return rest.partition(".")[0] if room == "studies" and "." in rest else ""


def test_every_module_stands_on_a_floor():
    homeless = sorted(name for name in MODULES if name.split(".")[0] not in FLOORS)
    assert not homeless, f"{homeless} stand on no floor: move them into one of {', '.join(FLOORS)}"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_only_floors_below_it_and_its_own(name):
    for other in sorted(imports(MODULES[name]) & set(MODULES)):
        assert floor(other) <= floor(name), (
            f"{name} imports {other}, which stands above it ({FLOORS[floor(other)]} over {FLOORS[floor(name)]}): "
            f"move what it needs down, or let the caller hand it over"
        )
        if study(name) and other.startswith("studies."):
            assert other not in [f"studies.{each}" for each in REGISTRY], (
                f"{name} imports {other}, which knows every study: read rows by plamo_study.measure.recording"
            )
        if study(name) not in ("", *GUIDES) and study(other) not in ("", study(name)):
            assert (study(name), study(other)) in NAMED, (
                f"the study {study(name)} imports {other} of another: move it to analysis/ or measure/, or name the "
                f"pair in {Path(__file__).name} with a reason"
            )


def test_a_pair_that_nobody_needs_any_more_is_not_named():
    needed = {(study(name), study(other)) for name, path in MODULES.items() for other in imports(path) & set(MODULES)}
    assert not {other for name, other in needed if name not in ("", *GUIDES)} & set(GUIDES), "nothing rests on a guide"
    assert not NAMED.keys() - needed


def test_no_modules_import_one_another_in_a_circle():
    """Imports inside functions count: a circle that hides behind them is one."""
    graph = {name: imports(path) & set(MODULES) - {name} for name, path in MODULES.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"{' -> '.join(error.args[1])} is a circle: split the module that both ends need")


def test_only_the_engine_s_room_touches_llama_cpp_and_ctypes():
    touching = {name for name, path in MODULES.items() if imports(path) & {"llama_cpp", "ctypes"}}
    assert {name.split(".")[0] for name in touching - {SYSTEM}} == {"engine"}


def has_runs(name):
    return "\nRUNS" in MODULES[name].read_text(encoding="utf-8")


def test_a_worker_loads_no_pandas():
    """It would start half a second later, for every row."""
    todo, seen = ["measure.worker", *(name for name in MODULES if has_runs(name) and name != SIMULATING)], set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            needed = imports(MODULES[name])
            assert "pandas" not in needed, f"{name} imports pandas, and a worker imports {name}"
            todo += needed & set(MODULES)


def names(code: str) -> set[str]:
    """Every name that a module or a page uses."""
    found = [(getattr(n, "id", ""), getattr(n, "attr", ""), getattr(n, "name", "")) for n in ast.walk(ast.parse(code))
             if isinstance(n, ast.Name | ast.Attribute | ast.alias)]  # fmt: skip
    return {name for each in found for name in each if name}


def only_one_page_reads(package: dict[str, str], tools: list[str], pages: list[str]) -> set[str]:
    """The public functions and classes that nothing of the package and no tool uses, and at most one page."""
    used = set().union(*(names(code) for code in (*package.values(), *tools)))
    by_page = [names(code) for code in pages]
    bodies = [ast.parse(code).body for name, code in package.items() if floor(name) != floor("cli")]
    defined = [each.name for body in bodies for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    public = [name for name in defined if not name.startswith("_") and name not in used]
    return {name for name in public if sum(name in page for page in by_page) < 2}


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
        package | {"analysis.planted": planted}, [*tools, "planted_tool()"],
        [*pages, "planted_once(planted_twice())", "analysis.planted_twice"],
    )  # fmt: skip
    assert more - found == {"planted_once", "planted_never"}


def takes_rows(code: str) -> list[str]:
    """The public functions whose annotations ask for several rows of a journal, as `measure.rows` defines them."""
    tree = ast.parse(code)
    imported = [each.names for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)
                if each.module in ("plamo_study.measure.rows", "plamo_study.measure")]  # fmt: skip
    if not {"Row", "rows"} & {alias.name for names_of in imported for alias in names_of}:
        return []  # a Row of another kind
    return [
        each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
        for arg in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)
        if arg.annotation and A_ROW.search(ast.unparse(arg.annotation).replace("rows.Row", "Row"))
    ]  # fmt: skip


def test_outside_of_measuring_rows_come_as_a_frame():
    above = {name: path for name, path in MODULES.items() if floor(name) != floor("measure")}
    asking = {name: takes_rows(path.read_text(encoding="utf-8")) for name, path in above.items()}
    assert not {name: found for name, found in asking.items() if found}, "take a frame (measure.frame), or one row"
    planted = (
        "from plamo_study.measure.rows import Row\ndef law(rows: Iterable[Row], n: int): ...\ndef one(row: Row): ..."
    )
    assert takes_rows(planted) == ["law"]


def test_a_room_s_front_door_holds_its_description_and_nothing_else():
    for path in set(PACKAGE.rglob("__init__.py")) - {PACKAGE / "__init__.py"}:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert [type(node) for node in body] == [ast.Expr], f"{path.relative_to(PACKAGE)}: move the code into a module"


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


HEAVY = {"altair", "IPython", "nbformat", "pandas", "papermill", "scipy"}


@pytest.mark.parametrize(
    ("entry", "absent"),
    [
        ("cli.main", HEAVY),
        ("measure.worker", HEAVY | {"gguf"}),
        ("measure.workloads", HEAVY | {"gguf"}),
    ],
)
def test_a_process_loads_no_charts_no_frames_and_no_jupyter_before_it_knows_what_it_is_asked(entry, absent):
    """They take two to three seconds of a slow core, and every command and every row would wait for them.

    The package for GGUF files, which a gate's oracle imports later, is a quarter of a worker's start.
    """
    loaded = children.python("-c", f"import sys, plamo_study.{entry}; print(*sys.modules)")
    found = subprocess.run(loaded, capture_output=True, text=True, check=True).stdout.split()
    assert not absent & set(found)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list what a process maps")
@pytest.mark.parametrize(
    "code",
    [
        "import plamo_study.cli.main",
        "import plamo_study.measure.workloads",
        "from plamo_study.measurements import measurements; measurements('01-phase-asymmetry')",
    ],
)
def test_importing_and_reading_rows_map_no_engine(code):
    """A process that measures nothing starts sooner without it, and works where no engine can be loaded."""
    ran = children.python("-c", f"{code}; print(open('/proc/self/maps').read())")
    maps = subprocess.run(ran, capture_output=True, text=True, check=True).stdout
    assert "python" in maps
    assert not {line.split()[-1] for line in maps.splitlines() if "libllama" in line or "libggml" in line}
