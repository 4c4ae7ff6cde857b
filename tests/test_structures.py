"""Bindings of other releases: their structures are held against llama.h before anything is set through them."""

import ctypes

import pytest

from llama_meter.engine import builds, structures
from llama_meter.engine.session import EngineError, set_field
from llama_meter.errors import StudyError

HEADER = """
#include <stdint.h>
struct llama_context_params { uint32_t n_ctx; bool offload; float scale; void * data; };
struct llama_batch { int32_t n_tokens; int32_t * token; };
"""
BINDINGS = """
import ctypes
class llama_batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32))]
class llama_context_params(ctypes.Structure):
    _fields_ = [("n_ctx", ctypes.c_uint32), ("offload", ctypes.c_bool), ("scale", ctypes.c_float),
                ("data", ctypes.c_void_p)]
"""


@pytest.fixture
def release(tmp_path):
    """A folder with bindings, and one with the header that they should fit."""

    def made(bindings):
        package = tmp_path / "engine" / "llama_cpp"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        (package / "llama_cpp.py").write_text(bindings, encoding="utf-8")
        (tmp_path / "llama.h").write_text(HEADER, encoding="utf-8")
        structures.check(tmp_path / "engine", [tmp_path], builds._compiler())

    return made


def test_bindings_that_fit_the_header_pass(release):
    release(BINDINGS)


@pytest.mark.parametrize(
    ("right", "planted", "named"),
    [
        ('("scale", ctypes.c_float),', "", r"llama_context_params\.data"),
        ('("scale", ctypes.c_float)', '("scale", ctypes.c_double)', "scale"),
        ('("offload", ctypes.c_bool)', '("offload", ctypes.c_int64)', "offload"),
        ('("n_ctx", ctypes.c_uint32)', '("gone", ctypes.c_uint32)', "gone"),
    ],
)
def test_a_field_that_is_missing_too_wide_or_unknown_is_an_error_that_names_it(release, right, planted, named):
    assert right in BINDINGS
    with pytest.raises(StudyError, match=named):
        release(BINDINGS.replace(right, planted))


class Older(ctypes.Structure):
    _fields_ = (("n_ctx", ctypes.c_uint32),)


def test_a_setting_that_a_release_lacks_is_refused_unless_it_does_so_anyway():
    params = Older()
    set_field(params, "n_ctx", 64)
    set_field(params, "n_rs_seq", 0)
    assert params.n_ctx == 64
    with pytest.raises(EngineError, match="n_rs_seq"):
        set_field(params, "n_rs_seq", 4)


def test_releases_are_builds_by_name_pinned_by_hash_and_in_order_of_their_versions():
    releases = builds.releases()
    assert list(releases) == sorted(releases, key=lambda name: [int(part) for part in name.split(".")])
    assert all(len(sha256) == 64 for sha256 in releases.values())
    assert {builds.definition(name)["release"] for name in releases} == set(releases)
