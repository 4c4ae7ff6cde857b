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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
PARTS = ("src", "include", "ggml", "cmake", "vendor", "licenses", "CMakeLists.txt", "LICENSE")
PROGRAM_PARTS = ("src", "include", "ggml/include", "common", "tests", "vendor")  # that a program is compiled from
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
STEP = re.compile(r"^\[(\d+)/(\d+)\]")  # Ninja's count of finished steps
MISSING = "plamo-study engine list"
COMPILER_HELP = "see above; usual causes: a full disk, a missing compiler"
# How a build is made, not what it is.
ASIDE = ("patches", "target", "libraries", "packages", "sha256")
RELEASED = ("llama", "ggml-base", "ggml-cpu", "ggml")  # the targets of a release
NO_AMX = {"CMAKE_C_FLAGS": "-U__AMX_INT8__", "CMAKE_CXX_FLAGS": "-U__AMX_INT8__"}  # the Makefile gives the reason

OnStep = Callable[[str, int, int], None]  # current task, steps finished, total steps (0: unknown)


@dataclass(frozen=True)
class Entry:
    """A build: what it corrects (codes of `limits.DEFECTS`), and whether it is built: "yes", "no" or "outdated"."""

    name: str
    here: str
    corrects: list[str]
    description: str
    folder: str


def entries() -> list[Entry]:
    """Every build that can be made; "outdated" where patches, sources or the installed engine have changed since."""
    listing = []
    for name, said in definitions().items():
        here = "yes" if _is_current(name) else "outdated" if folder(name).exists() else "no"
        listing.append(Entry(name, here, said["corrects"], said["description"], str(folder(name))))
    return listing


def definitions() -> dict[str, dict[str, Any]]:
    """Definitions by name from `data/upstream/engines.toml` and `releases.toml`; empty without those files."""
    own = tomllib.loads(DEFINED.read_text(encoding="utf-8")) if DEFINED.exists() else {}
    return own | {release: _as_released(release, sha256) for release, sha256 in releases().items()}


def releases() -> dict[str, str]:
    """The SHA-256 of each release's sdist, by version of llama-cpp-python, in order; empty without the file."""
    hashes = _noted("sha256")
    return {release: hashes[release] for release in sorted(hashes, key=in_order)}


def commits() -> dict[str, str]:
    """llama.cpp's commit of each release that names it; empty without the file."""
    return _noted("commits")


def _noted(table: str) -> dict[str, str]:
    return dict(tomllib.loads(RELEASES.read_text(encoding="utf-8"))[table]) if RELEASES.exists() else {}


def in_order(version: str) -> list[int]:
    """A key that sorts versions by release."""
    return [int(part) for part in version.split(".")]


def _sdist(release: str) -> Path:
    return folder("sdist") / f"llama_cpp_python-{release}.tar.gz"


def _as_released(release: str, sha256: str) -> dict[str, Any]:
    description = f"{PACKAGE} {release} as released, with its own bindings"
    return {"description": description, "corrects": [], "patches": [], "release": release, "sha256": sha256}


def definition(name: str) -> dict[str, Any]:
    """One build's definition; StudyError for an unknown name."""
    builds = definitions()
    if name not in builds:
        raise StudyError(f"engine {name}", f"unknown; there are {', '.join(builds)}", MISSING)
    return builds[name]


def folder(name: str) -> Path:
    """The folder of a build; it need not exist."""
    return paths.DATA / "engines" / name


def is_pinned(libraries: Path) -> bool:
    """Whether a folder's libraries come from the locked sdist: those installed, and those of a build made here."""
    return libraries in (installed_libraries().resolve(), *(folder(name).resolve() for name in definitions()))


def program(name: str) -> Path:
    """The program of a build; UnmeasuredError when it was not built here, or for another engine."""
    if not _is_current(name):
        raise UnmeasuredError(name, "not built here, or for another engine", f"plamo-study engine build {name}")
    return folder(name) / str(definition(name)["program"])


def resolve(name_or_folder: str) -> Path:
    """The folder of a build by its name, or the folder itself; StudyError when it holds no build."""
    path = Path(name_or_folder)
    if name_or_folder in definitions():  # not a folder of this name in the working directory
        path = folder(name_or_folder)
        if definitions()[name_or_folder].get("program"):
            raise StudyError(name_or_folder, "is a program and no engine", MISSING)
        if not _is_current(name_or_folder):
            raise StudyError(
                f"engine {name_or_folder}",
                "not built here, or from other patches or another engine",
                f"plamo-study engine build {name_or_folder}",
            )
    if not any(path.glob("libllama.*")):
        raise StudyError(
            name_or_folder,
            "neither a known build nor a folder that holds libllama",
            f"{MISSING}, or build llama.cpp with -DBUILD_SHARED_LIBS=ON and name its bin folder",
        )
    described(path)  # what it says of itself can be read
    return path.resolve()


