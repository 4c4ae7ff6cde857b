"""The documents: figures from recorded rows, sentences that hold, diffs that are the patches, notebooks as they ran."""

import json
import re

import msgspec
import nbformat
import papermill
import pytest
from documents import headlines, parts, upstream

from llama_meter import paths
from llama_meter.cells import ORDER
from llama_meter.engine import builds as engines
from llama_meter.errors import StudyError
from llama_meter.rows import Request, Row
from llama_meter.serve.concurrency import Served
from plamo_study.laws import batching_tests as batching_law
from plamo_study.live.collect import collect
from plamo_study.read.recording import added
from plamo_study.run import runs
from plamo_study.show import collected
from plamo_study.show.tables import FAR

UPSTREAM = paths.DATA / "upstream"
REPORTS = (
    "plamo2-batching", "plamo2-projections", "plamo2-rollback", "plamo2-rope", "k-quant-packing", "amx",
    "server-wakeups",
)  # fmt: skip


def test_every_document_says_what_the_rows_say():
    assert parts.is_current(), "python tools/readme.py"
    assert all(f"<!-- {part}: written by" in (paths.ROOT / name).read_text() for name in parts.PARTS
               for part in parts.PARTS[name])  # fmt: skip
    text = (paths.DATA / "ROWS.md").read_text()
    assert [name for names in (Row.__struct_fields__, Request.__struct_fields__, ORDER) for name in names
            if f"`{name}`" not in text] == []  # fmt: skip


@pytest.mark.parametrize(
    ("said", "page", "question"),
    [
        (headlines.cliff, "03-batch-scaling", "nine sequences"),
        (headlines.window, "05-context-length", "window save"),
        (headlines.bits, "04-quantization", "write at least"),
        (headlines.asymmetry, "01-phase-asymmetry", "written token"),
    ],
)
def test_a_headline_that_its_notebook_no_longer_says_is_refused(monkeypatch, said, page, question):
    """Where the question behind it is answered otherwise, and where it is not asked any more."""
    known = json.loads(json.dumps(collected.read()))
    monkeypatch.setattr(headlines, "known", lambda: known)
    for line in known[page]["questions"]:
        line["answer"] = "no" if question in line["question"] else line["answer"]
    with pytest.raises(StudyError, match="not what the recorded rows say"):
        said()
    known[page]["questions"] = [line for line in known[page]["questions"] if question not in line["question"]]
    with pytest.raises(StudyError, match="does not ask it"):
        said()
    known[page]["findings"] = []
    with pytest.raises(StudyError, match="has none"):
        said()


def test_the_share_of_prompts_that_company_changes_is_quoted_from_its_page_or_refused(monkeypatch):
    known = json.loads(json.dumps(collected.read()))
    monkeypatch.setattr(headlines, "known", lambda: known)
    other, distinct, _ = headlines.shared_calls("stock")
    assert f"Of {distinct} distinct prompts" in headlines.corruption()[0]
    assert f"{other} got another answer" in headlines.corruption()[0]
    findings = known["03b-batching-law"]["findings"]
    of_patched = next(n for n, line in enumerate(findings) if "corrected, 2 equally long" in line)
    findings[of_patched] = findings[of_patched].replace(": 0 of", ": 1 of")
    with pytest.raises(StudyError, match="not what the recorded rows say"):
        headlines.corruption()
    del findings[of_patched]
    with pytest.raises(StudyError, match="has none"):
        headlines.corruption()


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_names_files_that_are_here_and_types_no_figure_by_hand(name):
    text = (UPSTREAM / f"{name}.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert all((UPSTREAM / link).exists() for link in links)
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


def test_batches_that_were_drawn_are_counted_apart_from_the_fixed_map_and_cuda_s_are_those_that_can_go_wrong():
    law = collect("03-batching-law", "recorded", "mini")
    hybrid = batching_law.of_hybrid(batching_law.checked(law.rows, law.facts), law.facts)
    of_stock = hybrid[hybrid["build"] == "stock"]["label"].value_counts()
    for said, label in zip(upstream.law(law).split("\n\n"), ("", "map"), strict=True):
        assert set(re.findall(r"of (\d+)[;.]", said)) == {str(of_stock[label])}
    there = [batching_law.of_hybrid(batching_law.checked(r.rows, r.facts), r.facts)
             for r in added("03-batching-law", "mini")]  # fmt: skip
    on_gpu = sum((found["build"] == "stock").sum() for found in there)
    assert f"all {on_gpu} with CUDA" in headlines.corruption()[0]


def test_a_dead_server_and_a_living_one_are_told_apart():
    alive = Served(
        build="corrected", model="m", version="v", slots=4, at_once=2, rounds=5, rounds_done=5, answers=10, differ=0,
        gaps=[], exit=None,
    )  # fmt: skip
    dead = msgspec.structs.replace(alive, build="stock", rounds_done=1, answers=3, differ=2, gaps=[0.01, 2.0], exit=-6)
    table = upstream.server([dead, alive]).frame
    assert table["server"].tolist() == ["dead in round 2 of 5", "lives"]
    assert table["answers that changed"].tolist() == ["1 of 3", "0 of 10"]
    assert table["and at near-ties"].tolist() == ["1", "0"]


@pytest.mark.parametrize("path", sorted(paths.NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_explains_its_parameters_and_is_committed_as_it_ran(path):
    shown = papermill.inspect_notebook(str(path))
    assert "source" in shown
    for name, parameter in shown.items():
        assert parameter["inferred_type_name"] not in ("", "None"), f"{name} has no type"
        assert parameter["help"], f"{name} has no comment"
    notebook = nbformat.read(path, as_version=4)
    assert notebook.cells[0].source.startswith("# ")
    assert not runs.unfinished(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not any(output.output_type in ("stream", "error") for output in outputs), "stderr never reproduces"
    assert "/home/" not in path.read_text()
