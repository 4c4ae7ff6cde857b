"""Guests on every page: rows of volunteers, of any study, alone and twice, on a chip of ours or on another."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import nbformat
import pytest
from IPython.core.formatters import DisplayFormatter
from test_packing import rekeyed

from llama_meter import journal, packs, paths
from llama_meter.cells import Decode
from llama_meter.measure.tasks import REPEAT
from llama_meter.rows import Fact, Row, content_id
from plamo_study.laws import machines
from plamo_study.measurements import measured_added
from plamo_study.read import processors
from plamo_study.stats.estimates import estimate

TRACKED = paths.MEASURED


@cache
def tracked() -> dict[str, dict[str, list]]:
    """The tracked records of every machine, by journal."""
    found: dict[str, dict[str, list]] = {}
    for path in sorted(TRACKED.glob("*/*.jsonl")):
        records = journal.read(path)
        for machine in sorted({row.machine for row in records if isinstance(row, Row)}):
            own = [each for each in records if not isinstance(each, Row) or each.machine == machine]
            found.setdefault(machine, {})[path.stem] = own
    return found


def guest(machine: str, **changes: str) -> packs.Pack:
    """What a volunteer sends whose machine is one of ours but for some facts."""
    made = packs.Pack()
    for name, records in tracked()[machine].items():
        data = next(each.data for each in records if isinstance(each, Fact) and each.id == machine)
        data = data | {key: value for key, value in changes.items() if key != "board"}
        if "gpus" in data and "board" in changes:
            data |= {"gpus": [board | {"chip": changes["board"]} for board in data["gpus"]]}
        made.machine = content_id(data)
        facts = [each for each in records if isinstance(each, Fact) and each.what != "machine"]
        rows = [rekeyed(each, {machine: made.machine}) for each in records if isinstance(each, Row)]
        made.journals[name] = [Fact(id=made.machine, what="machine", data=data), *facts, *rows]
    return made


def visited(folder: Path, *guests: packs.Pack, study: str = "") -> Path:
    """A folder of measured rows: the tracked ones, and those that guests have of a study, or of all."""
    folder.mkdir()
    for place in ("reference", "others"):
        (folder / place).symlink_to(TRACKED / place)
    for each in guests:
        named = {name: records for name, records in each.journals.items() if not study or name.startswith(f"{study}.")}
        packs.file(packs.Pack(each.machine, named))
    return folder


SHOWN = DisplayFormatter()


def executed(page: str, **parameters: Any) -> dict[str, Any]:
    """Run the code cells of a page and make what they show; the names that it leaves. Charts are made, not drawn."""
    notebook, names = nbformat.read(paths.NOTEBOOKS / f"{page}.ipynb", as_version=4), {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        parsed = ast.parse(cell.source)
        last = parsed.body.pop() if isinstance(parsed.body[-1:][0] if parsed.body else None, ast.Expr) else None
        exec(compile(parsed, f"{page}, cell {number}", "exec"), names)
        if "parameters" in cell.metadata.get("tags", ()):
            names |= parameters
        if last:
            shown = eval(compile(ast.Expression(last.value), f"{page}, cell {number}", "eval"), names)
            shown.to_dict() if hasattr(shown, "to_dict") else SHOWN.format(shown)
    return names


@pytest.fixture(scope="module")
def everybody(tmp_path_factory):
    """A folder with the rows of guests of every study, twice, and of the reference machines' own chips."""
    folder = tmp_path_factory.mktemp("everybody") / "measured"
    everyone = [guest(machine, **chip) for chip in CHIPS for machine in tracked()]
    with pytest.MonkeyPatch.context() as place:
        place.setattr(paths, "MEASURED", folder)
        visited(folder, *everyone, *(guest(machine, os="Linux 7.2", chip="Invented M0") for machine in (H200, ZEN5)))
    return folder


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MEASURED", tmp_path / "measured")
    return tmp_path / "measured"


H200, ZEN5 = "d49900bc784c2342", "dbd2b3acfeaa796f"
CHIPS = [{"os": "Linux 6.99.1"}, {"os": "Linux 7.1", "chip": "Invented M0", "board": "Invented board"}]
PAGES = [
    ("01-phase-asymmetry", "recorded"), ("03-batch-scaling", "recorded"), ("05-context-length", "recorded"),
    ("06-chunked-prefill", "recorded"), ("08-speculative", "recorded"), ("13-machines", "live"),
    ("15-hybrids", "recorded"), ("17-builds", "recorded"),
]  # fmt: skip


@pytest.mark.long
def test_machines_of_one_chip_have_names_of_their_own_and_the_tracked_one_keeps_its_name(measured):
    twice = [guest(ZEN5, os="Linux 6.99.1"), guest(ZEN5, os="Linux 6.99.2")]
    visited(measured, *twice, guest(H200, os="Linux 6.99.3"), study="03-batch-scaling")
    found = measured_added("03-batch-scaling")
    assert found["machine"].nunique() == found["device"].nunique() == 4
    assert "NVIDIA H200" in set(found["device"])
    usable = found[found["usable"] & found["metric"].eq("step") & found["policy"].eq("shared")]
    rates = estimate(usable, by="device model build n_seq")
    assert rates.groupby(["model", "build", "n_seq"])["device"].nunique().max() >= 2
    assert set(measured_added("03-batch-scaling", board="NVIDIA H200")["device"]) == {"NVIDIA H200"}
    shown = machines.recordings("live", "shape")
    chips = machines.facts_of(shown)
    assert len({processors.machine(fact) for fact in chips.values()}) == len(chips)


def test_a_repeat_of_a_row_stands_in_its_place_on_a_guest_s_frame(measured):
    once = guest(ZEN5, os="Linux 6.99.1")
    records = once.journals["03-batch-scaling.shape"]
    steps = [each for each in records if isinstance(each, Row) and isinstance(each.cell, Decode) and not each.anchor]
    records += [rekeyed(msgspec.structs.replace(each, replicate=each.replicate + REPEAT), {}) for each in steps]
    visited(measured, once, study="03-batch-scaling")
    found = measured_added("03-batch-scaling").query("usable == True and metric == 'step' and build == 'stock'")
    rates = estimate(found[found["policy"].eq("shared")], by="device model n_seq")
    assert set(rates["n"]) <= set(range(1, 10))


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "source"), PAGES)
def test_every_page_bears_guests_of_every_study_twice_and_of_the_reference_s_own_chips(
    page, source, everybody, monkeypatch
):
    monkeypatch.setattr(paths, "MEASURED", everybody)
    executed(page, source=source)


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("study", "page", "source", "machine"),
    [
        ("03-batch-scaling", "03-batch-scaling", "recorded", H200),
        ("03-batch-scaling", "03-batch-scaling", "recorded", ZEN5), ("03-batch-scaling", "13-machines", "live", H200),
        ("04-quantization", "13-machines", "live", ZEN5), ("01-phase-asymmetry", "13-machines", "live", H200),
    ],
)  # fmt: skip
def test_a_page_bears_a_guest_with_the_rows_of_one_study_only(study, page, source, machine, measured):
    visited(measured, guest(machine, **CHIPS[0]), study=study)
    executed(page, source=source)


NEW = {"03b-batching-law", "your-machine"}  # they read a GPU's rows, as 01 and 03 do


def test_other_pages_read_no_guest_s_rows():
    """Those that do are executed above."""
    reading = set()
    for path in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        if re.search(r"measured_added\(|\badded\(|machines\.recordings\(", code):
            reading.add(path.stem)
    assert reading - NEW == {page for page, _ in PAGES}
