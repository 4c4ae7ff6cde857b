"""What those who fork it get: a workflow, Binder and Colab, a citation. Checked as files; none of it has run here."""

import re
import shutil
import tomllib

import nbformat
import pytest
import yaml
from documents import parts

from plamo_study import paths
from plamo_study.studies import registry

BINDER = paths.ROOT / ".binder"


def test_binder_gets_every_declared_version_but_the_engine():
    declared = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = [line for line in (BINDER / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == [line for line in declared if not line.startswith("llama-cpp-python")]
    install = (BINDER / "postBuild").read_text()
    assert "--no-deps" in install, "the engine would be compiled"
    assert (BINDER / "postBuild").stat().st_mode & 0o100
    version = re.fullmatch(r"python-3\.(\d+)\n", (BINDER / "runtime.txt").read_text())
    assert 11 <= int(version[1]) <= 14


@pytest.mark.parametrize("address", ["https://github.com/some/fork", "https://github.com/some/fork.git"])
def test_links_take_the_address_from_the_citation_and_name_a_notebook_that_is_there(address, tmp_path, monkeypatch):
    assert "repository-code" in parts.forks(), "the address of this repository is not known"
    shutil.copy(paths.ROOT / "CITATION.cff", tmp_path)
    with (tmp_path / "CITATION.cff").open("a") as cited:
        cited.write(f"repository-code: {address}\n")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    links = re.findall(r"\]\((\S+)\)", parts.forks())
    assert len(links) == 2
    assert all("/some/fork/" in link for link in links)
    assert all((paths.NOTEBOOKS / link.rpartition("notebooks/")[2]).exists() for link in links)


def test_the_citation_says_what_its_schema_requires_and_the_version_of_the_package():
    cited = yaml.safe_load((paths.ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "title", "message", "type", "authors", "abstract", "keywords"} <= set(cited)
    assert (str(cited["version"]), cited["license"]) == (project["version"], project["license"])


def test_the_workflow_runs_what_the_makefile_has_on_both_systems_without_a_gpu():
    jobs = yaml.safe_load((paths.ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    assert {name.split("-")[0] for name in jobs["test"]["strategy"]["matrix"]["os"]} == {"ubuntu", "macos"}
    assert "-DGGML_METAL=OFF" in jobs["test"]["env"]["CMAKE_ARGS"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([\w$(). -]+):", (paths.ROOT / "Makefile").read_text(), re.MULTILINE)
    for step in steps:
        tool, *words = step.split()
        assert tool != "make" or words[0] in (*targets, ".venv/.ready"), step
    assert {job["timeout-minutes"] > 0 for job in jobs.values()} == {True}


def test_links_between_notebooks_and_to_files_lead_somewhere():
    for name in registry.NOTEBOOKS:
        notebook = nbformat.read(paths.NOTEBOOKS / f"{name}.ipynb", as_version=4)
        text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)\s#]+)", text):
            assert (paths.NOTEBOOKS / link).exists(), (name, link)
