"""Our rates against those of llama.cpp's own tools: same libraries and file, interleaved runs, ratios paired by round.

A tool is a path to a binary the user built; nothing here builds or downloads one.
"""

import json
import os
import subprocess
from pathlib import Path
from statistics import median

from llama_meter import children, progress, stats
from llama_meter.cells import Cell, Decode, OnModel
from llama_meter.engine import builds
from llama_meter.errors import StudyError
from llama_meter.measure.plan import change
from llama_meter.measure.process import ONCE_S, measured_once
from llama_meter.serve.server import offload
from llama_meter.stats import Estimate

BATCHES, BATCH_PROMPT, BATCH_STEPS = (1, 4, 16), 32, 12


def llama_bench(cell: OnModel, path: Path, tool: Path, rounds: int) -> dict[str, Estimate]:
    """Our prefill and decode rate over llama-bench's: 512 tokens of prompt; 32 steps at depth 128."""
    found: dict[str, Estimate] = {}
    prefill = change(cell, workload="prefill", n_prompt=512)
    decode = change(cell, workload="decode", depth=128, n_gen=32)
    for ours, tokens in ((prefill, "-p 512 -n 0"), (decode, "-p 0 -n 32 -d 128")):
        command = [*_command(tool, path, cell), *tokens.split(), "-r", "1", "-o", "json"]
        found |= _ratios(ours, path, rounds, command, (ours.workload,))
    return found


def batched_bench(cell: OnModel, path: Path, tool: Path, rounds: int) -> dict[str, Estimate]:
    """Our S_PP and S_TG over llama-batched-bench's, prompts packed as it packs them, for each of `BATCHES`."""
    found: dict[str, Estimate] = {}
    for n in BATCHES:
        ours = change(cell, workload="decode", depth=BATCH_PROMPT, n_gen=BATCH_STEPS, n_seq=n, policy="packed")
        sizes = {"-npp": BATCH_PROMPT, "-ntg": BATCH_STEPS, "-npl": n, "-c": n * (BATCH_PROMPT + BATCH_STEPS)}
        command = [*_command(tool, path, cell), *(str(word) for size in sizes.items() for word in size)]
        found |= _ratios(ours, path, rounds, [*command, "--output-format", "jsonl"], (f"S_PP of {n}", f"S_TG of {n}"))
    return found


def _ratios(cell: Cell, path: Path, rounds: int, command: list[str], names: tuple[str, ...]) -> dict[str, Estimate]:
    """Their seconds over ours for each of `names`, one run of each tool per round, in alternating order."""
    ours, theirs = [], []
    for number in progress.counted(range(rounds), f"beside {Path(command[0]).name}, {' and '.join(names)}"):
        if number % 2:
            theirs.append(_their_seconds(command))
        ours.append(_our_seconds(cell, path, number))
        if not number % 2:
            theirs.append(_their_seconds(command))
    return {name: stats.ratio([t[i] for t in theirs], [o[i] for o in ours]) for i, name in enumerate(names)}


def _our_seconds(cell: Cell, path: Path, replicate: int) -> list[float]:
    """Seconds of the packed prompts, if the cell times them too, and of its samples."""
    found = measured_once(cell, path, replicate)
    samples = median(sum(repetition) for repetition in found.samples_ns)
    fills = found.prefill_ns if isinstance(cell, Decode) and cell.policy == "packed" else []
    return [nanoseconds / 1e9 for nanoseconds in (*fills, samples)]


def _their_seconds(command: list[str]) -> list[float]:
    """A tool's times in seconds: prompts and steps from llama-batched-bench, one of them from llama-bench."""
    done = ran(command)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise StudyError(command[0], f"failed ({said})", " ".join(command))
    if "-npl" in command:
        line = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{"))
        return [line["t_pp"], line["t_tg"]]
    return [median(json.loads(done.stdout)[0]["samples_ns"]) / 1e9]


def _command(tool: Path, path: Path, cell: OnModel) -> list[str]:
    settings = {"-m": path, "-t": cell.n_threads, "-b": cell.n_batch, "-ub": cell.n_ubatch}
    words = [str(word) for setting in settings.items() for word in setting]
    return [str(tool.absolute()), *words, *offload(cell.n_gpu_layers)]


def ran(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run a tool with the shared libraries that our workers load."""
    folder = os.path.abspath(os.environ.get("LLAMA_CPP_LIB_PATH") or builds.installed_libraries())
    env = children.environment() | dict.fromkeys(("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"), folder)
    return subprocess.run(command, capture_output=True, env=env, cwd=children.NOWHERE, timeout=ONCE_S, check=False)
