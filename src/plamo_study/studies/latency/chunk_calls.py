"""What an arrival evaluates, call by call."""

from collections.abc import Iterator

from llama_meter.cells import Arrival, Calls


def calls(cell: Arrival) -> Calls:
    """What is evaluated, call by call: (sequence, tokens). The prompt is the sequence after the decoding ones."""
    step, arriving = tuple((seq, 1) for seq in range(cell.n_seq)), cell.n_seq
    after = (*step, (arriving, 1))
    return (*[step] * before(cell), *_arrival(cell, step), *[after] * cell.n_gen)


def before(cell: Arrival) -> int:
    """Steps before the prompt arrives; 0 if no sequence decodes."""
    return cell.n_gen if cell.n_seq else 0


def _arrival(cell: Arrival, step: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    size = cell.n_arriving if cell.way == "whole" else cell.n_chunk
    for start in range(0, cell.n_arriving, size):
        piece = (cell.n_seq, min(size, cell.n_arriving - start))
        if cell.way == "together":
            yield (*step, piece)
        else:
            yield (piece,)
            if cell.way == "apart" and step:
                yield step


def lengths(cell: Arrival) -> dict[int, int]:
    """Tokens of every sequence at the end, those it starts from included."""
    totals = {seq: cell.depth for seq in range(cell.n_seq)} | {cell.n_seq: 0}
    for call in calls(cell):
        for seq, n in call:
            totals[seq] += n
    return totals
