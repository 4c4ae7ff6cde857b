"""Types of cells: names in JSON, keys, changes; and studies that bring a type: two models, no engine, requests."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import msgspec
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini
from crosscheck.selfcheck import example_row

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.fields import ORDER
from plamo_study.measure import cells, frame, journal, plan
from plamo_study.measure.cells import KINDS, Decode, Prefill, Scan, canonical, columns
from plamo_study.measure.rows import Measured, Request, Row, row_key


def test_every_name_stands_in_the_order_and_means_one_default():
    fields = [field for kind in KINDS.values() for field in msgspec.structs.fields(kind)]
    assert {field.encode_name for field in fields} <= set(ORDER)
    assert len({(field.encode_name, field.default) for field in fields}) == len({field.encode_name for field in fields})


@pytest.mark.parametrize("name", KINDS)
def test_a_cell_of_every_workload_is_read_as_it_was_written(name):
    cell = msgspec.convert({"workload": name, "seed": 7, "n_threads": 2}, cells.Cell)
    assert cell.workload == name
    assert msgspec.json.decode(msgspec.json.encode(cell), type=cells.Cell) == cell
    assert set(columns(cell)) == set(ORDER)


def test_a_key_does_not_depend_on_where_a_type_has_its_fields():
    cell = Decode(seed=1, depth=16, model="m", n_threads=2, cold=True)
    told = b'{"workload":"decode","model":"m","n_prompt":16,"n_threads":2,"cold":true,"seed":1}'
    assert bytes(canonical(cell)) == told
    assert row_key("s", cell, "m", "e", "h", 0) == row_key(
        "s", msgspec.json.decode(told, type=Decode), "m", "e", "h", 0
    )


def test_a_cell_of_another_workload_keeps_what_both_have():
    decode = plan.change(Prefill(model=HYBRID, n_prompt=64, n_seq=3, cold=True), workload="decode", n_gen=4)
    assert decode == Decode(model=HYBRID, n_seq=3, cold=True, n_gen=4)


def test_a_field_that_a_cell_lacks_is_named():
    with pytest.raises(StudyError, match=r"Decode: has no field n_prompt\n.*depth"):
        plan.change(Prefill(), workload="decode", n_prompt=16)
    with pytest.raises(msgspec.ValidationError, match="calls"):
        mini("scan", calls=())
    assert plan.change(Scan(), n_ctx=5) == Scan(n_ctx=5)


# ------------------------------------------------------------------ requests


REQUESTS = [
    Request(id="a", n_prompt=16, arrived_ns=100, token_ns=[150, 170, 200]),
    Request(id="b", n_prompt=8, arrived_ns=120, token_ns=[190]),
    Request(id="c", n_prompt=8, arrived_ns=130, failure="refused"),
]


def test_requests_are_written_and_read(tmp_path):
    row = msgspec.structs.replace(example_row(), requests=REQUESTS)
    with journal.Journal(tmp_path / "j.jsonl") as opened:
        opened.append(row)
    assert journal.read(tmp_path / "j.jsonl") == [row]
    measured = Measured(requests=REQUESTS)
    assert msgspec.json.decode(msgspec.json.encode(measured), type=Measured) == measured
    assert b"requests" not in msgspec.json.encode(example_row())
    assert msgspec.json.decode(msgspec.json.encode(example_row()), type=Row).requests == []


def test_a_frame_has_a_line_a_request():
    found = frame.requests([msgspec.structs.replace(example_row(), requests=REQUESTS), example_row()])
    expected = pd.DataFrame({
        "key": ["0" * 16] * 3,
        "request": ["a", "b", "c"],
        "ttft_ns": [50.0, 70.0, float("nan")],
        "n_tokens": [3, 1, 0],
        "itl_ns": [25.0, float("nan"), float("nan")],
        "largest_gap_ns": [30.0, float("nan"), float("nan")],
        "failure": ["", "", "refused"],
    })  # fmt: skip
    pd.testing.assert_frame_equal(found, expected)
    assert list(frame.requests([example_row()])) == list(expected)


# ------------------------------------------------------------------ a study that brings a type of cell

TYPES = '''
class Speculative(Decode, frozen=True, kw_only=True):
    """Decode steps of a target, foretold by a draft model beside it."""

    draft: str = ""

    @property
    def files(self) -> tuple[File, ...]:
        """Target and draft."""
        return (*super().files, (self.draft, self.scale, self.dtype))


class Queue(AnyCell, frozen=True, kw_only=True):
    """Requests that wait for one server."""

    arrivals: int = 0


'''
WORKLOAD = '''
"""The process that the cells of this study run in."""

import random

from plamo_study.measure.cells import Queue, Speculative
from plamo_study.measure.rows import Measured, Request


def queue(cell, path, stage):
    rng = random.Random(cell.seed)
    requests = [
        Request(id=str(n), n_prompt=16, arrived_ns=n * 100, token_ns=[n * 100 + rng.randint(10, 90)])
        for n in range(cell.arrivals)
    ]
    return Measured(requests=requests, valid=True)


def speculate(cell, path, stage, draft):
    from plamo_study.engine.session import Session
    from plamo_study.measure import sessions

    with Session(path, sessions.config(cell, 64)) as target, Session(draft, sessions.config(cell, 64)) as other:
        same = target.n_vocab == other.n_vocab
        return Measured(checks={"same_vocabulary": same, "files": float(len({path, draft}))}, valid=True)


RUNS = {Queue: queue, Speculative: speculate}
'''
ASKED = """
import json, sys
from pathlib import Path
import msgspec
from plamo_study.measure import frame, recording, runner
from plamo_study.measure.cells import Queue, Speculative
from plamo_study.measure.plan import MODELS, Plan, change, with_gates
from plamo_study.measure.rows import row_key
from dataclasses import replace

