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
from plamo_study.studies.right_answers import architectures, hybrids, plan
from plamo_study.studies.right_answers.architectures import QUESTIONS, tolerance

WRONG = {"equal", "unequal"}  # of the hybrid on the engine as released
REFUSED = {"back", "kept", "kept apart", "kept beside", "kept copied"}  # by a recurrent state without a rollback
ABORTS = {"left"}


def asked(name, model, planted=False):
    question = QUESTIONS[name]
    return hybrids.ask(name, question.numbers[len(question.numbers) // 3], mini_file(model), planted=planted)


def is_right(name, answer):
    return max(answer.error.values()) <= tolerance(name, answer.rounding)


@pytest.mark.long
@pytest.mark.parametrize("name", QUESTIONS)
def test_attention_answers_every_question_rightly_and_a_planted_fault_shows(name):
    answer, planted = asked(name, ATTENTION), asked(name, ATTENTION, planted=True)
    assert answer.refused or is_right(name, answer), answer
    assert bool(planted.refused) == bool(answer.refused)
    assert planted.refused or not is_right(name, planted), planted


@pytest.mark.parametrize("name", sorted({*QUESTIONS} - ABORTS))
def test_the_hybrid_is_wrong_where_prompts_share_a_call_and_refuses_to_take_tokens_back(name):
    answer = asked(name, HYBRID)
    assert bool(answer.refused) == (name in REFUSED or name == "resized")
    assert answer.refused or is_right(name, answer) == (name not in WRONG), answer


def test_every_architecture_is_asked_everything_once_plainly_and_once_with_a_fault_planted():
    cells = [cell for cell in plan.hybrids("mini").cells if isinstance(cell, Hybrid)]
    assert len(set(cells)) == len(cells)
    for model in (*plan.RECURRENT, *plan.CONTROLS):
        own = [cell for cell in cells if cell.model == model and cell.dtype == "F32" and cell.form == "whole"]
        assert {cell.question for cell in own if cell.planted} == set(QUESTIONS)
        for name, question in QUESTIONS.items():
            numbers = [cell.number for cell in own if cell.question == name and not cell.planted]
            assert sorted(numbers) == sorted(question.numbers)


@pytest.fixture(scope="module")
def generator():
    try:
        return builds.build(architectures.NAME)
    except StudyError as error:
        pytest.skip(f"the generator cannot be built here: {error.why}")


@pytest.mark.whole
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [{}, {"dtype": "Q8_0"}, {"form": "three layers"}, {"form": "plain"}, {"planted": True}])
def test_a_worker_writes_a_file_and_says_whether_its_answer_is_right(generator, how):
    cell = Hybrid(**{"dtype": "F32", "model": "jamba-dense", "question": "steps"} | how)
    outcome = work(Job(cell=cell), 60.0, workload="plamo_study.studies.right_answers.hybrids")
    assert outcome.status == "ok", outcome.failure
    assert outcome.measured.valid
    assert (outcome.measured.checks["wrong"] > 0) == cell.planted
    assert len(outcome.measured.file_sha256) == 64


def test_head_counts_by_layer_are_all_that_differs_between_two_files(tmp_path):
    usual = tmp_path / "usual.gguf"
    usual.write_bytes(mini_file(HYBRID).read_bytes())
    one, other = (GGUFReader(path) for path in (usual, architectures.by_layer(usual)))
    fields = [{name: of.contents() for name, of in file.fields.items() if "GGUF" not in name} for file in (one, other)]
    (differs,) = {name for name in fields[0] | fields[1] if fields[0].get(name) != fields[1].get(name)}
    of_keys = fields[0]["plamo2.attention.head_count_kv"]
    assert fields[1][differs] == [fields[0]["plamo2.attention.head_count"] if keys else 0 for keys in of_keys]
    assert [tensor.name for tensor in one.tensors] == [tensor.name for tensor in other.tensors]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(one.tensors, other.tensors, strict=True))


def test_an_architecture_that_the_generator_cannot_write_is_an_error_with_its_reason(generator):
    cell = Hybrid(dtype="F32", model="rwkv6qwen2-dense", question="steps")
    outcome = work(Job(cell=cell), 60.0, workload="plamo_study.studies.right_answers.hybrids")
    assert (outcome.status, outcome.failure.stage) == ("error", "writing the file")
    assert "no file of rwkv6qwen2" in outcome.failure.message


def test_on_a_gpu_f32_may_be_off_by_what_tf32_rounds_and_the_same_is_wrong_on_a_cpu():
    with_nine_columns, alone = 8.9e-4, 2e-6  # of Mamba on an H200
    assert tolerance("slots", alone) < with_nine_columns < tolerance("slots", alone, gpu=True)
    assert tolerance("slots", alone, "Q8_0", gpu=True) == tolerance("slots", alone, "Q8_0")
