"""Names that are matched in the engine's logs and registries are those of the locked sources, not ones from memory."""

import re
import tarfile
from functools import cache

import pytest

from llama_meter.engine import builds, library
from llama_meter.errors import StudyError
from llama_meter.limits import BACKENDS
from llama_meter.measure import process
from plamo_study.studies.batch_scaling import work as replicas

READ = (  # files of llama.cpp
    "ggml/src/ggml-backend.cpp",
    "ggml/src/ggml-cpu/repack.cpp",
    "ggml/src/ggml.c",
    "ggml/src/ggml-metal/ggml-metal.cpp",
    "ggml/include/ggml.h",
    "ggml/include/ggml-cuda.h",
    "ggml/include/ggml-vulkan.h",
    "src/llama-model.cpp",
)
METAL = "ggml/src/ggml-metal/ggml-metal.cpp"
pytestmark = pytest.mark.timeout(200)


@cache
def sources():
    """The text of each file. A test that needs it is skipped where pip has no such sdist."""
    try:
        sdist = builds.fetch()
    except StudyError as error:
        pytest.skip(f"pip cannot fetch the sdist here: {error.why}")
    found = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = member.name.partition("/")[2].removeprefix("vendor/llama.cpp/")
            if name in READ:
                found[name] = archive.extractfile(member).read().decode()
    assert set(found) == set(READ)
    return found


def said(name, pattern):
    """What one place of a file says."""
    found = set(re.findall(pattern, sources()[f"ggml/src/{name}" if f"ggml/src/{name}" in sources() else name]))
    assert len(found) == 1, (name, pattern, found)
    return found.pop()


def metal():
    return said("ggml-metal/ggml-metal.cpp", r'#define GGML_METAL_NAME "(\w+)"')


def test_weights_are_mapped_or_not_by_the_names_of_buffers_in_the_engine_s_own_line():
    line = said("src/llama-model.cpp", r'LLAMA_LOG_INFO\("(%s: %12s model buffer size = .*?)\\n"')
    ends = re.findall(r'GGML_METAL_NAME \+ std::to_string\(i\)(?: \+ "(\w+)")?', sources()[METAL])
    assert set(ends) >= {"", "_Mapped", "_Private"}
    names = {f"{metal()}0{end}": end == "_Mapped" for end in ends}
    names |= {said("ggml-backend.cpp", r'from_ptr_type_get_name\([^{]*\{\s*return "(\w+)"'): True}
    names |= {said("ggml-cpu/repack.cpp", r'return "(CPU_\w+)"'): False}
    for name, mapped in names.items():
        device, kind, mib = library.BUFFER.search((line % ("load_tensors", name, 512.0)).encode()).groups()
        assert (device.decode().endswith(replicas.MAPPED), kind, float(mib)) == (mapped, b"model", 512), name


def test_backends_have_the_names_that_the_registry_gives_them():
    cuda, vulkan = (sources()[f"ggml/include/ggml-{which}.h"] for which in ("cuda", "vulkan"))
    assert f'#define GGML_CUDA_NAME "{BACKENDS["CUDA"]}"' in cuda
    assert f'#define GGML_VK_NAME "{BACKENDS["Vulkan"]}"' in vulkan
    assert BACKENDS["Metal"] == metal()


def test_an_assertion_is_found_as_the_engine_prints_it():
    printed = said("ggml/include/ggml.h", r'#define GGML_ASSERT\(x\) if \(!\(x\)\) GGML_ABORT\("(.*?)"')
    assert process.ASSERT.search(f"/x/ggml.c:3: {printed % 'n_tokens > 0'}")
    assert 'getenv("GGML_NO_BACKTRACE")' in sources()["ggml/src/ggml.c"]