EVERY_RELEASE = "releases"  # a name for all of them


def named(names: Sequence[str], here: bool = True) -> list[str]:
    """Names of builds, with "releases" replaced by every release: those that are built here, or also the others."""
    all_releases = [name for name in releases() if name != locked()[0] and (not here or folder(name).exists())]
    return list(dict.fromkeys(entry for name in names for entry in (all_releases if name == EVERY_RELEASE else [name])))


def build(name: str, on_step: OnStep = lambda *step: None) -> tuple[Path, bool]:
    """Make a build, atomically; returns its folder and whether anything had to be done.

    Raises
    ------
    StudyError
        An unknown name, no compiler or CMake, no network, a hash mismatch, a patch that does not apply, a
        compiler error, a full disk.

    """
    asked = definition(name)
    if _is_current(name):
        return folder(name), False
    tools = tools_found()
    partial = folder(name).with_name(f"{name}.partial")
    with room(partial):
        on_step("fetching the sources", 0, 0)
        program, release = asked.get("program", ""), asked.get("release", "")
        sdist = fetch(release, asked["sha256"]) if release else fetch()
        source = unpack(sdist, partial / "source", PROGRAM_PARTS if program else PARTS)
        on_step("patching", 0, 0)
        for patch in asked["patches"]:
            apply(PATCHES / f"{patch}.patch", source)
        if program:
            on_step("compiling", 0, 0)
            made = _program(program, source, partial / "engine")
        elif release:
            made = _release(sdist, source, partial, tools, on_step)
        else:
            target = asked.get("target", "llama")
            options, packages = asked.get("options", []), asked.get("packages", [])
            compile_target(target, source, partial / "build", tools, on_step, options=options, packages=packages)
            made = assemble(asked.get("libraries", [target]), partial / "build" / "bin", partial / "engine")
            _check_loads(made)
        (made / NOTE).write_text(_note_text(asked), encoding="utf-8")
        shutil.rmtree(folder(name), ignore_errors=True)
        made.rename(folder(name))
    return folder(name), True


def _program(name: str, source: Path, into: Path) -> Path:
    """Compile one of upstream's own test programs against the installed engine; returns the folder `into`.

    A file NAME-common.cpp here, if there is one, replaces what the program takes of llama.cpp's common library.
    """
    into.mkdir()
    files = [source / "tests" / f"{name}.cpp", *TESTS.glob(f"{name}-common.cpp")]
    _compiled(files, ("include", "ggml/include", "common", "src", "vendor"), source, installed_libraries(), into / name)
    return into


def _compiled(files: Sequence[Path], headers: Sequence[str], source: Path, libraries: Path, binary: Path) -> None:
    includes = [f"-I{source / part}" for part in headers]
    linked = [str(libraries / f"lib{name}{SUFFIX}") for name in ("llama", "ggml", "ggml-base")]
    command = [_compiler(), "-std=c++17", "-O1", *includes, *map(str, files), "-o", str(binary), *linked]
    _run([*command, f"-Wl,-rpath,{libraries}"], f"compiling {files[0].name}", lambda line: None)


def _release(sdist: Path, source: Path, partial: Path, tools: dict[str, str], on_step: OnStep) -> Path:
    """Compile all of a release's llama.cpp and put its bindings beside it."""
    into, made = partial / "build", partial / "engine"
    values = {"BUILD_SHARED_LIBS": "ON", "GGML_CCACHE": "OFF", "LLAMA_CURL": "OFF", **NO_AMX}
    _compile(source, into, values, RELEASED, tools, on_step)
    made.mkdir()
    for file in (into / "bin").glob(f"lib*{SUFFIX}*"):
        shutil.copy2(file, made / file.name, follow_symlinks=False)
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if re.fullmatch(r"[^/]+/llama_cpp/\w+\.py", m.name)]
        archive.extractall(partial / "bindings", members, filter="data")
    shutil.copytree(next((partial / "bindings").iterdir()) / "llama_cpp", made / "llama_cpp")
    return made


def fetch(release: str = "", sha256: str = "") -> Path:
    """A release's sdist, downloaded by pip if missing; nothing is compiled. The one in requirements.lock by default."""
    pinned = RELEASES.name if release else LOCK
    if not release:
        release, sha256 = locked()
        if (installed := version(PACKAGE)) != release:
            why = f"requirements.lock has {release}, whose headers would not fit"
            raise StudyError(f"{PACKAGE} {installed}", why, "make study")
    path = _sdist(release)
    if not (path.exists() and sha256_of(path) == sha256):
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(f"{PACKAGE}=={release} --hash=sha256:{sha256}\n", path.parent, pinned)
    if not path.exists() or sha256_of(path) != sha256:
        raise StudyError(str(path), f"does not match the hash in {pinned}, {sha256[:12]}…", f"rm {path}")
    return path


