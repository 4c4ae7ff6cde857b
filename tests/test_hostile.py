"""Files from strangers: every one ends in a finding or a clear error, in time, in memory, and in its own process.

PLAMO_STUDY_HOSTILE=all sends every mutant that passes the check through the engine, instead of a few.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import hostile
import hostile_released
import hostile_worker
import pytest

ALL = os.environ.get("PLAMO_STUDY_HOSTILE") == "all"
THROUGH_THE_ENGINE = 5  # of those that pass the check, without PLAMO_STUDY_HOSTILE
RELEASED = 20 * len(hostile_released.KINDS)


def fed(mode: str, folder: Path, *numbers: str) -> tuple[list[dict], int]:
    """One line for each file, and the peak of the process's memory in bytes."""
    command = [sys.executable, str(Path(__file__).with_name("hostile_worker.py")), mode, str(folder), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200 if ALL else 100)
    assert done.returncode == 0, done.stderr[-2000:]
    *rows, last = (json.loads(line) for line in done.stdout.splitlines())
    return rows, last["peak_rss"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], int]:
    """All mutants through the check."""
    return fed("check", tmp_path_factory.mktemp("hostile"), f"0:{hostile.N}")


def assert_contained(rows: list[dict], peak: int) -> None:
    assert [row["name"] for row in rows if row["accident"]] == [], "neither a finding nor a StudyError"
    assert [row["name"] for row in rows if row["seconds"] > hostile_worker.LIMIT_S] == []
    assert [(row["name"], row["left"]) for row in rows if row["left"]] == [], "files left behind"
    assert [row["name"] for row in rows if not row["printable"]] == []
    assert peak < hostile_worker.LIMIT_BYTES


@pytest.mark.timeout(110)
def test_all_mutants_end_in_findings_or_clear_errors_within_limits(checked):
    rows, peak = checked
    assert len(rows) == hostile.N
    assert_contained(rows, peak)


def test_the_check_lets_few_mutants_through_and_only_kinds_that_can_be_harmless(checked):
    rows, _ = checked
    through = [row["name"].split()[1] for row in rows if not row["blocking"] and not row["error"]]
    assert len(through) < len(rows) / 4
    always_found = {"cut_in_header", "duplicate_key", "missing_tensor", "duplicate_tensor", "garbage"}
    assert not always_found & set(through)
    assert len({code for row in rows for code in row["blocking"]}) > 20, "mutants of many kinds"


@pytest.mark.timeout(1300 if ALL else 110)
def test_mutants_that_pass_the_check_do_no_harm_in_the_engine_s_process(checked, tmp_path):
    through = [str(row["number"]) for row in checked[0] if not row["blocking"] and not row["error"]]
    chosen = through if ALL else through[:: max(1, len(through) // THROUGH_THE_ENGINE)][:THROUGH_THE_ENGINE]
    rows, peak = fed("gate", tmp_path, *chosen)
    assert len(rows) == len(chosen) > 0
    assert_contained(rows, peak)
    silent = [row["name"] for row in rows if not (row["blocking"] or row["error"] or "gate" in row["others"])]
    assert silent == [], "neither found wrong nor shown right"


def test_the_same_seed_makes_the_same_mutants_and_another_seed_others(tmp_path):
    originals = hostile.bases(tmp_path)
    made = [made for _, made in hostile.mutants(originals, n=80)]
    assert made == [made for _, made in hostile.mutants(originals, n=80)]
    assert made != [made for _, made in hostile.mutants(originals, n=80, seed=1)]


@pytest.mark.timeout(110)
def test_mutated_releases_are_converted_or_refused_and_leave_nothing_behind(tmp_path):
    pytest.importorskip("plamo_study.models.convert")
    rows, peak = fed("convert", tmp_path, f"0:{RELEASED}")
    assert len(rows) == RELEASED
    assert_contained(rows, peak)
    refused = [row for row in rows if row["error"]]
    assert not any(row["whole"] for row in refused), "a refused conversion leaves no file"
    assert len(refused) > len(rows) / 2
