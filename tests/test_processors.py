"""Machines by the names that pages give them."""

import pytest

from plamo_study.measure import journal
from plamo_study.measure.recording import REFERENCE
from plamo_study.paths import MEASURED
from plamo_study.present import evidence, processors


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        ("AMD EPYC (family 26)", "AMD EPYC Zen 5, 2 vCPUs"),
        ("AMD EPYC (family 25)", "AMD EPYC Zen 3 or 4, 2 vCPUs"),
        ("AMD EPYC (family 23)", "AMD EPYC Zen or Zen 2, 2 vCPUs"),
        ("AMD EPYC (family 99)", "AMD EPYC (family 99), 2 vCPUs"),
        ("AMD EPYC 9R14 (family 25)", "AMD EPYC 9R14, 2 cores"),
        ("Intel(R) Xeon(R) Processor (family 6)", "Intel Xeon, 2 vCPUs"),
        ("Intel(R) Xeon(R) Processor @ 2.90GHz (family 6)", "Intel Xeon @ 2.90GHz, 2 vCPUs"),
        ("Intel(R) Xeon(R) Processor (family 19)", "Intel Xeon (family 19), 2 vCPUs"),
        ("Intel(R) Xeon(R) Platinum 8488C (family 6)", "Intel Xeon Platinum 8488C, 2 cores"),
        ("aarch64 (family ?)", "aarch64, 2 cores"),
        ("Apple M4 Pro", "Apple M4 Pro"),
        ("unknown", "unknown"),
    ],
)
def test_a_machine_is_named_by_what_its_fact_says_and_no_more(chip, name):
    assert processors.machine({"chip": chip, "performance_cores": 2}) == name


def test_one_core_is_one():
    assert processors.cores({"chip": "AMD EPYC (family 26)", "performance_cores": 1}) == "1 vCPU"


@pytest.fixture(scope="module")
def recorded():
    """The machines of the reference journals, and the builds of the engines that computed right on each."""
    facts, builds = {}, {}
    for path in sorted((MEASURED / REFERENCE).glob("*.jsonl")):
        records = journal.read(path)
        known = {record.id: record.data for record in records if hasattr(record, "data")}
        for row in journal.latest_rows(records):
            facts[row.machine] = known[row.machine]
            if row.status == "ok" and row.valid and row.engine:
                builds.setdefault(row.machine, set()).add(known[row.engine]["build"])
    return facts, builds


def test_what_decides_between_generations_is_what_computed_right_there(recorded):
    _, builds = recorded
    for machine, used in processors.USED.items():
        assert any(all(each in build for each in used) for build in builds[machine]), machine


def test_names_tell_recorded_machines_apart_where_their_facts_did(recorded):
    facts, _ = recorded
    chips = {machine: fact["chip"] for machine, fact in facts.items()}
    names = {machine: processors.processor(fact) for machine, fact in facts.items()}
    assert (
        len(set(zip(chips.values(), names.values(), strict=True)))
        == len(set(chips.values()))
        == len(set(names.values()))
    )
    assert {evidence.chip(fact) for fact in facts.values()} == {
        "AMD EPYC Zen 4, 2 vCPUs",
        "AMD EPYC Zen 5, 2 vCPUs",
        "AMD EPYC Zen 5, 2 vCPUs + llvmpipe (LLVM 15.0.6, 256 bits)",
        "Intel Xeon Sapphire Rapids or newer, 2 vCPUs",
    }
