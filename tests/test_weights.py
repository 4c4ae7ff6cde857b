"""Released files are measured like any other, once they are here and nothing blocking was found in them."""

import re
from contextlib import suppress

import pytest
import released
from conftest import HYBRID, mini_file

from llama_meter import journal, paths
from llama_meter.cells import Prefill
from llama_meter.errors import StudyError
from llama_meter.measure import files, plan, runner
from llama_meter.models import convert, registry, synthetic
from plamo_study.plans import batch_scaling as batch_scaling_plan, registry as registry_of_studies
from plamo_study.read import frame

MINI = mini_file()  # before the folder of models is another
CELL = Prefill(model=HYBRID, scale="weights", dtype="BF16", n_prompt=16)


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    """An empty folder of models."""
    monkeypatch.setattr(paths, "MODELS", tmp_path / "models")
    (tmp_path / "models").mkdir()


@pytest.mark.long
def test_a_released_repository_becomes_rows_that_say_so(tmp_path):
    folder = released.write_released(MINI, tmp_path / "released", shards=2)
    convert.convert(folder, plan.model_file(CELL), "BF16")
    gate, anchor = (
        plan.change(CELL, workload="gate", n_prompt=8, n_gen=4),
        plan.change(CELL, workload="decode", n_gen=4),
    )
    asked = plan.Plan("small", "weights", (CELL,), (gate,), anchor, 1, 0, 60.0)
    rows = runner.sweep(asked, tmp_path / "j.jsonl").rows
    assert all(row.status == "ok" and row.valid for row in rows)
    fact = frame.facts(journal.read(tmp_path / "j.jsonl"))[rows[0].model]
    assert (fact["synthetic"], fact["scale"], fact["assumptions"]) == (False, "weights", [])
    assert fact["shape"]["hidden"] == registry.spec(HYBRID, "mini").hidden, "the file's own shape, not the registry's"


def test_a_missing_file_is_asked_for_and_a_blocking_one_accepted_only_in_words_that_enter_the_rows(monkeypatch):
    with pytest.raises(StudyError, match="not here") as refused:
        files.model_fact(HYBRID, "weights", "BF16")
    assert "models fetch" in refused.value.mend
    synthetic.write(registry.spec(HYBRID, "mini"), "BF16", plan.model_file(CELL), head_count_array=True)
    with pytest.raises(StudyError, match="must not be measured"):
        files.model_fact(HYBRID, "weights", "BF16")
    monkeypatch.setenv(files.ACCEPT, "to show the hang")
    fact = files.model_fact(HYBRID, "weights", "BF16")
    assert "to show the hang" in fact["assumptions"][0]
    assert frame.starred(fact) == f"{HYBRID}*"


def test_a_user_reads_which_models_a_whole_study_of_released_weights_needs():
    needed = set()
    for study in registry_of_studies.STUDIES.values():
        with suppress(StudyError):  # a study that has no released weights
            needed |= {name for name, scale, _ in files.needed(study.plan("weights")) if scale == "weights"}
    said = (
        (paths.ROOT / "docs" / "USING.md")
        .read_text(encoding="utf-8")
        .split("## Measure released weights")[1]
        .split("\n## ")[0]
    )
    assert len(needed) > len(plan.MODELS)
    assert {name for name in needed if not re.search(rf"\b{re.escape(name)}\b", said)} == set()


def test_a_model_without_released_weights_is_in_no_plan_of_them():
    assert not [cell for cell in batch_scaling_plan.batch_scaling("weights").cells if plan.MATCHED in str(cell.files)]
    with pytest.raises(StudyError, match="no released weights"):
        registry.spec(plan.MATCHED, "weights")
