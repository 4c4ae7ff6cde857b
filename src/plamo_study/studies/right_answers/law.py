"""The batching law of PLaMo 2 on stock llama.cpp: from the shape of every call to right, silently wrong, or abort.

It replays what the engine does with a batch: cut it into micro-batches of equal sequences (llama-batch.cpp,
split_equal), give each sequence a cell of the recurrent memory (llama-memory-recurrent.cpp, find_slot), read the states
from their rows, and write them back where build_plamo2_mamba_layer writes them. Two defects are in that replay:

mixed prompts (D2)       a micro-batch with several sequences and several tokens each mixes their tokens;
misplaced states (D3)    the scan's states are stored from row head * n_seqs on instead of from row head.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from llama_meter.limits import ROUNDINGS
from plamo_study.studies.right_answers.plan import TESTS

Call = Sequence[tuple[int, int]]  # (sequence, tokens) in stream order; no tokens: the sequence leaves
HYBRID = "plamo2"  # the architecture whose graph has the defects
DEFECTS = frozenset({"D2", "D3"})
ZERO, GARBAGE = (-1, 0), (-2, 0)  # labels of a cleared row and of one that holds no valid state
FREE, NOWHERE = -1, -1  # the sequence of an empty cell, and the row of a state that lies in none


def micro_batches(call: Call, n_ubatch: int) -> list[tuple[list[int], int]]:
    """Cut one call into micro-batches: (sequences, tokens of each). Sequence numbers within one rise by one."""
    left: dict[int, int] = {}
    for seq, n_tokens in call:
        left[seq] = left.get(seq, 0) + n_tokens
    batches = []
    while any(left.values()):
        chosen: list[int] = []
        for seq, n_tokens in left.items():
            if n_tokens and (not chosen or seq == chosen[-1] + 1) and len(chosen) <= n_ubatch:
                chosen.append(seq)
        most = max(n_ubatch // len(chosen), 1)
        n_tokens = min(most, *(left[seq] for seq in chosen))
        for seq in chosen:
            left[seq] -= n_tokens
        batches.append((chosen, n_tokens))
    return batches


def replay(
    calls: Sequence[Call], n_seq_max: int, n_ubatch: int = 512, defects: frozenset[str] = DEFECTS
) -> tuple[str, list[frozenset[int]]]:
    """Follow a run call by call: "right", "wrong" or "abort", and the sequences whose logits are wrong after each call.

    Every call must already be at most n_batch tokens long. The one that aborts is not in the list.
    """
    memory = _Memory(n_seq_max, defects)
    wrong: list[frozenset[int]] = []
    for call in calls:
        for seq in (seq for seq, n_tokens in call if n_tokens == 0):
            memory.leave(seq)
        for seqs, n_tokens in micro_batches(call, n_ubatch):
            if not memory.step(seqs, n_tokens):
                return "abort", wrong
        wrong.append(frozenset(seq for seq, _ in call if seq in memory.wrong))
    return "wrong" if any(wrong) else "right", wrong


class _Memory:
    """The recurrent memory: each cell's sequence and the row its state lies in, and each row's (sequence, tokens)."""

    def __init__(self, size: int, defects: frozenset[str]):
        self.size, self.defects, self.head = size, defects, 0
        self.cells, self.sources = [FREE] * size, [NOWHERE] * size
        self.rows = [GARBAGE] * size
        self.tokens = [0] * size  # of each sequence
        self.wrong: set[int] = set()

    def step(self, seqs: list[int], n_tokens: int) -> bool:
        """One micro-batch; False when it aborts."""
        low, high = self._find_slot(seqs)
        n_seqs, sources = len(seqs), self._stage(low, high)
        store = low * n_seqs if "D3" in self.defects else low
        if store + n_seqs > self.size:
            return False
        read = [self.rows[source] for source in sources]
        self.rows[low + n_seqs : high + 1] = read[n_seqs:]
        mixed = "D2" in self.defects and n_seqs > 1 and n_tokens > 1
        for i, seq in enumerate(seqs):
            expected = (seq, self.tokens[seq]) if self.tokens[seq] else ZERO
            if mixed or read[i] != expected:
                self.wrong.add(seq)
            self.tokens[seq] += n_tokens
            self.rows[store + i] = GARBAGE if seq in self.wrong else (seq, self.tokens[seq])
        return True

    def leave(self, seq: int) -> None:
        """Forget a sequence; its cell is the first to be given out again."""
        if seq in self.cells:
            cell = self.cells.index(seq)
            self.cells[cell], self.sources[cell] = FREE, NOWHERE
            self.head = min(self.head, cell)
        self.tokens[seq] = 0
        self.wrong.discard(seq)

    def _find_slot(self, seqs: list[int]) -> tuple[int, int]:
        """Cells for the sequences, gathered side by side from the lowest on; returns the range they span."""
        if self.head > self.size - self.cells.count(FREE) + 2 * len(seqs):
            self.head = 0
        for seq in seqs:
            if seq not in self.cells:
                after = FREE in self.cells[self.head :]
                self.cells[self.cells.index(FREE, self.head if after else 0)] = seq
        spanned = [self.cells.index(seq) for seq in seqs]
        low, high = min(spanned), max(spanned)
        for to, seq in enumerate(seqs, low):
            place = self.cells.index(seq)
            for column in (self.cells, self.sources):
                column[to], column[place] = column[place], column[to]
        self.head = low
        return low, high

    def _stage(self, low: int, high: int) -> list[int]:
        """Rows to read the cells' states from; an unreferenced row is cleared for new sequences."""
        zero = next((row for row in range(low, high + 1) if row not in self.sources), NOWHERE)
        if zero >= 0:
            self.rows[zero] = ZERO
        sources = [zero if source == NOWHERE else source for source in self.sources[low : high + 1]]
        self.sources[low : high + 1] = range(low, high + 1)
        return sources


