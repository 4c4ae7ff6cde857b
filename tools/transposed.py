"""MiniMax-01 on the CPU with the mistake of CUDA's transposed copy planted in it: is it as far off as on an H200?

plamo-study engine build architectures
python tools/transposed.py
"""

import argparse
import ctypes
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from llama_meter.cells import Hybrid
from llama_meter.engine.ggml import Tensor
from llama_meter.engine.nodes import Watched, name_of
from llama_meter.journal import journal_path, latest_rows, read
from llama_meter.oracle.compare import relative_error
from llama_meter.workloads import architectures, hybrid_questions
from llama_meter.workloads.architectures import QUESTIONS, STEPS

MODEL, VALUES = "minimax-01-moe", "v_trans"  # minimax-01.cpp 354
PIECES = (1, 2, 3, 4, 5, 7, 8, 12, 21)  # tokens of a micro-batch; 24 tokens leave a rest of three after 7 and 21


def is_taken(ne: Sequence[int], nb: Sequence[int], size: int) -> bool:
    """Whether CUDA takes a tensor for transposed matrices, ggml-cuda/cpy.cu 461: it asks for two of three strides."""
    return nb[1] == size and ne[3] == 1 and nb[2] == ne[0] * ne[1] * size


def misread(memory: np.ndarray, ne: Sequence[int]) -> np.ndarray:
    """What its kernel makes of it, where rows lie further apart than the others: rows without gaps, transposed.

    `memory`: from the tensor's first number on, (ne0 * ne1 * ne2,). As the kernel's launch does, all matrices are one.
    """
    return np.ascontiguousarray(memory.reshape(ne[0], ne[1] * ne[2]).T).ravel()


class Planted(Watched):
    """A session on the CPU whose copies of values are as wrong as CUDA's."""

    taken = 0

    def wanted(self, node: Tensor) -> bool:
        """The copies."""
        return name_of(node).startswith(VALUES) and self.op(node.op) == "CONT"

    def see(self, node: Tensor) -> None:
        """Write what CUDA would have written."""
        source = node.src[0].contents
        ne = list(source.ne)
        if is_taken(ne, list(source.nb), ctypes.sizeof(ctypes.c_float)):
            numbers = ctypes.c_float * int(np.prod(ne))
            copied = np.ctypeslib.as_array(numbers.from_address(node.data))
            copied[:] = misread(np.ctypeslib.as_array(numbers.from_address(source.data)), ne)
            self.taken += 1


def cut(path: Path, pieces: Iterable[int]) -> Iterator[tuple[int, float, int]]:
    """For prompts cut into micro-batches of so many tokens: the tokens, how far off logits are from those of the whole
    prompt in one call, and how many copies were wrong."""
    (n_prompt,) = QUESTIONS["cut"].lengths
    with Planted(path, hybrid_questions.ALONE) as session:
        tokens = np.random.default_rng(0).integers(0, session.n_vocab, n_prompt + STEPS, dtype=np.int32)
        whole = hybrid_questions.by_itself(session, 0, tokens, n_prompt)
    for piece in pieces:
        with Planted(path, replace(hybrid_questions.ALONE, n_ubatch=piece)) as session:
            logits = hybrid_questions.by_itself(session, 0, tokens, n_prompt)
            yield piece, max(relative_error(logits[at], row) for at, row in whole.items()), session.taken


def on_gpu() -> float:
    """The error of the recorded row: pieces of three on an H200."""
    rows = latest_rows(read(journal_path("15-elsewhere", "mini", "others")))
    asked = {row.cell: row for row in rows if isinstance(row.cell, Hybrid)}
    (cell,) = [cell for cell in asked if (cell.model, cell.question, cell.planted) == (MODEL, "cut", False)]
    return float(asked[cell].checks["error"])


def main() -> None:
    """Print the error for each size of pieces, and the H200's."""
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pieces",
        nargs="*",
        type=int,
        default=PIECES,
        help=f"tokens of a micro-batch (default: {' '.join(map(str, PIECES))})",
    )
    pieces = parser.parse_args().pieces
    with tempfile.TemporaryDirectory() as folder:
        for piece, error, taken in cut(architectures.write(MODEL, Path(folder)), pieces):
            print(f"pieces of {piece:2}: off by {error:.6f}, {taken} copies taken for transposed")
    print(f"pieces of  3 on an H200: off by {on_gpu():.6f}")


if __name__ == "__main__":
    main()
