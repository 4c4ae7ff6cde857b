"""Keys outlive updates of Python and of the system and new builds of an engine, and no change of what makes times."""

from collections import Counter

import msgspec
import pytest
from conftest import mini
from test_packing import rekeyed
from test_runner import small_plan

from llama_meter import journal, packs, paths
from llama_meter.engine import builds, library
from llama_meter.measure import bench, identity, machine, runner
from llama_meter.measure.facts import plainly
from llama_meter.rows import Fact, Row, content_id
from plamo_study.plans.registry import STUDIES
from plamo_study.read import frame, recording
from plamo_study.show import evidence

MACHINE = {
    "chip": "Apple M4 Pro", "cores": 12, "performance_cores": 8, "memory_bytes": 25276502016, "architecture": "arm64",
    "last_level_cache_bytes": 96 << 20, "os": "Darwin 25.1.0", "macos_build": "25B78", "python": "3.13.1",
    "compiler": "Clang 17.0.0", "wired_limit_mb": "0",
    "gpus": [{"name": "MTL0", "chip": "Apple M4 Pro", "memory_bytes": 17179885568}],
}  # fmt: skip
ENGINE = {
    "binding": "llama-cpp-python 0.3.36", "llama": "0.5.0-dev", "ggml": "0.25.3", "commit": "0c1e570",
    "build": "MTL : EMBED_LIBRARY = 1 | CPU : NEON = 1", "gpu_offload": True, "sha256": "0" * 64,
    "libraries": ["libggml", "libllama"], "compiler": "clang 17", "pinned": True,
}  # fmt: skip
UPDATES = [
    {"python": "3.13.9"}, {"os": "Darwin 25.6.2", "macos_build": "25G5"}, {"compiler": "Clang 18.1.0"},
    {"memory_bytes": 25276063744}, {"gpus": [MACHINE["gpus"][0] | {"memory_bytes": 17179869184}]},
]  # fmt: skip
OTHERS = [
    {"chip": "Apple M4"}, {"python": "3.14.0"}, {"os": "Darwin 26.0.0"}, {"memory_bytes": 48 << 30},
    {"last_level_cache_bytes": 48 << 20}, {"performance_cores": 10}, {"wired_limit_mb": "20000"},
    {"gpus": [*MACHINE["gpus"], *MACHINE["gpus"]]},
]  # fmt: skip


@pytest.mark.parametrize("changes", UPDATES)
def test_an_update_makes_no_other_machine(changes):
    assert identity.of_machine(MACHINE | changes) == identity.of_machine(MACHINE)
    assert identity.system(MACHINE | changes, ENGINE) != identity.system(MACHINE, ENGINE) or "gpus" in changes


@pytest.mark.parametrize("changes", OTHERS)
def test_what_may_change_a_time_makes_another_machine(changes):
    assert identity.of_machine(MACHINE | changes) != identity.of_machine(MACHINE)


def test_an_engine_is_its_sources_and_flags_where_they_are_locked_and_else_its_bytes():
    rebuilt = ENGINE | {"sha256": "1" * 64, "description": "said better"}
    assert identity.of_engine(rebuilt) == identity.of_engine(ENGINE)
    assert "pinned" not in identity.of_engine(ENGINE)
    for changes in ({"build": "CPU : NEON = 1"}, {"compiler": "clang 18"}, {"libraries": ["libllama"]},
                    {"patches": {"window": "a"}}, {"options": ["GGML_BLAS=ON"]}, {"pinned": False}):  # fmt: skip
        assert identity.of_engine(ENGINE | changes) != identity.of_engine(ENGINE), changes
    assert identity.of_engine(rebuilt | {"pinned": False}) != identity.of_engine(ENGINE | {"pinned": False})


def test_the_installed_engine_is_pinned_and_a_copy_elsewhere_is_not(tmp_path):
    told = library.describe()
    assert told["pinned"]
    assert told["compiler"] or machine.MACOS
    assert "libllama" in told["libraries"]
    assert not builds.is_pinned(tmp_path)


# ---------------------------------------------------------------- rows from before


