"""NumPy's matrix product timed in a process of its own, so that its BLAS can be told which kernels to use.

Called as a module with SIZE COLUMNS THREADS PRODUCTS; prints JSON: `blas`, and `rates` in FLOP/s.
"""

import json
import sys
import time
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits


def products(size: int, columns: int, threads: int, n: int) -> dict[str, Any]:
    """FLOP/s of `n` F32 products of (size, size) and (size, columns) after one that warms up, and which BLAS it was."""
    rng, rates = np.random.default_rng(0), []
    weights, inputs = (rng.random(shape, dtype=np.float32) for shape in ((size, size), (size, columns)))
    with threadpool_limits(threads, user_api="blas"):
        for _ in range(n + 1):
            start = time.perf_counter_ns()
            weights @ inputs
            rates.append(2 * size**2 * columns * 1e9 / (time.perf_counter_ns() - start))
    which = next((info for info in threadpool_info() if info["user_api"] == "blas"), None)
    library = (
        f"{which['internal_api']} {which['version']}, {which.get('architecture')} kernels" if which else "unknown BLAS"
    )
    return {"blas": f"NumPy {np.__version__}, {library}", "rates": rates[1:]}


if __name__ == "__main__":
    json.dump(products(*(int(word) for word in sys.argv[1:5])), sys.stdout)