def defects(model: dict[str, Any], engine: dict[str, Any]) -> frozenset[str]:
    """Defects of a build for a model: none for attention alone, else those that the build does not claim to correct."""
    return DEFECTS - set(engine.get("corrects", ())) if model["shape"]["arch"] == HYBRID else frozenset()


def limit(rows: pd.DataFrame) -> float:
    """The relative error beyond which a sequence is wrong: `ROUNDINGS` times the largest between two correct ones.

    That rounding is measured without a batch: one sequence alone, cut into calls in several ways (measure/proof.py).
    """
    return ROUNDINGS * float(max(checks["rounding"] for checks in rows["checks"] if "rounding" in checks))


def checked(rows: pd.DataFrame, facts: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Replay rows with `predicted` and `observed` outcome, and `exact`: the same sequences wrong, call by call.

    For a run that aborts, `exact` covers the calls before the abort, which must be in the call the law names.
    `foretold`: the sequences the law calls wrong, call by call. A worker that ends in a way the law does not cover is
    observed as its status.
    """
    replays = rows[(rows["workload"] == "replay") & (rows["status"] != "starved")].reset_index(drop=True)
    most = limit(rows)
    entries = []
    for row in replays.to_dict("records"):
        of = defects(facts[row["model"]], facts[row["engine"]])
        predicted, foretold = replay(row["calls"], row["n_seq"], row["n_ubatch"], of)
        wrong = _wrong(row, most)
        observed = row["status"] if row["status"] != "ok" else "wrong" if any(wrong) else "right"
        entries.append([predicted, observed, (predicted, foretold) == (observed, wrong), foretold])
    outcomes = pd.DataFrame(entries, columns=["predicted", "observed", "exact", "foretold"])
    return pd.concat([replays, outcomes], axis=1)


def separation(table: pd.DataFrame) -> tuple[float, float]:
    """Largest relative error of sequences that the law calls right in `checked` rows, and smallest of wrong ones.

    NaN where there is none.
    """
    errors: dict[bool, list[float]] = {True: [], False: []}
    for checks, foretold in zip(table["checks"], table["foretold"], strict=True):
        for (call, seq), error in _errors(checks):
            if call < len(foretold):
                errors[seq in foretold[call]].append(error)
    return max(errors[False], default=float("nan")), min(errors[True], default=float("nan"))


def three_tests(rows: pd.DataFrame) -> pd.DataFrame:
    """Identity, isolation and bystander per build and model: the largest relative `error` of the logits tested.

    NaN if the engine did not get that far; a test fails above `limit`.
    """
    tests, entries = rows[rows["question"].isin(TESTS)], []
    for row in tests.to_dict("records"):
        errors = [error for name, error in row["checks"].items() if name.endswith(TESTS[row["question"]])]
        entries.append([row["build"], row["model"], row["question"], max(errors, default=float("nan"))])
    return pd.DataFrame(entries, columns=["build", "model", "test", "error"]).assign(limit=limit(rows))


def first_aborts(table: pd.DataFrame) -> pd.DataFrame:
    """Smallest number of sequences that aborts, per build and n_batch of the map: `predicted` and `observed`."""
    packed, kinds = table[table["question"] == "map"], ["predicted", "observed"]
    of = {kind: packed[packed[kind] == "abort"].groupby(["build", "n_batch"])["n_seq"].min() for kind in kinds}
    return pd.DataFrame(of).reset_index()


def _wrong(row: dict[str, Any], limit: float) -> list[frozenset[int]]:
    """The sequences whose logits were wrong, call by call, up to the call that aborted."""
    wrong: list[set[int]] = [set() for _ in row["calls"]]
    last = len(wrong) - 1
    errors = _errors(row["checks"])
    if row["status"] != "ok":
        last = max((call for (call, _), _ in errors), default=-1)
        while last + 1 < len(wrong) and not any(n for _, n in row["calls"][last + 1]):
            last += 1  # a call in which sequences only leave has no logits
    for (call, seq), error in errors:
        if not error <= limit:
            wrong[call].add(seq)
    return [frozenset(seqs) for seqs in wrong[: last + 1]]


def _errors(checks: dict[str, Any]) -> list[tuple[tuple[int, int], float]]:
    """((call, sequence), relative error) of a replay's checks."""
    named = [(name.partition("/"), error) for name, error in checks.items()]
    return [((int(call), int(seq)), error) for (call, _, seq), error in named if seq]
