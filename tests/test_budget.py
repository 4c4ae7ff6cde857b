"""How the time for measuring is shared: all of it, by weight, and never for a study that would not get ready."""

import pytest

from llama_meter.measure.asked import NOTHING
from plamo_study.live import budget
from plamo_study.plans import registry

NAMES = [name for name in registry.NOTEBOOKS if name != "04b-quality" and registry.of_notebook(name, "mini")]


@pytest.mark.long
@pytest.mark.parametrize("minutes", [1e-6, 1, 10, 1e6])
def test_notebooks_share_all_the_time_and_those_needed_most_never_wait_for_others(minutes):
    shares = budget.of_notebooks(NAMES, "mini", minutes)
    given = {name: share for name, share in shares.items() if share != budget.LEFT_OUT}
    assert sum(given.values()) == pytest.approx(minutes)
    assert min(given.values()) > 0
    assert next(iter(registry.NOTEBOOKS)) in given
    for name in (minutes > 1e-3) * list(given):
        needs = [budget._need(*each) for each in budget._asked(name, "mini", NOTHING) if not budget._whole(*each[:2])]
        assert given[name] >= sum(needs) * 0.99, name


def test_a_notebook_without_time_is_left_out_and_not_measured_without_a_limit():
    shares = budget.of_notebooks(registry.NOTEBOOKS, "mini", 3)
    assert shares["16-two-files"] == budget.LEFT_OUT
    assert budget.of_notebook("16-two-files", "mini", shares["16-two-files"]) == []
    measured = [name for name in registry.NOTEBOOKS if budget.of_notebook(name, "mini", shares[name])]
    assert all(share > 0 for name in measured for *_, share in budget.of_notebook(name, "mini", shares[name]))


def test_no_time_named_means_whole_plans():
    assert {share for name in NAMES for _, _, share in budget.of_notebook(name, "mini", 0)} == {0}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_too_long_for_its_share_leaves_its_time_to_the_others(name):
    measured = budget.of_notebook(name, "mini", 0.2)
    assert sum(share for *_, share in measured) == pytest.approx(0.2)
    assert not [study for study, _, _ in measured if study in ("04-quality", "05-drift")]
    assert {study for study, _, _ in budget.of_notebook(name, "mini", 1000)} == {
        study for study, _ in registry.of_notebook(name, "mini")
    }


@pytest.mark.parametrize("minutes", [0.5, 5, 1000])
def test_a_command_and_the_notebooks_it_runs_share_alike(minutes):
    every = budget.of_notebooks(NAMES, "mini", minutes)
    shares = {name: share for name, share in every.items() if share != budget.LEFT_OUT}
    asked = {name: budget._asked(name, "mini", NOTHING) for name in shares}
    of_command = budget._shares([each for own in asked.values() for each in own], minutes)
    alike = 0
    for name, share in shares.items():
        found = {(study, at, NOTHING): own for study, at, own in budget.of_notebook(name, "mini", share)}
        if found.keys() == of_command.keys() & set(asked[name]):
            alike += 1
            assert found == {each: pytest.approx(of_command[each]) for each in found}
    assert alike > len(shares) / 2


def test_time_that_a_plan_of_fixed_length_cannot_use_goes_to_those_that_grow():
    alone = budget.of_notebooks(["your-machine"], "mini", 480)
    both = budget.of_notebooks(["your-machine", "01-phase-asymmetry"], "mini", 480)
    assert alone["your-machine"] == 480
    assert both["your-machine"] < 60
    assert sum(both.values()) == pytest.approx(480)
