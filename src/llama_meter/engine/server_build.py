"""llama-server from the locked sdist: one binary for all builds of the engine, which it loads as libraries.

No engine patch touches the server's own sources, so it is compiled once, against the installed ggml; the libllama
compiled along the way is discarded. A second, patched binary is made only on request: PATCHES change the server's own
sources and nothing that computes. A server's libllama and ggml are chosen when it starts, by the folder it finds its
libraries in: the installed engine's, or that of a build of `engine.builds`.
"""

import json
import shutil
import tomllib
from pathlib import Path

from llama_meter import disk
from llama_meter.engine import builds, note
from llama_meter.engine.builds import PARTS, SUFFIX, OnStep, fetch, folder, locked, unpack

BINARY = "llama-server"
STOCK = "stock"
TURNED_ON = ("BUILD_COMMON", "BUILD_TOOLS", "BUILD_SERVER")
OWN = ("llama-common", "llama-server-impl", "mtmd")  # libraries beside it; an engine brings libllama and ggml
PATCHES = ("server-wakeups",)  # of data/upstream/patches
PLACES = {"src": "libllama", "common": "common", "vendor": "others' libraries", "tools": "server and tools"}


def home(patched: bool = False) -> Path:
    """The folder of the binary; it need not exist."""
    return folder("server-patched" if patched else "server")


def built(patched: bool = False) -> Path | None:
    """The binary that `build` made from the current sources and patches, None without one."""
    said = home(patched) / note.NAME
    made = said.exists() and disk.toml(said) == tomllib.loads(_note_text(patched))
    return home(patched) / BINARY if made else None


def is_ours(binary: Path) -> bool:
    """Whether a binary is one that was built here, as released or patched."""
    return binary.resolve() in {(home(patched) / BINARY).resolve() for patched in (False, True)}


def libraries(engine: str = STOCK) -> Path:
    """The folder whose libllama and ggml a server of this engine loads; StudyError for a build that is not here."""
    return builds.installed_libraries() if engine == STOCK else builds.resolve(engine)


def build(
    engine: str = STOCK, on_step: OnStep = lambda *step: None, patched: bool = False
) -> tuple[Path, dict[str, float]]:
    """Make the binary and, if it is missing, the engine; returns the binary and compile times.

    Times are seconds of compiler processes by part of the sources, empty when nothing had to be compiled. Raises
    StudyError as `engine.builds.build` does.
    """
    if engine != STOCK:
        builds.build(engine, on_step)
    if binary := built(patched):
        return binary, {}
    tools, place = builds.tools_found(), home(patched)
    partial = place.with_name(f"{place.name}.partial")
    with builds.room(partial):
        on_step("fetching the sources", 0, 0)
        source = unpack(fetch(), partial / "source", (*PARTS, "common", "tools", "scripts"))
        for patch in PATCHES if patched else ():
            builds.apply(builds.PATCHES / f"{patch}.patch", source)
        tree = partial / "build"
        builds.compile_target(BINARY, source, tree, tools, on_step, TURNED_ON)
        made = partial / "made"
        made.mkdir()
        shutil.copy2(tree / "bin" / BINARY, made / BINARY)
        for name in OWN:
            for file in (tree / "bin").glob(f"lib{name}*{SUFFIX}*"):
                shutil.copy2(file, made / file.name, follow_symlinks=False)
        (made / note.NAME).write_text(_note_text(patched), encoding="utf-8")
        spent = spent_by_part((tree / ".ninja_log").read_text(encoding="utf-8"))
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)
    return place / BINARY, spent


def spent_by_part(log: str) -> dict[str, float]:
    """Compile seconds by part of the sources, from Ninja's log: start and end in ms, mtime, output, hash."""
    spent: dict[str, float] = {}
    for line in log.splitlines():
        fields = line.split("\t")
        if len(fields) == 5:
            place = PLACES.get(fields[3].split("/")[0], "linking")
            spent[place] = spent.get(place, 0.0) + (int(fields[1]) - int(fields[0])) / 1e3
    return spent


def _note_text(patched: bool) -> str:
    release, sha256 = locked()
    entries = {"source": f"{builds.PACKAGE} {release}, sha256 {sha256}"}
    for patch in PATCHES if patched else ():
        entries[patch] = builds.sha256_of(builds.PATCHES / f"{patch}.patch")
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in entries.items())
