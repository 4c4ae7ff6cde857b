"""Quality of quantized files: the reference and every candidate evaluated side by side, chunk by chunk, nothing kept.

The reference is evaluated once, its log-probabilities live as long as one chunk, and no logits reach the disk. As in
llama-perplexity a chunk is one sequence and its second half is scored. One `llama_decode` takes one chunk: several
would be mixed up on PLaMo 2 (mixed prompts, D2). The output is sums per chunk; statistics are computed elsewhere.

Series, one number per chunk: `tokens` scored, their text's `bytes`, and of each file NAME (llama-perplexity's terms)
`nll/NAME` (sum, nats) and `not_finite/NAME` (tokens left out of all sums); of each candidate also `kld/NAME` (sum,
nats), `same_top/NAME` (count), `dp/NAME` and `dp2/NAME` (sums of Δp and Δp²), `below/NAME/Q` (tokens whose KLD is at
most the Q-quantile of all). Others: `quantiles/NAME`, KLD at `divergence.GRID`; `loop/NAME`, per prompt the period of
the loop that the greedy continuation ends in, 0 without one, -1 where logits were not finite; `file_bytes` per file.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from llama_meter.cells import Comparison, OnModel, Quality
from llama_meter.engine import library
from llama_meter.engine.session import EngineError, Session, SessionConfig
from llama_meter.measure import sessions, texts
from llama_meter.rows import Measured, passed
from plamo_study.studies.quantization import divergence

BLOCK = 1 << 18  # logits that one thread works on at a time: they stay in its cache
DIGITS = 7  # a float32 has no more

Sums = dict[str, list[float]]
clock = time.perf_counter_ns


def run(cell: Quality, path: Path, stage: Callable[[str], None]) -> Measured:
    """Evaluate the cell's text with its reference `path` and its candidates, then continue greedily with each."""
    library.capture_log([])
    text = texts.planned(cell.text, cell.text_sha256)
    files = {cell.dtype: path} | {name: candidate_path(cell, path, name) for name in cell.candidates}
    with ExitStack() as stack:
        start = clock()
        opened = {}
        for name, file in files.items():
            stage(f"load {name}")
            opened[name] = stack.enter_context(Session(file, config(cell, cell.n_ctx)))
        load_ns = clock() - start
        stage("tokenize")
        chunks, checks = _chunks(cell, opened[cell.dtype], text)
        _check_vocabularies(opened)
        series, samples, engine_ns = _evaluate(cell, opened, chunks, stage)
    series["file_bytes"] = [float(file.stat().st_size) for file in files.values()]
    longer = config(cell, PROMPT_TOKENS + cell.n_gen, cell.n_seq)
    for name, file in files.items() if cell.n_gen else ():
        stage(f"continue {name}")
        series[f"loop/{name}"] = loops(file, longer, text)
    n_evaluated = chunks.size * len(files)
    checks |= {"reference_finite": not any(series[f"not_finite/{cell.dtype}"])}
    return Measured(
        samples_ns=[samples],
        load_ns=load_ns,
        n_evaluated=n_evaluated,
        checks=checks | {"statistics_share": 1 - engine_ns / sum(samples)},
        series=series,
        valid=passed(checks),
    )


def candidate_path(cell: Comparison, reference: Path, name: str) -> Path:
    """A candidate's file: beside the reference, named as models/registry.py names it."""
    return reference.with_name(f"{cell.model}.{cell.scale}.{name}.gguf")


def config(cell: OnModel, n_ctx: int, n_seq: int = 1) -> SessionConfig:
    """A context for `n_seq` sequences of `n_ctx` tokens, set by the cell and otherwise as in llama-perplexity."""
    return sessions.config(cell, n_ctx, n_batch=n_ctx, n_seq_max=n_seq, swa_full=False)


def _chunks(cell: Quality, session: Session, text: bytes) -> tuple[np.ndarray, dict[str, float | bool]]:
    """The chunks, and whether the tokens' bytes add up to the text's, as bits per byte assumes."""
    tokens = session.tokenize(text)
    chunks = texts.chunks(tokens, cell.n_ctx, cell.n_chunks, session.bos)
    spelt = tokens[1:] if tokens[0] == session.bos else tokens  # what an engine puts first is not in the text
    return chunks, {"bytes_add_up": int(session.piece_bytes(spelt).sum()) == len(text)}


def _check_vocabularies(opened: dict[str, Session]) -> None:
    sizes = {name: session.n_vocab for name, session in opened.items()}
    if len(set(sizes.values())) > 1:
        raise EngineError(f"files of different vocabularies cannot be compared: {sizes}")


def _evaluate(
    cell: Quality, opened: dict[str, Session], chunks: np.ndarray, stage: Callable[[str], None]
) -> tuple[Sums, list[int], int]:
    """Evaluate all files on all chunks: the series, nanoseconds per chunk, and nanoseconds inside the engine."""
    first, reference = cell.n_ctx // 2, opened[cell.dtype]
    sums: Sums = {}
    klds: dict[str, list[np.ndarray]] = {name: [] for name in cell.candidates}
    samples, engine_ns = [], 0
    with ThreadPoolExecutor(cell.n_threads) as pool:
        for number, chunk in enumerate(chunks):
            start, targets = clock(), chunk[first + 1 :]
            add(sums, {"tokens": len(targets), "bytes": int(reference.piece_bytes(targets).sum())})
            for name, session in opened.items():
                stage(f"chunk {number + 1} of {len(chunks)}, {name}")
                began = clock()
                logits = session.score(chunk, first)
                engine_ns += clock() - began
                if session is reference:
                    log_p = _by_rows(pool, divergence.log_softmax, logits)
                    add(sums, reference_sums(name, divergence.nll(log_p, targets)))
                else:
                    rows = _by_rows(pool, divergences, log_p, logits, targets)
                    add(sums, candidate_sums(name, rows))
                    klds[name].append(rows[:, 1])
            samples.append(clock() - start)
    return sums | distribution(klds), samples, engine_ns


