"""Rows come home: a pack with its text, what it may not claim, and a stranger's machine on pages 13 and 03."""

import re

import msgspec
import pytest
from test_packing import rekeyed

from llama_meter import journal, packs, paths, plausible
from llama_meter.cells import Decode
from llama_meter.errors import StudyError
from llama_meter.rows import Fact, Row, content_id
from plamo_study.cli import rows as commands
from plamo_study.laws import machines, strangers
from plamo_study.measurements import measured_added
from plamo_study.plans.registry import STUDIES
from plamo_study.stats.estimates import estimate

pytestmark = pytest.mark.timeout(300)
REFERENCE = paths.MEASURED / "reference"
ZEN5, XEON = "dbd2b3acfeaa796f", "19415f43ff8f8a41"
MAC = {"chip": "Invented M0", "os": "Darwin 0.0", "architecture": "arm64"}  # no Mac has been measured
PAGES = {"01-phase-asymmetry.shape", "03-batch-scaling.shape"}


def journals(machine, names):
    """The records of a recorded machine, by journal."""
    return {name: [record for record in journal.read(REFERENCE / f"{name}.jsonl")
                   if not isinstance(record, Row) or record.machine == machine] for name in names}  # fmt: skip


def packed(machine, names=PAGES):
    return packs.packed(machine, journals(machine, names), STUDIES).data


def invented(change=lambda row: row, only=lambda row: True):
    """The pack of an invented Mac: a recorded machine's rows under facts of its own."""
    made = journals(ZEN5, PAGES)
    machine = ""
    for name, records in made.items():
        ids = {}
        for number, record in enumerate(records):
            if isinstance(record, Fact) and record.what in ("machine", "engine"):
                told = MAC if record.what == "machine" else {"build": "CPU : NEON = 1 | REPACK = 1"}
                if record.what == "machine" and record.id != ZEN5:
                    continue
                data = record.data | told
                ids[record.id] = content_id(data)
                records[number] = Fact(id=ids[record.id], what=record.what, data=data)
            elif isinstance(record, Row):
                records[number] = rekeyed(change(record), ids)
        machine = ids[ZEN5]
        made[name] = [each for each in records if not isinstance(each, Row) or only(each)]
    return packs.packed(machine, made, STUDIES).data, machine


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A folder of measured rows with two of the reference's journals."""
    folder = tmp_path / "measured"
    (folder / "reference").mkdir(parents=True)
    for name in PAGES:
        (folder / "reference" / f"{name}.jsonl").write_bytes((REFERENCE / f"{name}.jsonl").read_bytes())
    monkeypatch.setattr(paths, "MEASURED", folder)
    monkeypatch.chdir(tmp_path)
    return folder


def written(tmp_path, data):
    path = tmp_path / "pack.rows.gz"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("machine", "names"), [(ZEN5, PAGES), (XEON, {"04-controlled.shape"})])
