"""What an executed notebook is made from: any change of it gives another digest."""

import pytest

from plamo_study import paths
from plamo_study.publish import inputs
from plamo_study.studies.registry import OF_ALL

NOTEBOOK = "01-phase-asymmetry"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    data = tmp_path / "data"
    for name in ("measured/local/01.jsonl", "published/figures.csv", "models.toml"):
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("first")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "DATA", data)
    monkeypatch.setattr(paths, "MEASURED", data / "measured")
    return data


def test_the_digest_is_the_same_until_something_changes(tree):
    assert inputs.digest(NOTEBOOK) == inputs.digest(NOTEBOOK)


@pytest.mark.parametrize("name", ["measured/local/01.jsonl", "published/figures.csv", "models.toml"])
def test_another_content_gives_another_digest(tree, name):
    before = inputs.digest(NOTEBOOK)
    (tree / name).write_text("other")
    assert inputs.digest(NOTEBOOK) != before


def test_another_engine_gives_another_digest(tree, monkeypatch):
    before = inputs.digest(NOTEBOOK)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "elsewhere")
    assert inputs.digest(NOTEBOOK) != before


def test_rows_of_another_notebook_change_only_the_one_that_shows_every_study(tree):
    before = {name: inputs.digest(name) for name in (NOTEBOOK, *OF_ALL)}
    (tree / "measured/local/05-context.mini.jsonl").write_text("measured")
    assert inputs.digest(NOTEBOOK) == before[NOTEBOOK]
    assert all(inputs.digest(name) != before[name] for name in OF_ALL)
