"""How many tokens of the next prompt are evaluated: what llama.cpp's source says, and what was measured.

Source: `tools/server/server-context.cpp` and `server-task.cpp` of llama.cpp 0c1e57098, `generate` in llama_cpp/llama.py
of llama-cpp-python 0.3.36. No constant is fitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, NamedTuple

import pandas as pd

from llama_meter.cells import Turns
from llama_meter.measure.tolerance import Parting
from plamo_study.read.recording import Recording
from plamo_study.studies.next_turn.conversation import CUT, MOVES, SETTINGS, points, questions

SPACING = 8192  # --checkpoint-min-step
ENDS = (4, 4 + 512)  # tokens before a prompt's end where a batch ends; the second one and a micro-batch
BATCH, MICRO_BATCH = 2048, 512
CELLS = 256  # a window's cache is a multiple of them


class Checkpoint(NamedTuple):
    """What a slot keeps at `n` tokens: memory from position `low` to `high`, made while it answered prompt `turn`."""

    n: int
    low: int
    high: int
    turn: int


@dataclass
class Slot:
    """A slot of llama-server: the tokens it holds, the first position of its memory, and its checkpoints.

    `window`: of sliding layers, 0 for none. `recurrent`: its memory has a state that cannot be cut back.
    `n_checkpoints`: how many it keeps.
    """

    window: int
    recurrent: bool
    n_checkpoints: int
    n: int = 0
    low: int = 0
    turn: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)

    def first(self) -> int:
        """The first position of which everything is held: of a recurrent state only the last one is."""
        return self.n - 1 if self.recurrent else self.low

    def evaluate(self, n: int, common: int, starts: list[int]) -> int:
        """Read a prompt of `n` tokens, `common` of which it holds; the number of tokens that it evaluates.

        `starts`: where the questions begin, empty where the server does not know.
        """
        self.turn, at = self.turn + 1, common
        least = max(0, at - self.window - (0 if at < n else 1))
        if at > 0 and self.first() >= least:
            fit = [c for c in self.checkpoints if c.high <= at and (c.low < least or c.low == 0)]
            at = min(at, max(fit[-1].low + 1, fit[-1].high), fit[-1].n) if fit else 0
            self.low = max(0, fit[-1].n - self.window) if fit else 0
        self.checkpoints = [c for c in self.checkpoints if c.high <= at]
        self.n = at = at - 1 if at == n else at
        while self.n < n:
            self._batch(n, starts)
        return n - at

    def _batch(self, n: int, starts: list[int]) -> None:
        """One batch of a prompt; a checkpoint is made before it is computed."""
        begin, end, keeps = self.n, self.n, self.n_checkpoints > 0 and (self.recurrent or self.window > 0)
        while end < n and end - begin < BATCH:
            end += 1
            if keeps and ((end in starts and (end == starts[-1] or self._is_far(end))) or n - end in ENDS):
                break
        near = n < end + MICRO_BATCH
        last = bool(starts) and begin == starts[-1]
        if keeps and begin > 0 and (end == n or begin in starts or near) and (last or near or self._is_far(begin)):
            self._keep(begin)
        self.hold(end)

    def _is_far(self, n: int) -> bool:
        return not self.checkpoints or n > self.checkpoints[-1].n + SPACING

    def _keep(self, n: int) -> None:
        """Make a checkpoint; where there are too many, those near an earlier one go first, then the oldest."""
        left: list[Checkpoint] = []
        for number, old in enumerate(self.checkpoints):
            full = len(left) + len(self.checkpoints) - number + 1 >= self.n_checkpoints
            if not (full and old.turn != self.turn and left and old.n <= left[-1].n + SPACING):
                left.append(old)
        left = left[max(0, len(left) - self.n_checkpoints + 1) :]
        made = Checkpoint(n, self.first(), n - 1, self.turn)
        self.checkpoints = [*(old for old in left if old.n != n), made]

    def hold(self, n: int) -> None:
        """Hold `n` tokens; a window's cache has room for the window and one micro-batch."""
        self.n = n
        if self.window:
            room = -(-(self.window + MICRO_BATCH) // CELLS) * CELLS
            self.low = max(self.low, n - room)

    def leave_and_return(self) -> None:
        """Go to another memory and come back as bytes: tokens outside the window are not written."""
        if self.window:
            self.low = max(self.low, self.n - self.window)


def foretold(row: Mapping[str, Any], window: int, recurrent: bool) -> list[int]:
    """Tokens that each of the MOVES evaluates, for a row's cell on a file with such a `window` and memory."""
    sizes, shared = row["series"]["n_next"], row["series"]["common"]
    return [
        _of_move(row, window, recurrent, int(n_next), int(held), number)
        for number, (n_next, held) in enumerate(zip(sizes, shared, strict=True))
    ]


def _of_move(row: Mapping[str, Any], window: int, recurrent: bool, n_next: int, held: int, number: int) -> int:
    n, n_gen = row["n_prompt"], row["n_gen"]
    written = n + n_gen - 1  # the last token of an answer is not evaluated
    if row["reuse"] == "states":
        return n_next - max(at for at in points(n, n_gen) if at <= min(held, n_next - 1))
    if row["reuse"] == "bindings":
        return n_next if recurrent and held < written else n_next - min(held, n_next - 1)
    if row["away"] and not row["cache_mib"] and row["reuse"] != "saved":
        return n_next
    slot = Slot(window, recurrent, row["n_checkpoints"])
    slot.evaluate(n, 0, questions(n) if row["marked"] else [])
    slot.hold(written)
    if row["away"]:
        slot.leave_and_return()
    if row["reuse"] == "saved":
        slot.checkpoints = []
    following = [n + n_gen - CUT * number] if number < 2 else []
    return slot.evaluate(n_next, held, [*questions(n), *following] if row["marked"] else [])


USUAL = {name: getattr(Turns(), name) for fields in SETTINGS.values() for name in fields}
OF_ROW = ["machine", "model", "dtype", "build", "n_prompt", "key", "block"]
OF_SERIES = ("evaluated", "n_next", "first", "fresh", "differs", "gap")
OF_MOVE = ["n_next", "evaluated", "foretold", "share", "first", "fresh", "gap", "verdict"]


def moves(part: Recording) -> pd.DataFrame:
    """A line for each row and move: tokens of the prompt, evaluated and foretold ones, and the share of them.

    `first`, `fresh`: seconds to the first token, from what was kept and from nothing. `verdict`: "same" as from
    nothing, "near-tie", "other" also of logits, or "died" where the server ended before.
    """
    lines: list[list[Any]] = []
    rows = part.rows[part.rows["workload"].eq("turns") & part.rows["status"].eq("ok") & ~part.rows["anchor"]]
    for row in rows.to_dict("records"):
        shape, series = part.facts.get(row["fact"], {}).get("shape", {}), row["series"]
        recurrent = bool(shape.get("mamba_heads")) if shape else not row["model"].startswith("llama")
        counts = foretold(row, int(shape.get("window") or 0), recurrent)
        here = {name: row[name] for name in USUAL}
        setting = next((label for label, fields in SETTINGS.items() if USUAL | fields == here), "other settings")
        for n, move in enumerate(MOVES):
            line = [*(row[name] for name in OF_ROW), setting, move]
            if n < len(counts):
                read, n_next, first, fresh, token, gap = (series[name][n] for name in OF_SERIES)
                verdict = Parting(int(token), gap).verdict if row["checks"].get("logits", True) else "other"
                lines.append([*line, n_next, read, counts[n], read / n_next, first, fresh, gap, verdict])
            else:
                lines.append([*line, *[nan] * (len(OF_MOVE) - 1), "died"])
    return pd.DataFrame(lines, columns=[*OF_ROW, "setting", "move", *OF_MOVE])


def sentence(part: Recording | None, model: str, dtype: str) -> str:
    """What the next turn costs a file on llama-server with one slot, in a sentence; "" where it was not measured."""
    lines = moves(part) if part else pd.DataFrame(columns=[*OF_ROW, "setting", "move", *OF_MOVE])
    names = lines["model"].str.rstrip("*").eq(model.rstrip("*")) & lines["dtype"].eq(dtype)
    own = lines[names & lines["setting"].eq(next(iter(SETTINGS))) & lines["verdict"].isin(["same", "near-tie"])]
    own = own[own["n_prompt"] == own["n_prompt"].max()]
    waits = [
        f"{move} {middle['evaluated']:,.0f} ({middle['first']:.2g} s)"
        for move, middle in own.groupby("move", sort=False)[["evaluated", "first"]].median().iterrows()
    ]
    whole = f"{own['fresh'].median():.2g} s from nothing"
    read = f"Of a conversation of {own['n_prompt'].max():,} tokens llama-server (`-np 1`) reads for the next: "
    return f"{read}{', '.join(waits)}; {whole}." if waits else ""
