"""What an executed notebook is made from: any change of it gives another digest."""

import pytest

from plamo_study import paths
from plamo_study.publish import inputs


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
    assert inputs.digest() == inputs.digest()


@pytest.mark.parametrize("name", ["measured/local/01.jsonl", "published/figures.csv", "models.toml"])
def test_another_content_gives_another_digest(tree, name):
    before = inputs.digest()
    (tree / name).write_text("other")
    assert inputs.digest() != before


def test_another_engine_gives_another_digest(tree, monkeypatch):
    before = inputs.digest()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "elsewhere")
    assert inputs.digest() != before
