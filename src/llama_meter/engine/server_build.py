"""llama-server from the locked sdist: one binary for all builds of the engine, which it loads as libraries.

No engine patch touches the server's own sources, so it is compiled once, against the installed ggml; the libllama
compiled along the way is discarded. A server's libllama and ggml are chosen when it starts, by the folder it finds its
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
TURNED_ON = ("BUILD_COMMON", "BUILD_TOOLS", "BUILD_SERVER")
OWN = ("llama-common", "llama-server-impl", "mtmd")  # libraries beside it; an engine brings libllama and ggml


def home() -> Path:
    """The folder of the binary; it need not exist."""
    return folder("server")


def built() -> Path | None:
    """The binary that `build` made from the current sources, None without one."""
    said = home() / note.NAME
    made = said.exists() and disk.toml(said) == tomllib.loads(_note_text())
    return home() / BINARY if made else None


def build(on_step: OnStep = lambda *step: None) -> Path:
    """Make the binary if it is missing. Raises StudyError as `engine.builds.build` does."""
    if binary := built():
        return binary
    tools, place = builds.tools_found(), home()
    partial = place.with_name(f"{place.name}.partial")
    with builds.room(partial):
        on_step("fetching the sources", 0, 0)
        source = unpack(fetch(), partial / "source", (*PARTS, "common", "tools", "scripts"))
        tree = partial / "build"
        builds.compile_target(BINARY, source, tree, tools, on_step, TURNED_ON)
        made = partial / "made"
        made.mkdir()
        shutil.copy2(tree / "bin" / BINARY, made / BINARY)
        for name in OWN:
            for file in (tree / "bin").glob(f"lib{name}*{SUFFIX}*"):
                shutil.copy2(file, made / file.name, follow_symlinks=False)
        (made / note.NAME).write_text(_note_text(), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)
    return place / BINARY


def _note_text() -> str:
    release, sha256 = locked()
    return f"source = {json.dumps(f'{builds.PACKAGE} {release}, sha256 {sha256}')}\n"