def older(records, facts):
    """The records as they were written before there was a `system`: `facts` are the whole ones, by id of today's."""
    ids = {new: content_id(whole) for new, whole in facts.items()}
    kinds = {record.id: record.what for record in records if isinstance(record, Fact)}
    made = [Fact(id=ids[new], what=kinds[new], data=whole) for new, whole in facts.items()]
    for record in records:
        if isinstance(record, Row):
            made.append(rekeyed(msgspec.structs.replace(record, schema=1, system=""), ids))
        elif record.what == "model":
            made.append(record)
    return made


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of two builds, one of them from unknown sources, and its journal as an older program wrote it."""
    path = tmp_path_factory.mktemp("swept") / "j.jsonl"
    planned = small_plan((mini("prefill", n_prompt=16),), blocks=2)
    assert runner.sweep(planned, path).measured == 1 + 2 + 3
    records = journal.read(path)
    today = {record.what: record for record in records if isinstance(record, Fact)}
    here, engine = machine.facts(), plainly(bench._asked("")[0])
    engine = {name: value for name, value in engine.items() if name not in ("pinned", "libraries", "compiler")}
    whole = {today["machine"].id: here, today["engine"].id: engine | {"sha256": "a" * 64}}
    return planned, older(records, whole)


@pytest.mark.long
def test_a_sweep_finds_all_rows_after_an_update_of_python_and_the_system_and_a_rebuilt_engine(
    swept, tmp_path, monkeypatch
):
    planned, records = swept
    with journal.Journal(tmp_path / "j.jsonl") as here:
        here.append(*records)
    ours, asked = machine.facts(), bench._asked
    updated = ours | {"python": f"{ours['python']}9", "os": f"{ours['os']}-updated", "compiler": "another"}

    def rebuilt(folder):
        engine, gpus = asked(folder)
        return engine | {"sha256": "b" * 64}, gpus

    monkeypatch.setattr(machine, "facts", lambda: updated)
    monkeypatch.setattr(bench, "_asked", rebuilt)
    summary = runner.sweep(planned, tmp_path / "j.jsonl")
    assert (summary.measured, len(summary.rows)) == (0, 6)
    again = journal.read(tmp_path / "j.jsonl")
    assert [record for record in again if isinstance(record, Row)] == [row for row in records if isinstance(row, Row)]
    facts = frame.facts(again)
    shown = recording.Recording(frame.frame(summary.rows, facts), facts, "small", "mini", "live")
    assert shown.rows["machine"].nunique() == 1
    assert f"{updated['os'].partition(' ')[0]} {updated['os'].partition(' ')[2].split('.')[0]}" in repr(
        evidence.provenance(shown)
    )
    more = small_plan((mini("prefill", n_prompt=16), mini("prefill", n_prompt=24)), blocks=2)
    summary = runner.sweep(more, tmp_path / "j.jsonl")
    assert summary.measured == 2, "what is new is measured, and stands beside the rest"
    assert len({row.machine for row in summary.rows}) == 1
    monkeypatch.setattr(machine, "facts", lambda: updated | {"chip": "another"})
    assert runner.sweep(planned, tmp_path / "j.jsonl").measured == 6


def test_a_gate_passed_before_an_update_is_taken_over_with_what_was_said_of_its_system(swept, tmp_path):
    planned, records = swept
    with journal.Journal(tmp_path / "other.jsonl") as here:
        here.append(*records)
    summary = runner.sweep(planned, tmp_path / "j.jsonl")
    assert summary.measured == 5, "all but the gate"
    made = packs.packed(summary.rows[0].machine, {"00-gates.mini": journal.read(tmp_path / "j.jsonl")}, {"small"})
    assert (made.rows, dict(made.left_out)) == (6, {})


def test_a_pack_of_older_rows_and_newer_ones_is_of_one_machine(swept, tmp_path, monkeypatch):
    _, records = swept
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    with journal.Journal(tmp_path / "local" / "00-gates.mini.jsonl") as here:
        here.append(*records)
    more = small_plan((mini("prefill", n_prompt=16), mini("prefill", n_prompt=24)), blocks=2)
    runner.sweep(more, tmp_path / "local" / "00-gates.mini.jsonl")
    assert packs.pack("local", {"small", *STUDIES}).rows == 8
    assert len(list(packs.machines())) == 1


def today(fact: Fact) -> Fact:
    """A machine's or an engine's fact as it is written now, after an update of everything, and a new build."""
    if fact.what == "machine":
        return made(
            "machine", identity.of_machine(fact.data | {"python": "3.11.99", "os": "Linux 6.99.1", "compiler": ""})
        )
    new = {"libraries": ["libllama"], "compiler": "GCC 15", "ggml": "0.25.3"}  # what facts of older rows lack
    rebuilt = {"sha256": "b" * 64, "pinned": True} | (new if "libraries" not in fact.data else {})
    return made("engine", identity.of_engine(fact.data | rebuilt))


def made(what, data):
    return Fact(id=content_id(data), what=what, data=data)


def test_every_tracked_row_would_be_found_again_after_updates_and_new_builds():
    """Journals under old keys, each as one that was measured here."""
    n, lost = 0, Counter()
    for path in sorted(paths.MEASURED.glob("*/*.jsonl")):
        records = journal.read(path)
        newer = {each.id: today(each) for each in records if isinstance(each, Fact) and each.what != "model"}
        keys = {row.key for row in journal.latest_rows(identity.renewed([*records, *newer.values()]))}
        for row in journal.latest_rows(records):
            asked = rekeyed(row, {old: fact.id for old, fact in newer.items()})
            n += 1
            lost[path.stem, row.engine] += asked.key not in keys
    assert n > 10_000
    assert +lost == Counter()