def divergences(log_p: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Per token (n, 4) float64: nll and KLD in nats, whether the likeliest token is the same, Δp."""
    log_q = divergence.log_softmax(logits)
    return np.column_stack(
        (
            divergence.nll(log_q, targets),
            divergence.kl_divergence(log_p, log_q),
            divergence.same_top(log_p, log_q),
            divergence.delta_p(log_p, log_q, targets),
        )
    )


def reference_sums(name: str, nll: np.ndarray) -> dict[str, float]:
    """A chunk's sums of the reference."""
    finite = np.isfinite(nll)
    return {f"nll/{name}": nll[finite].sum(), f"not_finite/{name}": int((~finite).sum())}


def candidate_sums(name: str, rows: np.ndarray) -> dict[str, float]:
    """A chunk's sums of a candidate, over the tokens for which all numbers are finite."""
    finite = np.isfinite(rows).all(axis=1)
    nll, kld, same, dp = rows[finite].sum(axis=0)
    values = {"nll": nll, "not_finite": int((~finite).sum()), "kld": kld, "same_top": int(same), "dp": dp}
    return {f"{what}/{name}": value for what, value in (values | {"dp2": np.square(rows[finite, 3]).sum()}).items()}


def distribution(klds: dict[str, list[np.ndarray]]) -> Sums:
    """Quantiles of each candidate's KLDs over all chunks, and how many of each chunk are at or below each."""
    sums: Sums = {}
    for name, per_chunk in klds.items():
        finite = [values[np.isfinite(values)] for values in per_chunk]
        together = np.concatenate(finite)
        if together.size:
            sums[f"quantiles/{name}"] = [short(value) for value in np.quantile(together, divergence.GRID)]
            for q in divergence.QUANTILES:
                bound = np.quantile(together, q)
                sums[f"below/{name}/{q}"] = [int((values <= bound).sum()) for values in finite]
    return sums


def add(sums: Sums, values: dict[str, float]) -> None:
    """Append one chunk's numbers to their series."""
    for name, value in values.items():
        sums.setdefault(name, []).append(value if isinstance(value, int) else short(value))


def short(value: float) -> float:
    """A number rounded to the digits of a float32."""
    return float(f"{value:.{DIGITS}g}")


def _by_rows(pool: ThreadPoolExecutor, function: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """A function of rows, applied to blocks of rows on all threads."""
    rows = max(BLOCK // arrays[0].shape[1], 1)
    parts: Iterator[np.ndarray] = pool.map(
        lambda start: function(*(array[start : start + rows] for array in arrays)), range(0, len(arrays[0]), rows)
    )
    return np.concatenate(list(parts))


RUNS = {Quality: run}

PROMPT_TOKENS = 160  # the last ones of longer prompts
LEAST_TOKENS, LEAST_TIMES = 2, 3  # of a phrase that counts as a repetition


def loops(path: Path, config: SessionConfig, text: bytes) -> list[float]:
    """Period in tokens of the loop that each prompt's continuation ends in; 0: no loop, -1: logits not finite.

    One prompt for each of `config.n_seq_max` sequences, continued to the end of its context. A prompt's last token is
    dropped: tokens span a line break and the next line's indentation, so a cut after a line makes a token no text has.
    """
    excerpts = texts.excerpts(text, config.n_seq_max, texts.PROMPT_LINES)
    with Session(path, config) as session:
        prompts = [session.tokenize(excerpt)[:-1][-PROMPT_TOKENS:] for excerpt in excerpts]
        return [_period(session, tokens) for tokens in continued(session, prompts, config.n_ctx_seq - PROMPT_TOKENS)]


def continued(session: Session, prompts: list[np.ndarray], n_gen: int) -> np.ndarray:
    """The likeliest `n_gen` tokens after each prompt, (n_prompts, n_gen) int32; -1 from where logits are not finite."""
    session.clear()
    logits = session.prefill(dict(enumerate(prompts)))
    rows = np.concatenate(list(logits.values()))
    tokens = np.empty((n_gen, len(prompts)), dtype=np.int32)
    for step in range(n_gen):
        tokens[step] = np.where(np.isfinite(rows).all(axis=1), rows.argmax(axis=1), -1)
        session.decode(dict(enumerate(np.maximum(tokens[step], 0).tolist())))
        rows = session.outputs(len(prompts))
    return tokens.T


def loop_period(tokens: np.ndarray) -> int:
    """Tokens in the shortest phrase repeated `LEAST_TIMES` times at the end of (n,) token ids; 0: no loop.

    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration": a phrase of at least two tokens counts as a
    repetition if it occurs at least three times in a row at the end of the generated tokens.
    """
    for period in range(LEAST_TOKENS, len(tokens) // LEAST_TIMES + 1):
        end = tokens[-LEAST_TIMES * period :]
        if np.array_equal(end[period:], end[:-period]):
            return period
    return 0


def _period(session: Session, tokens: np.ndarray) -> float:
    if (tokens < 0).any():
        return -1
    ends = [i for i, token in enumerate(tokens.tolist()) if session.is_end(token)]
    return loop_period(tokens[: ends[0]] if ends else tokens)
