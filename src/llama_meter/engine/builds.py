"""Builds of llama.cpp by name: corrected ones of the locked sdist, and earlier and later releases as they are.

Of a corrected build one library, nearly always libllama, differs from the installed engine; the others are copies of
the installed ones. So any difference in speed or results between two builds comes from the patches. A build with an
additional backend also contains that backend's library and the one that registers it.

A release is all of the llama.cpp that a version of llama-cpp-python carries, with that version's bindings beside it.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from llama_meter import children, paths
from llama_meter.engine.bindings import NOTE, described
from llama_meter.errors import StudyError, UnmeasuredError

PACKAGE = "llama-cpp-python"
LOCK = "requirements.lock"
DEFINED = paths.DATA / "upstream" / "engines.toml"
RELEASES = paths.DATA / "upstream" / "releases.toml"
PATCHES = paths.DATA / "upstream" / "patches"
TESTS = paths.DATA / "upstream" / "tests"
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
RPATH = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
# llama.cpp's CMake needs this from a ggml that is already built: the two libraries that libllama links.
GGML_CONFIG = """\
foreach(name ggml-base ggml)
    add_library(ggml::${name} SHARED IMPORTED)
    set_target_properties(ggml::${name} PROPERTIES
        IMPORTED_LOCATION "${GGML_LIBRARIES}/lib${name}${CMAKE_SHARED_LIBRARY_SUFFIX}"
        INTERFACE_INCLUDE_DIRECTORIES "${GGML_HEADERS}")
endforeach()
target_link_libraries(ggml::ggml INTERFACE ggml::ggml-base)
"""
OPTIONS = (
    "BUILD_COMMON",
    "BUILD_TESTS",
    "BUILD_TOOLS",
    "BUILD_EXAMPLES",
    "BUILD_SERVER",
    "BUILD_APP",
    "BUILD_UI",
    "USE_PREBUILT_UI",
    "OPENSSL",
)
STEP = re.compile(r"\s*\[(\d+)/(\d+)\]")  # Ninja's count of finished steps
PIP = ("--disable-pip-version-check", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes")
MISSING = "plamo-study engine list"
HELP = f"see above; usual causes: no network, a full disk, no compiler, or the packages that {DEFINED.name} names"
ASIDE = ("patches", "target", "libraries", "packages", "sha256")  # how a build is made, not what it is
NO_AMX = ("CMAKE_C_FLAGS=-U__AMX_INT8__", "CMAKE_CXX_FLAGS=-U__AMX_INT8__")  # the Makefile gives the reason
PACKAGED = (*NO_AMX, "LLAVA_BUILD=OFF", f"CMAKE_PROJECT_INCLUDE={paths.ROOT / 'tools' / 'engine.cmake'}")

OnStep = Callable[[str, int, int], None]  # current task, steps finished, total steps (0: unknown)


# ---------------------------------------------------------------- what there is


def definitions() -> dict[str, dict[str, Any]]:
    """Definitions by name from `data/upstream/engines.toml` and `releases.toml`; empty without those files."""
    return _toml(DEFINED) | {
        release: {
            "description": f"{PACKAGE} {release} as released, with its own bindings",
            "corrects": [],
            "release": release,
            "sha256": sha256,
        }
        for release, sha256 in releases().items()
    }


def definition(name: str) -> dict[str, Any]:
    """One build's definition; StudyError for an unknown name."""
    builds = definitions()
    if name not in builds:
        raise StudyError(f"engine {name}", f"unknown; there are {', '.join(builds)}", MISSING)
    return builds[name]


def releases() -> dict[str, str]:
    """The SHA-256 of each release's sdist, by version of llama-cpp-python, in order; empty without the file."""
    hashes = _toml(RELEASES).get("sha256", {})
    return {release: hashes[release] for release in sorted(hashes, key=in_order)}


def commits() -> dict[str, str]:
    """llama.cpp's commit of each release that names it; empty without the file."""
    return dict(_toml(RELEASES).get("commits", {}))


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def in_order(version: str) -> list[int]:
    """A key that sorts versions by release."""
    return [int(part) for part in version.split(".")]


