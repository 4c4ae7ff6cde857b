"""The workload `scan`: quality lost by quantizing each class of tensors and each layer alone, or all but it.

Drop-one: everything as in the reference but one point. Protect-one: everything as in the candidate but one point. A
point is a class ("ffn_down") or a layer ("layer 3"). The models are composed in memory from the two files
(engine/swapping.py). Damage is the mean KL divergence to the reference over a chunk's scored tokens, nats per token;
as in llama-perplexity the first half of a chunk is only context.

Beside every drop stands its control: the same tensors with an error of the same type that knows nothing of the weights
(engine/kernels.py), drawn `DRAWS` times; chunk k is evaluated with draw k mod DRAWS. It says how much damage the size
and the role of these tensors explain. The frontier protects one class after the other in the order of damage avoided
per byte. The reference's log-probabilities are computed once for as many chunks as `LOGITS_BYTES` hold.

Series of a row, one number per chunk unless said otherwise: "drop P", "control P", "protect P", "frontier N C" (classes
up to the N-th, C, are protected), "all" (the candidate), "floor" (the reference in smaller pieces, without flash
attention), and "size P": weights, bytes in the reference, bytes in the candidate. No damage is judged here.
"""

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from llama_meter.cells import Scan as Asked
from llama_meter.engine import kernels, library, swapping
from llama_meter.engine.session import EngineError, Session, SessionConfig
from llama_meter.engine.swapping import Composer
from llama_meter.limits import DRAWS
from llama_meter.measure import texts
from llama_meter.models.tensors import TensorInfo
from llama_meter.rows import Measured, passed
from llama_meter.workloads import quality
from llama_meter.workloads.divergence import kl_divergence, log_softmax

LOGITS_BYTES = 2 << 30
COMPARED = 4  # chunks on which composed models are compared with written files
ALL = "all"

Points = dict[str, tuple[str, ...]]  # name of a point -> its tensors
clock = time.perf_counter_ns


@dataclass
class Scan:
    """One scan under way: what is composed and evaluated, and what came out."""

    composer: Composer
    config: SessionConfig
    points: Points
    series: dict[str, list[float]] = field(default_factory=dict)
    samples_ns: list[list[int]] = field(default_factory=list)
    n_evaluated: int = 0

    def add(self, name: str, session: Session, chunks: np.ndarray, expected: list[np.ndarray]) -> None:
        """Append the damage of each chunk under `name`, and free the session."""
        start = clock()
        with session:
            damages = [damage(session, *pair) for pair in zip(chunks, expected, strict=True)]
        self.series.setdefault(name, []).extend(damages)
        self.samples_ns.append([clock() - start])
        self.n_evaluated += chunks.size


def run(cell: Asked, path: Path, stage: Callable[[str], None], *others: Path) -> Measured:
    """Scan the one candidate of a cell, or any other file, against its reference; `seed` draws the controls."""
    (other,) = others or (quality.candidate_path(cell, path, candidate) for candidate in cell.candidates)
    return scan(cell, path, other, stage)


def scan(cell: Asked, path: Path, other: Path, stage: Callable[[str], None]) -> Measured:
    """Scan the file `other` against the file `path`; only the cell's text, chunks, threads and seed are used."""
    library.capture_log([])
    start = clock()
    composer = Composer(path, other)
    if not composer.differing:
        raise EngineError(f"{other.name} holds every tensor in the type that {path.name} has")
    under_way = Scan(composer, quality.config(cell, cell.n_ctx), points(composer.differing))
    chunks = _chunks(cell, under_way)
    load_ns = clock() - start
    stage("compare")
    checks = _checks(under_way, chunks[:COMPARED], other)
    for offset, group, expected in _groups(under_way, chunks):
        stage("drop")
        _drop(under_way, group, expected, offset, cell.seed)
        stage("protect")
        _protect(under_way, group, expected)
    return _measured(under_way, checks, load_ns)


def points(names: Iterable[str]) -> Points:
    """Classes, then layers, of the tensors that two files hold in different types."""
    tensors = [TensorInfo(name, "F32", ()) for name in names]
    classes = {t.kind: tuple(o.name for o in tensors if o.kind == t.kind) for t in tensors}
    numbers = sorted({t.layer for t in tensors if t.layer is not None})
    return classes | {f"layer {n}": tuple(t.name for t in tensors if t.layer == n) for n in numbers}


def damage(session: Session, chunk: np.ndarray, expected: np.ndarray) -> float:
    """Mean KL divergence in nats per token from the expected log-probabilities, over a chunk's scored tokens."""
    return float(kl_divergence(expected, log_probabilities(session, chunk)).mean())


