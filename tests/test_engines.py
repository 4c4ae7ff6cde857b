"""Corrected builds by name: patches, sources by hash, what can be missing, and what is said of a build.

A whole build takes two to four minutes of two cores, so it is not made here. What can rot without one is tested: the
sources come by the locked hash, every patch applies to them, and the patched file still compiles.
"""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib

import pytest
from darwin import GPU_LOG
from typer.testing import CliRunner

from plamo_study import paths
from plamo_study.cli import main as cli, options
from plamo_study.engine import builds as engines, library
from plamo_study.errors import StudyError
from plamo_study.measure import defects, frame
from plamo_study.models import casts

CBLAS = """
#include <cstdint>
#include <memory>
enum CBLAS_ORDER { CblasRowMajor }; enum CBLAS_TRANSPOSE { CblasNoTrans, CblasTrans };
static void cblas_sgemm(CBLAS_ORDER, CBLAS_TRANSPOSE, CBLAS_TRANSPOSE, int m, int n, int k, float, const float * a, int,
                        const float * b, int, float, float * c, int) {
    for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) {
        float sum = 0; for (int l = 0; l < k; l++) sum += a[i * k + l] * b[j * k + l];
        c[i * n + j] = sum;
    }
}
"""
BESIDE_BLAS = """
import sys
from plamo_study.engine import kernels, library
def taken(dtype, columns, packed=True):
    return kernels.matmul_times(dtype, (256, 256, columns), 2, False, 1, packed)[1]
before = {dtype: taken(dtype, 64) for dtype in kernels.GGML_TYPES}
library.ggml("ggml").ggml_backend_load(sys.argv[1].encode())
for dtype, kernel in before.items():
    assert taken(dtype, 64) == ("packed" if kernel == "packed" else "blas"), dtype
    assert taken(dtype, 64, packed=False) == "blas", dtype
    assert taken(dtype, 4) == kernel, dtype
"""
HELLO = """\
--- a/src/hello.cpp
+++ b/src/hello.cpp
@@ -1,3 +1,3 @@
 int one;
-int two;
+int three;
 int four;
"""


