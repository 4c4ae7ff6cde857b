"""Questions to models that keep a state, asked of the embedded models: what is right, wrong and refused is known."""

import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from gguf import GGUFReader

from llama_meter.cells import Hybrid
from llama_meter.engine import builds
from llama_meter.errors import StudyError
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from plamo_study.studies.right_answers import hybrids, plan
from plamo_study.studies.right_answers.plan import QUESTIONS, tolerance

WRONG = {"equal", "unequal"}  # of the hybrid on the engine as released
REFUSED = {"kept", "kept apart", "kept beside", "kept copied", "resized"}  # by a recurrent state without a rollback
ABORTS = {"left"}


def judged(name, model, planted=False):
    numbers = QUESTIONS[name].numbers
    cell = Hybrid(dtype="F32", question=name, number=numbers[len(numbers) // 3], planted=planted)
    return hybrids.judged(cell, mini_file(model))


@pytest.mark.long
@pytest.mark.parametrize("name", QUESTIONS)
def test_attention_answers_every_question_rightly_and_a_planted_fault_shows(name):
    answer, planted = judged(name, ATTENTION), judged(name, ATTENTION, planted=True)
    assert answer.valid
    assert planted.valid
    assert planted.checks["refused"] == answer.checks["refused"]


@pytest.mark.parametrize("name", sorted({*QUESTIONS} - ABORTS))
def test_the_hybrid_is_wrong_where_prompts_share_a_call_and_refuses_to_take_tokens_back(name):
    answer = judged(name, HYBRID)
    assert answer.checks["refused"] == (name in REFUSED)
    assert answer.valid == (name not in WRONG), answer


def test_every_architecture_is_asked_everything_once_plainly_and_once_with_a_fault_planted():
    cells = plan.hybrids("mini").cells
    assert len(set(cells)) == len(cells)
    for model in (*plan.RECURRENT, *plan.CONTROLS):
        own = [cell for cell in cells if cell.model == model and cell.form == "whole"]
        assert {cell.question for cell in own if cell.planted} == set(QUESTIONS)
        for name, question in QUESTIONS.items():
            numbers = [cell.number for cell in own if cell.question == name and not cell.planted]
            assert sorted(numbers) == sorted(question.numbers)


@pytest.fixture(scope="module")
def generator():
    try:
        return builds.build(plan.GENERATOR)
    except StudyError as error:
        pytest.skip(f"the generator cannot be built here: {error.why}")


@pytest.mark.whole
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [{}, {"form": "three layers"}, {"form": "plain"}, {"planted": True}])
def test_a_worker_writes_a_file_and_says_whether_its_answer_is_right(generator, how):
    cell = Hybrid(**{"dtype": "F32", "model": "jamba-dense", "question": "steps"} | how)
    outcome = work(Job(cell=cell), 60.0, workload="plamo_study.studies.right_answers.hybrids")
    assert outcome.status == "ok", outcome.failure
    assert outcome.measured.valid
    assert (outcome.measured.checks["wrong"] > 0) == cell.planted
    assert len(outcome.measured.file_sha256) == 64


def test_head_counts_by_layer_are_all_that_differs_between_two_files(generator, tmp_path):
    usual = hybrids.write("plamo2-dense", tmp_path, plan.STATE_FIRST)
    one, other = (GGUFReader(path) for path in (usual, hybrids.by_layer(usual)))
    fields = [{name: of.contents() for name, of in file.fields.items() if "GGUF" not in name} for file in (one, other)]
    (differs,) = {name for name in fields[0] | fields[1] if fields[0].get(name) != fields[1].get(name)}
    recurrent = fields[0]["plamo2.attention.recurrent_layers"]
    assert fields[1][differs] == [0 if each else fields[0]["plamo2.attention.head_count"] for each in recurrent]
    assert [tensor.name for tensor in one.tensors] == [tensor.name for tensor in other.tensors]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(one.tensors, other.tensors, strict=True))


def test_on_a_gpu_f32_may_be_off_by_what_tf32_rounds_and_the_same_is_wrong_on_a_cpu():
    with_nine_columns, alone = 8.9e-4, 2e-6  # of Mamba on an H200
    assert tolerance(alone) < with_nine_columns < tolerance(alone, gpu=True)
