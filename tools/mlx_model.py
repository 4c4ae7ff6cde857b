"""A worker's jobs on mlx-lm: read a prompt, take steps, and prove both. Nothing but `Mlx` touches MLX.

The timed work is llama.cpp's: the same tokens, a warm-up of the measured shape, raw nanoseconds, a process of its own.
A prompt is read as mlx-lm reads it (generate.py, generate_step): in pieces, whose logits are never computed, and its
last token alone. A step is over when its logits are on the host, as with llama.cpp. `stream_ns` of a decode are the
times between tokens of generate_step itself, which starts a step before it hands out the token before.

mlx-lm 0.32.2 holds PLaMo 2's step sizes dt at 0.001 or more: models/plamo2.py leaves `time_step_limit` of models/ssm.py
at its default. llama.cpp, vLLM (plamo2.py: dt_limit 0 to infinity) and the oracle have no such bound. `unclipped` lifts
it. Measured with mlx 0.32.4 on a CPU in F32, 300 tokens: on the trained embedded model, whose slow heads take steps
below it, logits are off by 20 % and a third of the likeliest tokens differ; on random weights by 1.9 %. Without the
bound they agree with the oracle to 6e-7 and 4e-6. (The embedded model's Mamba heads are wider than its attention heads,
which mlx-lm cannot load: there its Mamba layers were made with the other width.)
"""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from llama_meter.cells import Decode, Gate, Prefill
from llama_meter.errors import StudyError
from llama_meter.measure import watch
from llama_meter.measure.proof import TAIL_STEPS
from llama_meter.measure.tolerance import near_tie
from llama_meter.oracle.compare import relative_error
from llama_meter.oracle.forward import Oracle
from llama_meter.rows import Measured, passed
from llama_meter.workloads.phases import draw, warm_passes

PIECE = 2048  # tokens of a prompt evaluated at once: prefill_step_size of mlx-lm's generate_step
SAME = 6e-2  # relative error of logits over two paths that rounding explains: that of BF16 weights here
NEEDS = "it needs a Mac with Apple silicon and `pip install -e '.[mlx]'`"

Tokens = Sequence[int] | np.ndarray

clock = time.perf_counter_ns


class MlxJob(msgspec.Struct, frozen=True, kw_only=True):
    """A cell on released weights: `folder` as Hugging Face has it, `gguf` the same weights for the oracle.

    No cell: only report what would compute.
    """

    cell: Prefill | Decode | Gate | None = None
    folder: str = ""
    gguf: str = ""
    replicate: int = 0
    unclipped: bool = False


class Mlx:
    """PLaMo 2 in mlx-lm with one sequence: tokens in, logits of the last one out. StudyError without mlx-lm.

    API: mlx_lm.utils.load_model, mlx_lm.generate.generate_step and mlx_lm.models.cache.make_prompt_cache of 0.32.
    """

    def __init__(self, folder: Path, unclipped: bool = False):
        try:
            import mlx.core as mx
            from mlx_lm import utils
            from mlx_lm.generate import generate_step
            from mlx_lm.models import plamo2
            from mlx_lm.models.cache import make_prompt_cache
        except ImportError as error:
            raise StudyError("mlx-lm", f"cannot be imported ({error})", NEEDS) from error
        if unclipped:
            plamo2.ssm_update = partial(plamo2.ssm_update, time_step_limit=(0.0, math.inf))
        self._mx, self._generate, self._new_cache = mx, generate_step, make_prompt_cache
        self._model, config = utils.load_model(folder)
        self.n_vocab, self.n_evaluated = int(config["vocab_size"]), 0
        self.clear()

    def clear(self) -> None:
        """Forget the sequence."""
        self._cache = self._new_cache(self._model)

    def read(self, tokens: Tokens) -> np.ndarray:
        """Read a prompt; logits after its last token, (n_vocab,) float32."""
        head = [int(token) for token in tokens[:-1]]
        for start in range(0, len(head), PIECE):
            self._model(self._mx.array([head[start : start + PIECE]]), cache=self._cache)
            self._mx.eval([cache.state for cache in self._cache])
        self.n_evaluated += len(head)
        return self.step(int(tokens[-1]))

    def step(self, token: int) -> np.ndarray:
        """Evaluate one token; its logits."""
        logits = self._model(self._mx.array([[token]]), cache=self._cache)[0, -1].astype(self._mx.float32)
        self.n_evaluated += 1
        return np.array(logits)

    def greedy(self, prompt: Tokens) -> Iterator[int]:
        """Tokens that mlx-lm's own generator continues a prompt with; it keeps a cache of its own."""
        tokens = self._mx.array([int(token) for token in prompt])
        for token, _ in self._generate(tokens, self._model, max_tokens=-1):
            yield int(token)

    def on_gpu(self) -> bool:
        """Whether MLX computes on a GPU."""
        return bool(self._mx.default_device() == self._mx.gpu)


def run(job: MlxJob) -> Measured:
    """Do a job in this process."""
    model = Mlx(Path(job.folder), job.unclipped)
    if job.cell is None:
        return Measured(facts=facts(model, Path(job.folder), job.unclipped))
    if isinstance(job.cell, Gate):
        return gate(model, job)
    work = prefill if isinstance(job.cell, Prefill) else decode
    return work(model, job.cell, job.replicate)  # type: ignore[arg-type]


RUNS = {MlxJob: run}


