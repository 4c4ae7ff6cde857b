"""Released files are measured like any other, once they are here and nothing blocking was found in them."""

import shutil

import pytest
import released
from conftest import HYBRID, mini_file

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.measure import files, frame, journal, plan, runner
from plamo_study.measure.cells import Prefill
from plamo_study.models import convert, recipes, registry, synthetic
from plamo_study.studies.batch_scaling import plan as batch_scaling_plan

MINI = mini_file()
CELL = Prefill(model=HYBRID, scale="weights", dtype="BF16", n_prompt=16)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """An empty folder of models."""
    monkeypatch.setattr(paths, "MODELS", tmp_path / "models")
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def small_plan():
    gate = plan.change(CELL, workload="gate", n_prompt=8, n_gen=4)
    anchor = plan.change(CELL, workload="decode", n_gen=4)
    return plan.Plan("small", "weights", (CELL,), (gate,), anchor, 1, 0, 60.0)


def test_a_released_repository_becomes_rows_that_say_so(models, tmp_path):
    folder = released.write_released(MINI, tmp_path / "released", shards=2)
    convert.convert(folder, plan.model_file(CELL), "BF16")
    rows = runner.sweep(small_plan(), tmp_path / "j.jsonl").rows
    assert all(row.status == "ok" and row.valid for row in rows)
    facts = frame.facts(journal.read(tmp_path / "j.jsonl"))
    fact = facts[rows[0].model]
    assert (fact["synthetic"], fact["scale"], fact["assumptions"]) == (False, "weights", [])
    assert fact["shape"]["hidden"] == registry.spec(HYBRID, "mini").hidden, "the file's own shape, not the registry's"


def test_a_file_that_is_not_here_is_asked_for(models):
    with pytest.raises(StudyError, match="not here") as refused:
        files.model_fact(HYBRID, "weights", "BF16")
    assert "models fetch" in refused.value.mend


def test_a_blocking_finding_is_refused_unless_accepted_in_words_that_enter_the_rows(models, monkeypatch):
    spec = registry.spec(HYBRID, "mini")
    synthetic.write(spec, "BF16", plan.model_file(CELL), head_count_array=True)
    with pytest.raises(StudyError, match="must not be measured"):
        files.model_fact(HYBRID, "weights", "BF16")
    monkeypatch.setenv(files.ACCEPT, "to show the hang")
    fact = files.model_fact(HYBRID, "weights", "BF16")
    assert "to show the hang" in fact["assumptions"][0]
    assert frame.starred(fact) == f"{HYBRID}*"


def test_the_invented_model_has_no_released_weights(models):
    assert not [cell for cell in batch_scaling_plan.batch_scaling("weights").cells if plan.MATCHED in str(cell.files)]
    with pytest.raises(StudyError, match="no released weights"):
        registry.spec(plan.MATCHED, "weights")


def test_a_recipe_names_a_file_too(models):
    shutil.copy(MINI, recipes.model_path(HYBRID, "weights", "Q4_0-ssm_out-F16"))
    assert [path.name for path in models.iterdir()] == [f"{HYBRID}.weights.Q4_0-ssm_out-F16.gguf"]
    with pytest.raises(StudyError, match="unknown"):
        recipes.model_path(HYBRID, "mini", "Q9_0-ssm_out-F16")