def locked() -> tuple[str, str]:
    """Version and SHA-256 of the engine's sdist in requirements.lock."""
    text = (paths.ROOT / LOCK).read_text(encoding="utf-8")
    match = re.search(rf"^{PACKAGE}==(\S+).*\n\s+--hash=sha256:([0-9a-f]{{64}})\s*$", text, re.MULTILINE)
    if not match:
        raise StudyError(LOCK, f"does not pin one file of {PACKAGE}", "git checkout requirements.lock")
    return match[1], match[2]


def unpack(sdist: Path, into: Path, parts: Sequence[str] = PARTS) -> Path:
    """Unpack parts of llama.cpp from the sdist, by default those libllama needs; returns llama.cpp's folder."""
    with tarfile.open(sdist) as archive:
        root = archive.next()
        assert root is not None
        base = f"{root.name.split('/')[0]}/vendor/llama.cpp"
        wanted = tuple(f"{base}/{part}" for part in parts)
        members = [m for m in archive.getmembers() if any(m.name == w or m.name.startswith(w + "/") for w in wanted)]
        archive.extractall(into, members, filter="data")
    return into / base


def apply(patch: Path, source: Path) -> None:
    """Apply a unified diff to a source tree, exactly or not at all; StudyError when it does not apply."""
    if not shutil.which("git"):
        raise StudyError("git", "not found, and patches are applied with `git apply`", "install git")
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(patch.resolve())],
        cwd=source,
        env=_outside(source),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise StudyError(
            f"{patch.name}",
            f"does not apply to the sources of {PACKAGE}: {done.stderr.strip().splitlines()[0]}",
            "the patch is for the version in requirements.lock: git status data/upstream, and make study",
        )


def _outside(source: Path) -> dict[str, str]:
    """An environment in which git does not take sources for part of our repository, whose commit they would name."""
    return os.environ | {"GIT_CEILING_DIRECTORIES": str(source.resolve().parent)}