def named(names: Sequence[str], here: bool = True) -> list[str]:
    """Names of builds, with "releases" replaced by every other release: those built here, or all of them."""
    every = [name for name in releases() if name != locked()[0] and (not here or folder(name).exists())]
    return list(dict.fromkeys(entry for name in names for entry in (every if name == "releases" else [name])))


def folder(name: str) -> Path:
    """The folder of a build; it need not exist."""
    return paths.DATA / "engines" / name


def state(name: str) -> str:
    """Whether a build is here: "yes", "no", or "outdated" where patches, sources or the installed engine changed."""
    made = described(folder(name))
    if made | {"description": ""} == _note(definition(name)) | {"description": ""}:
        return "yes"
    return "outdated" if folder(name).exists() else "no"


def resolve(name_or_folder: str) -> Path:
    """The folder of a build by its name, or the folder itself; StudyError when it holds no build."""
    path = Path(name_or_folder)
    if name_or_folder in definitions():  # not a folder of this name in the working directory
        path = _current(name_or_folder)
    if not any(path.glob("libllama.*")):
        why = "is not for measuring: it" if name_or_folder in definitions() else "is no known build, and"
        mend = f"{MISSING}, or build llama.cpp with -DBUILD_SHARED_LIBS=ON and name its bin folder"
        raise StudyError(name_or_folder, f"{why} holds no libllama", mend)
    described(path)
    return path.resolve()


def program(name: str) -> Path:
    """The program of a build; UnmeasuredError when it was not built here, or for another engine."""
    return _current(name) / str(definition(name)["program"])


def _current(name: str) -> Path:
    if state(name) != "yes":
        why = "not built here, or from other patches or another engine"
        raise UnmeasuredError(f"engine {name}", why, f"plamo-study engine build {name}")
    return folder(name)


def installed_libraries() -> Path:
    """Folder of the installed package's shared libraries, without importing it: an import loads them.

    Where a release's own bindings come first on the path, it is still the installed package's.
    """
    return Path(str(distribution(PACKAGE).locate_file("llama_cpp"))) / "lib"


def is_pinned(libraries: Path) -> bool:
    """Whether a folder's libraries come from a locked sdist: those installed, and those of a build made here."""
    return libraries == installed_libraries().resolve() or libraries.parent == folder("").resolve()


def locked() -> tuple[str, str]:
    """Version and SHA-256 of the engine's sdist in requirements.lock."""
    text = (paths.ROOT / LOCK).read_text(encoding="utf-8")
    match = re.search(rf"^{PACKAGE}==(\S+).*\n\s+--hash=sha256:([0-9a-f]{{64}})\s*$", text, re.MULTILINE)
    if not match:
        raise StudyError(LOCK, f"does not pin one file of {PACKAGE}", "git checkout requirements.lock")
    return match[1], match[2]


def _note(wanted: dict[str, Any]) -> dict[str, Any]:
    """What a build's `engine.toml` says of it; of its patches and the installed ggml their SHA-256."""
    note = {key: value for key, value in wanted.items() if key not in ASIDE}
    if "release" in wanted:
        return note | {"source": f"{PACKAGE} {wanted['release']}, sha256 {wanted['sha256']}"}
    release, sha256 = locked()
    ggml = b"".join(file.read_bytes() for file in sorted(installed_libraries().glob(f"libggml*{SUFFIX}")))
    return note | {
        "source": f"{PACKAGE} {release}, sha256 {sha256}",
        "ggml": f"sha256 {hashlib.sha256(ggml).hexdigest()}",
        "patches": {patch: hashlib.sha256(_patch(patch).read_bytes()).hexdigest() for patch in wanted["patches"]},
    }


def _patch(name: str) -> Path:
    return PATCHES / f"{name}.patch"


# ---------------------------------------------------------------- how it is made


