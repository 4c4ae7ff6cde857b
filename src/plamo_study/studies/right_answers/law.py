"""The batching law of PLaMo 2 on stock llama.cpp: from the shape of every call to right, silently wrong, or abort.

It replays what the engine does with a batch: cut it into micro-batches of equal sequences (llama-batch.cpp,
split_equal), give each sequence a cell of the recurrent memory (llama-memory-recurrent.cpp, find_slot), read the states
from their rows, and write them back where build_plamo2_mamba_layer writes them. Two defects are in that replay:

mixed prompts (D2)       a micro-batch with several sequences and several tokens each mixes their tokens;
misplaced states (D3)    the scan's states are stored from row head * n_seqs on instead of from row head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd

from llama_meter.limits import ROUNDINGS

Call = Sequence[tuple[int, int]]  # (sequence, tokens) in stream order; no tokens: the sequence leaves
Outcome = Literal["right", "wrong", "abort"]
HYBRID = "plamo2"  # the architecture whose graph has the defects
REPLAYS = ("replay", "isolation")
ASKED = {"identity": ("/0", "/1", "/2", "/3"), "isolation": ("isolation_error",), "bystander": ("/3",)}

Facts = dict[str, dict[str, Any]]
ZERO, GARBAGE = (-1, 0), (-2, 0)  # labels of a cleared row and of one that holds no valid state


@dataclass(frozen=True)
class Engine:
    """Which defects a build has: stock has both, a corrected one none."""

    mixes_tokens: bool = True
    misplaces_states: bool = True


STOCK, CORRECT = Engine(), Engine(mixes_tokens=False, misplaces_states=False)


@dataclass(frozen=True)
class Verdict:
    """Result of a run: the sequences whose logits are wrong after each call, and the call that aborts, if any."""

    wrong: list[frozenset[int]]
    aborted_at: int | None

    @property
    def outcome(self) -> Outcome:
        """The worst result of the run."""
        if self.aborted_at is not None:
            return "abort"
        return "wrong" if any(self.wrong) else "right"


@dataclass
class _Cell:
    seqs: set[int] = field(default_factory=set)
    src: int = -1  # row its state lies in; -1: nowhere yet
    tail: int = -1  # of the sequence numbered like this cell


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


def replay(calls: Sequence[Call], n_seq_max: int, n_ubatch: int = 512, engine: Engine = STOCK) -> Verdict:
    """Follow a run call by call. Every call must already be at most n_batch tokens long."""
    memory = _Memory(n_seq_max, engine)
    wrong: list[frozenset[int]] = []
    for number, call in enumerate(calls):
        for seq in (seq for seq, n_tokens in call if n_tokens == 0):
            memory.leave(seq)
        for seqs, n_tokens in micro_batches(call, n_ubatch):
            if not memory.step(seqs, n_tokens):
                return Verdict(wrong, number)
        wrong.append(frozenset(seq for seq, _ in call if seq in memory.wrong))
    return Verdict(wrong, None)


class _Memory:
    """The recurrent memory: the engine's cells, and the (sequence, tokens) whose state each row holds."""

    def __init__(self, size: int, engine: Engine):
        self.size, self.engine, self.head, self.used = size, engine, 0, 0
        self.cells = [_Cell() for _ in range(size)]
        self.rows = [GARBAGE] * size
        self.tokens = [0] * size  # of each sequence
        self.wrong: set[int] = set()

    def step(self, seqs: list[int], n_tokens: int) -> bool:
        """One micro-batch; False when it aborts."""
        low, high = self._find_slot(seqs)
        n_seqs, sources = len(seqs), self._stage(low, high)
        store = low * n_seqs if self.engine.misplaces_states else low
        if store + n_seqs > self.size:
            return False
        read = [self.rows[sources[low + i]] for i in range(n_seqs)]
        extra = [self.rows[sources[cell]] for cell in range(low + n_seqs, high + 1)]
        self.rows[low + n_seqs : high + 1] = extra
        mixed = self.engine.mixes_tokens and n_seqs > 1 and n_tokens > 1
        for i, seq in enumerate(seqs):
            expected = (seq, self.tokens[seq]) if self.tokens[seq] else ZERO
            if mixed or read[i] != expected:
                self.wrong.add(seq)
            self.tokens[seq] += n_tokens
            self.rows[store + i] = GARBAGE if seq in self.wrong else (seq, self.tokens[seq])
        return True

    def leave(self, seq: int) -> None:
        """Forget a sequence; its cell is the first to be given out again."""
        tail = self.cells[seq].tail
        if tail >= 0:
            self.cells[tail].seqs, self.cells[tail].src = set(), -1
            self.used -= 1
            self.head = min(self.head, tail)
        self.cells[seq].tail, self.tokens[seq] = -1, 0
        self.wrong.discard(seq)

    def _find_slot(self, seqs: list[int]) -> tuple[int, int]:
        """Cells for the sequences, gathered side by side from the lowest on; returns the range they span."""
        if self.head > self.used + 2 * len(seqs):
            self.head = 0
        empty = self._next_empty(self.head)
        for place, seq in enumerate(seqs):
            if self.cells[seq].tail < 0:
                self.cells[seq].tail = empty
                if place + 1 < len(seqs):
                    empty = self._next_empty(empty + 1)
        tails = [self.cells[seq].tail for seq in seqs]
        low, high = min(self.size - 1, *tails), max(0, *tails)
        for place, seq in enumerate(seqs):
            self._swap(low + place, self.cells[seq].tail)
        for place, seq in enumerate(seqs):
            self.cells[low + place].seqs = {seq}
            self.cells[seq].tail = low + place
        self.head, self.used = low, sum(bool(cell.seqs) for cell in self.cells)
        return low, high

    def _next_empty(self, start: int) -> int:
        order = [(start + i) % self.size for i in range(self.size)]
        return next((cell for cell in order if not self.cells[cell].seqs), order[0])

    def _swap(self, to: int, source: int) -> None:
        if to == source:
            return
        a, b = self.cells[to], self.cells[source]
        a.src, b.src, a.seqs, b.seqs = b.src, a.src, b.seqs, a.seqs
        for cell in self.cells:
            cell.tail = {source: to, to: source}.get(cell.tail, cell.tail)

    def _stage(self, low: int, high: int) -> dict[int, int]:
        """Rows to read each cell's state from; an unreferenced row is cleared for new sequences."""
        referred = {cell.src for cell in self.cells}
        zero = next((row for row in range(low, high + 1) if row not in referred), -1)
        if zero >= 0:
            self.rows[zero] = ZERO
        sources = {}
        for number in range(low, high + 1):
            cell = self.cells[number]
            sources[number] = zero if cell.src < 0 else cell.src
            cell.src = number
        return sources


