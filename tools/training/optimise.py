"""The training loop: batches of windows, Muon for the blocks' matrices, AdamW for the rest, a learning curve.

Muon: Jordan et al. 2024, kellerjordan.github.io/posts/muon; AdamW: Loshchilov & Hutter, arXiv:1711.05101. It takes
token streams and knows neither text files nor the engine.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from llama_meter.disk import growing
from training.architectures import Plamo

Tokens = NDArray[np.int32]
ADAM = {"ssm_conv1d", "ssm_dt", "token_embd"}  # matrices that Muon's orthogonal steps do not suit


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. `stages`: share of the steps and tokens per window; every step sees `batch` tokens.

    Learning rates rise over `warm_up` steps and fall linearly to zero over the last `cool_down` share of the steps.
    """

    steps: int
    batch: int = 4096
    stages: tuple[tuple[float, int], ...] = ((0.75, 256), (0.15, 512), (0.10, 1024))
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    weight_decay: float = 0.1
    warm_up: int = 40
    cool_down: float = 0.6
    seed: int = 0
    bfloat16: bool = True

    def window(self, step: int) -> int:
        """Tokens per window at a step."""
        done = 0.0
        for share, window in self.stages:
            done += share
            if step < done * self.steps:
                return window
        return self.stages[-1][1]

    def rate(self, step: int) -> float:
        """Factor on both learning rates."""
        return min((step + 1) / self.warm_up, 1.0, (self.steps - step) / (self.cool_down * self.steps))


@dataclass
class Progress:
    """Where a training stands. `curve`: step, seconds, training bits per token, held-out bits per byte."""

    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float, float, float]] = field(default_factory=list)


def train(
    model: Plamo,
    stream: Tokens,
    recipe: Recipe,
    held_out: Callable[[Plamo], float],
    checkpoint: Path | None = None,
    every: int = 100,
    report: Callable[[Plamo, Progress], None] | None = None,
) -> Progress:
    """Train `model` in place on windows of `stream` (one sequence of token ids, a bos before every document).

    Every `every` steps `held_out` is evaluated, `checkpoint` written and `report` called. An existing checkpoint is
    resumed.
    """
    optimisers, progress = _optimisers(model, recipe), Progress()
    if checkpoint and checkpoint.exists():
        progress = _resume(checkpoint, model, optimisers)
    batches = _batches(stream, recipe, progress.step)
    before, began = progress.seconds, time.monotonic()
    losses: list[float] = []
    while progress.step < recipe.steps:
        losses.append(_step(model, optimisers, next(batches), recipe, progress.step))
        progress.step += 1
        progress.tokens_seen += recipe.batch
        progress.seconds = before + time.monotonic() - began
        if progress.step % every == 0 or progress.step == recipe.steps:
            bits = float(np.mean(losses)) / math.log(2)
            progress.curve.append(
                (progress.step, round(progress.seconds, 1), round(bits, 4), round(held_out(model), 4))
            )
            losses.clear()
            if checkpoint:
                _save(checkpoint, model, optimisers, progress)
            if report:
                report(model, progress)
    return progress


def bits(model: Plamo, streams: Sequence[Tokens], window: int = 1024) -> float:
    """Total -log2 p of the tokens of `streams` after the first of each, in windows without overlap.

    The first token of a window is predicted from the one before it alone.
    """
    total = 0.0
    with torch.no_grad():
        for stream in streams:
            ids = torch.from_numpy(stream.astype(np.int64))
            for start in range(0, len(ids) - 1, window):
                part = ids[start : start + window + 1]
                logits = model(part[None, :-1])[0].float()
                total += float(functional.cross_entropy(logits, part[1:], reduction="sum")) / math.log(2)
    return total


def _step(model: Plamo, optimisers: Sequence[Any], batch: torch.Tensor, recipe: Recipe, step: int) -> float:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["full_lr"] * recipe.rate(step)
        optimiser.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
        logits = model(batch[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    for optimiser in optimisers:
        optimiser.step()
    return float(loss.detach())


def _batches(stream: Tokens, recipe: Recipe, skip: int) -> Iterator[torch.Tensor]:
    """Windows in random order, each one token longer than its prediction; every epoch is cut at another offset."""
    random, ids = np.random.default_rng(recipe.seed), torch.from_numpy(stream.astype(np.int64))
    starts: list[int] = []
    window = 0
    for step in range(recipe.steps):
        if window != recipe.window(step):
            window, starts = recipe.window(step), []
        chosen: list[int] = []
        while len(chosen) < recipe.batch // window:
            if not starts:
                cut = np.arange(random.integers(window), len(stream) - window - 1, window)
                starts = random.permutation(cut).tolist()
            chosen.append(starts.pop())
        if step >= skip:
            yield torch.stack([ids[start : start + window + 1] for start in chosen])


def _optimisers(model: Plamo, recipe: Recipe) -> list[Any]:
    matrices: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for name in model.spec.tensor_shapes():
        tensor, kind = model.tensor(name), name.removesuffix(".weight").rsplit(".", 1)[-1]
        is_matrix = tensor.ndim == 2 and kind not in ADAM and not kind.endswith("_norm")
        (matrices if is_matrix else rest).append(tensor)
    found = [
        torch.optim.Muon(matrices, lr=recipe.muon_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(rest, lr=recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimiser in found:
        for group in optimiser.param_groups:
            group["full_lr"] = group["lr"]
    return found


def _save(path: Path, model: Plamo, optimisers: Sequence[Any], progress: Progress) -> None:
    states = [optimiser.state_dict() for optimiser in optimisers]
    with growing(path) as partial:
        torch.save({"model": model.state_dict(), "optimisers": states, "progress": vars(progress)}, partial)


def _resume(path: Path, model: Plamo, optimisers: Sequence[Any]) -> Progress:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimiser, state in zip(optimisers, saved["optimisers"], strict=True):
        optimiser.load_state_dict(state)
    return Progress(**saved["progress"])