def log_probabilities(session: Session, chunk: np.ndarray) -> np.ndarray:
    """Log-probabilities of the second half of a chunk, (n_ctx - n_ctx // 2 - 1, n_vocab): the part that is scored."""
    return log_softmax(session.score(chunk, len(chunk) // 2))


def _chunks(cell: Asked, under_way: Scan) -> np.ndarray:
    with under_way.composer.compose(under_way.config) as session:
        text = texts.planned(cell.text, cell.text_sha256)
        tokens = session.tokenize(texts.beginning(text, cell.n_ctx * cell.n_chunks))
        return texts.chunks(tokens, cell.n_ctx, cell.n_chunks, session.bos)


def _groups(under_way: Scan, chunks: np.ndarray) -> Iterator[tuple[int, np.ndarray, list[np.ndarray]]]:
    """Groups of chunks whose reference fits in memory: number of the first, chunks, log-probabilities of each."""
    start = 0
    while start < len(chunks):
        with under_way.composer.compose(under_way.config) as reference:
            held = (chunks.shape[1] // 2) * reference.n_vocab * 4
            group = chunks[start : start + max(LOGITS_BYTES // held, 1)]
            expected = [log_probabilities(reference, chunk) for chunk in group]
        yield start, group, expected
        start += len(group)


def _drop(under_way: Scan, chunks: np.ndarray, expected: list[np.ndarray], offset: int, seed: int) -> None:
    compose, config = under_way.composer.compose, under_way.config
    coarse = replace(config, n_ubatch=max(config.n_batch // 4, 1), flash_attn="off")
    under_way.add("floor", compose(coarse), chunks, expected)
    under_way.add(ALL, compose(config, under_way.composer.differing), chunks, expected)
    for point, names in under_way.points.items():
        under_way.add(f"drop {point}", compose(config, names), chunks, expected)
        _control(under_way, point, chunks, expected, offset, seed)


def _control(
    under_way: Scan, point: str, chunks: np.ndarray, expected: list[np.ndarray], offset: int, seed: int
) -> None:
    """Damage of structureless errors in a point's tensors; chunks that share a draw share a model."""
    klds = np.empty(len(chunks))
    for draw in range(min(DRAWS, len(chunks))):
        mine = [k for k in range(len(chunks)) if (offset + k) % DRAWS == (offset + draw) % DRAWS]
        drawn = _draw(under_way.composer, under_way.points[point], seed, (offset + draw) % DRAWS)
        name = f"control {point} {draw}"
        session = under_way.composer.compose(under_way.config, replaced=drawn)
        under_way.add(name, session, chunks[mine], [expected[k] for k in mine])
        klds[mine] = under_way.series.pop(name)
    under_way.series.setdefault(f"control {point}", []).extend(klds.tolist())


def _draw(composer: Composer, names: Iterable[str], seed: int, draw: int) -> dict[str, np.ndarray]:
    """A tensor's errors depend on its name, the seed and the draw alone, not on the point it is part of."""
    drawn = {}
    for name in names:
        rng = np.random.default_rng([seed, draw, zlib.crc32(name.encode())])
        types = composer.reference[name].dtype, composer.candidate[name].dtype
        drawn[name] = kernels.with_structureless_error(composer.raw(name), *types, rng)
    return drawn


def _protect(under_way: Scan, chunks: np.ndarray, expected: list[np.ndarray]) -> None:
    compose, config, everything = under_way.composer.compose, under_way.config, set(under_way.composer.differing)
    for point, names in under_way.points.items():
        under_way.add(f"protect {point}", compose(config, everything - set(names)), chunks, expected)
    protected: set[str] = set()
    for i, point in enumerate(_order(under_way), 1):
        protected |= set(under_way.points[point])
        under_way.add(f"frontier {i} {point}", compose(config, everything - protected), chunks, expected)


def _order(under_way: Scan) -> list[str]:
    """Classes by damage avoided per byte, in the order that the first group of chunks gives."""
    steps = [name.split(" ", 2) for name in under_way.series if name.startswith("frontier ")]
    if steps:
        return [point for _, _, point in sorted(steps, key=lambda words: int(words[1]))]
    before = float(np.mean(under_way.series[ALL]))

    def worth(point: str) -> float:
        _, reference, candidate = _size(under_way.composer, under_way.points[point])
        return (before - float(np.mean(under_way.series[f"protect {point}"]))) / max(reference - candidate, 1)

    return sorted((p for p in under_way.points if not p.startswith("layer ")), key=worth, reverse=True)


def _size(composer: Composer, names: Iterable[str]) -> list[float]:
    names = list(names)
    weights = sum(float(np.prod(composer.reference[n].shape)) for n in names)
    return [weights, *(float(sum(f[n].n_bytes for n in names)) for f in (composer.reference, composer.candidate))]


def _checks(under_way: Scan, chunks: np.ndarray, other: Path) -> dict[str, float | bool]:
    """Whether composed models give the logits of written files, and what the candidate's usual kernels change."""
    composer, config, first = under_way.composer, under_way.config, {0: chunks[0]}

    def logits(session: Session) -> np.ndarray:
        with session:
            return session.prefill(first, every=True)[0]

    def damages(session: Session, expected: list[np.ndarray]) -> float:
        with session:
            return float(np.mean([damage(session, *pair) for pair in zip(chunks, expected, strict=True)]))

    mixtures = ((composer.path, ()), (other, composer.differing))
    same = [
        np.array_equal(logits(composer.compose(config, names)), logits(swapping.as_plain_file(file, config)))
        for file, names in mixtures
    ]
    with composer.compose(config) as reference:
        expected = [log_probabilities(reference, chunk) for chunk in chunks]
    usual = damages(Session(other, config), expected)
    composed = damages(composer.compose(config, composer.differing), expected)
    return {"reference_is_file": same[0], "candidate_is_file": same[1], "usual_kernels": usual / composed}


def _measured(under_way: Scan, checks: dict[str, float | bool], load_ns: int) -> Measured:
    """The row; series with a non-finite number are left out, as JSON has none, and make it invalid."""
    finite = {name: values for name, values in under_way.series.items() if np.isfinite(values).all()}
    checks = {k: v for k, v in checks.items() if np.isfinite(v)} | {"finite": len(finite) == len(under_way.series)}
    sizes = {f"size {p}": _size(under_way.composer, names) for p, names in under_way.points.items()}
    sizes["size all"] = _size(under_way.composer, under_way.composer.reference)
    return Measured(
        samples_ns=under_way.samples_ns,
        load_ns=load_ns,
        n_evaluated=under_way.n_evaluated,
        checks=checks,
        series=finite | sizes,
        valid=passed(checks),
    )


RUNS = {Asked: run}