def build(name: str, on_step: OnStep = lambda *step: None) -> tuple[Path, bool]:
    """Make a build, atomically; returns its folder and whether anything had to be done.

    Raises StudyError for an unknown name and where pip, git, CMake or a compiler is missing or fails.
    """
    wanted = definition(name)
    if state(name) == "yes":
        return folder(name), False
    with replacing(folder(name)) as (partial, made):
        if "release" in wanted:
            _release(wanted["release"], wanted["sha256"], partial, made, on_step)
        else:
            source = sources(partial, on_step)
            for patch in wanted["patches"]:
                apply(_patch(patch), source)
            if "program" in wanted:
                on_step("compiling", 0, 0)
                _program(wanted["program"], source, made)
            else:
                target = wanted.get("target", "llama")
                compile_target(target, source, partial / "build", on_step, options=wanted.get("options", ()))
                assemble(wanted.get("libraries", [target]), partial / "build" / "bin", made)
        note = _note(wanted)
        patches = note.pop("patches", None)
        lines = [f"{key} = {json.dumps(value)}" for key, value in note.items()]  # such JSON is also TOML
        if patches is not None:
            lines += ["", "[patches]", *(f"{patch} = {json.dumps(digest)}" for patch, digest in patches.items())]
        (made / NOTE).write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder(name), True


