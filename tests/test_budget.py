"""How the time for measuring is shared: all of it, by weight, and never for a study that would not get ready."""

import pytest

from llama_meter.measure.asked import NOTHING
from plamo_study.live import budget
from plamo_study.plans import registry

NAMES = [name for name in registry.NOTEBOOKS if name != "04b-quality" and registry.of_notebook(name, "mini")]


@pytest.mark.long
def test_notebooks_share_all_the_time():
    for minutes in (1e-6, 1, 10, 1e6):
        shares = budget.of_notebooks(NAMES, "mini", minutes)
        assert sum(shares.values()) == pytest.approx(minutes)
        assert min(shares.values()) > 0


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
    asked = {name: budget._asked(name, "mini", NOTHING) for name in NAMES}
    of_command = budget._shares([each for own in asked.values() for each in own], minutes)
    alike = 0
    for name, share in budget.of_notebooks(NAMES, "mini", minutes).items():
        found = {(study, at, NOTHING): own for study, at, own in budget.of_notebook(name, "mini", share)}
        if found.keys() == of_command.keys() & set(asked[name]):
            alike += 1
            assert found == {each: pytest.approx(of_command[each]) for each in found}
    assert alike > len(NAMES) / 2


def test_time_that_a_plan_of_fixed_length_cannot_use_goes_to_those_that_grow():
    alone = budget.of_notebooks(["your-machine"], "mini", 480)
    both = budget.of_notebooks(["your-machine", "01-phase-asymmetry"], "mini", 480)
    assert alone["your-machine"] == 480
    assert both["your-machine"] < 60
    assert sum(both.values()) == pytest.approx(480)