def defects(model: dict[str, Any], engine: dict[str, Any]) -> Engine:
    """Defects of a build for a model: none for attention alone, else those that the build does not claim to correct."""
    hybrid, corrected = model["shape"]["arch"] == HYBRID, engine.get("corrects", ())
    return Engine(mixes_tokens=hybrid and "D2" not in corrected, misplaces_states=hybrid and "D3" not in corrected)


def limit(rows: pd.DataFrame) -> float:
    """The relative error beyond which a sequence is wrong: `ROUNDINGS` times the largest between two correct ones.

    That rounding is measured without a batch: one sequence alone, cut into calls in several ways (measure/proof.py).
    """
    replayed = rows[rows["workload"].isin(REPLAYS)]
    return ROUNDINGS * float(max(checks["rounding"] for checks in replayed["checks"] if "rounding" in checks))


def checked(rows: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """Replay rows with `predicted` and `observed` outcome, and `exact`: the same sequences wrong, call by call.

    For a run that aborts, `exact` covers the calls before the abort, which must be in the call the law names. `judged`:
    whether there were logits to decide by; rows recorded before checks were kept per call have none after an abort.
    `foretold`: the sequences the law calls wrong, call by call. A worker that ends in a way the law does not cover is
    observed as its status.
    """
    replays = rows[(rows["workload"] == "replay") & (rows["status"] != "starved")]
    most = limit(rows)
    entries = []
    for row in replays.to_dict("records"):
        engine = defects(facts[row["model"]], facts[row["engine"]])
        predicted = replay(row["calls"], row["n_seq"], row["n_ubatch"], engine)
        ok, judged = row["status"] == "ok", bool(row["checks"])
        wrong = _wrong(row, most) if judged else []
        observed = row["status"] if not ok else "wrong" if any(wrong) else "right"
        exact = predicted.outcome == observed and (not judged or predicted.wrong == wrong)
        entry = {"predicted": predicted.outcome, "observed": observed, "exact": exact, "judged": judged}
        entries.append({**entry, "foretold": predicted.wrong})
    return pd.concat([replays.reset_index(drop=True), pd.DataFrame(entries)], axis=1)


def separation(table: pd.DataFrame) -> pd.DataFrame:
    """Gap between right and wrong: per build and model, the errors of sequences by what the law says of them.

    `limit` is that of all rows; `right` and `wrong` count sequences after calls, `largest_right` and
    `smallest_wrong` are relative errors (NaN where there is none).
    """
    most = limit(table)
    entries = []
    for (build, model), group in table.groupby(["build", "model"]):
        errors: dict[bool, list[float]] = {True: [], False: []}
        for checks, foretold in zip(group["checks"], group["foretold"], strict=True):
            for (call, seq), error in _errors(checks):
                if call < len(foretold):
                    errors[seq in foretold[call]].append(error)
        own = [checks["rounding"] for checks in group["checks"] if "rounding" in checks]
        entry = {"build": build, "model": model, "rounding": max(own, default=float("nan")), "limit": most}
        entry |= {"right": len(errors[False]), "largest_right": max(errors[False], default=float("nan"))}
        entries.append(entry | {"wrong": len(errors[True]), "smallest_wrong": min(errors[True], default=float("nan"))})
    return pd.DataFrame(entries)


def three_tests(rows: pd.DataFrame) -> pd.DataFrame:
    """Identity, isolation and bystander per build and model: the largest relative `error` of the logits tested.

    NaN if the engine did not get that far; a test fails above `limit`.
    """
    asked, most = rows[rows["question"].isin(ASKED)], limit(rows)
    entries = []
    for row in asked.to_dict("records"):
        wanted = [error for name, error in row["checks"].items() if name.endswith(ASKED[row["question"]])]
        error = max(wanted, default=float("nan"))
        entry = {"build": row["build"], "model": row["model"], "test": row["question"], "error": error}
        entries.append({**entry, "limit": most})
    return pd.DataFrame(entries)


def packed_map(table: pd.DataFrame) -> pd.DataFrame:
    """The map of packed prompts from `checked` rows: columns build, n_tokens, n_batch, n_seq, predicted, observed."""
    packed = table[table["question"] == "map"]
    return packed[["build", "n_tokens", "n_batch", "n_seq", "predicted", "observed"]].reset_index(drop=True)


def first_aborts(table: pd.DataFrame) -> pd.DataFrame:
    """Smallest number of sequences that aborts, per build and n_batch of the map: `predicted` and `observed`."""
    field, keys = packed_map(table), ["build", "n_batch"]
    of = {column: field[field[column] == "abort"].groupby(keys)["n_seq"].min() for column in ("predicted", "observed")}
    every = field.groupby(keys).size().index
    return pd.DataFrame({column: first.reindex(every) for column, first in of.items()}).reset_index()


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
