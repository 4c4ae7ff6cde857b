"""Quantized files compute as the oracle says, and every refusal says how to mend it."""

import resource
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from built import measured
from conftest import ATTENTION, mini, mini_file

from llama_meter.errors import StudyError
from llama_meter.measure import checking, files
from llama_meter.models import header, recipes, tensors
from llama_meter.models.check import blocking
from llama_meter.models.recipes import Recipe, by_name

KINDS = ("Q4_0", "Q4_K_M", "IQ3_M", "Q8_0-ffn_up-MXFP4")  # by how they round


def refused(message, source, out, made_by=Recipe("Q4_0")):  # noqa: B008 # it is frozen
    """How quantizing is refused: nothing is left beside what was there."""
    before = set(out.parent.iterdir())
    with pytest.raises(StudyError, match=message) as caught:
        files.quantize(source, out, made_by)
    assert set(out.parent.iterdir()) == before
    return caught.value


@pytest.mark.whole
@pytest.mark.parametrize("name", KINDS)
def test_what_the_quantizer_writes_computes_as_the_oracle_says(tmp_path, name):
    out = files.quantize(mini_file(), tmp_path / "m.gguf", by_name(name))
    found = {finding.code: finding for finding in checking.check(out)}
    assert not blocking(found.values())
    assert "gate" in found


def test_a_type_that_needs_an_importance_matrix_is_refused_in_the_quantizer_s_words(tmp_path):
    refused("requires an imatrix", mini_file(), tmp_path / "out.gguf", Recipe("IQ1_S"))


def test_an_exception_for_a_kind_that_cannot_have_one_is_refused():
    for kind in ("ssm_ou", "attn_norm", "ssm_conv1d"):
        with pytest.raises(StudyError, match="ffn_down, ffn_up, ssm_dt, ssm_in, ssm_out"):
            recipes.check_source(mini_file(), Recipe("Q4_0", ((kind, "F16"),)))
    with pytest.raises(StudyError, match="has no 'ssm_out'"):
        recipes.check_source(mini_file(ATTENTION), by_name("Q4_0-ssm_out-F16"))


def test_a_quantized_file_is_whole_computes_and_reports_its_progress(tmp_path):
    seen, out = [], tmp_path / "deep" / "out.gguf"
    made_by = by_name("Q8_0-ssm_out-BF16")
    assert files.quantize(mini_file(), out, made_by, lambda *at: seen.append(at)) == out
    total = mini_file().stat().st_size
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.gguf"]
    measured(mini("gate", dtype="Q8_0", n_prompt=32, n_gen=4), out)


def test_an_exempted_tensor_stays_byte_for_byte_and_float_types_take_exceptions_too(tmp_path):
    out = files.quantize(mini_file(), tmp_path / "out.gguf", by_name("Q4_0-ssm_out-F16"))
    before, after = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (mini_file(), out))
    exempt = [name for name in before if "ssm_out" in name]
    assert len(exempt) == 2
    assert all(np.array_equal(before[name].data, after[name].data) for name in exempt)
    out = files.quantize(mini_file(), tmp_path / "out.gguf", by_name("F16-ssm_out-BF16-ffn_up-Q8_0"))
    types = {tensor.kind: tensor.dtype for tensor in tensors.tensor_table(out)}
    assert (types["ssm_out"], types["ffn_up"], types["ffn_down"], types["token_embd"]) == ("BF16", "Q8_0", "F16", "F16")
    assert header.read(out).number("general.file_type") == 1


def test_a_source_that_is_quantized_or_cannot_be_read_or_is_the_target_is_refused(tmp_path):
    cut, whole = tmp_path / "cut.gguf", Path(shutil.copy(mini_file(), tmp_path / "source.gguf"))
    cut.write_bytes(mini_file().read_bytes()[:100_000])
    once = files.quantize(mini_file(), tmp_path / "once.gguf", Recipe("Q8_0"))
    for source, name, why in (
        (tmp_path / "none.gguf", "out.gguf", "no such file"),
        (cut, "out.gguf", "cut short or damaged"),
        (whole, "./source.gguf", "is the source itself"),
        (once, "out.gguf", "is quantized already"),
    ):
        refused(why, source, tmp_path / name)
    assert whole.read_bytes() == mini_file().read_bytes()


def test_a_disk_that_fills_up_on_the_way_is_told_as_such(tmp_path, request):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # of the child's files too
    full = refused("cannot be written", mini_file(), tmp_path / "out.gguf", Recipe("Q8_0"))
    assert full.mend == f"free space in {tmp_path}"
