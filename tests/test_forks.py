"""What those who fork it get: a workflow, Binder and Colab, a citation. Checked as files; none of it has run here."""

import os
import re
import shutil
import subprocess
import tomllib

import nbformat
import pytest
import yaml
from documents import parts

from llama_meter import paths
from plamo_study.plans import registry

BINDER = paths.ROOT / ".binder"


def test_binder_gets_every_locked_package_by_its_hash_but_the_engine(tmp_path):
    """Its script, with a pip that notes what it is asked for."""
    asked = tmp_path / "asked"
    noting = f'#!/bin/bash\necho "$*" >> {asked}\n[[ "${{@: -1}}" == . ]] || cat "${{@: -1}}" >> {asked}\n'
    (tmp_path / "pip").write_text(noting)
    (tmp_path / "pip").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run([BINDER / "postBuild"], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
    first, *locked, last = asked.read_text().splitlines()
    assert {"--require-hashes", "--no-deps"} <= set(first.split())
    assert {"--no-deps", "--no-build-isolation"} <= set(last.split())
    names = {line.split("==")[0] for line in locked if re.match("[a-z]", line)}
    declared = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {line.split("==")[0] for line in declared} - names == {"llama-cpp-python"}
    version = re.fullmatch(r"python-3\.(\d+)\n", (BINDER / "runtime.txt").read_text())
    assert 11 <= int(version[1]) <= 14


def test_actions_of_the_workflow_are_pinned_by_commit_with_their_tag_beside_it():
    text = (paths.ROOT / ".github" / "workflows" / "test.yml").read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", each) for each in used), used


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
