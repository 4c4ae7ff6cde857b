"""How many processes stand behind a number is counted, and said from the rows."""

from types import SimpleNamespace

import pandas as pd

from plamo_study.analysis import usable
from plamo_study.present import evidence


def rows_of(counts):
    """(cell's prompt, processes) -> that many rows of it, one a block, and a gate and an anchor that do not count."""
    base = {"workload": "prefill", "text": "", "anchor": False, "verdict": "valid", "drift": 0.0, "disturbed": False}
    rows = [base | {"n_prompt": n, "block": block} for n, count in counts.items() for block in range(count)]
    rows += [base | {"n_prompt": 1, "block": 0, "workload": "gate"}, base | {"n_prompt": 2, "block": 0, "anchor": True}]
    return pd.DataFrame(rows)


def test_fewest_and_most_processes_of_a_timed_cell():
    assert usable.processes(rows_of({16: 5, 32: 7})) == (5, 7)
    assert usable.processes(rows_of({})) == (0, 0)


def test_a_process_that_was_disturbed_stands_behind_nothing():
    rows = rows_of({16: 5})
    rows.loc[1, "disturbed"] = True
    assert usable.processes(rows) == (4, 4)


def test_the_sentence_names_every_study_under_its_count():
    found = [SimpleNamespace(study=name, rows=rows_of(counts)) for name, counts in
             {"a": {16: 5}, "b": {16: 5}, "c": {16: 3, 32: 6}, "untimed": {}}.items()]  # fmt: skip
    assert evidence.processes(found) == "Processes behind a timed cell: 3 to 6 in c; 5 in a, b."