def test_a_recorded_machine_s_pack_holds_and_has_a_text_for_a_pull_request(machine, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = packs.unpack(packed(machine, names), STUDIES)
    strangers.check(found)
    text = strangers.text(found, "mine.rows.gz", "plamo-study rows pack")
    assert "<" not in text.replace("\\<", "")
    for name in names:
        (line,) = re.findall(rf"^\| {name} \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
        assert int(line[0]) == sum(isinstance(record, Row) for record in found.journals[name])
        assert int(line[2]) + int(line[3]) <= int(line[1])
    assert f"id `{machine}`" in text
    assert "llama.cpp 0c1e570" in text
    assert "(please fill in)" in text
    assert ("| 512 | 1 |" in text) == (machine == ZEN5), "main figures, where there are ceilings"


def test_the_command_writes_both_files_or_none(measured, tmp_path):
    (measured / "reference").rename(measured / "local")
    commands.pack()
    (file,) = tmp_path.glob("*.rows.gz")
    about = tmp_path / f"{file.name.removesuffix('.rows.gz')}.md"
    assert about.read_text().startswith("# Rows of AMD EPYC Zen 5")
    file.unlink()
    with pytest.raises(StudyError, match="is there already"):
        commands.pack()
    assert not file.exists()


def test_an_invented_mac_is_shown_beside_the_reference_on_pages_13_and_03(measured, tmp_path):
    data, machine = invented()
    commands.add(written(tmp_path, data))
    found = machines.passes(machines.recordings("live", "shape"))
    assert set(found["chip"]) == {"AMD EPYC Zen 5", MAC["chip"]}
    assert {MAC["chip"]} <= {*machines.pairs(found)["known"], *machines.pairs(found)["asked"]}
    assert MAC["chip"] not in set(machines.passes(machines.recordings("recorded", "shape"))["chip"])
    guests = measured_added("03-batch-scaling").query("usable == True and metric == 'step' and build == 'stock'")
    rate = estimate(guests[guests.policy.eq("shared")], by="machine model n_seq", work="n_seq")
    assert set(rate["machine"]) == {MAC["chip"]}
    assert {8, 9} <= set(rate["n_seq"])
    assert measured_added("03-batch-scaling", asked=False).empty
    assert packs.remove(machine)
    assert measured_added("03-batch-scaling").empty


def faster(row):
    """Decode steps in a tenth of the time: faster than the machine reads the weights."""
    if not isinstance(row.cell, Decode) or row.anchor or row.status != "ok":
        return row
    return msgspec.structs.replace(row, samples_ns=[[time // 10 for time in sample] for sample in row.samples_ns])


@pytest.mark.parametrize(
    ("change", "only", "why"),
    [
        (faster, lambda row: True, r"own ceilings allow"),
        (lambda row: row, lambda row: row.cell.workload != "gate", r"have no verdict: no gate judged"),
    ],
    ids=["faster than its ceilings", "no verdict"],
)
def test_what_a_pack_s_own_rows_contradict_is_refused_with_how_to_mend_it(change, only, why, measured, tmp_path):
    data, machine = invented(change, only)
    with pytest.raises(StudyError, match=why) as error:
        commands.add(written(tmp_path, data))
    assert "plamo-study" in error.value.mend
    assert not (measured / machine).exists()


@pytest.mark.parametrize(
    ("facts", "layers", "why"),
    [
        ({"engine": {"build": "CPU : AVX2 = 1"}}, 0, "built for another machine"),
        ({"machine": {"architecture": "x86_64"}}, 0, "built for another machine"),
        ({}, -1, "engine whose facts say that it has none"),
        ({"engine": {"gpu_offload": True, "build": "MTL : EMBED_LIBRARY = 1 | CPU : NEON = 1"}}, -1, "facts name none"),
    ],
)
def test_a_row_of_another_engine_than_its_facts_name_is_refused(facts, layers, why):
    engine = {"build": "CPU : NEON = 1", "gpu_offload": False} | facts.get("engine", {})
    machine = MAC | facts.get("machine", {})
    row = next(each for each in journals(ZEN5, PAGES)["03-batch-scaling.shape"] if isinstance(each, Row)
               and isinstance(each.cell, Decode))  # fmt: skip
    row = msgspec.structs.replace(row, cell=msgspec.structs.replace(row.cell, n_gpu_layers=layers))
    with pytest.raises(ValueError, match=why):
        plausible._check_engine(row, machine, engine)
    gpu = {"gpus": [{"name": "MTL0"}]}
    plausible._check_engine(row, MAC | gpu, engine | {"gpu_offload": True, "build": "CPU : NEON = 1"})


def test_a_text_shows_nothing_that_markdown_obeys():
    found = packs.unpack(packed(XEON, {"04-controlled.shape"}), STUDIES)
    text = strangers.text(found, "a`b|c.rows.gz", "plamo-study rows pack <x>")
    assert "`a\\`b" in text