def compile_target(
    target: str,
    source: Path,
    into: Path,
    tools: dict[str, str],
    on_step: OnStep,
    turned_on: Sequence[str] = (),
    options: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> None:
    """Compile a target against the ggml of the installed package, or a part of ggml; `into` / bin holds the result.

    The sdist's headers are used. `turned_on`: the OPTIONS that the target needs; `options`: further CMake options as
    NAME=VALUE; `packages`: the Debian packages that those need.
    """
    config = into / "ggml-config"
    config.mkdir(parents=True, exist_ok=True)
    (config / "ggml-config.cmake").write_text(GGML_CONFIG, encoding="utf-8")
    if target.startswith("ggml"):
        values = NO_AMX
    else:
        values = {
            "LLAMA_USE_SYSTEM_GGML": "ON",
            "ggml_DIR": str(config),
            "GGML_LIBRARIES": str(installed_libraries()),
            "GGML_HEADERS": str(source / "ggml" / "include"),
        }
    how = f"Debian: apt-get install {' '.join(packages)}" if packages else COMPILER_HELP
    _compile(source, into, values, [target], tools, on_step, turned_on, options, how)


def _compile(
    source: Path,
    into: Path,
    values: dict[str, str],
    targets: Sequence[str],
    tools: dict[str, str],
    on_step: OnStep,
    turned_on: Sequence[str] = (),
    options: Sequence[str] = (),
    how: str = COMPILER_HELP,
) -> None:
    """Configure and compile targets with the flags that all builds share; `options` overrule those of the environment.

    `how`: the mend where CMake fails.
    """
    values = {
        "CMAKE_MAKE_PROGRAM": tools["ninja"],
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_INSTALL_RPATH": RPATH,
        **{f"LLAMA_{option}": "ON" if option in turned_on else "OFF" for option in OPTIONS},
        **values,
    }
    command = [tools["cmake"], "-G", "Ninja", "-S", str(source), "-B", str(into)]
    on_step("configuring", 0, 0)
    own = shlex.split(os.environ.get("CMAKE_ARGS", ""))  # as in the installed engine's build
    own += [f"-D{option}" for option in options]
    asked = [*command, *(f"-D{key}={value}" for key, value in values.items()), *own]
    _run(asked, "CMake", lambda line: None, how, _outside(source))
    jobs = str(os.cpu_count() or 1)
    compiling = [tools["ninja"], "-j", jobs, "-C", str(into), *targets]
    _run(compiling, "the compiler", lambda line: _steps(line, on_step))


def assemble(libraries: Sequence[str], built: Path, into: Path) -> Path:
    """Copy the installed libraries, with `libraries` replaced or added from `built`; returns the folder `into`."""
    replaced = [f"lib{library}.*" for library in libraries]
    shutil.copytree(installed_libraries(), into, ignore=shutil.ignore_patterns(*replaced, "*.a"))
    for file in (file for pattern in replaced for file in built.glob(pattern)):
        shutil.copy2(file, into / file.name, follow_symlinks=False)
    return into


def installed_libraries() -> Path:
    """Folder of the installed package's shared libraries, without importing it: an import loads them.

    Where a release's own bindings come first on the path, it is still the installed package's.
    """
    return Path(str(distribution(PACKAGE).locate_file("llama_cpp"))) / "lib"


def _is_current(name: str) -> bool:
    """Whether a build exists and its patches, sources and installed libraries are unchanged."""
    asked = tomllib.loads(_note_text(definition(name)))
    return described(folder(name)) | {"description": asked["description"]} == asked


def _note_text(asked: dict[str, Any]) -> str:
    if release := asked.get("release"):
        source = f"{PACKAGE} {release}, sha256 {asked['sha256']}"
        said = {key: value for key, value in asked.items() if key not in ASIDE} | {"source": source}
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in said.items())
    release, sha256 = locked()
    patches = "".join(f'{patch} = "{sha256_of(PATCHES / f"{patch}.patch")}"\n' for patch in asked["patches"])
    ggml = hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted(installed_libraries().glob(f"libggml*{SUFFIX}")))
    )
    said = {key: value for key, value in asked.items() if key not in ASIDE}
    said |= {"source": f"{PACKAGE} {release}, sha256 {sha256}", "ggml": f"sha256 {ggml.hexdigest()}"}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in said.items())  # such JSON is also TOML
    return f"{lines}\n[patches]\n{patches}"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tools_found() -> dict[str, str]:
    """Paths of CMake and Ninja, from this environment or the system. StudyError if one or a C++ compiler is missing."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    tools = {name: shutil.which(name, path=places) for name in ("cmake", "ninja")}
    for name, path in tools.items():
        if not path:
            raise StudyError(name, "not found", f"{sys.executable} -m pip install {name}, or make study")
    _compiler()
    return {name: str(path) for name, path in tools.items()}


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    raise StudyError("a C++ compiler", "not found", "Debian: apt-get install g++; macOS: xcode-select --install")


def _download(requirement: str, into: Path, pinned: str = LOCK) -> None:
    wanted = into / "requirement.txt"
    wanted.write_text(requirement, encoding="utf-8")
    quiet = ("--disable-pip-version-check", "--quiet", "--retries", "1", "--timeout", "20")
    alone = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    alone += ["--require-hashes"] if "--hash" in requirement else []
    command = children.python("-m", "pip", "download", *quiet, *alone, "-r", str(wanted), "-d", str(into))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        mismatch = "DO NOT MATCH THE HASHES" in done.stderr
        why = f"what came has another hash than {pinned}" if mismatch else _last_words(done.stderr)
        raise StudyError(f"pip download {PACKAGE}", why, "check the network (or pip's index), then try again")


def _run(
    command: Sequence[str],
    what: str,
    on_line: Callable[[str], None],
    how: str = COMPILER_HELP,
    environment: dict[str, str] | None = None,
) -> None:
    """Run a tool and pass each output line to `on_line`; StudyError with the first error lines when it fails."""
    said = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                on_line(line)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        errors = [line for line in said if "error" in line.lower()] or said
        raise StudyError(what, "failed: " + "".join(errors[:3]).strip(), how)


def _steps(line: str, on_step: OnStep) -> None:
    if match := STEP.match(line):
        on_step("compiling", int(match[1]), int(match[2]))


def _check_loads(made: Path) -> None:
    """StudyError unless the bindings load this build."""
    done = subprocess.run(
        children.python("-c", "from llama_meter.engine.bindings import llama; llama.llama_print_system_info()"),
        env=os.environ | {"LLAMA_CPP_LIB_PATH": str(made.resolve())},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise StudyError(
            str(made.parent.name), "was built but does not load: " + _last_words(done.stderr), "make study"
        )


def _last_words(text: str) -> str:
    return " ".join(text.strip().splitlines()[-1:]) or "it failed without output"


@contextmanager
def room(partial: Path) -> Iterator[None]:
    """A fresh working folder, removed afterwards; disk errors become StudyError."""
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield
    except OSError as error:
        raise StudyError(
            str(partial), f"{error.strerror or error}", "make room: a build needs about 400 MB while it runs"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