@pytest.fixture
def tree(tmp_path):
    """A source tree of one file, inside a folder that is a git repository of somebody else."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    source = tmp_path / "tree"
    (source / "src").mkdir(parents=True)
    (source / "src" / "hello.cpp").write_text("int one;\nint two;\nint four;\n")
    (tmp_path / "hello.patch").write_text(HELLO)
    return source


@pytest.fixture
def nothing_here(tmp_path, monkeypatch):
    """No build and no sources here yet."""
    monkeypatch.setattr(paths, "DATA", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """llama.cpp as the locked sdist has it."""
    try:
        sdist = engines.fetch()
    except StudyError as error:
        pytest.skip(f"pip cannot fetch the sdist here: {error.why}")
    return engines.unpack(sdist, tmp_path_factory.mktemp("sdist"))


def test_the_names_this_project_knows_apple_s_backends_by_stand_in_the_sources(sources):
    metal = sources / "ggml" / "src" / "ggml-metal"
    backend, device = ((metal / name).read_text() for name in ("ggml-metal.cpp", "ggml-metal-device.m"))
    assert f'#define GGML_METAL_NAME "{casts.ON_GPUS["Metal"]}"' in backend
    for line in ('"%s: GPU name:   %s (%s)', '"%s: has tensor            = %s'):
        assert line in device
    assert library.has_tensor_units(GPU_LOG.splitlines(keepends=True)) == {"MTL0": True, "MTL1": False}
    told = (sources / "src" / "llama.cpp").read_text().partition("llama_print_system_info")[2]
    assert told.index("ggml_backend_reg_name(reg)") < told.index('" : "')


def test_a_patch_is_applied_in_a_tree_inside_another_repository(tree):
    engines.apply(tree.parent / "hello.patch", tree)
    assert (tree / "src" / "hello.cpp").read_text() == "int one;\nint three;\nint four;\n"


def test_a_patch_that_does_not_apply_says_so_and_changes_nothing(tree):
    other = "int one;\nint five;\nint four;\n"
    (tree / "src" / "hello.cpp").write_text(other)
    with pytest.raises(StudyError, match=r"hello\.patch.*does not apply.*src/hello\.cpp"):
        engines.apply(tree.parent / "hello.patch", tree)
    assert (tree / "src" / "hello.cpp").read_text() == other


def test_every_definition_names_patches_that_are_here_and_words_that_mean_something():
    for name, said in engines.definitions().items():
        assert all((engines.PATCHES / f"{patch}.patch").exists() for patch in said["patches"]), name
        assert all(code in defects.BY_CODE or code == name for code in said["corrects"]), name
        assert frame.build_name(said) == name


@pytest.mark.parametrize("name", list(engines.definitions()))
def test_every_build_s_patches_apply_to_the_locked_sources_and_compile(name, sources, tmp_path):
    compiler = shutil.which("c++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    if not engines.definition(name)["patches"]:
        return  # the locked sources themselves
    tree = shutil.copytree(sources, tmp_path / "tree")
    for patch in engines.definition(name)["patches"]:
        engines.apply(engines.PATCHES / f"{patch}.patch", tree)
    if "packages" in engines.definition(name):
        return  # what it includes is not on every machine
    parts = ("src", "include", "ggml/include", "ggml/src", "ggml/src/ggml-cpu")
    for file in sorted(tree / name for patch in engines.definition(name)["patches"] for name in patched(patch)):
        if file.suffix == ".cpp":
            command = [compiler, "-std=c++17", "-fsyntax-only", *(f"-I{tree / part}" for part in parts), str(file)]
            subprocess.run(command, check=True)


def patched(patch):
    """Names of the files that a patch changes."""
    text = (engines.PATCHES / f"{patch}.patch").read_text()
    return set(re.findall(r"^\+\+\+ b/(\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("missing", "what"), [("cmake", "cmake: not found"), ("ninja", "ninja: not found"), ("c++", "a C++ compiler")]
)
def test_a_missing_tool_is_named_before_anything_is_fetched(missing, what, nothing_here, monkeypatch):
    hidden = {missing} | ({"g++", "clang++"} if missing == "c++" else set())
    which = shutil.which
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(engines.shutil, "which", lambda name, **kw: None if name in hidden else which(name, **kw))
    with pytest.raises(StudyError, match=re.escape(what)):
        engines.build("corrected")
    assert not list(nothing_here.iterdir())


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(StudyError, match="unknown; there are corrected, corrected-projections"):
        engines.build("nonsense")


def test_no_network_is_said_in_pip_s_words(nothing_here, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(StudyError, match=r"pip download.*[Nn]o matching distribution"):
        engines.build("corrected")
    assert not (nothing_here / "engines" / "corrected.partial").exists()


def test_sources_with_another_hash_are_refused(nothing_here, tmp_path, monkeypatch):
    release, _ = engines.locked()
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with tarfile.open(shelf / f"llama_cpp_python-{release}.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(f"llama_cpp_python-{release}/PKG-INFO"), io.BytesIO())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(StudyError, match=r"another hash than requirements\.lock"):
        engines.build("corrected")


def test_a_full_disk_leaves_nothing_behind(nothing_here, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(engines, "fetch", full)
    with pytest.raises(StudyError, match=r"(?s)No space left.*make room"):
        engines.build("corrected")
    assert not list((nothing_here / "engines").iterdir())


def test_a_tool_that_fails_is_quoted():
    with pytest.raises(StudyError, match="the compiler: failed: error: no such header"):
        engines._run(["sh", "-c", "echo fine; echo error: no such header; exit 1"], "the compiler", lambda line: None)


def pretend(name, at):
    """A build as `engine build` leaves it, but for its library."""
    at.mkdir(parents=True)
    (at / "libllama.so").write_text("a library")
    (at / "engine.toml").write_text(engines._note_text(engines.definition(name)))


def test_a_name_stands_for_the_build_s_folder_once_it_is_there(nothing_here):
    with pytest.raises(StudyError, match="plamo-study engine build window"):
        engines.resolve("window")
    pretend("window", engines.folder("window"))
    assert engines.resolve("window") == engines.folder("window").resolve()
    assert tomllib.loads((engines.folder("window") / "engine.toml").read_text())["window"] == 2048


def test_a_build_from_other_patches_is_outdated(nothing_here):
    pretend("corrected", engines.folder("corrected"))
    note = engines.folder("corrected") / "engine.toml"
    note.write_text(note.read_text().replace('misplaced-states = "', 'misplaced-states = "0'))
    assert next(entry.here for entry in engines.entries()) == "outdated"
    with pytest.raises(StudyError, match="from other patches"):
        engines.resolve("corrected")


def test_a_build_that_is_here_is_not_made_again(nothing_here):
    pretend("corrected", engines.folder("corrected"))
    assert engines.build("corrected") == (engines.folder("corrected"), False)


def test_a_folder_serves_as_well_and_nonsense_does_not(tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    with pytest.raises(StudyError, match="neither a known build nor a folder"):
        options.use_engine(str(tmp_path))
    (tmp_path / "libllama.so").write_text("a library")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "")
    options.use_engine(str(tmp_path))
    assert os.environ["LLAMA_CPP_LIB_PATH"] == str(tmp_path.resolve())


def test_list_says_what_is_here_and_what_it_corrects(nothing_here):
    pretend("corrected", engines.folder("corrected"))
    listed = json.loads(CliRunner().invoke(cli.app, ["engine", "list", "--json"]).stdout)
    assert {entry["name"]: entry["here"] for entry in listed} == {
        name: "yes" if name == "corrected" else "no" for name in engines.definitions()
    }
    shown = CliRunner().invoke(cli.app, ["engine", "list"]).stdout
    assert "misplaced" in shown
    assert "states" in shown


def test_codes_of_recorded_engines_are_shown_by_name():
    assert frame.build_name({}) == "stock"
    assert frame.build_name({"corrects": ["D2", "D3"]}) == "corrected"
    assert frame.build_name({"corrects": ["D3"]}) == "misplaced states"


def test_a_product_is_timed_with_the_backend_that_the_engine_prefers_for_it(sources, tmp_path):
    """As on every Mac, where BLAS stands beside the CPU's own kernels; here on a BLAS of ten lines."""
    (tmp_path / "cblas.h").write_text(CBLAS)
    library, ggml = tmp_path / "libggml-blas.so", sources / "ggml"
    includes = [f"-I{each}" for each in (tmp_path, ggml / "include", ggml / "src")]
    command = [engines._compiler(), "-std=c++17", "-O0", "-shared", "-fPIC", "-DGGML_BACKEND_DL", *includes]
    command += [str(ggml / "src" / "ggml-blas" / "ggml-blas.cpp"), "-o", str(library)]
    command += [str(engines.installed_libraries() / f"libggml-base{engines.SUFFIX}")]
    subprocess.run(command, check=True)
    subprocess.run([sys.executable, "-c", BESIDE_BLAS, str(library)], check=True, timeout=60)
