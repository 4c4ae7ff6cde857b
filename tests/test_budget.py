"""How the time for measuring is shared: all of it, by weight, and never for a study that would not get ready."""

import pytest

from plamo_study.studies import budget, collect, registry

NAMES = [name for name in registry.NOTEBOOKS if registry.of_notebook(name, "mini")]


def test_notebooks_share_all_the_time():
    shares = budget.of_notebooks(NAMES, 10)
    assert sum(shares.values()) == pytest.approx(10, abs=0.01)
    assert min(shares.values()) > 0


def test_no_time_named_means_whole_plans():
    assert {share for name in NAMES for _, _, share in budget.of_notebook(name, "mini", 0)} == {0}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_too_long_for_its_share_leaves_its_time_to_the_others(name):
    measured = budget.of_notebook(name, "mini", 0.2)
    assert sum(share for *_, share in measured) == pytest.approx(0.2)
    assert not [study for study, _, _ in measured if study in ("04-scan", "04-quality", "05-drift")]
    assert {study for study, _, _ in budget.of_notebook(name, "mini", 1000)} == {
        study for study, _ in registry.of_notebook(name, "mini")
    }


def test_what_was_never_recorded_is_measured_however_short_the_time():
    assert budget.of_study("04-scan", "weights", 0.1) > 0


@pytest.mark.parametrize("scale", ["mini", "shape"])
@pytest.mark.parametrize("name", registry.STUDIES)
def test_every_file_of_a_plan_has_a_name(name, scale):
    if scale == registry.shown_at(name, scale):
        planned = collect.build(name, scale)
        assert planned.needed > 0
        assert all(all(file) for cell in planned.asked for file in cell.files)