def facts(model: Mlx, folder: Path, unclipped: bool) -> dict[str, Any]:
    """What computes, in the words of an engine's fact; `sha256`: of the files that compute PLaMo 2.

    `build`: which weights, by their configuration and the sizes of their files.
    """
    spec = find_spec("mlx_lm")
    assert spec
    assert spec.origin
    models = Path(spec.origin).parent / "models"
    code = b"".join((models / name).read_bytes() for name in ("plamo2.py", "ssm.py"))
    sizes = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    weights = sha256((folder / "config.json").read_bytes() + repr(sizes).encode()).hexdigest()[:16]
    name = f"mlx-lm {_version('mlx-lm')}" + (", dt not clipped" if unclipped else "")
    return {
        "binding": name,
        "llama": name,
        "ggml": f"mlx {_version('mlx')}",
        "commit": "unknown",
        "build": f"weights {weights}",
        "gpu_offload": model.on_gpu(),
        "sha256": sha256(code).hexdigest(),
        "corrects": [name],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def prefill(model: Mlx, cell: Prefill, replicate: int) -> Measured:
    """Time prompts. Proof and warm-up: the last draw with its last tokens one by one."""
    draws = [tokens[0] for tokens in draw(cell, model.n_vocab, replicate)]
    start = clock()
    n_steps = min(TAIL_STEPS, cell.n_prompt - 1)
    model.clear()
    expected = model.read(draws[-1][: cell.n_prompt - n_steps])
    for token in draws[-1][cell.n_prompt - n_steps : cell.n_prompt]:
        expected = model.step(int(token))
    warmup, samples, model.n_evaluated = clock() - start, [], 0
    for tokens in draws:
        model.clear()
        with watch.timed():
            start = clock()
            logits = model.read(tokens[: cell.n_prompt])
            samples.append([clock() - start])
    return _measured(samples, [warmup], logits, expected, model.n_evaluated, len(draws) * cell.n_prompt)


def decode(model: Mlx, cell: Decode, replicate: int) -> Measured:
    """Time steps after a prompt. Proof: one reading of all those tokens. Warm-up: the first steps, from the prompt."""
    samples, fills, warmup, evaluated = [], [], 0, 0
    draws = [tokens[0] for tokens in draw(cell, model.n_vocab, replicate)]
    for tokens in draws:
        start = clock()
        for n_steps in warm_passes(cell):
            _filled(model, cell, tokens)
            _steps(model, tokens[cell.depth :][:n_steps])
        warmup += clock() - start
        fills.append(_filled(model, cell, tokens))
        model.n_evaluated = 0
        with watch.timed():
            logits, steps = _steps(model, tokens[cell.depth :])
        samples.append(steps)
        evaluated += model.n_evaluated
    model.clear()
    expected = model.read(draws[-1])
    measured = _measured(samples, [warmup], logits, expected, evaluated, cell.repetitions * cell.n_gen)
    stream = _stream(model, draws[-1][: max(cell.depth, 1)], cell.n_gen)
    return msgspec.structs.replace(measured, prefill_ns=fills, series={"stream_ns": stream})


def _filled(model: Mlx, cell: Decode, tokens: np.ndarray) -> int:
    """Read the prompt that steps start from; the nanoseconds it took."""
    model.clear()
    start = clock()
    if cell.depth:
        model.read(tokens[: cell.depth])
    return clock() - start


def _steps(model: Mlx, tokens: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Evaluate tokens one by one: the last logits, and nanoseconds from the end of one step to the end of the next."""
    stamps, logits = [clock()], np.empty(0)
    for token in tokens.tolist():
        logits = model.step(token)
        stamps.append(clock())
    return logits, np.diff(stamps).tolist()


def _stream(model: Mlx, prompt: Tokens, n: int) -> list[float]:
    """Nanoseconds between the tokens of mlx-lm's generator after its first, which waits for the prompt."""
    generator = model.greedy(prompt)
    stamps = [float(clock()) for _ in zip(range(n + 1), generator, strict=False)]
    return np.diff(stamps).tolist()


def _measured(
    samples: list[list[int]], warmup: list[int], logits: np.ndarray, expected: np.ndarray, evaluated: int, due: int
) -> Measured:
    error = relative_error(logits, expected)
    checks: dict[str, float | bool] = {"second_path_error": error, "second_path": error <= SAME}
    checks |= {"finite": bool(np.isfinite(logits).all()), "evaluated": evaluated == due}
    return Measured(samples_ns=samples, warmup_ns=warmup, n_evaluated=evaluated, checks=checks, valid=passed(checks))


def gate(model: Mlx, job: MlxJob) -> Measured:
    """Greedy tokens against the oracle, which reads them too: each must be its likeliest, or nearly so."""
    cell = job.cell
    assert isinstance(cell, Gate)
    prompt = draw(cell, model.n_vocab, job.replicate)[0][0][: cell.n_prompt]
    model.clear()
    after = model.read(prompt)
    answer = [token for _, token in zip(range(cell.n_gen), model.greedy(prompt), strict=False)]
    positions = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    logits = Oracle(Path(job.gguf)).logits([*prompt.tolist(), *answer[:-1]], list(positions))
    gaps = logits.max(axis=1) - logits[np.arange(len(answer)), answer]
    checks: dict[str, float | bool] = {
        "prefill_error": relative_error(after, logits[0]),
        "greedy_gap": float(gaps.max()),
        "greedy_disputed": int((~near_tie(gaps)).sum()),
        "greedy_agrees": bool(near_tie(gaps).all()),
    }
    return Measured(checks=checks, n_evaluated=model.n_evaluated + len(answer), valid=checks["greedy_agrees"] is True)
