"""The upstream reports: figures from rows, diffs that are the patches, tests that the project's own style asks for."""

import re

import pytest

from plamo_study import paths
from plamo_study.engine import builds as engines
from plamo_study.measure.serving import Served
from plamo_study.present.tables import FAR
from plamo_study.publish import readme, upstream
from plamo_study.studies.collect import collect

UPSTREAM = paths.DATA / "upstream"
REPORTS = ("plamo2-batching", "plamo2-projections", "plamo2-rollback", "k-quant-packing", "amx", "server-wakeups")


@pytest.mark.parametrize("name", REPORTS)
def test_every_file_a_report_names_is_here(name):
    text = (UPSTREAM / f"{name}.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert all((UPSTREAM / link).exists() for link in links)


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_a_page_and_types_no_figure_by_hand(name):
    text = (UPSTREAM / f"{name}.md").read_text()
    assert len(text.splitlines()) <= 110
    by_hand = re.sub(r"<!-- (\w+): written.*?<!-- end of \1 -->|```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert not re.findall(r"\d[\d.,]* ?(?:t/s|%|GFLOP/s|times)|\d\.\d+e-\d+", by_hand)


def test_the_diff_shown_is_the_patches():
    shown = re.search(r"```diff\n(.*?)```", (UPSTREAM / "plamo2-batching.md").read_text(), re.DOTALL)[1]
    patches = "".join((engines.PATCHES / f"{name}.patch").read_text() for name in ("mixed-prompts", "misplaced-states"))
    changed = [line for line in shown.splitlines() if line.startswith(("+", "-"))]
    assert len(changed) == 7
    assert all(line in patches.splitlines() for line in changed)


def test_split_projections_are_compared_by_raw_step_times_that_divide_or_say_to_what():
    table = upstream.projections(collect("03-batch-scaling", "recorded", "shape")).frame
    for row in table.to_dict("records"):
        quotient = float(row["step, split (ms)"]) / float(row["step, one product (ms)"])
        ratio, _, said = row["times as fast"].partition("] (")
        assert float(said.rstrip(")") or ratio.split()[0]) == pytest.approx(quotient, rel=FAR, abs=0.006)


def test_a_dead_server_and_a_living_one_are_told_apart():
    run = Served(
        build="stock", model="m", version="v", slots=4, at_once=2, rounds=5, rounds_done=1, answers=3, differ=2,
        gaps=[0.01, 2.0], exit=-6,
    )  # fmt: skip
    alive = Served(
        build="corrected", model="m", version="v", slots=4, at_once=2, rounds=5, rounds_done=5, answers=10, differ=0,
        gaps=[], exit=None,
    )  # fmt: skip
    table = upstream.server([run, alive]).frame
    assert table["server"].tolist() == ["dead in round 2 of 5", "lives"]
    assert table["answers that differ"].tolist() == ["2 of 3", "0 of 10"]
    assert table["of these near-ties"].tolist() == ["1", "n/a"]


def test_every_part_of_a_report_is_written():
    for name in (readme.BATCHING, readme.PROJECTIONS, readme.PACKING, readme.WAKEUPS):
        text = (paths.ROOT / name).read_text()
        assert all(f"<!-- {part}: written by" in text for part in readme.PARTS[name])
