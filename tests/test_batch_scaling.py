"""Curves of batched decode hold what was put into them; the source's table keeps right, wrong and aborted apart."""

import numpy as np
import pandas as pd
import pytest

from plamo_study.arithmetic import kernels
from plamo_study.laws import builds

SEQUENCES = (*range(1, 17), 24, 32)
USUAL = {
    "build": "stock", "engine": "stock", "machine": "m", "dtype": "Q8_0", "anchor": False, "drift": 0.0, "status": "ok",
    "n_threads": 2, "n_gpu_layers": 0, "failure": "", "type_k": "f16", "type_v": "f16",
}  # fmt: skip


def made_up(seconds, model=builds.HYBRID, build="stock", blocks=5, noise=0.01, seed=7, **changes):
    """Decode rows whose steps take `seconds(n_seq)`, times a factor of the block and a little noise."""
    rng = np.random.default_rng(seed)
    base = USUAL | {"workload": "decode", "policy": "shared", "model": model, "build": build, "engine": build}
    base |= {"verdict": "valid", "n_prompt": 128, "n_gen": 6, "prefill_ns": [], "checks": {"second_path_error": 0.0}}
    rows = []
    for block in range(blocks):
        for n in SEQUENCES:
            step = seconds(n) * (1 + 0.05 * block) * rng.lognormal(0, noise)
            row = {"block": block, "n_seq": n, "samples_ns": [[int(step * 1e9)] * 6]}
            rows.append(base | row | {"peak_rss_bytes": 2**30 + n * 2**20} | changes)
    return pd.DataFrame(rows)


def of_one(rows):
    """The curve of rows of one build and model."""
    (curve,) = builds.curves(rows).values()
    return curve


def straight(n):
    return 0.03 + 0.01 * n


def test_steps_come_out_as_put_in_and_wrong_rows_are_in_no_curve():
    rows = made_up(straight, noise=0)
    curve = of_one(rows)
    assert curve.loc[16].median() == pytest.approx(0.19 * 1.1)
    bad = made_up(lambda n: 1e-6, verdict="invalid")
    assert of_one(pd.concat([rows, bad], ignore_index=True)).equals(curve)


def test_columns_left_over_by_a_tile_need_a_second_pass():
    for tile, two in ((4, {5, 6, 7, 9, 10, 11, 13, 14, 15}), (2, {3, 5, 7, 9, 11, 13, 15})):
        assert {n for n in range(1, 17) if kernels.weight_passes(n, tile) == 2} == two
