"""How the time for measuring is shared: in the order of need, and never for a study that would not get ready."""

import pytest

from llama_meter import paths
from llama_meter.measure.asked import NOTHING
from plamo_study.cli.notebooks import Time
from plamo_study.live import budget, collect, conduct
from plamo_study.studies import registry

NAMES = [name for name in registry.NOTEBOOKS if registry.of_notebook(name, "mini")]
SWEEPS = dict.fromkeys(NAMES, NOTHING)


def studied(scale, minutes):
    return {name: own for name, own in budget.of_notebooks(scale, minutes, SWEEPS).items() if own}


@pytest.mark.parametrize(
    ("scale", "minutes"), [("mini", 1e-6), ("mini", 3), ("mini", 9), ("shape", 60), ("shape", 1e6)]
)
def test_notebooks_needed_most_are_measured_and_each_study_has_time_to_say_something(scale, minutes):
    measured = studied(scale, minutes)
    n = sum(map(len, measured.values()))
    assert NAMES[0] in measured
    assert n == 1 or minutes / n >= budget.LEAST[scale]
    assert list(measured) == [name for name in NAMES if name in measured], "in the order of need"
    assert len(measured) <= len(studied(scale, 2 * minutes))


def test_no_limit_means_whole_plans_of_all():
    assert studied("mini", 0) == {name: registry.of_notebook(name, "mini") for name in NAMES}
    assert budget.of_study(NAMES[0], "mini", 0) == 0
    assert Time(0, 2).minutes == 0


def test_a_study_that_is_meaningless_in_part_waits_for_time_for_all_of_it():
    whole = {name for name, study in registry.STUDIES.items() if study.whole}
    few, many = ({study for own in studied("mini", minutes).values() for study, _ in own} for minutes in (30, 1000))
    assert not whole & few
    assert whole & many
    assert budget.of_study("06-drift", "mini", 1) == budget.LEFT_OUT
    assert budget.of_study("06-drift", "mini", 60) == budget.of_study("06-context", "mini", 60) == 15


def test_a_study_that_ends_early_leaves_its_rest_to_those_after_it_and_files_take_none():
    time = Time(180, 3)
    assert time.minutes == 1
    time.spend(20)
    assert time.minutes == pytest.approx(80 / 60)
    time.spend(10_000)
    assert time.minutes == pytest.approx(80 / 60), "what a study takes beyond its share was the writing of files"


def test_what_is_meaningless_in_part_is_shown_as_recorded_where_its_share_is_too_short():
    found = collect.collect("06-drift", "live", "mini", 1)
    assert found.source == "recorded"
    assert len(found.rows)


def test_a_kernel_measures_nothing_of_what_the_command_measured_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    monkeypatch.setenv(conduct.MEASURED, "01-phase-asymmetry 02-roofline")
    monkeypatch.setattr(conduct, "measure", lambda *_, **__: pytest.fail("it measures"))
    found = collect.collect("01-phase-asymmetry", "live", "mini", 5)
    assert (len(found.rows), found.lacks) == (0, "there was no time for it")