@contextmanager
def replacing(place: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a fresh working folder, removed afterwards, and the folder to make in it, which then replaces `place`."""
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial, partial / "made"
        shutil.rmtree(place, ignore_errors=True)
        (partial / "made").rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sources(into: Path, on_step: OnStep = lambda *step: None) -> Path:
    """Unpack llama.cpp as the locked sdist has it; returns its folder."""
    on_step("fetching the sources", 0, 0)
    with tarfile.open(fetch()) as archive:
        wanted = [member for member in archive if re.search(r"^[^/]+/vendor/llama\.cpp/(?!\.git$)", member.name)]
        archive.extractall(into, wanted, filter="data")
    return next(into.glob("*/vendor/llama.cpp"))


def fetch() -> Path:
    """The sdist in requirements.lock, downloaded by pip where it is missing or another; nothing is compiled."""
    release, sha256 = locked()
    if (installed := version(PACKAGE)) != release:
        why = f"requirements.lock has {release}, whose headers would not fit"
        raise StudyError(f"{PACKAGE} {installed}", why, "make study")
    path = folder("sdist") / f"llama_cpp_python-{release}.tar.gz"
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        path.parent.mkdir(parents=True, exist_ok=True)
        _pip(release, sha256, ["download", "--dest", str(path.parent), "--retries", "1"], path.parent)
    return path


def _pip(release: str, sha256: str, command: Sequence[str], at: Path, on_step: OnStep | None = None) -> None:
    requirement = at / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={release} --hash=sha256:{sha256}\n", encoding="utf-8")
    _run(children.python("-m", "pip", *command, *PIP, "-r", str(requirement)), f"pip {command[0]}", at, on_step)


def _release(release: str, sha256: str, partial: Path, made: Path, on_step: OnStep) -> None:
    """Let pip compile a release of the package, and put its bindings beside its libraries."""
    on_step("compiling", 0, 0)
    package = partial / "package"
    _pip(release, sha256, ["install", "--verbose", "--no-cache-dir", "--target", str(package)], partial, on_step)
    (package / "llama_cpp" / "lib").rename(made)
    (package / "llama_cpp").rename(made / "llama_cpp")


def apply(patch: Path, source: Path) -> None:
    """Apply a unified diff to a source tree, exactly or not at all; StudyError when it does not apply."""
    _run(["git", "apply", "--whitespace=nowarn", str(patch.resolve())], patch.name, source)


def _program(name: str, source: Path, made: Path) -> None:
    """Compile one of upstream's own test programs against the installed engine.

    A file NAME-common.cpp here, if there is one, replaces what the program takes of llama.cpp's common library.
    """
    made.mkdir()
    includes = [f"-I{part}" for part in ("include", "ggml/include", "common", "src", "vendor")]
    files = [f"tests/{name}.cpp", *map(str, TESTS.glob(f"{name}-common.cpp"))]
    libraries = installed_libraries()
    linked = [str(libraries / f"lib{library}{SUFFIX}") for library in ("llama", "ggml", "ggml-base")]
    command = [compiler(), "-std=c++17", "-O1", *includes, *files, "-o", str(made / name), *linked]
    _run([*command, f"-Wl,-rpath,{libraries}"], f"compiling {name}", source)


def compiler() -> str:
    """The command of the C++ compiler."""
    return os.environ.get("CXX", "c++")


def compile_target(
    target: str,
    source: Path,
    into: Path,
    on_step: OnStep,
    turned_on: Sequence[str] = (),
    options: Sequence[str] = (),
) -> None:
    """Compile a target against the ggml of the installed package, or a part of ggml; `into` / bin holds the result.

    The sdist's headers are used. `turned_on`: the OPTIONS that the target needs; `options`: further CMake options as
    NAME=VALUE, which overrule those of the environment.
    """
    config = into / "ggml-config"
    config.mkdir(parents=True, exist_ok=True)
    (config / "ggml-config.cmake").write_text(GGML_CONFIG, encoding="utf-8")
    values = ["CMAKE_BUILD_TYPE=Release", "CMAKE_BUILD_WITH_INSTALL_RPATH=ON", f"CMAKE_INSTALL_RPATH={RPATH}"]
    values += [f"LLAMA_{option}={'ON' if option in turned_on else 'OFF'}" for option in OPTIONS]
    if target.startswith("ggml"):
        values += NO_AMX
    else:
        values += ["LLAMA_USE_SYSTEM_GGML=ON", f"ggml_DIR={config}"]
        values += [f"GGML_LIBRARIES={installed_libraries()}", f"GGML_HEADERS={source / 'ggml' / 'include'}"]
    on_step("configuring", 0, 0)
    cmake = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(into)]
    _run([*cmake, *_defined(values), *(f"-D{option}" for option in options)], "CMake", source)
    _run(["ninja", "-C", str(into), target], "the compiler", source, on_step)


def _defined(values: Iterable[str]) -> list[str]:
    """CMake's arguments for NAME=VALUE, then those of the environment, as in the installed engine's build."""
    return [*(f"-D{value}" for value in values), *shlex.split(os.environ.get("CMAKE_ARGS", ""))]


def assemble(libraries: Sequence[str], built: Path, into: Path) -> None:
    """Copy the installed libraries, with `libraries` replaced or added from `built`, to the new folder `into`."""
    replaced = [f"lib{library}.*" for library in libraries]
    shutil.copytree(installed_libraries(), into, ignore=shutil.ignore_patterns(*replaced, "*.a"))
    for file in (file for pattern in replaced for file in built.glob(pattern)):
        shutil.copy2(file, into / file.name, follow_symlinks=False)


def _run(command: Sequence[str], what: str, at: Path, on_step: OnStep | None = None) -> None:
    """Run a tool in a folder and follow its steps; StudyError with its first errors, else its last lines.

    CMake and Ninja are this environment's, else the system's. Git does not take the folder for a part of our
    repository, whose commit the sources would name.
    """
    variables = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "GIT_CEILING_DIRECTORIES": str(at.resolve().parent),
        "CMAKE_ARGS": shlex.join(_defined(PACKAGED)),  # that pip passes on
    }
    lines = []
    try:
        tool = subprocess.Popen(
            command, cwd=at, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError:
        raise StudyError(command[0], "not found", "make study; Debian: apt-get install git g++") from None
    with tool:
        assert tool.stdout is not None
        try:
            for line in tool.stdout:
                lines.append(line)
                if on_step and (match := STEP.match(line)):
                    on_step("compiling", int(match[1]), int(match[2]))
        except BaseException:
            tool.terminate()
            raise
    if tool.returncode:
        errors = [line for line in lines if "error" in line.lower()][:3] or lines[-3:]
        raise StudyError(what, "failed: " + "".join(errors).strip(), HELP)