path, what = Path(sys.argv[1]), sys.argv[2]
if what == "queue":
    planned = Plan("98-queue", "mini", (Queue(arrivals=3), Queue(arrivals=3, seed=1)), (), None, 2, 1, 60.0)
else:
    cell = Speculative(model=MODELS[0], draft=MODELS[1], scale="mini", dtype="F16", depth=8, n_gen=8)
    planned = with_gates("99-speculative", "mini", (cell, change(cell, workload="decode")), exact_cache=False)
    planned = replace(planned, blocks=1, extra_blocks=0, anchors=1)
planned = replace(planned, workload="plamo_study.toy_workload")
summary = runner.sweep(planned, path)
again = runner.sweep(planned, path)
rows, facts = recording.framed(summary, path)
out = {"measured": [summary.measured, again.measured], "verdicts": rows["verdict"].tolist()}
out |= {"rows": [msgspec.to_builtins(row) for row in summary.rows]}
out |= {"names": {name: fact.get("name") for name, fact in facts.items()}}
out |= {"requests": frame.requests(summary.rows).to_dict("records"), "build": rows["build"].tolist()}
out |= {"kept": all(row.key == row_key(row.study + "/anchor" * row.anchor, row.cell, row.model, row.engine, row.machine,
                                       row.replicate, *row.others) for row in summary.rows)}
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """A copy of the package whose cells have two more types, and the worker of their study."""
    folder = tmp_path_factory.mktemp("brought")
    shutil.copytree(paths.ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    package = folder / "src" / "plamo_study"
    last = "    | Naive | Arrival | Idle\n"
    for file, before, after in (
        (package / "measure" / "cells.py", "Cell = (\n", TYPES + "Cell = (\n"),
        (package / "measure" / "cells.py", last, "    | Naive | Arrival | Idle | Speculative | Queue\n"),
        (package / "fields.py", ")  # fmt: skip\n", '    "draft", "arrivals",\n)  # fmt: skip\n'),
    ):
        text = file.read_text()
        assert text.count(before) == 1, before
        file.write_text(text.replace(before, after))
    (folder / "src" / "plamo_study" / "toy_workload.py").write_text(textwrap.dedent(WORKLOAD).lstrip())
    return folder


def swept(brought, what, **told):
    everything = {"PYTHONPATH": str(brought / "src"), "PLAMO_STUDY_ROOT": str(paths.ROOT)} | told
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(brought / f"{what}.jsonl"), what],
        env=os.environ | everything, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_draft_stands_beside_a_target(brought):
    found = swept(brought, "speculative")
    rows = {row["cell"]["workload"]: row for row in found["rows"] if not row.get("anchor")}
    both, alone = rows["speculative"], rows["decode"]
    assert [found["names"][fact] for fact in (both["model"], *both["others"])] == [HYBRID, ATTENTION]
    assert both["checks"] == {"same_vocabulary": True, "files": 2.0}
    assert "others" not in alone
    assert alone["model"] == both["model"]
    assert sum(row["cell"]["workload"] == "gate" for row in found["rows"]) == 2, "a gate for each of both files"
    assert set(found["verdicts"]) == {"valid"}
    assert found["kept"]
    assert found["measured"] == [len(found["rows"]), 0]


def test_a_key_covers_every_file():
    told = ("s", Decode(), "target", "e", "m", 0)
    assert len({row_key(*told), row_key(*told, "draft"), row_key(*told, "another")}) == 3


def test_a_simulation_needs_no_model_no_gate_no_anchor_and_no_engine(brought):
    found = swept(brought, "queue", LLAMA_CPP_LIB_PATH="/nowhere")
    assert found["measured"] == [4, 0]
    assert found["verdicts"] == ["n/a"] * 4
    assert found["build"] == [""] * 4
    assert all(row["valid"] and not row.keys() & {"model", "engine"} for row in found["rows"])
    assert len(found["names"]) == 1, "the machine"
    assert len(found["requests"]) == 12
    assert all(10 <= request["ttft_ns"] <= 90 for request in found["requests"])
